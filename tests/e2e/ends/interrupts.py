#!/usr/bin/env python3
"""Signals and what becomes of a run at one: what is finished is written, the exit code and the sentence are those of launch/README.md."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from ending import SLOWLY, interpreter, long_requests, wait_for_results  # noqa: E402
from harness import DEMO, DEMO_MODEL, expect, expect_equal, request, test, wait_until  # noqa: E402


@test
def an_interrupt_finishes_what_is_being_written(workspace):
    for number in (signal.SIGTERM, signal.SIGINT):
        folder = workspace / f"by-{number}"
        folder.mkdir()
        requests = long_requests(workspace)
        output = folder / "out.jsonl"
        process = workspace.start(*workspace.run_words(requests, output, *SLOWLY))
        wait_for_results(f"{output}.poise", 2)
        began = time.monotonic()
        process.send_signal(number)
        workspace.finish(process, timeout=40).expect(75, "--resume", "results are safe")
        expect(time.monotonic() - began < 30, "took longer than 30 s")
        expect(not output.exists(), "an unfinished output")


def catches(pid, number):
    with open(f"/proc/{pid}/status") as file:
        (caught,) = [int(line.split()[1], 16) for line in file if line.startswith("SigCgt")]
    return bool(caught >> (number - 1) & 1)


@test
def a_signal_before_a_run_has_begun_ends_it_in_a_sentence(workspace):
    """As soon as Python runs our code, and while options are checked: here by a planner that takes its time."""
    programs, asked = workspace / "programs", workspace / "asked"
    programs.mkdir()
    for name in harness.PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\ntouch {shlex.quote(str(asked))}\nexec sleep 60\n")
        (programs / name).chmod(0o755)
    words = workspace.run_words(DEMO / "show.jsonl", workspace / "out.jsonl", "--policy", "kv-only")
    for number in (signal.SIGTERM, signal.SIGINT):
        for early in (True, False):
            process = workspace.start(*words, env={"POISE_BIN": str(programs)})
            wait_until(lambda p=process: catches(p.pid, signal.SIGTERM) if early else asked.exists(), "the command to begin")
            process.send_signal(number)
            ended = workspace.finish(process).expect(75, "poise: interrupted")
            expect_equal(len(ended.lines()), 1, ended.err)
            asked.unlink(missing_ok=True)
    expect(not (workspace / "out.jsonl.poise").exists(), "a run directory")


@test
def a_signal_before_python_has_handlers_ends_a_command_in_a_sentence(workspace):
    """While the shell part looks for what it needs, and while Python starts: each takes half a second here, and says when."""
    began, slow = workspace / "began", workspace / "slow"
    slow.mkdir()
    for name, program in (("env", "/usr/bin/env"), ("python", interpreter())):
        # (dash would let through what is blocked.)
        lines = (f"#!{interpreter()} -sS", "import os, sys, time", f"open({str(began)!r}, 'w').close()", "time.sleep(0.5)")
        (slow / name).write_text("\n".join((*lines, f"os.execv({program!r}, [{program!r}, *sys.argv[1:]])\n")))
        (slow / name).chmod(0o755)
    shell = {"PATH": f"{slow}:{os.environ['PATH']}"}
    python = {"POISE_PYTHON": str(slow / "python")}
    for environment in (shell, python):
        for number in (signal.SIGTERM, signal.SIGINT):
            words = [str(harness.POISE), "policies"]
            process = subprocess.Popen(words, env=workspace.environment(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_until(began.exists, "the command to begin")
            process.send_signal(number)
            said = process.communicate(timeout=60)
            expect_equal((process.returncode, *said), (75, "", "poise: interrupted\n"), f"signal {number}, {environment}")
            began.unlink()


@test
def a_signal_to_a_command_that_prints_ends_it_in_a_sentence(workspace):
    """The planner, which prints for it, comes to its end only once somebody reads. One signal comes while it starts."""
    slow = workspace / "slow"
    slow.mkdir()
    began = slow / "began"
    lines = (f"#!{interpreter()} -sS", "import os, sys, time", f"open({str(began)!r}, 'w').close()", "time.sleep(0.5)")
    for name in harness.PROGRAMS:
        (slow / name).write_text("\n".join((*lines, f"os.execv({str(harness.bin_folder() / name)!r}, ['poise', *sys.argv[1:]])\n")))
        (slow / name).chmod(0o755)
    for number in (signal.SIGTERM, signal.SIGINT):
        for environment in ({}, {"POISE_BIN": str(slow)}):
            read, write = os.pipe()
            os.set_blocking(write, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(write, b"x" * 4096)
            os.set_blocking(write, True)
            words = [str(harness.POISE), "policies"]
            process = subprocess.Popen(words, env=workspace.environment(environment), stdout=write, stderr=subprocess.PIPE, text=True)
            wait_until(began.exists if environment else lambda pid=process.pid: has_become_the_planner(pid), "the command to begin")
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
            expect_equal((process.returncode, said), (75, "poise: interrupted\n"), f"signal {number}, {environment}")
            os.close(read)
            os.close(write)
            began.unlink(missing_ok=True)


def has_become_the_planner(pid):
    return Path(f"/proc/{pid}/comm").read_text().startswith("poise-planner") and catches(pid, signal.SIGTERM)


@test
def a_signal_after_a_command_has_ended_does_not_change_how(workspace):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        process = workspace.start(*workspace.run_words(DEMO / "show.jsonl", workspace / "out.jsonl", "--overwrite"))
        wait_until(lambda p=process: "is written" in harness.said(p), "the summary")
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.0005)
        workspace.finish(process).expect(0)


@test
def a_signal_to_every_process_at_once_ends_a_run_as_one_to_its_supervisor_does(workspace):
    """systemd's default (KillMode=control-group), in both orders."""
    requests = long_requests(workspace)
    for order in ("children first", "supervisor first"):
        output = workspace / f"{order}.jsonl"
        # An iteration takes long enough that there is always one under way, and it is finished.
        process = workspace.start(*workspace.run_words(requests, output, *SLOWLY, *workspace.paced(1)))
        wait_for_results(f"{output}.poise", 2)
        run_id = harness._json(workspace / f"{order}.jsonl.poise" / "run.json")["run_id"]
        children = list(workspace.children(f"{output}.poise").values())
        expect_equal(len(children), 3, "processes")
        began = time.monotonic()
        if order == "children first":  # long before, even
            process.send_signal(signal.SIGSTOP)
            for pid in children:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.3)
        for pid in (process.pid, *([] if order == "children first" else children)):
            os.kill(pid, signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        ended = workspace.finish(process, timeout=40).expect(75, "poise: interrupted; ", "results are safe", "--resume")
        expect(time.monotonic() - began < 8, f"took {time.monotonic() - began:.1f} s: {ended.err}")
        expect_equal(harness.segments_of(run_id), [], "shared memory")
        told = workspace.poise("inspect", "--json", f"{output}.poise").expect(0).out
        orders = [order for order in map(json.loads, told.splitlines()) if order.get("type") == "layer"]
        last = [order for order in orders if order["iteration"] == orders[-1]["iteration"]]
        expect(all("done_s" in order for order in last) and len(last) == len({order["stage"] for order in orders}), f"{last}")


@test
def an_interrupted_bench_waits_for_its_run_and_leaves_nothing(workspace):
    temporary = workspace / "tmp"
    temporary.mkdir()
    sizes = ("--num-prompts", "400", "--input-len", "100", "--output-len", "400")
    for end, number in ((os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)):  # as a terminal, and as a scheduler does
        process = workspace.start("bench", "--model", DEMO_MODEL, *sizes, *SLOWLY, env={"TMPDIR": str(temporary)})
        wait_until(lambda: list(temporary.glob("poise-bench-*/run-1/status.json")), "the run")
        end(process.pid, number)
        workspace.finish(process, timeout=40).expect(75, "keeps nothing")
        expect_equal(os.listdir(temporary), [], "temporary files")


@test
def a_second_interrupt_ends_at_once(workspace):
    requests = long_requests(workspace)
    process = workspace.start(*workspace.run_words(requests, workspace / "out.jsonl", *SLOWLY))
    wait_for_results(workspace / "out.jsonl.poise", 1)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "interrupt again" in harness.said(process), "the first one to be seen")
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    workspace.finish(process).expect(75, "--resume")
    expect(time.monotonic() - began < 3, "did not end at once")


@test
def a_hangup_and_a_closed_terminal_do_not_end_a_run(workspace):
    requests = workspace.write_requests("requests.jsonl", [request(i, "Once", max_tokens=24) for i in range(100)])
    process = workspace.start(*workspace.run_words(requests, workspace / "out.jsonl", *SLOWLY))
    wait_for_results(workspace / "out.jsonl.poise", 1)
    for number in (signal.SIGHUP, signal.SIGPIPE):
        process.send_signal(number)
    workspace.finish(process).expect(0, "100 results")


if __name__ == "__main__":
    raise SystemExit(harness.main())
