"""What scripts about the ends of runs share: a refusal in one line, the interpreter of commands, long runs that are interrupted."""

import os
import signal

from harness import expect, request, wait_until
from mixed_requests import good_request


def refused(workspace, words, code, *fragments, **more):
    """One line on stderr, and fast."""
    ended = workspace.poise(*words, **more).expect(code, *fragments)
    expect(len(ended.lines()) <= 2, f"one line wanted:\n{ended.err}")
    expect(ended.seconds < 10, f"took {ended.seconds:.1f} s")
    return ended


def interpreter():
    """That of the shell part."""
    return os.environ.get("POISE_PYTHON") or "/usr/bin/python3"


SLOWLY = ("--max-num-seqs", "3")


def long_requests(workspace, count=400):
    """With SLOWLY, work for half a minute: enough to interrupt it in the middle."""
    lines = [good_request(workspace.random, i) for i in range(4)]
    lines += [request(f"long{i}", "Once there was a clever wolf", max_tokens=100, ignore_eos=True) for i in range(count)]
    return workspace.write_requests("requests.jsonl", lines)


def wait_for_results(run, count):
    partial = os.path.join(run, "results.jsonl.partial")

    def enough():
        try:
            with open(partial, "rb") as file:
                return file.read().count(b"\n") >= count
        except OSError:
            return False

    wait_until(enough, f"{count} results", seconds=60)


def interrupted(workspace):
    """A run that was stopped in its middle: (requests, output)."""
    requests = long_requests(workspace, 60)
    output = workspace / "out.jsonl"
    process = workspace.start(*workspace.run_words(requests, output, *SLOWLY))
    wait_for_results(f"{output}.poise", 2)
    process.send_signal(signal.SIGTERM)
    workspace.finish(process).expect(75, "--resume")
    return requests, output
