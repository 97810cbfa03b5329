#!/usr/bin/env python3
"""If host memory is short, blocks replace the host's copy of weights that the device holds: the same answers, more requests
at a time, and the loader has all weights again at the end, whichever process was killed."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import harness
from ending import long_requests, wait_for_results
from harness import DEMO, comparable, expect, expect_equal, kill_together, request, test, wait_until
from supervisor.lifecycle import segments

# The demo model's weights are 2.7 MiB; so the device keeps a layer, and the host's blocks have little room.
TIGHT = ("--policy", "act-only", "--gpu-memory", "9MiB", "--max-num-seqs", "64")
SAID = "stay on the device alone"


def kept(workspace):
    loaders = json.loads(workspace.poise("status", "--json").expect(0).out)["kept_loaders"]
    expect_equal(len(loaders), 1, "kept loaders")
    return loaders[0]["pid"]


def short_of_memory(workspace):
    """Options of a run whose requests find too few blocks beside the weights."""
    return (*TIGHT, "--host-memory", "3500KiB")


def short_to_the_end():
    """Requests with the same number at a time to the end, so that there are always too few blocks."""
    return [request(i, "Rosa lives in", max_tokens=60, ignore_eos=True) for i in range(90)]


@test
def more_requests_run_at_a_time_and_answer_the_same(workspace):
    questions = DEMO / "questions.jsonl"
    workspace.run(questions, workspace / "plenty", *TIGHT).expect(0)
    ended = workspace.run(questions, workspace / "short", *short_of_memory(workspace)).expect(0, SAID)
    expect_equal(comparable(workspace / "short"), comparable(workspace / "plenty"), "answers")
    expect(SAID not in workspace.run(questions, workspace / "again", *TIGHT).expect(0).err, "released without need")
    pool = json.loads((Path(f"{workspace / 'short'}.poise") / "status.json").read_text())["host_pool_bytes"]
    weights = os.stat(harness.DEMO_MODEL / "model.safetensors").st_size
    expect(pool + weights > 3500 << 10, f"no more blocks than beside all weights: {pool} bytes of them\n{ended.err}")
    workspace.poise("inspect", "--check", f"{workspace / 'short'}.poise").expect(0)
    workspace.replay(f"{workspace / 'short'}.poise", "--host-memory", "3500KiB")


@test
def a_kept_loader_is_whole_again(workspace):
    questions = DEMO / "questions.jsonl"
    workspace.run(questions, workspace / "short", *short_of_memory(workspace), "--keep-loader").expect(0, SAID)
    pid = kept(workspace)
    again = workspace.run(questions, workspace / "plenty", "--policy", "act-only", "--host-memory", "3500KiB")
    again.expect(0, "using the kept loader")
    expect_equal(kept(workspace), pid, "the loader's pid")
    expect_equal(comparable(workspace / "short"), comparable(workspace / "plenty"), "answers")
    workspace.replay(f"{workspace / 'short'}.poise", "--host-memory", "3500KiB")
    run_id = json.loads((Path(f"{workspace / 'short'}.poise") / "run.json").read_text())["run_id"]
    wait_until(lambda: len(set(segments.reserved(run_id, "weights"))) == 1, "all weights after a replay")
    workspace.poise("stop").expect(0)


@test
def a_profile_needs_no_run_to_put_a_kept_loader_right(workspace):
    requests, output = long_requests(workspace, 40), workspace / "out"
    options = (*short_of_memory(workspace), *workspace.paced(6), "--keep-loader")
    process = workspace.start(*workspace.run_words(requests, output, *options))
    wait_for_results(f"{output}.poise", 1)
    os.kill(wait_until(lambda: workspace.children(f"{output}.poise").get("planner"), "planner"), signal.SIGKILL)
    workspace.finish(process).expect(75, "--resume")
    words = ["profile", "--model", harness.DEMO_MODEL, "--device", "cpu", "--link-gbps", "1", "--compute-gflops", "20"]
    workspace.poise(*words, "-o", workspace / "profile.json").expect(0, "are read again")
    expect(json.loads((workspace / "profile.json").read_text())["kv_gen"]["points"], "nothing was measured")
    workspace.poise("stop").expect(0)


@test
def after_the_kill_of_any_process_resume_does_what_is_missing(workspace):
    requests, slow = long_requests(workspace, 40), workspace.paced(6)
    workspace.run(requests, workspace / "oracle", *TIGHT).expect(0)
    for victim in ("planner", "gpu_executor"):
        output = workspace / victim
        run = f"{output}.poise"
        options = (*short_of_memory(workspace), *slow, "--keep-loader")
        process = workspace.start(*workspace.run_words(requests, output, *options))
        wait_for_results(run, 1)
        pid = kept(workspace)
        os.kill(wait_until(lambda: workspace.children(run).get(victim), victim), signal.SIGKILL)
        workspace.finish(process).expect(75, "--resume")
        workspace.run(requests, output, "--resume", *short_of_memory(workspace), "--keep-loader").expect(0)
        expect_equal(comparable(output), comparable(workspace / "oracle"), f"after the death of the {victim}")
        expect_equal(kept(workspace), pid, "the loader's pid")
    workspace.poise("stop").expect(0)


@test
def planners_and_policies_change_while_the_host_lacks_weights(workspace):
    requests, output = long_requests(workspace, 40), workspace / "out"
    workspace.run(requests, workspace / "oracle", *TIGHT).expect(0)
    options = (*short_of_memory(workspace), *workspace.paced(6))
    process = workspace.start(*workspace.run_words(requests, output, *options))
    run = f"{output}.poise"
    wait_for_results(run, 1)
    workspace.poise("restart", "planner", run).expect(0)
    workspace.poise("policy", "hybrid", run, "--act-share", "0.7").expect(0)
    workspace.poise("restart", "planner", run, "--kill").expect(0)
    workspace.finish(process).expect(0)
    expect_equal(comparable(output), comparable(workspace / "oracle"), "answers")


@test
def executors_are_restarted_while_the_host_lacks_weights(workspace):
    requests, output = workspace.write_requests("requests.jsonl", short_to_the_end()), workspace / "out"
    workspace.run(requests, workspace / "oracle", *TIGHT).expect(0)
    options = (*short_of_memory(workspace), *workspace.paced(6), "--restarts", "1")
    process = workspace.start(*workspace.run_words(requests, output, *options))
    run = f"{output}.poise"
    wait_for_results(run, 1)
    loader = workspace.children(run)["loader"]
    for kill in ([], ["--kill"]):
        workspace.poise("restart", "gpu_executor", run, *kill).expect(0)
    workspace.poise("restart", "planner", run).expect(0)
    expect_equal(workspace.children(run)["loader"], loader, "the loader's pid")
    os.kill(workspace.children(run)["gpu_executor"], signal.SIGKILL)
    ended = workspace.finish(process).expect(0)
    expect_equal(comparable(output), comparable(workspace / "oracle"), "answers")
    expect_equal(ended.err.count("are read again"), 3, "times that weights were read again")
    expect_equal(ended.err.count(SAID), 4, "times that their memory went to blocks")
    workspace.poise("inspect", "--check", run).expect(0)


def living(workspace, run):
    """Planner and gpu_executor, once there are both."""
    pids = workspace.children(run)
    return all(what in pids for what in ("planner", "gpu_executor")) and (pids["planner"], pids["gpu_executor"])


@test
def planner_and_executor_die_at_the_same_instant_while_the_host_lacks_weights(workspace):
    requests = workspace.write_requests("requests.jsonl", short_to_the_end())
    workspace.run(requests, workspace / "oracle", *TIGHT).expect(0)
    options = (*short_of_memory(workspace), *workspace.paced(6))

    output = workspace / "replaced"
    run = f"{output}.poise"
    process = workspace.start(*workspace.run_words(requests, output, *options, "--restarts", "6"))
    wait_for_results(run, 1)  # from the first iteration on, a layer is on the device alone
    loader = workspace.children(run)["loader"]
    for _ in range(3):  # the later ones in whatever phase: asked, reading again, releasing, at work
        old = living(workspace, run)
        kill_together(process, *old)
        wait_until(lambda o=old: (new := living(workspace, run)) and not set(new) & set(o), "both to be replaced")
        time.sleep(workspace.random.uniform(0, 0.6))
    expect_equal(workspace.children(run).get("loader"), loader, "the loader's pid")
    ended = workspace.finish(process).expect(0, "are read again")
    expect_equal(comparable(output), comparable(workspace / "oracle"), "answers")
    for what in ("planner", "gpu_executor"):
        expect_equal(ended.err.count(f"{what} was killed; another one goes on"), 3, f"times that another {what} was told of")
    workspace.poise("inspect", "--check", run).expect(0)

    output = workspace / "resumed"
    process = workspace.start(*workspace.run_words(requests, output, *options, "--restarts", "1"))
    wait_for_results(f"{output}.poise", 1)
    kill_together(process, *living(workspace, f"{output}.poise"))
    workspace.finish(process).expect(75, "planner was killed", "--resume")
    workspace.run(requests, output, "--resume", *short_of_memory(workspace)).expect(0)
    expect_equal(comparable(output), comparable(workspace / "oracle"), "answers")


@test
def a_model_that_changed_meanwhile_ends_the_run_that_needs_it_again(workspace):
    model = workspace / "model"
    shutil.copytree(harness.DEMO_MODEL, model)
    requests, output = workspace.write_requests("requests.jsonl", short_to_the_end()), workspace / "out"
    process = workspace.start(
        *workspace.run_words(requests, output, *short_of_memory(workspace), *workspace.paced(6), model=model)
    )
    run = f"{output}.poise"
    wait_for_results(run, 1)
    os.utime(model / "model.safetensors")  # the same bytes: they may be read again
    workspace.poise("restart", "gpu_executor", run).expect(0)
    os.truncate(model / "model.safetensors", 4096)
    workspace.poise("restart", "gpu_executor", run).expect(75, "ended before")
    workspace.finish(process).expect(76, "was it changed meanwhile")


@test
def a_later_run_of_a_kept_loader_has_the_memory_that_it_asks_for(workspace):
    questions = DEMO / "questions.jsonl"
    workspace.run(questions, workspace / "short", *short_of_memory(workspace), "--keep-loader").expect(0, SAID)
    pid = kept(workspace)
    for name, options in (("more", ["--host-memory", "50MiB"]), ("free", []), ("less", short_of_memory(workspace))):
        workspace.run(questions, workspace / name, *options).expect(0, "using the kept loader")
        expect_equal(comparable(workspace / name), comparable(workspace / "short"), "answers")
    expect_equal(kept(workspace), pid, "the loader's pid")
    run_id = json.loads((workspace / "less.poise" / "run.json").read_text())["run_id"]

    def whole():
        status = os.stat(harness.SHM / f"{harness.segments.prefix()}{run_id}-weights")
        return status.st_blocks * 512 >= status.st_size and len(harness.segments.names_of(run_id)) == 2

    wait_until(whole, "the kept loader to have all weights, and no pool", 10)
    workspace.poise("stop").expect(0)


if __name__ == "__main__":
    raise SystemExit(harness.main())
