#!/usr/bin/env python3
"""`bench/gpu_check.sh` on the CPU device: it records its results, and does not report failed or missing checks as passed."""

import json
import os
import signal
import subprocess
import sys
import time

import harness
from harness import DEMO_MODEL, ROOT, bin_folder, expect, expect_equal, test, wait_until

sys.path.append(str(ROOT / "bench"))
import speed_table  # noqa: E402

_SHAPE = json.loads((DEMO_MODEL / "config.json").read_text()) | {"num_hidden_layers": 2}
_POISE = [{"name": "kv-only", "options": ["--policy", "kv-only"]}]
_POISE += [{"name": "act-only, 4", "num_prompts": 4, "options": ["--policy", "act-only"]}]
_POISE += [{"name": "token-recompute", "options": ["--policy", "token-recompute"]}]
_POISE += [{"name": "prompts alone", "output_len": 1, "options": ["--policy", "kv-only"]}]
_PEER = ("prefill_per_second", "output_tokens_per_second", "gpu_peak_by_driver_bytes", "gpu_reserved_bytes", "host_peak_bytes")
# What compute-sanitizer says at its end, behind a program that ran as if nothing were around it.
_TOOL = '#!/bin/sh\nshift 4\n"$@"; code=$?\necho "========= {summary}"\nexit $code\n'


def prepared(workspace, *options, root=ROOT, tool=None, extra=None, pace=((), ())):
    """The command that runs gpu_check.sh, and its environment."""
    (workspace / "shape.json").write_text(json.dumps(_SHAPE))
    work = {"config": str(workspace / "shape.json"), "num_prompts": 6, "input_len": 20, "output_len": 5, "poise": _POISE}
    work |= {"flexgen": [{"gpu_batch_size": 2, "num_gpu_batches": 2, "percent": [100, 0, 0, 100, 100, 0]}]}
    work |= {"transformers": {"batches": [4], "seconds": 60}}
    works = {"gpu_memory": "8MiB", "host_memory": "32MiB", "works": {"tiny": work}}
    works["restart"] = {"config": work["config"], "gpu_memory": "64MiB", "policy": "kv-only"}
    works["restart"] |= {"num_prompts": 60, "input_len": 20, "output_len": 200, "demo": {"num_prompts": 40}}
    # Slow devices make the runs last, in place of work: there is time to end what is to be ended in their midst.
    works["restart"]["options"], works["restart"]["demo"]["options"] = pace
    (workspace / "works.json").write_text(json.dumps(works))
    path = os.environ.get("PATH", "/usr/bin:/bin")
    if tool is not None:
        (workspace / "tools").mkdir(exist_ok=True)
        (workspace / "tools" / "compute-sanitizer").write_text(_TOOL.format(summary=tool))
        os.chmod(workspace / "tools" / "compute-sanitizer", 0o755)
        path = f"{workspace / 'tools'}:{path}"
    command = ["/bin/sh", root / "bench" / "gpu_check.sh", "--results", workspace / "out", "--device", "cpu"]
    command += ["--works-file", workspace / "works.json", *options]
    return [str(word) for word in command], {**os.environ, "PATH": path, "POISE_PYTHON": sys.executable, **(extra or {})}


def check(workspace, *options, **more):
    """(exit code, {section: {item: …}}) of gpu_check.sh."""
    command, environment = prepared(workspace, *options, **more)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    expect("Traceback" not in done.stderr, done.stderr)
    told = json.loads((workspace / "out" / "gpu_check.json").read_text())
    return done.returncode, {name: {item["name"]: item for item in items} for name, items in told["sections"].items()}


@test
def speeds_are_noted_and_gather_over_calls(workspace):
    code, told = check(workspace, "--only", "speed", "--link-peak", "4", "--trace")
    expect_equal((code, set(told)), (0, {"speed"}), "the first call")
    code, told = check(workspace, "--only", "sanitizer", tool="ERROR SUMMARY: 0 errors")
    expect_equal((code, set(told)), (0, {"speed", "sanitizer"}), "the second call adds to it")
    expect_equal([item["ok"] for item in told["sanitizer"].values()], [True, True], "a sanitizer that finds nothing")
    expect_equal(set(told["speed"]), {"tiny profile", *(f"tiny {one['name']}" for one in _POISE)}, "speeds")
    phases = {name: item["figures"]["phases"] for name, item in told["speed"].items() if "figures" in item}
    expect_equal(phases["tiny prompts alone"]["decode"], None, "a run of prompts alone")
    for name in ("tiny kv-only", "tiny token-recompute"):
        expect_equal(phases[name]["decode"]["sampled_tokens"], 6 * 4, f"{name}: tokens behind the first ones")
    expect_equal(told["speed"]["tiny act-only, 4"]["figures"]["num_requests"], 4, "its own batch")
    text = (workspace / "out" / "gpu_check.txt").read_text()
    expect("poise act-only, 4" in text and "decode tok/s" in text, text)
    raw = json.loads((workspace / "out" / "gpu_check.json").read_text())
    peer = {"num_requests": 4, "decode_tokens_per_second": 10.0} | dict.fromkeys(_PEER)
    raw["sections"]["peers"] = [{"ok": True, "work": "tiny", "system": "FlexGen", "peer": peer}]
    ratios = {row[1]: row[4] for row in speed_table.speed_rows(raw)}
    expect_equal((ratios["FlexGen"], ratios["poise prompts alone"]), ("1.00", ""), "beside FlexGen, where nothing decodes")
    predicted = told["speed"]["tiny kv-only"]["figures"]["predicted"]
    expect(predicted["decode_iteration_seconds"] > 0, "nothing was predicted from the profile")
    expect((workspace / "out" / "tiny-kv-only.trace.json.gz").exists(), "no timeline")
    expect_equal(len(list((workspace / "out").iterdir())), 4 + len(_POISE), "files: JSON, text, log, profile, timelines")


