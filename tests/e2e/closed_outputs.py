#!/usr/bin/env python3
"""Commands whose stdout is closed, full, or read no further: no message if the reader closed the pipe, otherwise a sentence."""

import os
import subprocess
import sys

import harness
from harness import DEMO, expect, expect_equal, test


def commands(run):
    """Commands that only print."""
    return [
        ["inspect", run],
        ["inspect", run, "--json"],
        ["status", run],
        ["status", run, "--json"],
        ["status"],
        ["version"],
        ["help"],
        ["help", "run"],
    ]


def finished_run(workspace):
    workspace.run(DEMO / "show.jsonl", workspace / "out.jsonl").expect(0)
    return workspace / "out.jsonl.poise"


def ended(workspace, words, **popen):
    """(exit code, stderr) of `poise WORDS` with a stdout of the caller's."""
    command = [sys.executable, "-s", str(harness.ROOT / "launch" / "start.py"), *map(str, words)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=workspace.environment(), timeout=60,
        check=False, **popen,
    )
    return done.returncode, done.stderr


@test
def a_reader_that_has_seen_enough_is_no_trouble(workspace):
    run = finished_run(workspace)
    for restored in (True, False):  # SIGPIPE as a shell leaves it, and ignored
        for words in commands(run):
            read_end, write_end = os.pipe()
            os.close(read_end)
            with os.fdopen(write_end, "wb") as stdout:
                got = ended(workspace, words, stdout=stdout, restore_signals=restored)
            expect_equal(got, (0, ""), f"`poise {' '.join(map(str, words))}` without a reader")


@test
def a_closed_stdout_is_no_trouble(workspace):
    run = finished_run(workspace)
    for words in commands(run):
        got = ended(workspace, words, preexec_fn=lambda: os.close(1))
        expect_equal(got, (0, ""), f"`poise {' '.join(map(str, words))}` with a closed stdout")


@test
def an_output_that_takes_no_more_is_said(workspace):
    run = finished_run(workspace)
    for words in commands(run):
        with open("/dev/full", "wb") as stdout:
            code, said = ended(workspace, words, stdout=stdout)
        told = f"`poise {' '.join(map(str, words))}` ended with {code}: {said}"
        expect(code == 73 and said.count("\n") == 1 and "No space left" in said and "Traceback" not in said, told)


@test
def a_run_with_closed_outputs_answers_all_the_same(workspace):
    words = workspace.run_words(DEMO / "show.jsonl", workspace / "out.jsonl")
    for closed in ((1,), (2,), (0, 1, 2)):
        code, _ = ended(workspace, [*words, "--overwrite"], preexec_fn=lambda closed=closed: [os.close(n) for n in closed])
        expect_equal(code, 0, f"exit code with {closed} closed")
        expect_equal((workspace / "out.jsonl").read_bytes().count(b"\n"), 8, "results")


if __name__ == "__main__":
    raise SystemExit(harness.main())
