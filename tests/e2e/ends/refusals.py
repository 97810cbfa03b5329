#!/usr/bin/env python3
"""What a command refuses, and with which exit code and line, as launch/README.md documents; machines that are short of something."""

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from ending import SLOWLY, interpreter, long_requests, refused, wait_for_results  # noqa: E402
from harness import DEMO, DEMO_MODEL, comparable, expect, expect_equal, request, test  # noqa: E402


def without_roots_rights():
    """Permissions must hold for root too: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH go with the next exec."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (1, 2):
            if libc.prctl(24, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


@test
def options_and_files_that_cannot_work_are_refused_in_one_line(workspace):
    requests = workspace.write_requests("requests.jsonl", [request("a", "Once")])
    existing = workspace / "existing.jsonl"
    existing.write_text("precious\n")
    (workspace / "folder").mkdir()
    (workspace / "empty").mkdir()
    (workspace / "notes").mkdir()
    (workspace / "notes" / "diary.txt").write_text("mine")
    os.link(requests, workspace / "hardlink.jsonl")
    os.symlink(requests, workspace / "link.jsonl")
    os.mkfifo(workspace / "fifo")
    run = ["run", "--model", DEMO_MODEL, "-i", requests, "-o"]
    out = workspace / "out.jsonl"
    cases = [
        ([], 2, "which command"),
        (["frobnicate"], 2, "frobnicate"),
        (["run"], 2, "--model"),
        ([*run], 2, "-o"),
        ([*run, out, "--modle", "x"], 2, "--modle", "did you mean --model"),
        ([*run, out, "--gpu_memory", "lots"], 2, "--gpu-memory", "lots"),
        ([*run, out, "--host-memory=0"], 2, "--host-memory", "0"),
        ([*run, out, "--host-memory", "-5GiB"], 2, "--host-memory"),
        ([*run, out, "--act-share", "1.5"], 2, "--act-share", "0 to 1"),
        ([*run, out, "--act-share", "nan"], 2, "--act-share"),
        ([*run, out, "--max-num-seqs", "0"], 2, "--max-num-seqs"),
        ([*run, out, "--mini-batch-tokens", "many"], 2, "--mini-batch-tokens"),
        ([*run, out, "--dtype", "float8"], 2, "--dtype", "float8"),
        ([*run, out, "--policy", "guess"], 2, "--policy", "guess"),
        ([*run, out, "--device", "tpu"], 2, "--device", "tpu"),
        ([*run, out, "extra"], 2, "extra"),
        (["run", "--model", workspace / "nowhere", "-i", requests, "-o", out], 2, "nowhere"),
        (["run", "--model", workspace / "empty", "-i", requests, "-o", out], 2, "config.json"),
        (["run", "--model", requests, "-i", requests, "-o", out], 2, "not a directory"),
        (["run", "--model", DEMO_MODEL, "-i", workspace / "none.jsonl", "-o", out], 2, "none.jsonl"),
        (["run", "--model", DEMO_MODEL, "-i", workspace / "folder", "-o", out], 2, "not a regular file"),
        (["run", "--model", DEMO_MODEL, "-i", workspace / "fifo", "-o", out], 2, "not a regular file"),
        ([*run, requests], 2, "input and output at once"),
        ([*run, workspace / "hardlink.jsonl"], 2, "input and output at once"),
        ([*run, workspace / "link.jsonl", "--overwrite"], 2, "input and output at once"),
        ([*run, existing], 2, "exists already", "--overwrite"),
        ([*run, workspace / "folder"], 2, "not a regular file"),
        ([*run, workspace / "nowhere" / "out.jsonl"], 2, "not there"),
        ([*run, ""], 2, "names no file"),
        ([*run, out, "--run-dir", workspace / "notes"], 2, "holds other files"),
        ([*run, out, "--run-dir", requests], 2, "not a directory"),
        ([*run, out, "--run-dir", workspace / "a" / "b"], 2, "make it first"),
        (["status", workspace / "nowhere"], 2, "no run"),
        (["status", workspace / "folder"], 2, "holds no run"),
        (["stop", workspace / "folder"], 2, "holds no run"),
        (["inspect", workspace / "folder"], 2, "holds no run"),
        (["simulate", "the-weather"], 2, "capture-table3"),
        (["simulate"], 2, "NAME"),
        (["inspect", workspace / "nowhere"], 2, "no such file"),
        (["inspect", requests], 2, "requests.jsonl"),
        (["simulate", "policy-grid", "--svg", out], 2, "no picture of policy-grid"),
        (["simulate", "policy-grid", "--svg", workspace / "nowhere" / "p.svg"], 2, "no picture"),
        (["simulate", "capture-table3", "--svg", workspace / "folder"], 2, "a directory"),
        ([*run, out, "--trace", requests], 2, "--trace", "is the input, too"),
        ([*run, out, "--trace", workspace / "hardlink.jsonl"], 2, "is the input, too"),
        ([*run, out, "--trace", out], 2, "is the output, too"),
        ([*run, out, "--trace", workspace / "nowhere" / "t.json"], 2, "--trace", "make it first"),
        ([*run, out, "--trace", workspace / "out.jsonl.poise" / "orders.log"], 2, "keeps a file of that name"),
        (["bench", "--model", DEMO_MODEL, "--output-json", workspace / "nowhere" / "b"], 2, "--output-json", "make it first"),
        (["profile", "--model", DEMO_MODEL, "-o", workspace / "nowhere" / "p"], 2, "make it first"),
        ([*run, out, "--min-num-seqs", "5", "--max-num-seqs", "4"], 2, "--min-num-seqs 5", "--max-num-seqs"),
        (["help", "frobnicate"], 2, "frobnicate"),
        (["load", "--model", workspace / "nowhere"], 2, "nowhere"),
    ]
    for words, code, *fragments in cases:
        refused(workspace, words, code, *fragments)
    expect_equal(existing.read_text(), "precious\n", "an existing output")
    expect_equal(requests.read_bytes().count(b"\n"), 1, "lines of the input")
    expect(not out.exists() and not (workspace / "out.jsonl.poise").exists(), "a refused run left something")
    expect_equal(os.listdir(workspace / "notes"), ["diary.txt"], "a folder of others")


@test
def an_output_that_may_not_be_written_ends_with_73(workspace):
    closed = workspace / "closed"
    closed.mkdir(mode=0o555)
    words = workspace.run_words(DEMO / "show.jsonl", closed / "out.jsonl", "--run-dir", workspace / "run")
    refused(workspace, words, 73, "cannot be written", preexec_fn=without_roots_rights)


@test
def a_disk_that_fills_up_ends_with_73_and_nothing_finished_is_lost(workspace):
    requests = long_requests(workspace, 60)
    output = workspace / "out.jsonl"
    run = workspace / "out.jsonl.poise"
    oracle = workspace / "oracle.jsonl"
    workspace.run(requests, oracle).expect(0)
    process = workspace.start(*workspace.run_words(requests, output, *SLOWLY))
    wait_for_results(run, 2)
    room = (run / "results.jsonl.partial").stat().st_size + workspace.random.randrange(1, 2000)
    # From now on the planner's files may not grow beyond this: a write stops halfway, the next one fails.
    resource.prlimit(workspace.children(run)["planner"], resource.RLIMIT_FSIZE, (room, room))
    ended = workspace.finish(process).expect(73, "--resume", "results are safe")
    expect(not output.exists(), "half an output")
    partial = (run / "results.jsonl.partial").read_bytes()
    expect(partial.endswith(b"\n"), "a torn line was left in the results")
    expect(ended.err.count("\n") < 20, f"too many words:\n{ended.err}")
    workspace.run(requests, output, "--resume").expect(0)
    expect_equal(comparable(output), comparable(oracle), "the resumed file")


@test
def a_disk_without_room_for_a_run_directory_keeps_none(workspace):
    """No file may have more than so many bytes: of those in the directory the lock's owner is the first, its description the next."""
    for room, points in ((0, ""), (4096, "supervisor.write:errno=ENOSPC")):
        words = workspace.run_words(DEMO / "show.jsonl", workspace / "out.jsonl", "--run-dir", workspace / "run")
        ended = subprocess.run(
            [sys.executable, "-s", str(harness.ROOT / "launch" / "start.py"), *map(str, words)],
            env=workspace.environment({"POISE_FAILPOINTS": points}) | {"PYTHONDONTWRITEBYTECODE": "1"},  # nor any half compiled source
            cwd=workspace.folder,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=lambda limit=room: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        expect_equal(ended.returncode, 73, ended.stderr)
        expect(not (workspace / "run").exists(), f"the run directory stays: {os.listdir(workspace.folder)}")


@test
def a_full_shared_memory_is_refused_with_numbers(workspace):
    """The pools and weights are reserved before anything is loaded: no SIGBUS later."""
    shape = json.loads((DEMO_MODEL / "config.json").read_text())
    model = workspace / "huge"
    shutil.copytree(DEMO_MODEL, model)
    shape |= {"hidden_size": 12288, "ffn_dim": 49152, "num_hidden_layers": 96, "num_attention_heads": 96}
    shape |= {"word_embed_proj_dim": 12288}
    (model / "config.json").write_text(json.dumps(shape))
    words = workspace.run_words(DEMO / "show.jsonl", workspace / "out", "--load-format", "dummy", model=model)
    refused(workspace, words, 2, "memory")


@test
def too_few_open_files_are_refused_or_raised(workspace):
    """libzmq aborts a process that runs out of descriptors."""
    words = workspace.run_words(DEMO / "show.jsonl", workspace / "out.jsonl")

    def hard():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def soft():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))

    def enough_for_one():
        resource.setrlimit(resource.RLIMIT_NOFILE, (270, 270))

    refused(workspace, words, 2, "open files", preexec_fn=hard)
    workspace.poise(*words, preexec_fn=soft).expect(0)
    shards = workspace / "shards"
    shutil.copytree(DEMO_MODEL, shards)
    for number in range(40):
        (shards / f"{number}.safetensors").write_bytes(b"")
    words = workspace.run_words(DEMO / "show.jsonl", workspace / "other.jsonl", model=shards)
    refused(workspace, words, 2, "only 270 open files are allowed, 297 are needed", preexec_fn=enough_for_one)


