#!/usr/bin/env python3
"""Runs that were ended before, and the attempts to go on with them or to write over them: nothing finished is lost."""

import gzip
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from ending import SLOWLY, interrupted, long_requests, refused, wait_for_results  # noqa: E402
from harness import DEMO, DEMO_MODEL, comparable, expect, expect_equal, request, test, wait_until  # noqa: E402


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
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot tidy up between the kills
    with harness.segments.held(run_id):  # other scripts' runs tidy up, too
        for pid in (*children, process.pid):
            os.kill(pid, signal.SIGKILL)
        workspace.finish(process)
        expect(harness.segments_of(run_id), "the killed run left no shared memory")
    workspace.poise(*words, "--resume").expect(0)
    expect_equal(harness.segments_of(run_id), [], "shared memory")


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
