#!/usr/bin/env python3
"""The small doors: standard input and output, packed and several files, `retry`, `tail`, `--notify`, `--json`, completion, the manual page, the
examples for systemd and Slurm; and stdout that is closed, full, or read no further."""

import configparser
import ctypes
import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import harness
from harness import DEMO, DEMO_MODEL, ROOT, comparable, expect, expect_equal, read_results, request, test

EXAMPLES = ROOT / "launch" / "examples"
LINES = [request(i, f"Q: {i} + 5 = ?\nA:", max_tokens=6, temperature=1.0, seed=i) for i in range(12)]


def text_of(lines):
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def zstd(data, level=3):
    """By the library's call for whole buffers; the supervisor uses those for streams."""
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(len(data) + 1000)
    size = library.ZSTD_compress(room, ctypes.c_size_t(len(room)), data, ctypes.c_size_t(len(data)), level)
    return room.raw[:size]  # (read behind the call)


def unzstd(data):
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_decompress.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(1 << 20)
    size = library.ZSTD_decompress(room, ctypes.c_size_t(len(room)), data, ctypes.c_size_t(len(data)))
    expect(size <= len(room), "libzstd cannot unpack it")
    return room.raw[:size]


def answers(path):
    """Without line numbers in ids, in the order of custom_ids."""
    return comparable(path)


def plain_run(workspace):
    requests = workspace.write_requests("plain.jsonl", LINES)
    workspace.run(requests, workspace / "plain.out").expect(0)
    return comparable(workspace / "plain.out")