@test
def what_a_sanitizer_reports_counts(workspace):
    code, told = check(workspace, "--only", "sanitizer", tool="ERROR SUMMARY: 3 errors")
    expect_equal((code, told["sanitizer"]["memcheck"]["errors"]), (1, 3), "three errors")
    code, told = check(workspace, "--only", "sanitizer", tool="nothing to say")
    expect_equal((code, told["sanitizer"]["racecheck"]["ok"]), (1, False), "no summary")
    code, told = check(workspace, "--only", "sanitizer", tool="Device not supported")
    expect_equal((code, told["sanitizer"]["racecheck"]["ok"]), (0, None), "a device that it does not know")


@test
def what_a_tool_leaves_behind_is_ended(workspace):
    gone = workspace / "gone"
    watched = f"""import pathlib, signal, sys, time
def end(*_):
    time.sleep(1)
    pathlib.Path("{gone}").touch()
    sys.exit()
signal.signal(signal.SIGINT, end)
time.sleep(100)
"""
    (workspace / "watched.py").write_text(watched)
    command, environment = prepared(workspace, "--only", "sanitizer", "--budget", "sanitizer=5", tool="")
    tool = f"#!/bin/sh\n{sys.executable} {workspace / 'watched.py'} &\nexec sleep 100\n"
    (workspace / "tools" / "compute-sanitizer").write_text(tool)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    expect("not run  sanitizer: memcheck" in done.stdout, done.stdout)
    expect(gone.exists(), "the check went on beside it")


@test
def what_does_not_run_is_not_called_well(workspace):
    code, told = check(workspace, "--only", "speed", "--budget", "speed=0.05")
    expect_equal({item["ok"] for item in told["speed"].values()}, {None}, "no time")
    expect_equal(code, 0, "what could not run is no failure, but it says so")
    expect("not run" in (workspace / "out" / "gpu_check.txt").read_text(), "said nowhere")
    (workspace / "empty").mkdir()
    code, told = check(workspace, "--only", "tests,speed", extra={"POISE_BIN": str(workspace / "empty")})
    expect_equal((code, told["tests"]["CUDA tests"]["ok"]), (1, False), "no test programs")
    expect_equal(told["speed"]["tiny kv-only"]["ok"], False, "no programs")
    code, told = check(workspace, "--only", "peers", "--peer-python", "/bin/false")
    expect_equal({item["ok"] for item in told["peers"].values()}, {None}, "peers that cannot")


@test
def restarts_are_timed_and_their_answers_compared(workspace):
    code, told = check(workspace, "--only", "restart", pace=(workspace.paced(3), workspace.paced(20)))
    found = told["restart"]
    expect_equal((code, [item["ok"] for item in found.values()]), (0, [True] * 5), found)
    expect("5 restarts, answers and logprobs equal" in found["tokens after restarts"]["told"], found)
    expect(found["ready again"]["pool_bytes"] > 0 and found["ready again"]["seconds"] < 10, found)


@test
def told_to_end_it_takes_along_what_it_began(workspace):
    for section, begun, number in (("restart", "undisturbed.run", signal.SIGTERM), ("speed", "tiny", signal.SIGINT)):
        environment = {"TMPDIR": str(workspace.folder)}
        command, environment = prepared(workspace, "--only", section, extra=environment, pace=(workspace.paced(3), workspace.paced(3)))
        running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 30
        while not list(workspace.folder.glob(f"poise-gpu-check-*/{begun}")) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)  # now it loads, or runs
        expect(running.poll() is None, f"{section} ended by itself")
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
        expect_equal((running.returncode, "Traceback" in said), (128 + number, False), f"exit of {section}, {said}")
        expect_equal(list(workspace.folder.glob("poise-gpu-check-*")), [], "folders left behind")
        left = [one for one in workspace.leftovers() if not one.startswith("shared memory")]
        expect_equal(left, [], "left behind")
        # Unit tests that run at the same time have segments that are nobody's for a moment.
        wait_until(lambda: not workspace.leftovers(), "no shared memory to be left behind", 10)


@test
def it_runs_from_a_bundle(workspace):
    bundle = workspace / "bundle"
    workspace.poise("bundle", "--with-tests", "-o", bundle, env={"POISE_BIN": str(bin_folder())}).expect(0)
    environment = {"POISE_BIN": "", "XDG_RUNTIME_DIR": str(workspace.runtime)}
    code, told = check(workspace, "--only", "demo,speed", "--variants", "kv-only", root=bundle, extra=environment)
    log = (workspace / "out" / "gpu_check.log").read_text()
    expect(code == 0, f"from a bundle: {log[-3000:]}")
    expect_equal(set(told["speed"]), {"tiny profile", "tiny kv-only"}, "speeds from a bundle")
    expect_equal(len(told["demo"]), 8, "policies that answered the questions, and their replays")
    for item in told["demo"].values():
        expect("100.0 % right" in item["told"] or "every answer is equal" in item["told"], item["told"])


if __name__ == "__main__":
    raise SystemExit(harness.main())
