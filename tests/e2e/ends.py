#!/usr/bin/env python3
"""How commands end: exit codes and the one line that says why, as launch/README.md documents."""

import contextlib
import ctypes
import gzip
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import harness
from harness import DEMO, DEMO_MODEL, comparable, expect, expect_equal, request, test, wait_until
from mixed_requests import good_request


def without_roots_rights():
    """Permissions must hold for root too: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH go with the next exec."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (1, 2):
            if libc.prctl(24, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")


def refused(workspace, words, code, *fragments, **more):
    """One line on stderr, and fast."""
    ended = workspace.poise(*words, **more).expect(code, *fragments)
    expect(len(ended.lines()) <= 2, f"one line wanted:\n{ended.err}")
    expect(ended.seconds < 10, f"took {ended.seconds:.1f} s")
    return ended


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
def a_living_run_is_left_alone_by_a_second_one(workspace):
    requests = long_requests(workspace)
    output = workspace / "out.jsonl"
    first = workspace.start(*workspace.run_words(requests, output, *SLOWLY))
    run = f"{output}.poise"
    wait_until(lambda: len(workspace.children(run)) == 3, "three processes")
    for extra in ((), ("--resume",), ("--overwrite",)):
        refused(workspace, workspace.run_words(requests, output, *extra), 74, "in use")
    expect(first.poll() is None, "the first run ended")
    expect(len(workspace.children(run)) == 3, "the first run lost a process")
    status = json.loads(workspace.poise("status", run, "--json").expect(0).out)
    expect_equal(status["state"], "running", "state")
    workspace.poise("stop", run).expect(0, "has ended")
    workspace.finish(first).expect(75, "--resume")


@test
def an_unfinished_run_is_not_started_over_by_accident(workspace):
    requests, output = interrupted(workspace)
    partial = workspace / "out.jsonl.poise" / "results.jsonl.partial"
    before = partial.read_bytes()
    refused(workspace, workspace.run_words(requests, output), 2, "--resume", "--run-dir")
    refused(workspace, workspace.run_words(requests, output, "--overwrite"), 2, "--resume", "--run-dir")
    expect_equal(partial.read_bytes(), before, "the unfinished run's results")


@test
def status_gives_the_command_that_goes_on(workspace):
    requests, output = interrupted(workspace)
    refused(workspace, workspace.run_words(requests, output, "--resume", "--dtype", "float32"), 76, "--dtype")
    told = workspace.poise("status", f"{output}.poise").expect(0).out
    command = next(line.partition("go on with: ")[2] for line in told.splitlines() if "go on with" in line)
    words = shlex.split(command.partition(") ")[2] or command)
    expect_equal(words[1], "run", command)
    expect("--resume" in words and "float32" not in words, f"another run's command: {command}")
    workspace.poise(*words[1:]).expect(0, "is written")


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
def another_input_model_or_option_does_not_resume_a_run(workspace):
    requests, output = interrupted(workspace)
    text = requests.read_text()
    requests.write_text(text.replace("Once", "Twice", 1))
    refused(workspace, workspace.run_words(requests, output, "--resume"), 76, "another input")
    requests.write_text(text)
    refused(workspace, workspace.run_words(requests, output, "--resume", "--dtype", "float32"), 76, "--dtype")
    refused(workspace, workspace.run_words(requests, output, "--resume", "--kv-cache-dtype", "int8"), 76, "--kv-cache-dtype")
    model = workspace / "model"
    shutil.copytree(DEMO_MODEL, model)
    weights = model / "model.safetensors"
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # one bit of one weight; name, size and time stay
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    words = workspace.run_words(requests, output, "--resume", model=model)
    refused(workspace, words, 76, "another model")
    model = workspace / "model with another tokenizer"
    shutil.copytree(DEMO_MODEL, model)
    words = workspace.run_words(requests, output, "--resume", model=model)
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text + "\n")  # means the same: we do not judge that
    refused(workspace, words, 76, "other tokenizer files", "SHA-256")
    (model / "tokenizer.json").write_text(text)
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    refused(workspace, words, 76, "another generation_config.json")
    workspace.run(requests, output, "--resume").expect(0)


@test
def resume_with_nothing_to_resume_starts_anew(workspace):
    output = workspace / "out.jsonl"
    workspace.run(DEMO / "show.jsonl", output, "--resume").expect(0, "8 results")


@test
def resume_of_a_finished_run_leaves_the_output_alone(workspace):
    output = workspace / "out.jsonl"
    workspace.run(DEMO / "show.jsonl", output).expect(0)
    before = (output.read_bytes(), output.stat().st_mtime_ns, output.stat().st_ino)
    workspace.run(DEMO / "show.jsonl", output, "--resume").expect(0)
    after = (output.read_bytes(), output.stat().st_mtime_ns, output.stat().st_ino)
    expect_equal(after, before, "the output")
    run = workspace / "out.jsonl.poise"
    status = (run / "status.json").read_bytes()
    (run / "finished.json").unlink()  # the model is then looked at again
    count = before[0].count(b"\n")
    workspace.run(DEMO / "show.jsonl", output, "--resume").expect(0, "finished already", f"{count} results, 0 of them errors")
    expect_equal((run / "status.json").read_bytes(), status, "the status of the run")
    expect(f"{count} results, 0 of them errors" in workspace.poise("status", "out.jsonl.poise").expect(0).out, "status")
    refused(workspace, workspace.run_words(DEMO / "show.jsonl", output), 2, "exists already")
    workspace.run(DEMO / "show.jsonl", output, "--overwrite").expect(0)


@test
def an_overwriting_run_that_is_killed_while_it_starts_is_not_finished(workspace):
    """The output still holds the answers of the run before it, and these are of another data type.
    Logprobs tell the two types apart; texts may be equal, and so may the second in which both were made."""
    output, record = workspace / "out.jsonl", workspace / "out.jsonl.poise" / "run.json"
    lines = [json.loads(line) for line in (DEMO / "show.jsonl").read_text().splitlines()]
    with_logprobs = [{**line, "body": {**line["body"], "logprobs": 1}} for line in lines]
    requests = workspace.write_requests("requests.jsonl", with_logprobs)
    workspace.run(requests, output, "--dtype", "float32").expect(0)
    before, of_before = output.read_bytes(), record.read_bytes()
    words = workspace.run_words(requests, output, "--dtype", "bfloat16")
    process = workspace.start(*words, "--overwrite")
    wait_until(lambda: record.read_bytes() != of_before, "the second run to note itself")
    process.kill()
    workspace.finish(process)
    ended = workspace.poise(*words, "--resume")
    expect("finished already" not in ended.err and ended.code != 0, f"exit {ended.code}: {ended.err}")
    expect_equal(output.read_bytes(), before, "the output of the first run")
    workspace.poise(*words, "--overwrite").expect(0)
    expect(output.read_bytes() != before, "the output of the second run")
    workspace.poise(*words, "--resume").expect(0, "finished already")
    record.with_name("manifest.json").unlink()
    workspace.poise(*words, "--resume").expect(76, "no manifest.json")


def facts_of(run):
    return {name: (run / name).read_bytes() for name in ("run.json", "status.json", "times.json", "manifest.json", "finished.json")}


def resume_command(told):
    return shlex.split(told.partition(" with: ")[2].splitlines()[0])[1:]


def interrupted_while_it_loads(workspace, words, run):
    """The attempt has noted itself, and its planner waits for a loader that halts."""
    before = (run / "run.json").read_bytes()
    process = workspace.start(*words, env={"POISE_FAILPOINTS": "loader.unsealed:stop"})
    wait_until(lambda: (run / "run.json").read_bytes() != before, "the attempt to note itself")
    wait_until(lambda: "planner" in workspace.children(run), "its planner")
    process.send_signal(signal.SIGTERM)
    return workspace.finish(process, timeout=40).expect(75)


@test
def an_attempt_that_changes_nothing_of_a_finished_run_leaves_its_facts(workspace):
    output = workspace / "out.jsonl"
    run = workspace / "out.jsonl.poise"
    words = workspace.run_words(DEMO / "show.jsonl", output)
    workspace.poise(*words, "--threads", "1").expect(0)
    before, answers = facts_of(run), output.read_bytes()
    for more in (("--seed", "7"), ("--quantization", "int8")):
        workspace.poise(*words, "--resume", *more).expect(76, "belongs to another")
        expect_equal(facts_of(run), before, f"the facts after --resume {' '.join(more)}")
    expect("8 results, 0 of them errors" in workspace.poise("status", run).expect(0).out, "what `status` says")
    workspace.replay(run)
    anew = (*words, "--overwrite", "--seed", "7")
    for typed in (anew, (*anew, "--resume")):
        ended = interrupted_while_it_loads(workspace, typed, run)
        expect_equal(facts_of(run), before, "the facts after an interrupted attempt")
        expect_equal(output.read_bytes(), answers, "the output")
        again = resume_command(ended.err)
        expect("--resume" not in again and "--overwrite" in again, f"{again}")
    workspace.poise(*again).expect(0, "is written")
    expect(facts_of(run)["run.json"] != before["run.json"], "the new run has no facts")


@test
def an_attempt_that_changes_nothing_of_an_unfinished_run_names_the_command_that_goes_on(workspace):
    requests, output = interrupted(workspace)
    run = workspace / "out.jsonl.poise"
    before = (run / "run.json").read_bytes()
    ended = interrupted_while_it_loads(workspace, workspace.run_words(requests, output, "--resume", "--dtype", "float32"), run)
    expect_equal((run / "run.json").read_bytes(), before, "run.json")
    again = resume_command(ended.err)
    expect("float32" not in again and "--resume" in again, f"{again}")
    workspace.poise(*again).expect(0, "is written")


@test
def a_finished_run_keeps_its_own_files_behind_an_attempt_that_changes_nothing(workspace):
    """Input and output are packed: the directory has them as they are."""
    output, run = workspace / "out.jsonl.gz", workspace / "out.jsonl.gz.poise"
    lines = (DEMO / "show.jsonl").read_bytes()
    first, second = workspace / "first.gz", workspace / "second.gz"
    first.write_bytes(gzip.compress(lines))
    second.write_bytes(gzip.compress(lines.splitlines(keepends=True)[0]))

    def own_files():
        return sorted(os.listdir(run)), (run / "input.jsonl").read_bytes(), (run / "output.jsonl").read_bytes()

    workspace.run(first, output).expect(0)
    before = own_files()
    interrupted_while_it_loads(workspace, workspace.run_words(second, output, "--overwrite"), run)
    expect_equal(own_files(), before, "the files of the finished run")
    workspace.run(second, output, "--overwrite").expect(0)
    expect_equal(own_files()[0], before[0], "names in the run directory")


@test
def a_finished_run_outlives_an_attempt_whose_supervisor_is_killed_while_it_loads(workspace):
    run = workspace / "stdout.poise"
    lines = (DEMO / "show.jsonl").read_bytes()
    first, second = workspace / "first.gz", workspace / "second.gz"
    first.write_bytes(gzip.compress(lines))
    second.write_bytes(gzip.compress(lines.splitlines(keepends=True)[0]))
    words = workspace.run_words(first, "-")
    answers = workspace.poise(*words).expect(0).out
    before = facts_of(run), sorted(os.listdir(run)), (run / "input.jsonl").read_bytes()
    process = workspace.start(*workspace.run_words(second, "-", "--seed", "7"), env={"POISE_FAILPOINTS": "loader.unsealed:stop"})
    wait_until(lambda: (run / "run.json").read_bytes() != before[0]["run.json"], "the attempt to note itself")
    wait_until(lambda: "planner" in workspace.children(run), "its planner")
    process.kill()
    workspace.finish(process)
    expect((run / "results.jsonl.published").exists() and not (run / "output.jsonl").exists(), "killed too late or too early")
    workspace.poise(*words, "--resume", "--seed", "7").expect(76, "belongs to another")
    expect_equal((facts_of(run), sorted(os.listdir(run)), (run / "input.jsonl").read_bytes()), before, "the finished run")
    expect_equal(workspace.poise(*words, "--resume").expect(0, "finished already").out, answers, "its answers")
    expect_equal(sorted(os.listdir(run)), before[1], "names in the run directory")


def all_files(run):
    """Logs of processes, and what only the run that lives has, aside."""
    names = {path.name for path in run.iterdir() if path.is_file()} - {"run.lock", "children.lock", "restarted.json"}
    return {name: (run / name).read_bytes() for name in names}


@test
def what_is_asked_of_a_finished_run_behind_a_killed_attempt_is_answered_of_that_run(workspace):
    lines = [request("a", "where is Jana?"), request("b", "where is Jana?", n=-1)]
    output, run = workspace / "out.jsonl.gz", workspace / "out.jsonl.gz.poise"
    words = workspace.run_words(workspace.write_requests("requests.jsonl", lines), output)
    workspace.poise(*words).expect(0, "1 of them errors")
    before, answers = facts_of(run), gzip.decompress(output.read_bytes())
    another = workspace.write_requests("another.jsonl", lines[:1])
    told = {name: workspace.poise(name, run, *more).expect(0).out for name, more in (("status", ()), ("tail", ("--all",)))}
    attempt = workspace.run_words(another, output, "--overwrite", "--dtype", "bfloat16")
    process = workspace.start(*attempt, env={"POISE_FAILPOINTS": "loader.unsealed:stop"})
    wait_until(lambda: "planner" in workspace.children(run), "the attempt's planner")
    process.kill()
    workspace.finish(process)
    expect((run / "standing.json").exists() and facts_of(run) != before, "killed too early")
    expect_equal(workspace.poise("status", run).expect(0).out, told["status"], "what `status` says")
    expect_equal(workspace.poise("tail", run, "--all").expect(0).out, told["tail"], "what `tail` says")
    workspace.replay(run)
    workspace.poise("retry", run).expect(0, "0 of 1 line that had failed have an answer now")
    facts = facts_of(run)
    expect_equal([name for name in facts if facts[name] != before[name] and name != "status.json"], [], "changed facts")
    expect_equal(json.loads(facts["status.json"]), json.loads(before["status.json"]), "the status")
    expect_equal(gzip.decompress(output.read_bytes()), answers, "the output")


@test
def an_overwriting_run_that_is_refused_leaves_the_finished_run_as_it_was(workspace):
    """By the plan, for too little memory, and by an executor that cannot have its buffers. One that is not refused measures costs first."""
    output, run = workspace / "out.jsonl", workspace / "out.jsonl.poise"
    little = ("--gpu-memory", "4MiB", "--host-memory", "8MiB")  # costs are measured with blocks for a part of it
    words = workspace.run_words(DEMO / "show.jsonl", output, *little)
    workspace.poise(*words, "--policy", "hybrid").expect(0)
    expect((run / "profile-orders.log").exists(), "no costs were measured")
    before, answers = all_files(run), output.read_bytes()
    dies = {"POISE_FAILPOINTS": "executor.registering:kill"}
    attempts = (
        (("--gpu-memory", "200KiB"), {}, 2, "device memory"),
        (("--host-memory", "1MiB"), {}, 2, "memory"),
        (("--policy", "act-only"), dies, 75, "as it was"),
        (("--policy", "hybrid", "--restarts", "1"), dies, 75, "as it was"),
    )
    for more, environment, code, said in attempts:
        workspace.poise(*words, "--overwrite", "--seed", "7", *more, env=environment).expect(code, said)
        now = all_files(run)
        expect_equal(sorted(now), sorted(before), f"files after {more}")
        expect_equal([name for name in before if now[name] != before[name]], [], f"changed by {more}")
        expect_equal(output.read_bytes(), answers, "the output")
    expect("8 results, 0 of them errors" in workspace.poise("status", run).expect(0).out, "what `status` says")
    workspace.poise("inspect", "--check", run).expect(0)
    workspace.replay(run)
    workspace.poise(*words, "--policy", "hybrid", "--resume").expect(0, "finished already")
    workspace.poise(*words, "--overwrite", "--policy", "hybrid", "--seed", "7", env={"XDG_CACHE_HOME": str(workspace / "other-cache")}).expect(0, "measuring it once", "is written")
    now = all_files(run)
    expect_equal([name for name in before if name != "results.jsonl.published" and now.get(name) == before[name]], [], "files of the run before")
    expect_equal(sorted(now), sorted(before), "files of the new run")
    workspace.poise("inspect", "--check", run).expect(0)
    workspace.poise("inspect", run / "profile-orders.log").expect(0)
    workspace.replay(run)


def is_halted(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@test
def an_overwriting_run_whose_planner_dies_before_it_begins_begins_all_the_same(workspace):
    """Another planner takes over; the finished run is not taken for this one's."""
    output, run = workspace / "out.jsonl", workspace / "out.jsonl.poise"
    requests = workspace.write_requests("requests.jsonl", [request("a", "where is Jana?", temperature=1)])
    workspace.run(requests, workspace / "other.jsonl", "--seed", "7").expect(0)
    workspace.run(requests, output).expect(0)
    words = workspace.run_words(requests, output, "--overwrite", "--seed", "7", "--restarts", "1")
    process = workspace.start(*words, env={"POISE_FAILPOINTS": "loader.granting:stop"})
    wait_until(lambda: harness._json(run / "status.json").get("state") == "preparing", "the planner to prepare")
    wait_until(lambda: len(workspace.children(run)) == 3, "its processes")
    children = workspace.children(run)
    wait_until(lambda: is_halted(children["loader"]), "the loader to halt")
    os.kill(children["planner"], signal.SIGKILL)
    wait_until(lambda: workspace.children(run).get("planner", children["planner"]) != children["planner"], "another planner")
    os.kill(children["loader"], signal.SIGCONT)
    workspace.finish(process).expect(0, "another one goes on", "is written")
    expect_equal(comparable(output), comparable(workspace / "other.jsonl"), "the answers of the new run")