@test
def standard_input_and_output_are_files_too(workspace):
    wanted = plain_run(workspace)
    words = workspace.run_words("-", "-")
    piped = subprocess.Popen(
        [sys.executable, "-s", str(ROOT / "launch" / "start.py"), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=workspace.environment(), cwd=workspace.folder,
    )  # fmt: skip
    out, err = piped.communicate(text_of(LINES), timeout=60)
    expect_equal(piped.returncode, 0, err.decode())
    (workspace / "piped.out").write_bytes(out)
    expect_equal(comparable(workspace / "piped.out"), wanted, "what came through pipes")
    # Finished: the same command with --resume reads no input, and delivers again.
    again = workspace.poise(*words, "--resume").expect(0, "finished already")
    expect_equal(again.out.encode(), out, "delivered again")
    workspace.poise(*workspace.run_words("-", "-"), "--json").expect(2, "--json")
    workspace.poise("run", "--model", DEMO_MODEL, "-i", "-", "plain.jsonl", "-o", "x.out").expect(2, "read alone")
    workspace.poise("retry", "stdout.poise", "--json").expect(2, "--json")
    expect_equal(json.loads(workspace.poise("status", "stdout.poise", "--json").expect(0).out)["output"], "-", "output in the status")
    _what_cannot_be_delivered_is_told(workspace, [*words, "--resume", "--notify", 'echo "$POISE_EXIT_CODE $POISE_SENTENCE" > told'])


def _what_cannot_be_delivered_is_told(workspace, words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    for stdout, why in ((write_end, "closed"), (os.open("/dev/full", os.O_WRONLY), "No space left")):
        code, said = ended(workspace, words, stdout=stdout, cwd=workspace.folder)
        os.close(stdout)
        expect(code == 73 and why in said and "--resume" in said and said.count("\n") == 1, f"ended with {code}: {said}")
        expect((workspace / "told").read_text().startswith("73 "), "what --notify was told")


@test
def packed_and_several_files_are_read_and_written(workspace):
    wanted = plain_run(workspace)
    (workspace / "part1.jsonl.gz").write_bytes(gzip.compress(text_of(LINES[:3])) + gzip.compress(text_of(LINES[3:5])))
    (workspace / "part2.jsonl.zst").write_bytes(zstd(text_of(LINES[5:7])) + zstd(text_of(LINES[7:8]), 19))
    (workspace / "part3.jsonl").write_bytes(text_of(LINES[8:]).rstrip(b"\n"))
    device = workspace.run_words("x", "y")[-2:]
    parts = ["part1.jsonl.gz", "part[23]*"]
    for output in ("out.jsonl.gz", "out.jsonl.zst"):
        words = ["run", "--model", DEMO_MODEL, "-i", *parts, "-o", output, *device]
        ended = workspace.poise(*words, "--json").expect(0, f"{output} is written: {len(LINES)} answers")
        facts = json.loads(ended.out)
        expect_equal([facts[name] for name in ("exit_code", "done", "errors")], [0, len(LINES), 0], "facts of --json")
        expect_equal(facts["output"], str(workspace / output), "output")
        packed = (workspace / output).read_bytes()
        plain = (gzip.decompress if output.endswith(".gz") else unzstd)(packed)
        (workspace / "unpacked").write_bytes(plain)
        expect_equal(comparable(workspace / "unpacked"), wanted, output)
        workspace.poise(*words).expect(2, "exists already")
        named = json.loads(workspace.poise("status", f"{output}.poise", "--json").expect(0).out)["output"]
        expect_equal(named, str(workspace / output), "output in the status")
        workspace.poise("status", f"{output}.poise").expect(0)
    plan = json.loads(workspace.poise("plan", "--model", DEMO_MODEL, "-i", *parts, "--machine", "a100-pcie4", "--json").expect(0).out)
    expect_equal(plan["requests"], len(LINES), "planned")
    workspace.poise("run", "--model", DEMO_MODEL, "-i", "none*.jsonl", "-o", "x.out").expect(2, "no file matches")


@test
def damaged_archives_are_refused_in_one_line(workspace):
    gz, zst = gzip.compress(text_of(LINES)), zstd(text_of(LINES))
    broken = bytearray(zst)
    broken[len(zst) // 2] ^= 0xFF
    cases = {"torn.gz": gz[:-9], "flipped.gz": gz[:40] + b"xxxx" + gz[44:], "torn.zst": zst[:-5], "broken.zst": bytes(broken), "plain.gz": b"{}\n"}
    for name, data in cases.items():
        (workspace / name).write_bytes(data)
        ended = workspace.run(name, "x.out").expect(2, name, "gzip" if name.endswith("gz") else "zstd")
        expect_equal(len(ended.lines()), 1, f"lines about {name}:\n{ended.err}")
        expect(not (workspace / "x.out.poise").exists() and not (workspace / "x.out").exists(), f"{name} left something behind")


@test
def an_interrupted_run_of_packed_files_goes_on(workspace):
    wanted = plain_run(workspace)
    (workspace / "in.jsonl.gz").write_bytes(gzip.compress(text_of(LINES)))
    words = workspace.run_words("in.jsonl.gz", "out.jsonl.gz", "--max-num-seqs", "1", *workspace.paced(0.2))
    process = workspace.start(*words)
    directory = workspace / "out.jsonl.gz.poise"
    harness.wait_until(lambda: (directory / "results.jsonl.partial").exists() and (directory / "results.jsonl.partial").read_bytes().count(b"\n") > 2, "results")
    followed = workspace.start("tail", directory, "--all")
    os.kill(process.pid, signal.SIGTERM)
    workspace.finish(process).expect(75, "--resume")
    seen = workspace.finish(followed).expect(0).out.splitlines()
    expect_equal(seen, (directory / "results.jsonl.partial").read_text().splitlines(), "what tail showed")
    words = workspace.run_words("in.jsonl.gz", "out.jsonl.gz", "--max-num-seqs", "1", "--resume")
    workspace.poise(*words).expect(0, "is written")
    (workspace / "unpacked").write_bytes(gzip.decompress((workspace / "out.jsonl.gz").read_bytes()))
    expect_equal(comparable(workspace / "unpacked"), wanted, "after --resume")
    last = workspace.poise("tail", directory, "-n", "2", "--no-follow").expect(0).out.splitlines()
    expect_equal(last, (workspace / "unpacked").read_text().splitlines()[-2:], "the last two")


@test
def lines_that_failed_are_run_again_alone(workspace):
    requests = workspace.write_requests("requests.jsonl", [*LINES[:3], request("wrong", "x", max_tokens=-1), *(request(f"n{i}", [5, i], max_tokens=4, temperature=1.0) for i in range(5, 9))])
    workspace.run(requests, "oracle.out").expect(0)
    fatal = {"POISE_FAILPOINTS": "executor.tokens:dies_of=7+"}
    workspace.run(requests, "out.jsonl", "--restarts", "20", env=fatal).expect(0)
    failed = {name for name, result in read_results(workspace / "out.jsonl").items() if result["response"]["status_code"] != 200}
    expect("n7" in failed and "wrong" in failed and len(failed) < 8, f"{failed} failed")
    ended = workspace.poise("retry", "out.jsonl.poise", "--json").expect(0)
    facts = json.loads(ended.out.splitlines()[-1])
    expect_equal([facts[name] for name in ("failed", "answered", "still_failed")], [len(failed), len(failed) - 1, 1], "facts of retry")
    expect_equal(comparable(workspace / "out.jsonl"), comparable(workspace / "oracle.out"), "after retry: seeds are those of the lines")
    status = json.loads(workspace.poise("status", "out.jsonl.poise", "--json").expect(0).out)
    expect_equal(status["errors"], 1, "errors in the status")
    workspace.poise("retry", "oracle.out.poise").expect(0, "0 of 1 line")
    requests.write_bytes(text_of(LINES))
    workspace.poise("retry", "out.jsonl.poise").expect(76, "another file by now")
    workspace.poise("retry", workspace / "nothing").expect(2, "no such directory")


@test
def packed_results_that_cannot_be_delivered_are_delivered_later(workspace):
    requests = workspace.write_requests("requests.jsonl", [request(f"n{i}", [5, i], max_tokens=4) for i in range(5, 9)])
    workspace.run(requests, "oracle.out").expect(0)
    words = workspace.run_words(requests, "out.jsonl.gz", "--json", "--restarts", "20")
    blocked, fatal = workspace / "out.jsonl.gz.new", {"POISE_FAILPOINTS": "executor.tokens:dies_of=7+"}
    blocked.mkdir()
    told = workspace.poise(*words, env=fatal).expect(73, "cannot be delivered", "--resume")
    expect("is written" not in told.err, told.err)
    facts = json.loads(told.out)
    expect_equal([facts["exit_code"], "delivered" in facts["sentence"]], [73, True], "facts of --json")
    blocked.rmdir()
    workspace.poise(*words, "--resume").expect(0)
    blocked.mkdir()
    workspace.poise("retry", "out.jsonl.gz.poise").expect(73, "cannot be delivered", "retry")
    blocked.rmdir()
    workspace.poise("retry", "out.jsonl.gz.poise").expect(0, "1 of 1 line")
    (workspace / "unpacked").write_bytes(gzip.decompress((workspace / "out.jsonl.gz").read_bytes()))
    expect_equal(comparable(workspace / "unpacked"), comparable(workspace / "oracle.out"), "after the second retry")
    left = [name for name in os.listdir(workspace / "out.jsonl.gz.poise") if "retr" in name or name.endswith(".new")]
    expect_equal(left, [], "left behind")
    with open(workspace / "oracle.out", "a") as file:
        file.write("a note\n")
    workspace.poise("retry", "oracle.out.poise").expect(76, "line 5")


@test
def the_end_of_a_run_is_told_to_a_command(workspace):
    requests = workspace.write_requests("requests.jsonl", LINES[:1])
    tells = 'echo "$POISE_EXIT_CODE $POISE_RESULTS $POISE_ERRORS $POISE_OUTPUT" > told'
    workspace.run(requests, "a.out", "--notify", tells).expect(0)
    expect_equal((workspace / "told").read_text(), f"0 1 0 {workspace / 'a.out'}\n", "told")
    workspace.run(requests, "b.out", "--notify", "exit 3").expect(0, "--notify: the command ended with 3")
    (workspace / "told").unlink()
    workspace.run(requests, "a.out", "--overwrite", "--notify", tells, "--host-memory", "1MiB").expect(2)
    expect((workspace / "told").read_text().startswith("2 "), "told of a run that could not start")


@test
def facts_come_as_json(workspace):
    def facts(*words, code=0):
        return json.loads(workspace.poise(*words, "--json").expect(code).out)

    expect(facts("version")["version"], "no version")
    found = facts("doctor")
    expect_equal(found["wrong"], 0, f"doctor: {found}")
    expect(any(one["what"] == "memory" for one in found["findings"]), f"doctor: {found}")
    loaded = facts("load", "--model", DEMO_MODEL)
    expect(loaded["loaded"] and loaded["bytes"] > 1 << 20, f"load: {loaded}")
    expect_equal(facts("load", "--model", DEMO_MODEL)["loaded"], False, "loaded already")
    expect_equal(facts("stop"), {"exit_code": 0, "ended": [{"loader_of": str(DEMO_MODEL)}]}, "stop")


@test
def shells_complete_every_command_and_option(workspace):
    script = workspace.poise("completion", "bash").expect(0).out
    (workspace / "poise.bash").write_text(script)

    def completed(*words):
        line = " ".join(map(shlex.quote, words))
        ask = f'. ./poise.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _poise; printf "%s\\n" "${{COMPREPLY[@]}}"'
        return subprocess.run(["bash", "-c", ask], cwd=workspace.folder, stdout=subprocess.PIPE, text=True, check=True).stdout.split()

    commands = completed("poise", "")
    expect({"run", "retry", "tail", "completion", "man"} <= set(commands), f"{commands}")
    expect_equal(completed("poise", "re"), ["restart", "retry", "report", "replay"], "commands with re")
    expect_equal(completed("poise", "run", "--kv"), ["--kv-cache-dtype"], "options")
    expect_equal(completed("poise", "run", "--kv-cache-dtype", "i"), ["int8", "int4"], "values")
    (workspace / "abc.jsonl").touch()
    expect_equal(completed("poise", "run", "-i", "ab"), ["abc.jsonl"], "files")
    for shell in ("zsh", "fish"):
        text = workspace.poise("completion", shell).expect(0).out
        expect("kv-cache-dtype" in text and "retry" in text, f"{shell}: {text[:200]}")
        if shutil.which(shell):
            (workspace / shell).write_text(text)
            subprocess.run([shell, "-n", workspace / shell], check=True)
    page = workspace.poise("man").expect(0).out
    expect(all(f".SS {name}" in page for name in commands if "-" not in name), "a command is missing in the manual page")
    if shutil.which("groff"):
        drawn = subprocess.run(["groff", "-Kutf8", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True, check=True)
        expect_equal(drawn.stderr, "", "groff's warnings")
        expect("answers every line of a file" in drawn.stdout.lower().replace("\n", " "), drawn.stdout[:300])


@test
def the_examples_for_systemd_and_slurm_work(workspace):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(EXAMPLES / "poise@.service")
    workspace.write_requests("work.jsonl", LINES[:2])
    start = unit["Service"]["ExecStart"].replace("%i", "work").replace("${MODEL}", str(DEMO_MODEL)).replace("$OPTIONS", "--device cpu")
    for _ in range(2):  # begins; leaves what is finished
        workspace.poise(*shlex.split(start)[1:]).expect(0)
    expect_equal(len(read_results(workspace / "work.results.jsonl")), 2, "results of the unit's command")
    if shutil.which("systemd-analyze"):
        said = subprocess.run(["systemd-analyze", "verify", EXAMPLES / "poise@.service"], capture_output=True, text=True, check=False).stderr
        wrong = [line for line in said.splitlines() if "poise" in line and "not executable" not in line and "Command " not in line]
        expect(not wrong, "\n".join(wrong))

    workspace.write_requests("long.jsonl", [request(i, "Once", max_tokens=60, ignore_eos=True) for i in range(30)])
    (workspace / "bin").mkdir()
    (workspace / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {workspace.folder}/asked\n')
    (workspace / "bin" / "poise").write_text(f'#!/bin/sh\nexec {sys.executable} -s {ROOT}/launch/start.py "$@"\n')
    for tool in ("scontrol", "poise"):
        (workspace / "bin" / tool).chmod(0o755)
    job = workspace.environment({"PATH": f"{workspace.folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "MODEL": str(DEMO_MODEL)})
    job |= {"REQUESTS": "long.jsonl", "RESULTS": "long.out", "OPTIONS": "--device cpu " + " ".join(workspace.paced(0.5))}
    with open(workspace / "slurm.log", "wb") as log:
        process = subprocess.Popen(["bash", EXAMPLES / "poise.slurm"], env=job, cwd=workspace.folder, stdin=subprocess.DEVNULL, stderr=log)
        harness.wait_until(lambda: (workspace / "long.out.poise" / "orders.log").exists(), "the job's run")
        time.sleep(0.3)
        process.terminate()
        expect_equal(process.wait(60), 75, (workspace / "slurm.log").read_text())
        expect_equal((workspace / "asked").read_text(), "requeue 17\n", "what Slurm was asked")
        job["OPTIONS"] = "--device cpu"
        expect_equal(subprocess.run(["bash", EXAMPLES / "poise.slurm"], env=job, cwd=workspace.folder, stderr=log, check=False).returncode, 0, "queued again")
    expect_equal(len(read_results(workspace / "long.out")), 30, "results of the job")


# ---- outputs that are closed, full, or read no further


def commands(run):
    """Commands that only print."""
    return [
        ["inspect", run],
        ["inspect", run, "--json"],
        ["status", run],
        ["status", run, "--json"],
        ["status"],
        ["version"],
        ["man"],
        ["completion", "zsh"],
        ["tail", run, "--no-follow"],
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
