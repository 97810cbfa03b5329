#!/usr/bin/env python3
"""`poise bundle`: a bundle runs elsewhere, with its own programs and libraries, and contains what it lists."""

import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import harness
from harness import bin_folder, expect, expect_equal, read_results, request, test, wait_until

_OURS = ("libzmq", "libfmt", "libspdlog", "libstdc++")
_CORE = re.compile(r"(ld-linux.*|lib(c|m|mvec|pthread|dl|rt|resolv|util)\.so.*|locale-archive|gconv-modules.*)")


def made(workspace, name, *options):
    workspace.poise("bundle", "-o", workspace / name, *options, env={"POISE_BIN": str(bin_folder())}).expect(0, "is written")
    return workspace / name


def elsewhere(bundle, *words, runtime):
    """`poise WORDS` of a bundle, with an empty environment."""
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    command = ["/bin/sh", str(bundle / "launch" / "poise"), *map(str, words)]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120)


@test
def a_packed_bundle_runs_its_demo_where_it_is_unpacked(workspace):
    archive = made(workspace, "poise-x.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(workspace / "unpacked")  # `filter` is not known to Debian 12's Python
    (bundle,) = (workspace / "unpacked").iterdir()
    expect_equal(bundle.name, "poise-x", "the directory in the archive")
    moved = workspace / "a moved bundle"
    shutil.move(bundle, moved)
    done = elsewhere(moved, "demo", "--device", "cpu", runtime=workspace.runtime)
    expect(done.returncode == 0 and "8 prompts answered" in done.stderr, f"the demo: {done.returncode} {done.stderr}")
    size = sum(path.stat().st_size for path in moved.rglob("*") if path.is_file())
    expect(size <= 60 << 20, f"{size} bytes")
    for words, fragment in ((["setup"], "this is a bundle"), (["test"], "this is a bundle"), (["bundle"], "a bundle already")):
        done = elsewhere(moved, *words, runtime=workspace.runtime)
        expect(done.returncode == 2 and fragment in done.stderr, f"{words}: {done.returncode} {done.stderr}")
    for words in (["doctor"], ["version"], ["help"], ["status"]):
        done = elsewhere(moved, *words, runtime=workspace.runtime)
        expect(done.returncode == 0, f"{words}: {done.returncode} {done.stderr} {done.stdout}")


@test
def its_processes_map_the_bundles_libraries_alone(workspace):
    bundle = made(workspace, "poise-y")
    prompts = [request(number, [5 + number] * 40, max_tokens=150, ignore_eos=True) for number in range(8)]
    requests = workspace.write_requests("requests.jsonl", prompts)
    words = ["run", "--model", bundle / "launch/demo/model", "-i", requests, "-o", workspace / "out", "--device", "cpu"]
    words += ["--skip-tokenizer-init", "--link-gbps", "0.15"]
    environment = {"XDG_RUNTIME_DIR": str(workspace.runtime)}
    process = subprocess.Popen(
        ["/bin/sh", str(bundle / "launch" / "poise"), *map(str, words)], env=environment, stderr=subprocess.PIPE, text=True
    )
    # A process that is still being loaded has not all of its libraries, and the linker's cache beside them.
    wait_until(lambda: harness._json(workspace / "out.poise" / "status.json").get("iteration", 0) > 0, "an iteration")
    expect_equal(len(workspace.children(workspace / "out.poise")), 3, "processes")
    folders = {}
    for pid in workspace.children(workspace / "out.poise").values():
        with open(f"/proc/{pid}/maps") as file:
            for path in {line.split(maxsplit=5)[5].strip() for line in file if "/" in line}:
                name = os.path.basename(path)
                if ".so" in name and not _CORE.fullmatch(name):
                    folders.setdefault(name, set()).add(os.path.dirname(path))
    _, said = process.communicate(timeout=120)
    expect_equal(process.returncode, 0, f"the run's end: {said}")
    expect_equal(len(read_results(workspace / "out")), 8, "results")
    for name in _OURS:
        expect(any(found.startswith(name) for found in folders), f"{name} is mapped by no process: {sorted(folders)}")
    for name, where in folders.items():
        expect_equal(where, {str(bundle / "lib")}, f"where {name} was found")
    noted = json.loads((bundle / "bundle.json").read_text())
    expect_equal(sorted(path.name for path in (bundle / "lib").iterdir()), noted["libraries"], "noted libraries")
    for path in (bundle / "lib").iterdir():
        expect(not _CORE.fullmatch(path.name), f"{path.name} belongs to the machine")


@test
def with_tests_it_brings_the_goldens(workspace):
    bundle = made(workspace, "poise-z", "--with-tests")
    environment = {"XDG_RUNTIME_DIR": str(workspace.runtime), "PATH": "/usr/bin:/bin"}
    script = [harness.sys.executable, "-s", str(bundle / "tests/e2e/goldens.py"), "no_bias_equals"]
    done = subprocess.run(script, env=environment, cwd="/", capture_output=True, text=True, timeout=120)
    expect("1 passed, 0 failed" in done.stdout, f"goldens: {done.stdout} {done.stderr}")
    for program in Path(bundle / "bin").glob("poise_*_tests"):
        listed = subprocess.run(
            [program, "--gtest_list_tests"], env={"POISE_SOURCE_DIR": str(bundle)}, cwd="/", capture_output=True, text=True
        )
        expect(listed.returncode == 0 and listed.stdout.count("\n") > 3, f"{program.name}: {listed.stdout} {listed.stderr}")


@test
def nothing_else_is_overwritten(workspace):
    (workspace / "mine").mkdir()
    (workspace / "mine" / "precious").write_text("x")
    environment = {"POISE_BIN": str(bin_folder())}
    workspace.poise("bundle", "-o", workspace / "mine", env=environment).expect(2, "is no bundle")
    workspace.poise("bundle", "-o", workspace / "none" / "b", env=environment).expect(2, "make it first")
    expect((workspace / "mine" / "precious").exists(), "somebody's file is gone")
    made(workspace, "again")
    made(workspace, "again")


if __name__ == "__main__":
    raise SystemExit(harness.main())