@test
def resume_that_cannot_start_says_so_and_keeps_what_is_finished(workspace):
    """Over an unfinished run, whose processes had begun, and over a finished one."""
    model = workspace / "model"
    shutil.copytree(DEMO_MODEL, model)
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    requests, output = long_requests(workspace, 30), workspace / "out.jsonl"
    words = workspace.run_words(requests, output, *SLOWLY, model=model)
    process = workspace.start(*words)
    wait_for_results(f"{output}.poise", 2)
    process.send_signal(signal.SIGTERM)
    workspace.finish(process).expect(75)
    partial = (workspace / "out.jsonl.poise" / "results.jsonl.partial").read_bytes()
    for more in (("--resume",), ("--overwrite",)):
        weights.write_bytes(whole[: len(whole) // 2])
        ended = workspace.poise(*words, *more).expect(2, "model.safetensors")
        expect("--resume" not in ended.err, f"speaks of resuming:\n{ended.err}")
        if more == ("--resume",):
            kept = (workspace / "out.jsonl.poise" / "results.jsonl.partial").read_bytes()
            expect_equal(kept, partial, "what was finished")
            weights.write_bytes(whole)
            workspace.poise(*words, "--resume").expect(0)
            before = facts_of(workspace / "out.jsonl.poise")
    expect_equal(facts_of(workspace / "out.jsonl.poise"), before, "the facts of the finished run")


@test
def resume_of_a_finished_run_removes_what_a_killed_one_left(workspace):
    output, record = workspace / "out.jsonl", workspace / "out.jsonl.poise" / "run.json"
    words = workspace.run_words(DEMO / "show.jsonl", output)
    workspace.poise(*words).expect(0)
    first = record.read_bytes()
    process = workspace.start(*words, "--overwrite", *workspace.paced(2))  # so that it is killed before it ends
    wait_until(lambda: record.read_bytes() != first, "the second run to note itself")
    run_id = json.loads(record.read_text())["run_id"]
    wait_until(lambda: harness.segments_of(run_id), "its shared memory")
    children = workspace.children(f"{output}.poise").values()
    for pid in (process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    workspace.finish(process)
    expect(harness.segments_of(run_id), "the killed run left no shared memory")
    workspace.poise(*words, "--resume").expect(0)
    expect_equal(harness.segments_of(run_id), [], "shared memory")


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


def interpreter():
    """That of the shell part."""
    return os.environ.get("POISE_PYTHON") or "/usr/bin/python3"


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
    time.sleep(0.05)
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


@test
def a_run_that_could_not_start_leaves_nothing_to_resume(workspace):
    bad = "{}"  # an error line, written before the device is known to be missing
    requests = workspace.write_requests("requests.jsonl", [request("a", "Once"), bad])
    words = workspace.run_words(requests, workspace / "out.jsonl")
    ended = workspace.poise(*words, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""}).expect(2, "--device cuda")
    expect("--resume" not in ended.err, f"speaks of resuming:\n{ended.err}")
    expect(not (workspace / "out.jsonl.poise").exists(), "the run directory stays")
    workspace.poise(*words, "--device", "cpu").expect(0)


if __name__ == "__main__":
    raise SystemExit(harness.main())
