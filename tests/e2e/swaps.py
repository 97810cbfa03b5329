#!/usr/bin/env python3
"""Policies swapped, planners and executors restarted while a run goes on: the same tokens, the same loader, nothing read
again, and every block that was stored still good."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import harness
from harness import comparable, expect, expect_equal, kill_together, request, short_model, test, wait_until
from mixed_requests import good_request
from supervisor.commands import policy as policy_command
from supervisor.commands import restart as restart_command
from supervisor.lifecycle import segments
from supervisor.shared.trouble import Refusal

RESTARTS = 6
SLOW_DEVICE = ("--link-gbps", "1", "--compute-gflops", "20")  # what a profile measures it mostly sleeps


def slowly(workspace):
    """Options of runs that take some seconds, so that there is time to disturb them."""
    return ("--max-num-seqs", "6", *workspace.paced(2))


def work(workspace, count):
    random = workspace.random
    lines = [good_request(random, i) for i in range(count)]
    lines += [
        request(f"long{i}", "Rosa lives in", max_tokens=random.randrange(50, 150), ignore_eos=True, logprobs=i % 3)
        for i in range(count)
    ]
    random.shuffle(lines)
    return workspace.write_requests("requests.jsonl", lines)


def policy_words(random, name=None):
    name = name or random.choice(harness.policies())
    share = []
    if name in ("hybrid", "kvpr"):
        share = ["--act-share", str(random.choice((0, 0.25, 0.5, 0.9)))]
    elif name == "optimal":
        share = ["--machine", random.choice(("rtx4090-pcie4", str(harness.ROOT / "tests" / "planner" / "profiles" / "machine.json")))]
    elif name == "three-way":
        share = ["--machine", str(harness.ROOT / "tests" / "planner" / "profiles" / "host_machine.json")]
    elif name == "token-recompute":
        share = ["--recompute-share", str(random.choice((0.1, 0.4)))]
    return name, share


class Disturbed:
    """A run under way of a model whose weights are gone from disk by now, even for a process that holds the files open: no process can
    read a byte of them again."""

    def __init__(self, workspace, requests, *options):
        self.workspace = workspace
        self.output = workspace / "out.jsonl"
        self.run = f"{self.output}.poise"
        model = workspace / "model"
        shutil.copytree(short_model(), model)
        words = workspace.run_words(requests, self.output, "--served-model-name", short_model(), *options, model=model)
        self.process = workspace.start(*words)
        wait_until(self.iteration, "the first iteration")
        for weights in model.glob("*.safetensors"):
            os.truncate(weights, 0)
            weights.unlink()
        self.loader = self.pid("loader")
        self.read_before = self.reads()

    def status(self):
        return harness._json(self.workspace / "out.jsonl.poise" / "status.json")

    def iteration(self):
        return self.status().get("iteration", 0)

    def pid(self, name):
        return self.workspace.children(self.run).get(name)

    def lives(self):
        return self.process.poll() is None

    def reads(self):
        """What the loader has read, except from sockets: (bytes, calls)."""
        with open(f"/proc/{self.loader}/io", encoding="ascii") as file:
            facts = dict(line.split(":") for line in file)
        return int(facts["rchar"]), int(facts["syscr"])

    def ask(self, command, *words):
        """Runs `poise COMMAND WORDS RUN` within this process, which is fast, and returns its output."""
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                expect_equal(command([*words, self.run]), 0, f"the end of {command.__name__} {' '.join(words)}")
        except Refusal as refusal:
            said = "" if self.lives() else self.workspace.finish(self.process).err
            raise harness.Failed(f"{command.__name__} {' '.join(words)}: {refusal.sentence}\n{said}") from None
        return printed.getvalue()

    def refused(self, command, *words):
        """The sentence with which `poise COMMAND WORDS RUN` refuses, ending with 2; without a process of its own, too."""
        try:
            command([*words, self.run])
        except Refusal as refusal:
            expect_equal(refusal.code, 2, f"the end of {command.__name__} {' '.join(words)}")
            return refusal.sentence
        raise harness.Failed(f"{command.__name__} {' '.join(words)} is not refused")

    def poise(self, *words):
        return self.workspace.poise(*words, self.run)

    def check_loader(self):
        expect_equal(self.pid("loader"), self.loader, "the loader's pid")
        size, calls = (now - before for now, before in zip(self.reads(), self.read_before))
        # Its threads wake each other through event descriptors, 8 bytes a time. It reads nothing else.
        expect(size <= 8 * calls, f"the loader read {size} bytes in {calls} calls")

    def finish(self, oracle):
        ended = self.workspace.finish(self.process).expect(0)
        expect_equal(comparable(self.output), oracle, "the disturbed file")
        return ended

    def replay(self):
        """After `finish`: the orders give the same answers without what disturbed the run."""
        return self.workspace.replay(self.run, "--model", short_model())


def undisturbed(workspace, requests, *options):
    workspace.run(requests, workspace / "oracle.jsonl", *options, model=short_model()).expect(0)
    return comparable(workspace / "oracle.jsonl")


@test
def policies_are_swapped_and_planners_killed_while_the_run_goes_on(workspace):
    random = workspace.random
    requests = work(workspace, 30)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace))
    swaps, kills, hand_overs, borders = 0, 0, 0, set()
    while run.lives() and (swaps < 24 or kills < 3 or hand_overs < 3):
        time.sleep(random.uniform(0, 0.08))
        name, share = policy_words(random)
        if random.random() < 0.25:
            kill = random.random() < 0.5
            planner = run.pid("planner")
            said = run.ask(restart_command.restart, "planner", "--policy", name, *share, *(["--kill"] if kill else []))
            expect(name in said and run.pid("planner") != planner, said)
            kills, hand_overs = kills + kill, hand_overs + (not kill)
        else:
            said = run.ask(policy_command.policy, name, *share, "--json")
            expect_equal(json.loads(said)["policy"], name, "the policy in force")
        swaps += 1
        blocks = run.status()["blocks"]
        borders.add((blocks["act"], blocks["kv"]))
        if run.lives():
            run.check_loader()
    expect(run.lives(), f"the run was over after {swaps} swaps and {kills} kills: too little work to disturb")
    said = run.finish(oracle).err
    expect(len(borders) > 4, f"the border stood still: {borders}")
    go_on = [line for line in said.splitlines() if "a planner took over before" in line and "continues 0 requests" not in line]
    expect(len(go_on) >= 3, f"a planner that handed over left nothing: {said}")
    workspace.poise("inspect", "--check", run.run).expect(0)
    run.replay()
    told = workspace.poise("inspect", run.run).expect(0).out
    expect(told.count("\npolicy ") > 20, "inspect does not show which policy came into force, and when")


def with_blocks_on_the_device(workspace, requests, *options):
    """A device with a memory size of its own holds blocks too; they are lost with it."""
    weights = (short_model() / "model.safetensors").stat().st_size
    return Disturbed(workspace, requests, *slowly(workspace), "--gpu-memory", str(weights * 10 // 3), *options)


@test
def executors_are_restarted_while_the_run_goes_on(workspace):
    random = workspace.random
    requests = work(workspace, 18)
    oracle = undisturbed(workspace, requests)
    run = with_blocks_on_the_device(workspace, requests, "--policy", "hybrid", "--act-share", "0.5")
    for number in range(RESTARTS):
        time.sleep(random.uniform(0, 0.15))
        executor, planner = run.pid("gpu_executor"), run.pid("planner")
        kill = ["--kill"] if number % 2 else []
        run.ask(restart_command.restart, "gpu_executor", *kill)
        expect(run.pid("gpu_executor") not in (executor, None), "it is the same executor")
        expect_equal(run.pid("planner"), planner, "the planner's pid")
        name, share = policy_words(random)
        run.ask(policy_command.policy, name, *share)
        run.check_loader()
    expect(run.lives(), "the run was over before it was disturbed enough")
    said = run.finish(oracle).err
    expect(", and 0 ACT and 0 KV blocks on the device" not in said, "the device held no blocks: nothing was lost with it")
    workspace.poise("inspect", "--check", run.run).expect(0)
    run.replay()
    expect_equal(said.count("the gpu_executor is back"), RESTARTS, "times that the planner saw another executor")
    expect("died twice" not in said, f"executors that were asked to end count as deaths: {said}")


@test
def codes_of_weights_and_context_stand_every_policy_and_every_death(workspace):
    """Packed weights and quantised context: every policy in one run, planners and executors killed and replaced between them."""
    random = workspace.random
    kept = ("--quantization", random.choice(("int8", "int4")), "--kv-cache-dtype", random.choice(("int8", "int4")))
    requests = work(workspace, 18)
    oracle = undisturbed(workspace, requests, *kept)
    run = with_blocks_on_the_device(workspace, requests, *kept)
    names = random.sample(harness.policies(), len(harness.policies()))
    ends = [(what, *kill) for what in ("planner", "gpu_executor") for kill in ((), ("--kill",))]
    for number, name in enumerate(names):
        time.sleep(random.uniform(0, 0.08))
        words = [name, *policy_words(random, name)[1], "--json"]
        try:
            said = run.ask(policy_command.policy, *words)
        except harness.Failed as failed:  # its split leaves no room in these pools
            expect("(--rebuild)" in str(failed), str(failed))
            said = run.ask(policy_command.policy, *words, "--rebuild")
        expect_equal(json.loads(said)["policy"], name, "the policy in force")
        what, *kill = ends[number % len(ends)]
        before = run.pid(what)
        run.ask(restart_command.restart, what, *kill)
        expect(run.pid(what) not in (before, None), f"it is the same {what}")
    expect(run.lives(), "the run was over before every policy had its turn")
    run.finish(oracle)
    workspace.poise("inspect", "--check", run.run).expect(0)
    run.replay()


def standing_still(run, seconds=0.5):
    """Waits until the executor has done nothing for that long: its planner is halted, and what it was told is done."""
    control = segments.ControlView(harness._json(run.workspace / "out.jsonl.poise" / "run.json")["run_id"])
    with contextlib.closing(control):
        done, since = control.progress[2], time.monotonic()
        while time.monotonic() < since + seconds:
            time.sleep(0.02)
            if (now := control.progress[2]) != done:
                done, since = now, time.monotonic()


def another(run, what, old):
    return wait_until(lambda: (pid := run.pid(what)) not in (old, None) and pid, f"another {what}")


@test
def blocks_of_an_executor_that_ends_between_two_planners_are_not_believed(workspace):
    requests = work(workspace, 18)
    oracle = undisturbed(workspace, requests)
    run = with_blocks_on_the_device(workspace, requests, "--policy", "hybrid", "--act-share", "0.5", "--restarts", "3")
    for _ in range(3):
        time.sleep(workspace.random.uniform(0.1, 0.4))
        planner, executor = run.pid("planner"), run.pid("gpu_executor")
        restart = workspace.start("restart", "planner", run.run)
        planner = another(run, "planner", planner)
        os.kill(planner, signal.SIGSTOP)  # before it has seen who the executor is
        os.kill(executor, signal.SIGKILL)
        another(run, "gpu_executor", executor)
        os.kill(planner, signal.SIGCONT)
        workspace.finish(restart).expect(0)
    expect(run.lives(), "the run was over before it was disturbed enough")
    said = run.finish(oracle).err
    expect(", and 0 ACT and 0 KV blocks on the device" not in said, "the device held no blocks: nothing was lost with it")
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def an_executor_that_ends_while_it_is_set_up_for_another_policy_takes_its_blocks_with_it(workspace):
    requests = work(workspace, 12)
    oracle = undisturbed(workspace, requests)
    run = with_blocks_on_the_device(workspace, requests, "--policy", "kv-only", "--restarts", "2")
    for policy in ("act-only", "row-by-row"):
        time.sleep(0.2)
        planner, executor = run.pid("planner"), run.pid("gpu_executor")
        os.kill(planner, signal.SIGSTOP)
        standing_still(run)  # the iteration under way ends, and no other begins
        os.kill(executor, signal.SIGSTOP)
        swap = workspace.start("policy", policy, run.run)
        wait_until(lambda: harness._json(workspace / "out.jsonl.poise" / "policy.json").get("policy") == policy, "the wish")
        os.kill(planner, signal.SIGCONT)
        workspace.finish(swap).expect(0)
        expect_equal(run.pid("gpu_executor"), executor, "the executor that was halted")
        os.kill(executor, signal.SIGKILL)
        another(run, "gpu_executor", executor)
    expect(run.lives(), "the run was over before it was disturbed enough")
    run.finish(oracle)
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def a_planner_that_dies_while_the_executor_is_set_up_is_followed_by_another(workspace):
    requests = work(workspace, 2)
    oracle = undisturbed(workspace, requests)
    # Weights take seconds over such a link: the next planner is there before the executor has time for it.
    slowly = ("--gpu-memory", "64MiB", "--link-gbps", "0.001", "--restarts", "1")
    process = workspace.start(*workspace.run_words(requests, workspace / "out.jsonl", *slowly, model=short_model()))
    log = workspace / "out.jsonl.poise" / "logs" / "gpu_executor.log"
    wait_until(lambda: log.exists() and "mapped block pool" in log.read_text(), "the executor to be set up")
    os.kill(workspace.children(workspace / "out.jsonl.poise")["planner"], signal.SIGKILL)
    workspace.finish(process).expect(0, "planner was killed; another one goes on")
    expect_equal(comparable(workspace / "out.jsonl"), oracle, "the disturbed file")


@test
def a_planner_that_cannot_bring_the_policy_it_was_to_bring_goes_on_with_the_one_before(workspace):
    requests = work(workspace, 12)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--policy", "act-only")
    for kill in ([], ["--kill"]):
        planner = run.pid("planner")
        told = run.poise("restart", "planner", "--policy", "optimal", *kill)  # costs were not measured
        told.expect(2, "--policy optimal decides by what things cost", "; act-only stays in force")
        expect(run.pid("planner") not in (planner, None), "it is the same planner")
        expect_equal(run.status()["policy"], "act-only", "the policy in force")
        run.check_loader()
    said = run.finish(oracle).err
    go_on = [line for line in said.splitlines() if "a planner took over before" in line and "continues 0 requests" not in line]
    expect_equal(len(go_on), 1, f"planners that went on with requests under way: {said}")
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def a_planner_that_cannot_take_over_loses_no_answer(workspace):
    requests = work(workspace, 12)
    oracle = undisturbed(workspace, requests)
    profile = workspace / "profile.json"
    workspace.poise("profile", "--model", short_model(), "--device", "cpu", *SLOW_DEVICE, "-o", profile).expect(0)
    run = Disturbed(workspace, requests, *slowly(workspace), "--profile", profile)
    done = wait_until(lambda: run.status().get("done", 0), "an answer")
    profile.unlink()
    run.poise("restart", "planner").expect(75, "ended before the planner was back")
    ended = workspace.finish(run.process).expect(75, "profile.json", "are safe in", "--resume")
    partial = (workspace / "out.jsonl.poise" / "results.jsonl.partial").read_bytes().splitlines()
    expect(len(partial) >= done, f"{done} answers were there, {len(partial)} are left: {ended.err}")
    shutil.copy(short_model() / "model.safetensors", workspace / "model")
    words = ("--served-model-name", short_model(), "--resume")
    workspace.run(requests, run.output, *words, model=workspace / "model").expect(0)
    expect_equal(comparable(run.output), oracle, "the resumed file")


@test
def a_journal_that_cannot_be_written_does_not_end_the_run(workspace):
    requests = work(workspace, 20)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace))
    (workspace / "out.jsonl.poise" / "journal" / "in the way").mkdir(parents=True)
    run.poise("restart", "planner").expect(0)
    expect("cannot be written: Is a directory (remove what stands in its place); what was under way is computed again" in run.finish(oracle).err, "nothing was said")


@test
def everybody_who_asks_for_a_restart_is_answered(workspace):
    requests = work(workspace, 40)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace))
    began = time.monotonic()
    asked = [workspace.start("restart", what, run.run) for what in ("planner", "gpu_executor", "planner", "planner")]
    ends = [workspace.finish(process, timeout=30) for process in asked]
    expect(run.lives(), f"the run was over after {time.monotonic() - began:.1f} s: {[end.err for end in ends]} {harness.said(run.process)[-900:]}")
    expect(all(end.code == 0 or "is being restarted just now" in end.err for end in ends), f"{[end.err for end in ends]}")
    expect(any(end.code == 0 for end in ends), "no wish was fulfilled")
    run.check_loader()
    run.finish(oracle)


@test
def who_dies_unasked_is_replaced_as_often_as_the_run_allows(workspace):
    requests = work(workspace, 12)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--restarts", "2")
    for victim in ("gpu_executor", "planner"):
        pid = run.pid(victim)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda v=victim, p=pid: run.status().get("pids", {}).get(v) not in (p, 0, None), f"another {victim}")
        wait_until(lambda: run.status().get("state") == "running", "work to go on")
        run.check_loader()
    os.kill(run.pid("planner"), signal.SIGKILL)
    ended = workspace.finish(run.process).expect(75, "planner was killed", "--resume")
    expect_equal(ended.err.count("another one goes on"), 2, "replacements that were told of")
    shutil.copy(short_model() / "model.safetensors", workspace / "model")
    words = ("--served-model-name", short_model(), "--resume")
    workspace.run(requests, run.output, *words, model=workspace / "model").expect(0)
    expect_equal(comparable(run.output), oracle, "the resumed file")


@test
def each_of_several_who_wish_for_a_policy_is_told_of_its_own(workspace):
    requests = work(workspace, 24)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--policy", "kv-only")
    planner = run.pid("planner")
    os.kill(planner, signal.SIGSTOP)  # so that it finds the last wish alone
    asked = {}
    for name in ("no-such-policy", "act-only", "hybrid"):
        asked[name] = workspace.start("policy", name, run.run)
        wait_until(lambda n=name: harness._json(workspace / "out.jsonl.poise" / "policy.json").get("policy") == n, "the wish")
    os.kill(planner, signal.SIGCONT)
    ends = {name: workspace.finish(process) for name, process in asked.items()}
    for name in ("no-such-policy", "act-only"):
        ends[name].expect(2, "a later request replaced this one; hybrid is in force")
    expect("hybrid, from iteration" in ends["hybrid"].expect(0).out, ends["hybrid"].out)
    # All at once, as it happens: each is granted, refused or replaced by itself.
    names = ["no-such-policy", "act-only", "hybrid", "hybrid-static", "kvpr"]
    workspace.random.shuffle(names)
    asked = {name: workspace.start("policy", name, run.run) for name in names}
    ends = {name: workspace.finish(process) for name, process in asked.items()}
    for name, end in ends.items():
        if end.code == 0:
            expect(end.out.startswith(f"{name}, from iteration"), f"{name} was answered: {end.out}")
        elif name == "no-such-policy" and "a later request" not in end.err:
            end.expect(2, "there is no such policy", "stays in force")
        else:
            end.expect(2, "a later request replaced this one; ")
    # Where the planner found the last wish alone, and that was for no policy, hybrid stays in force from before.
    granted = [name for name, end in ends.items() if end.code == 0]
    expect(run.status()["policy"] in (granted or ["hybrid"]), f"{run.status()['policy']} is in force, {granted} were granted")
    expect(run.lives(), "the run was over before it was disturbed enough")
    run.finish(oracle)


def kill_both(run):
    old = {what: run.pid(what) for what in ("planner", "gpu_executor")}
    kill_together(run.process, *old.values())
    return old


@test
def planner_and_executor_that_die_at_the_same_instant_are_both_replaced(workspace):
    requests = work(workspace, 12)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--restarts", "4")
    for _ in range(2):
        time.sleep(workspace.random.uniform(0, 0.3))
        for what, pid in kill_both(run).items():
            wait_until(lambda w=what, p=pid: run.status().get("pids", {}).get(w) not in (p, 0, None), f"another {what}")
        wait_until(lambda: run.status().get("state") == "running", "work to go on")
        run.check_loader()
    expect(run.lives(), "the run was over before it was disturbed enough")
    ended = run.finish(oracle)
    for what in ("planner", "gpu_executor"):
        expect_equal(ended.err.count(f"{what} was killed; another one goes on"), 2, f"times that another {what} was told of")
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def where_more_die_at_the_same_instant_than_may_be_replaced_the_run_ends(workspace):
    run = Disturbed(workspace, work(workspace, 12), *slowly(workspace), "--restarts", "1")
    kill_both(run)
    ended = workspace.finish(run.process).expect(75, "planner was killed", "--resume")
    expect("another one goes on" not in ended.err, "one of two was replaced")


def one_at_a_time(workspace, policy, *options):
    """A run of requests that fill the pool one by one; of each kind of block, as many as the largest takes. (run, oracle)"""
    requests = workspace.write_requests(
        "requests.jsonl", [request(i, "Rosa lives in", max_tokens=150, ignore_eos=True) for i in range(7)]
    )
    oracle = undisturbed(workspace, requests)
    paced = ("--max-num-seqs", "1", *workspace.paced(2))
    return Disturbed(workspace, requests, *paced, "--policy", policy, *options), oracle


@test
def what_cannot_be_is_refused_and_the_run_goes_on(workspace):
    # In a pool of ACT blocks, KV blocks, which are twice as large, do not fit.
    run, oracle = one_at_a_time(workspace, "act-only")
    in_force = "act-only stays in force"
    for words, fragment in (
        (("no-such-policy",), "there is no such policy"),
        (("kv-only", "--act-share", "0.5"), "takes no share"),
        (("hybrid", "--machine", "abacus"), "abacus"),
        (("kv-only",), "room for"),
    ):
        said = run.refused(policy_command.policy, *words)
        expect(fragment in said and in_force in said, said)
    run.poise("policy", "kv-only").expect(2, "room for", "--resume", "--rebuild", in_force)
    run.poise("restart", "planner", "--policy", "no-such-policy").expect(2, "there is no such policy", in_force)
    for command, words, fragment in (
        (restart_command.restart, ("gpu",), "there is no process gpu"),
        (restart_command.restart, ("gpu_executor", "--policy", "kv-only"), "--policy goes with planner"),
        (policy_command.policy, ("--act-share", "0.5"), "go with the NAME"),
        (policy_command.policy, ("--rebuild",), "go with the NAME"),
    ):
        said = run.refused(command, *words)
        expect(fragment in said, said)
    expect(run.lives(), "the run was over before it was disturbed enough")
    (workspace / "out.jsonl.poise" / "policy.json").write_text("{torn")
    wait_until(lambda: "policy.json" in run.status().get("policy_refusal", ""), "the torn wish to be refused")
    expect("act-only, from iteration" in run.ask(policy_command.policy), "another policy is in force")
    expect(run.lives(), "the run was over before it was disturbed enough")
    run.finish(oracle)
    run.poise("policy", "kv-only").expect(2, "nothing runs in")
    run.poise("restart", "planner").expect(2, "nothing runs in")
    workspace.poise("policy", "kv-only", workspace.folder).expect(2, "holds no run")
    workspace.poise("policy", "a", "b", "c").expect(2, "there is no argument")


@test
def what_a_swap_cannot_change_is_said_and_a_rebuild_changes_it(workspace):
    # Pools that `optimal` fills with ACT blocks hold half as many KV blocks.
    requests = workspace.write_requests(
        "requests.jsonl", [request(i, "Rosa lives in", max_tokens=150, ignore_eos=True) for i in range(18)]
    )
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--policy", "optimal", "--machine", "rtx4090-pcie4")
    pool = run.status()["host_pool_bytes"]
    line = "until its pools are made anew (--rebuild) this run has "
    for words in (("hybrid", "--act-share", "0.1"), ()):  # the swap, then the policy in force
        told = run.ask(policy_command.policy, *words)
        expect(line in told and " blocks of context instead of " in told, f"policy {words}: {told}")
        expect(f" policy hybrid {run.run} --act-share 0.1 --rebuild" in told, f"policy {words}: {told}")
    expect_equal(run.status()["host_pool_bytes"], pool, "the pool after a swap")
    told = run.poise("policy", "hybrid", "--act-share", "0.1", "--rebuild").expect(0).out
    expect("the pools are made anew" in told and line not in told, told)
    wait_until(lambda: run.status().get("host_pool_bytes") != pool and run.status().get("state") == "running", "new pools")
    expect(run.status()["host_pool_bytes"] > pool, "the new pool is no larger")
    expect_equal(json.loads(run.ask(policy_command.policy, "--json"))["held_back"], "", "held back after the rebuild")
    expect(run.lives(), "the run was over before it was disturbed enough")
    expect_equal(run.pid("loader"), run.loader, "the loader's pid")
    run.finish(oracle)
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def a_rebuild_makes_room_for_what_a_swap_refuses(workspace):
    run, oracle = one_at_a_time(workspace, "act-only")
    said = run.refused(policy_command.policy, "kv-only")
    expect("room for" in said and "have the pool made anew (--rebuild)" in said, said)
    expect("the pools are made anew" in run.ask(policy_command.policy, "kv-only", "--rebuild"), "the remedy is refused")
    expect(run.lives(), "the run was over before it was disturbed enough")
    run.finish(oracle)
    # The new pool is planned with the memory of the one before.
    log = Path(run.run, "logs", "planner.log").read_text()
    spare, planned = (re.search(pattern, log) for pattern in (r"given back: [1-9][0-9]* bytes are spare", "policy kv-only: up to"))
    expect(spare and planned and spare.start() < planned.start(), log)
    run.replay()
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def a_process_killed_while_pools_are_made_anew_costs_no_answer(workspace):
    requests = work(workspace, 24)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace), "--restarts", "9")
    for policy, name in (("act-only", "gpu_executor"), ("kv-only", "loader"), ("act-only", "planner"), ("kv-only", "gpu_executor")):
        asked = workspace.start("policy", policy, "--rebuild", run.run)
        time.sleep(workspace.random.uniform(0.1, 0.4))
        expect(run.lives(), "the run was over before it was disturbed enough")
        before = run.iteration()
        wait_until(lambda name=name: run.pid(name), f"a {name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid(name), signal.SIGKILL)
        workspace.finish(asked)  # where the planner was killed, it is refused
        wait_until(lambda before=before: run.iteration() > before + 2 or not run.lives(), "iterations after a death")
    run.finish(oracle)
    workspace.poise("inspect", "--check", run.run).expect(0)


@test
def a_rebuild_for_which_there_is_no_memory_leaves_the_pools_as_they_are(workspace):
    one = workspace.write_requests("one.jsonl", [request(0, "Rosa lives in", max_tokens=150, ignore_eos=True)])
    workspace.run(one, workspace / "one", "--policy", "act-only", model=short_model()).expect(0)
    pool = harness._json(workspace / "one.poise" / "status.json")["host_pool_bytes"]
    words = ("--model", short_model(), "-i", one, "--machine", "rtx4090-pcie4", "--device", "cpu", "--json")
    weights = json.loads(workspace.poise("plan", *words).expect(0).out)["memory"]["host"]["weights"]
    # KV blocks would take twice the pool.
    run, oracle = one_at_a_time(workspace, "act-only", "--host-memory", str(weights + pool * 3 // 2))
    blocks = run.status()["blocks"]["act"]
    said = run.refused(policy_command.policy, "kv-only", "--rebuild")
    expect("raise --host-memory" in said and "act-only stays in force" in said, said)
    expect_equal(run.status()["blocks"]["act"], blocks, "ACT blocks after the refusal")
    expect(run.lives(), "the run was over before it was disturbed enough")
    run.finish(oracle)


@test
def a_stop_ends_a_run_between_planners(workspace):
    requests = work(workspace, 12)
    oracle = undisturbed(workspace, requests)
    run = Disturbed(workspace, requests, *slowly(workspace))
    restart = workspace.start("restart", "planner", run.run)
    time.sleep(workspace.random.uniform(0.05, 0.3))
    run.poise("stop").expect(0)
    workspace.finish(restart)
    workspace.finish(run.process).expect(75, "--resume")
    shutil.copy(short_model() / "model.safetensors", workspace / "model")
    words = ("--served-model-name", short_model(), "--resume")
    workspace.run(requests, run.output, *words, model=workspace / "model").expect(0)
    expect_equal(comparable(run.output), oracle, "the resumed file")


if __name__ == "__main__":
    raise SystemExit(harness.main())
