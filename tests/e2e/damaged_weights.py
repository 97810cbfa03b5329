#!/usr/bin/env python3
"""`--verify`: weights that change in shared memory end the run with a sentence; no answer that may hang on them is kept."""

import json
import os
import signal
from pathlib import Path

import harness
from harness import DEMO_MODEL, comparable, expect, expect_equal, request, test, wait_until
from mixed_requests import good_request

# Weights are read from shared memory in each iteration.
SLOWLY = ("--max-num-seqs", "3", "--resident-layers", "0")


def work(workspace):
    lines = [good_request(workspace.random, i) for i in range(16)]
    lines += [request(f"long{i}", "Rosa lives in", max_tokens=100, ignore_eos=True) for i in range(14)]
    return workspace.write_requests("requests.jsonl", lines)


def damage(run_id):
    """Numbers of the last layers change their sign: every answer from now on is another one."""
    path = f"/dev/shm/poise-{os.geteuid()}-{run_id}-weights"
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        half = file.seek(0, os.SEEK_END) // 4 * 2
        file.seek(half)
        content = bytearray(file.read())
        content[1::2] = bytes(byte ^ 0x80 for byte in content[1::2])
        file.seek(half)
        file.write(content)
    os.chmod(path, 0o400)


def segments():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"poise-{os.geteuid()}-")]


def started(workspace, requests, output, answers, *words):
    """A run that has written so many answers: (process, its results, the id in the names of its segments)."""
    partial = Path(f"{output}.poise") / "results.jsonl.partial"
    process = workspace.start(*workspace.run_words(requests, output, *SLOWLY, *words))
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= answers, "results")
    return process, partial, json.loads((partial.parent / "run.json").read_text())["run_id"]


@test
def damaged_weights_end_a_run_and_a_resume_computes_what_hung_on_them(workspace):
    requests = work(workspace)
    workspace.run(requests, workspace / "oracle.jsonl", *SLOWLY, "--verify").expect(0, "once more")
    for kept in (False, True):
        output = workspace / f"out-{kept}.jsonl"
        run, partial = Path(f"{output}.poise"), Path(f"{output}.poise") / "results.jsonl.partial"
        words = (*SLOWLY, "--verify", *(("--keep-loader",) if kept else ()))
        process = workspace.start(*workspace.run_words(requests, output, *words))
        wait_until(lambda partial=partial: partial.exists() and partial.read_bytes().count(b"\n") > 3, "results")
        damage(json.loads((run / "run.json").read_text())["run_id"])
        ended = workspace.finish(process)
        ended.expect(75, "have changed since they were loaded: tensor ", "taken back", "--resume")
        expect_equal(len(ended.err.split("have changed")), 2, f"times that it is said:\n{ended.err}")
        oracle = set(comparable(workspace / "oracle.jsonl"))
        expect(set(comparable(partial)) <= oracle, "an answer from damaged weights was kept")
        resumed = workspace.run(requests, output, *words, "--resume").expect(0)
        expect("using the kept loader" not in resumed.err, resumed.err)
        expect_equal(comparable(output), sorted(oracle), "the answers")
    workspace.poise("stop").expect(0)


@test
def a_run_that_does_not_verify_shows_what_damage_does(workspace):
    """Otherwise the tests here would compare answers that no damage changes."""
    requests = work(workspace)
    workspace.run(requests, workspace / "oracle.jsonl", *SLOWLY).expect(0)
    process, partial, run_id = started(workspace, requests, workspace / "out.jsonl", 1)
    executor = workspace.children(partial.parent)["gpu_executor"]
    os.kill(executor, signal.SIGSTOP)  # or all answers might be there before the damage
    damage(run_id)
    os.kill(executor, signal.SIGCONT)
    workspace.finish(process).expect(0)
    expect(comparable(workspace / "out.jsonl") != comparable(workspace / "oracle.jsonl"), "damage changed no answer")


@test
def a_planner_that_follows_a_killed_one_takes_back_what_was_not_checked(workspace):
    requests = work(workspace)
    workspace.run(requests, workspace / "oracle.jsonl", *SLOWLY).expect(0)
    output = workspace / "out.jsonl"
    process, partial, run_id = started(workspace, requests, output, 1, "--verify", "--restarts", "2")
    loader, planner = (workspace.children(partial.parent)[name] for name in ("loader", "planner"))
    os.kill(loader, signal.SIGSTOP)  # checks nothing from here on
    damage(run_id)
    wait_until(lambda: partial.read_bytes().count(b"\n") == 30, "all answers")
    os.kill(planner, signal.SIGKILL)
    wait_until(lambda: partial.read_bytes().count(b"\n") < 30, "a planner that takes back what was not checked")
    os.kill(loader, signal.SIGCONT)
    workspace.finish(process).expect(75, "no check of the weights came behind the last answers", "--resume")
    expect(set(comparable(partial)) <= set(comparable(workspace / "oracle.jsonl")), "an answer from damaged weights was kept")
    workspace.run(requests, output, *SLOWLY, "--verify", "--resume").expect(0)
    expect_equal(comparable(output), comparable(workspace / "oracle.jsonl"), "the answers")


@test
def a_loader_that_was_kept_before_the_run_ends_with_damaged_weights_too(workspace):
    requests = work(workspace)
    workspace.poise("load", "--model", str(DEMO_MODEL)).expect(0)
    output = workspace / "out.jsonl"
    process, _, run_id = started(workspace, requests, output, 3, "--verify", "--keep-loader")
    damage(run_id)
    workspace.finish(process).expect(75, "have changed since they were loaded")
    workspace.run(requests, output, *SLOWLY, "--verify", "--resume").expect(0)
    expect_equal([name for name in segments() if run_id in name], [], "segments of the damaged loader")


@test
def weights_that_are_damaged_behind_the_last_answer_are_found_before_it_is_published(workspace):
    requests = workspace.write_requests("requests.jsonl", [request(i, "Once", max_tokens=2) for i in range(3)])
    output = workspace / "out.jsonl"
    halted = {"POISE_FAILPOINTS": "results.sync:delay=1500"}  # the sync behind the last answer
    process = workspace.start(*workspace.run_words(requests, output, "--verify"), env=halted)
    partial = Path(f"{output}.poise") / "results.jsonl.partial"
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") == 3, "the answers")
    damage(json.loads((Path(f"{output}.poise") / "run.json").read_text())["run_id"])
    workspace.finish(process).expect(75, "have changed since they were loaded", "--resume")
    expect(not output.exists() and partial.read_bytes() == b"", "an answer from weights that were not sound was kept")
    workspace.run(requests, output, "--verify", "--resume").expect(0)


if __name__ == "__main__":
    raise SystemExit(harness.main())
