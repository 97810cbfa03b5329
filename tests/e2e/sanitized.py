#!/usr/bin/env python3
"""The whole path once more, short enough for programs built with sanitizers (POISE_BIN says where they are)."""

import os
import signal

import harness
from harness import DEMO, comparable, expect, expect_equal, first_layers, request, test, wait_until
from mixed_requests import BAD_LINES, good_request


LAYERS = 3  # of the demo model's: as many processes, messages and kinds of kernels, less arithmetic


def work(workspace):
    lines = [good_request(workspace.random, i, longest=10) for i in range(16)]
    lines += [make(workspace.random, f"bad{i}") for i, (make, _) in enumerate(BAD_LINES)]
    return workspace.write_requests("requests.jsonl", lines)


@test
def the_pipeline_runs_clean_with_each_policy(workspace):
    requests, model = work(workspace), first_layers(LAYERS, workspace / "model")
    ways = (["--policy", "kv-only"], ["--policy", "act-only", "--threads", "3"], ["--policy", "hybrid", "--act-share", "0.5"])
    for number, options in enumerate(ways):
        workspace.run(requests, workspace / f"{number}.out", *options, model=model, timeout=280).expect(0)
        expect_equal(comparable(workspace / f"{number}.out"), comparable(workspace / "0.out"), " ".join(options))


@test
def kills_and_a_resume_run_clean(workspace):
    lines = [request(f"long{i}", "Rosa lives in", max_tokens=30, ignore_eos=True) for i in range(24)]
    requests, model = workspace.write_requests("requests.jsonl", lines), first_layers(LAYERS, workspace / "model")
    workspace.run(requests, workspace / "oracle", model=model, timeout=280).expect(0)
    output, run = workspace / "out", workspace / "out.poise"
    words = workspace.run_words(requests, output, "--resume", "--max-num-seqs", "2", model=model)
    hits = []
    for victim in ("gpu_executor", "planner", "loader", "supervisor", "none"):
        before = _lines(run)
        process = workspace.start(*words)
        wait_until(lambda p=process, n=before: _lines(run) > n or p.poll() is not None, "another result", seconds=120)
        pid = process.pid if victim in ("supervisor", "none") else workspace.children(run).get(victim)
        hit = pid is not None and process.poll() is None
        if hit:
            os.kill(pid, signal.SIGTERM if victim == "none" else signal.SIGKILL)
            hits.append(victim)
        ended = workspace.finish(process)
        if hit and victim != "supervisor" and not output.exists():
            ended.expect(75, "--resume")
    expect(len(hits) >= 2, f"hit were only {hits}: the work was done too soon")
    workspace.run(requests, output, "--resume", model=model, timeout=280).expect(0)
    expect_equal(comparable(output), comparable(workspace / "oracle"), "the resumed file")


@test
def the_demo_questions_run_clean_under_a_kept_loader(workspace):
    lines = (DEMO / "questions.jsonl").read_text().splitlines()[:30]
    requests = workspace.write_requests("requests.jsonl", lines)
    workspace.run(requests, workspace / "a", "--keep-loader", timeout=280).expect(0)
    workspace.run(requests, workspace / "b", timeout=280).expect(0, "using the kept loader")
    workspace.poise("stop").expect(0, "ended the loader")
    expect_equal(comparable(workspace / "a"), comparable(workspace / "b"), "second run")


def _lines(run):
    try:
        return (run / "results.jsonl.partial").read_bytes().count(b"\n")
    except OSError:
        return 0


if __name__ == "__main__":
    raise SystemExit(harness.main())
