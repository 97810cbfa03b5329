#!/usr/bin/env python3
"""Hostile request files through the whole of `poise run`: each case of hostile_requests.json is a test.

A file that is no request file ends with 2 and one line on stderr; every other ends with 0, and each input line has the
result line that the corpus says. `--command PATH` runs another `poise` than this checkout's; --within SECONDS says how
long a case may take.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import harness
from harness import DEMO_MODEL, Failed, expect, expect_equal

CORPUS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))["cases"]
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
_WITHIN = 10.0  # of a core


def taken(name, default):
    """The value of an option of ours, taken off the command line before the harness reads it."""
    if name not in sys.argv:
        return default
    at = sys.argv.index(name)
    value = sys.argv[at + 1 : at + 2]
    del sys.argv[at : at + 2]
    return value[0] if value else default


COMMAND = taken("--command", None)
WITHIN = float(taken("--within", _WITHIN))


def pieces(parts):
    """The bytes that a case's `file` stands for."""
    out = []
    for part in parts:
        if isinstance(part, str):
            out.append(part.replace("@vocab@", str(CONFIG["vocab_size"])).encode())
        elif "hex" in part:
            out.append(bytes.fromhex(part["hex"]))
        else:
            times = part["times"]
            if isinstance(times, list):
                times = CONFIG["max_position_embeddings"] + times[1]
            out.append(pieces(part["of"]) * times)
    return b"".join(out)


def input_of(case, workspace):
    path = workspace / "in.jsonl"
    kind = case.get("kind")
    if "file" in case:
        path.write_bytes(pieces(case["file"]))
    elif kind == "null_device":
        path = Path("/dev/null")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to("in.jsonl")
    elif kind == "broken_link":
        path.symlink_to("nowhere")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        expect_equal(kind, "missing", "kind of case")
    return path


def run(workspace, path, output):
    if COMMAND is None:
        return workspace.run(path, output)
    words = workspace.run_words(path, output)
    process = subprocess.run(
        [COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, env=workspace.environment(), timeout=600
    )
    return harness.Ended(words, process.returncode, "", process.stderr.decode("utf-8", "replace"), 0.0, 0.0)


def number_of(result):
    """The input line that a result is of."""
    found = re.fullmatch(r"[a-z]+-([1-9][0-9]*)", result["id"])
    expect(found, f"id {result['id']!r} tells no line")
    return int(found[1])


def outcome(result, workspace):
    """[code or "ok", param] of a result line, its shape checked on the way."""
    expect_equal(sorted(result), ["custom_id", "error", "id", "response"], "a result line's fields")
    response = result["response"]
    if response["status_code"] == 200:
        expect(response["body"]["choices"][0]["finish_reason"] in ("stop", "length"), f"no answer in {result}")
        return ["ok", ""]
    expect_equal(response["status_code"], 400, "status of an error line")
    error = response["body"]["error"]
    expect(error["message"] and isinstance(error["message"], str) and "\n" not in error["message"], f"message of {error}")
    for place in (workspace.folder, harness.ROOT):
        expect(str(place) not in error["message"], f"a path in {error['message']!r}")
    return [error["code"], error["param"] or ""]


def padded(code_and_param):
    return [*code_and_param, ""][:2]


def check_case(case, workspace):
    output = workspace / "out.jsonl"
    path = input_of(case, workspace)
    try:
        ended = run(workspace, path, output)
    finally:
        if case.get("kind") == "socket":
            path.unlink()  # ours, not a leftover
    expect(ended.cpu_seconds <= WITHIN, f"took {ended.cpu_seconds:.1f} s of a core")
    if "refused" in case:
        ended.expect(2, case["refused"])
        expect(1 <= len(ended.lines()) <= 2, f"one line wanted on stderr:\n{ended.err}")
        expect(not output.exists(), "an output was written")
        return
    ended.expect(0)
    results = {}
    for line in output.read_bytes().split(b"\n")[:-1]:
        result = json.loads(line.decode("utf-8"))
        expect(results.setdefault(number_of(result), result) is result, f"two results for line {number_of(result)}")
    for number, custom_id, *wanted in case["lines"]:
        if number not in results:
            raise Failed(f"no result for line {number}")
        result = results.pop(number)
        expect_equal(result["custom_id"], custom_id, f"custom_id of line {number}")
        expect_equal(outcome(result, workspace), padded(wanted), f"line {number}")
    count, *wanted = case.get("others", [0])
    expect_equal(len(results), count, "further results")
    for number, result in results.items():
        expect_equal(outcome(result, workspace), padded(wanted), f"line {number}")


def test_of(case):
    def function(workspace):
        check_case(case, workspace)

    function.__name__ = case["name"]
    return harness.test(function)


for _case in CORPUS:
    test_of(_case)

if __name__ == "__main__":
    sys.exit(harness.main())