@test
def a_planner_without_a_run_is_not_listed_as_one(workspace):
    with subprocess.Popen(
        [harness.bin_folder() / "poise-planner", "encode", "--model", DEMO_MODEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as planner:
        planner.stdin.write(b'"Once"\n')
        planner.stdin.flush()
        expect(planner.stdout.readline(), "the planner is not there")
        expect("None" not in json.loads(workspace.poise("status", "--json").expect(0).out)["runs"], "a run without a directory")
        planner.stdin.close()


@test
def a_directory_with_names_like_ours_is_left_as_it_is(workspace):
    for name in ("logs", "loader", "manifest.json", "status.json", "run.lock", "run.json"):
        theirs = workspace / f"theirs-{name}"
        theirs.mkdir(mode=0o755)
        (theirs / name).mkdir() if name in ("logs", "loader") else (theirs / name).write_text("{}")
        (theirs / "policy.json").write_text("theirs")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(theirs / "socket"))
        before = sorted(os.listdir(theirs))
        words = workspace.run_words(DEMO / "show.jsonl", workspace / "out.jsonl", "--run-dir", theirs)
        refused(workspace, words, 2, "holds other files and no run")
        expect_equal(sorted(os.listdir(theirs)), before, f"files beside {name}")
        expect_equal(stat.S_IMODE(theirs.stat().st_mode), 0o755, "the mode")
        refused(workspace, ("status", theirs), 2, "holds no run")


@test
def byte_code_that_a_full_disk_cut_off_is_compiled_again(workspace):
    launch, programs = workspace / "tree" / "launch", {"POISE_BIN": str(harness.bin_folder())}
    shutil.copytree(harness.ROOT / "launch", launch, ignore=shutil.ignore_patterns("__pycache__", "model"))
    words = [launch / "poise", "status", "--json"]

    def asked(*command):
        return subprocess.run([*map(str, command)], env=workspace.environment(programs), capture_output=True, text=True, check=False, input="{}")

    def cut(size):
        """All that is cached: as if the disk had been full at this byte, or had kept zeros from there on."""
        for path in launch.rglob("*.pyc"):
            content = path.read_bytes()
            path.write_bytes(content[:size] if size % 2 else content[:size] + bytes(len(content) - size))

    wanted = asked(*words)
    expect(wanted.returncode == 0 and "kept_loaders" in wanted.stdout, wanted.stderr)
    cached = {path: path.read_bytes() for path in launch.rglob("*.pyc")}
    expect(len(cached) > 10, f"only {len(cached)} modules have byte code")
    expect(not [path for path in cached if path.name.startswith("bytecode_cache.")], "the module that mends has byte code itself")
    for size in (1, 17, 100, 101, 1001):
        cut(size)
        ended = asked(*words)
        expect_equal((ended.returncode, ended.stderr), (0, ""), f"behind byte code of {size} bytes")
        ended = asked(*words)
        expect_equal({path: path.read_bytes() for path in launch.rglob("*.pyc")}, cached, f"byte code behind that of {size} bytes")
    # Programs of the server, whose packages need not be here.
    for name, module in (("start.py", "server/__init__"), ("chat_process.py", "supervisor/__init__")):
        source = launch / f"{module}.py"
        subprocess.run([interpreter(), "-m", "compileall", "-q", source], check=True)
        cut(17)
        said = asked(interpreter(), "-s", launch / "server" / name).stderr
        expect("EOFError" not in said and "marshal" not in said, f"{name}: {said}")
        expect(all(path.stat().st_size != 17 for path in (source.parent / "__pycache__").glob("__init__.*.pyc")), "it was not imported")


@test
def others_cannot_look_into_a_run(workspace):
    requests = long_requests(workspace)
    old = os.umask(0)
    try:
        process = workspace.start(*workspace.run_words(requests, workspace / "out.jsonl", *SLOWLY))
    finally:
        os.umask(old)
    run = workspace / "out.jsonl.poise"
    wait_for_results(run, 1)
    expect_equal(stat.S_IMODE(run.stat().st_mode), 0o700, "mode of the run directory")
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    names = [name for name in os.listdir("/dev/shm") if run_id in name]
    expect(len(names) >= 3, f"segments: {names}")
    for name in names:
        expect(stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) & 0o077 == 0, f"{name} is open to others")
    for path in run.rglob("*"):
        if path.is_file():
            expect(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or path.name == "results.jsonl.partial", f"{path.name} is open")
    process.send_signal(signal.SIGINT)
    workspace.finish(process).expect(75)


