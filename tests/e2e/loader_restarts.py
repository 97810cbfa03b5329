#!/usr/bin/env python3
"""The loader restarted alone: its successor adopts weights and context where they are, reads nothing, and the run goes on."""

import json
import os
import shutil
import signal
import time

import harness
from ending import wait_for_results
from harness import DEMO, bin_folder, comparable, expect, expect_equal, short_model, test, wait_until
from kept_loaders import alive, kept
from released_weights import TIGHT, short_of_memory, short_to_the_end
from supervisor.commands import policy as policy_command
from supervisor.commands import restart as restart_command
from supervisor.lifecycle import segments
from swaps import Disturbed, policy_words, slowly, undisturbed, work

SUCCESSIONS = 8


@test
def loaders_are_replaced_while_policies_and_planners_change(workspace):
    """The model's files are gone by then (Disturbed): a successor that read a weight would fail."""
    random = workspace.random
    requests = work(workspace, 30)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--restarts", str(SUCCESSIONS))
    for number in range(SUCCESSIONS):
        time.sleep(random.uniform(0, 0.1))
        loader, planner, executor = (run.pid(name) for name in ("loader", "planner", "gpu_executor"))
        if number % 4 == 3:
            os.kill(loader, signal.SIGKILL)  # unasked: --restarts allows it
            wait_until(lambda before=loader: run.pid("loader") not in (before, None), "another loader")
        else:
            said = run.ask(restart_command.restart, "loader", *(["--kill"] if number % 4 == 1 else []))
            expect("the loader is process" in said, said)
        expect(run.pid("loader") not in (loader, None), "it is the same loader")
        expect_equal((run.pid("planner"), run.pid("gpu_executor")), (planner, executor), "the other processes")
        name, share = policy_words(random)
        run.ask(policy_command.policy, name, *share, *(["--rebuild"] if number % 3 == 2 else []))
        if number == SUCCESSIONS // 2:
            run.ask(restart_command.restart, "planner")
    expect(run.lives(), "the run was over before it was disturbed enough")
    run.finish(oracle)
    workspace.poise("inspect", "--check", run.run).expect(0)
    run.replay()


@test
def a_loader_and_another_process_may_die_at_the_same_instant(workspace):
    requests = work(workspace, 16)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--restarts", "4")
    for victim in ("planner", "gpu_executor"):
        time.sleep(workspace.random.uniform(0, 0.2))
        victims = {name: run.pid(name) for name in ("loader", victim)}
        for pid in victims.values():
            os.kill(pid, signal.SIGKILL)
        for name, pid in victims.items():
            wait_until(lambda name=name, pid=pid: run.pid(name) not in (pid, None), f"another {name}")
    run.finish(oracle)


@test
def a_loader_that_dies_while_it_loads_is_replaced_by_one_that_loads(workspace):
    requests = workspace.write_requests("in.jsonl", [harness.request("a", [5, 6, 7], max_tokens=2)])
    config = workspace / "model"
    config.mkdir()
    shape = json.loads((harness.ROOT / "bench" / "models" / "opt-1.3b.json").read_text())
    (config / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 8}))  # it takes a second to load
    output = workspace / "out.jsonl"
    options = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "64", "--restarts", "2")
    process = workspace.start(*workspace.run_words(requests, output, *options, model=config))
    run_id = wait_until(lambda: harness._json(workspace / "out.jsonl.poise" / "run.json").get("run_id"), "the run's id")
    victim = None

    def one_that_loads():
        pid = workspace.children(f"{output}.poise").get("loader")
        return pid not in (None, victim) and segments.ControlView(run_id).loader_state == segments.LOADING and pid

    victim = wait_until(one_that_loads, "a loader that loads")
    os.kill(victim, signal.SIGKILL)
    wait_until(one_that_loads, "a loader that loads")
    told = workspace.poise("restart", "loader", "--kill", f"{output}.poise").expect(0).out
    expect(process.poll() is None and "the loader is process" in told and "policy" not in told, told)
    workspace.finish(process).expect(0, "loader was killed; another one goes on")
    expect("adopted" not in (workspace / "out.jsonl.poise" / "logs" / "loader.log").read_text(), "half of the weights were adopted")
    expect_equal(len(comparable(output)), 1, "results")