@test
def a_run_directory_too_deep_for_sockets_works(workspace):
    deep = workspace / ("d" * 100)
    deep.mkdir()
    output = deep / "out.jsonl"
    workspace.run(DEMO / "show.jsonl", output).expect(0)
    expect_equal(os.listdir(workspace.runtime / "poise"), [], "the short folder for sockets")


@test
def odd_names_and_relative_paths_work(workspace):
    folder = workspace / "a folder; with 'odd' \n names é"
    folder.mkdir()
    shutil.copytree(DEMO_MODEL, folder / "the model")
    shutil.copy(DEMO / "show.jsonl", folder / "-in put.jsonl")
    words = ["run", "--model", "the model", "--input_file=-in put.jsonl", "--output_file=-out.jsonl", "--device=cpu"]
    workspace.poise(*words, cwd=folder).expect(0)
    expect((folder / "-out.jsonl").exists(), "no output")


@test
def memory_beyond_the_machine_is_clipped_and_said(workspace):
    ended = workspace.run(
        DEMO / "show.jsonl", workspace / "out.jsonl", "--host-memory", "900TiB", "--gpu-memory", "900TiB"
    )
    ended.expect(0, "--host-memory", "--gpu-memory")


if __name__ == "__main__":
    raise SystemExit(harness.main())