@test
def a_kept_loader_is_replaced_within_a_run(workspace):
    requests = work(workspace, 16)
    oracle = undisturbed(workspace, requests)
    workspace.poise("load", "--model", short_model()).expect(0)
    output = workspace / "out.jsonl"
    # Some six seconds, however long a command takes on a busy machine: a kept loader that dies behind a run is not replaced.
    words = workspace.run_words(requests, output, "--max-num-seqs", "6", *workspace.paced(0.8), "--restarts", "1", model=short_model())
    process = workspace.start(*words)
    status = workspace / "out.jsonl.poise" / "status.json"
    wait_until(lambda: harness._json(status).get("iteration", 0) > 0, "the first iteration")
    for kill in (False, True):
        (before,) = kept(workspace)
        if kill:
            os.kill(before["pid"], signal.SIGKILL)
        else:
            workspace.poise("restart", "loader", f"{output}.poise").expect(0)
        wait_until(lambda before=before: [one for one in kept(workspace) if one["pid"] != before["pid"]], "another loader")
    workspace.finish(process).expect(0)
    expect_equal(comparable(output), oracle, "answers")
    workspace.run(DEMO / "show.jsonl", workspace / "b", model=short_model()).expect(0, "using the kept loader")
    workspace.poise("stop").expect(0, "ended the loader")


@test
def what_a_kept_loader_adopted_is_of_the_files_that_were_read(workspace):
    model = workspace / "model"
    shutil.copytree(short_model(), model)
    requests = work(workspace, 40)
    workspace.poise("load", "--model", model).expect(0)
    output = workspace / "out.jsonl"
    process = workspace.start(*workspace.run_words(requests, output, *slowly(workspace), model=model))
    wait_until(lambda: harness._json(workspace / "out.jsonl.poise" / "status.json").get("iteration", 0) > 0, "the first iteration")
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.unlink()
    weights.write_bytes(data)  # while the loader holds those of before
    workspace.poise("restart", "loader", f"{output}.poise").expect(0)
    shutil.move(model, workspace / "elsewhere")
    workspace.poise("restart", "loader", f"{output}.poise").expect(0)
    workspace.finish(process).expect(0)
    shutil.move(workspace / "elsewhere", model)
    workspace.run(DEMO / "show.jsonl", workspace / "b", model=model).expect(0, "the model's files changed")


@test
def a_kept_loader_that_is_told_to_end_begins_anew_within_a_run(workspace):
    requests = work(workspace, 16)
    oracle = undisturbed(workspace, requests)
    workspace.poise("load", "--model", short_model()).expect(0)
    output = workspace / "out.jsonl"
    process = workspace.start(*workspace.run_words(requests, output, *slowly(workspace), "--restarts", "1", model=short_model()))
    wait_for_results(f"{output}.poise", 1)
    os.kill(kept(workspace)[0]["pid"], signal.SIGTERM)  # as the end of a login session may do; it removes its segments
    workspace.finish(process).expect(0, "another one goes on", "a planner took over")
    expect_equal(comparable(output), oracle, "answers")
    workspace.replay(f"{output}.poise")
    workspace.poise("stop").expect(0, "ended the loader")


@test
def a_kept_loader_of_another_build_is_upgraded_in_place(workspace):
    programs = workspace / "bin"
    shutil.copytree(bin_folder(), programs, ignore=shutil.ignore_patterns("*_tests", "*-bench"))
    environment = {"POISE_BIN": str(programs)}
    model = workspace / "model"
    shutil.copytree(short_model(), model)
    workspace.poise("load", "--model", model, env=environment).expect(0, "kept until")
    (before,) = kept(workspace)
    os.utime(programs / "poise-loader", (0, 0))  # as if built anew
    words = workspace.run_words(DEMO / "show.jsonl", workspace / "a", model=model)
    workspace.poise(*words, env=environment).expect(0, "another build", "its successor has its memory")
    (after,) = kept(workspace)
    expect(after["pid"] != before["pid"] and not alive(before["pid"]), "the old loader lives")
    workspace.poise("stop").expect(0, "ended the loader")


@test
def a_successor_restores_weights_that_a_device_held_alone(workspace):
    requests = workspace.write_requests("in.jsonl", short_to_the_end())
    workspace.run(requests, workspace / "oracle", *TIGHT).expect(0)
    output = workspace / "out.jsonl"
    options = (*short_of_memory(workspace), *workspace.paced(12), "--keep-loader")
    process = workspace.start(*workspace.run_words(requests, output, *options))
    status = workspace / "out.jsonl.poise" / "status.json"
    wait_until(lambda: harness._json(status).get("iteration", 0) > 0, "the first iteration")
    workspace.poise("restart", "loader", f"{output}.poise").expect(0)
    workspace.finish(process).expect(0)
    expect_equal(comparable(output), comparable(workspace / "oracle"), "answers")
    workspace.run(requests, workspace / "plenty", "--policy", "kv-only").expect(0, "using the kept loader")
    expect_equal(comparable(workspace / "plenty"), comparable(workspace / "oracle"), "answers by restored weights")
    log = next((workspace.runtime / "poise" / "loaders").iterdir()) / "loader.log"
    said = log.read_text()
    expect("adopted" in said and "released weights are back" in said, said)
    workspace.poise("stop").expect(0)


if __name__ == "__main__":
    raise SystemExit(harness.main())
