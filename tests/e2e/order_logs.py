#!/usr/bin/env python3
"""`poise inspect`: --check accepts the orders of real runs under every policy, and refuses a damaged log; --diff tells runs apart;
logs with a limit, and logs that leave something out."""

import json
import os
import signal
import struct
from pathlib import Path

import harness
from harness import DEMO_MODEL, comparable, expect, expect_equal, short_model, test, wait_until
from mixed_requests import good_request

HOST_MACHINE = harness.ROOT / "tests" / "planner" / "profiles" / "host_machine.json"


def requests_of(workspace, count):
    lines = [good_request(workspace.random, number, longest=40) for number in range(count)]
    for line in lines[::2]:
        line["body"] |= {"max_tokens": workspace.random.randrange(20, 90), "ignore_eos": True}
    return workspace.write_requests("requests.jsonl", lines)


def check(workspace, what):
    ended = workspace.poise("inspect", "--check", what).expect(0)
    expect("every order holds" in ended.out and len(ended.out.splitlines()) == 1, ended.out)
    return ended.out


@test
def the_orders_of_every_policy_hold(workspace):
    requests = requests_of(workspace, 24)
    listed = workspace.poise("policies", "--json").expect(0).out.splitlines()
    names = [json.loads(line)["name"] for line in listed]
    expect(len(names) >= 6, f"few policies: {names}")
    weights = (short_model() / "model.safetensors").stat().st_size
    small = ["--host-memory", str(weights + (2 << 20)), "--gpu-memory", str(int(weights * 1.7))]
    for name in names:
        output = workspace / f"{name}.jsonl"
        costs = ["--machine", str(HOST_MACHINE)] if name == "three-way" else []
        workspace.run(requests, output, "--policy", name, "--mini-batch-tokens", "256", *small, *costs, model=short_model()).expect(0)
        check(workspace, f"{output}.poise")
        workspace.replay(f"{output}.poise")


@test
def the_orders_of_a_run_that_was_resumed_hold(workspace):
    requests = requests_of(workspace, 120)
    output = workspace / "results.jsonl"
    run = f"{output}.poise"
    process = workspace.start(*workspace.run_words(requests, output, "--max-num-seqs", "4"))
    partial = Path(run) / "results.jsonl.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 0, "the first results")
    process.send_signal(signal.SIGTERM)
    workspace.finish(process, 60).expect(75)
    check(workspace, run)
    workspace.run(requests, output, "--resume").expect(0)
    check(workspace, f"{run}/orders.log")
    workspace.replay(run)
    log = Path(run) / "orders.log"
    whole = log.read_bytes()
    for torn in (whole[:-5], whole + bytes(100)):  # a cut record; what a power loss leaves behind the last one
        log.write_bytes(torn)
        expect("torn off at the end" in check(workspace, log), "a torn log was taken for a whole one")


@test
def one_iteration_or_layer_is_shown_alone(workspace):
    output = workspace / "results.jsonl"
    workspace.run(requests_of(workspace, 4), output).expect(0)
    run = f"{output}.poise"
    told = workspace.poise("inspect", run, "--iteration", "2", "--layer", "3").expect(0).out
    expect("iteration 2 at" in told and "iteration 1 at" not in told, told)
    expect("layer 3" in told and "layer 2" not in told, told)
    workspace.poise("inspect", run, "--iteration", "-1").expect(2, "--iteration")
    workspace.poise("inspect", run, "--layer", "x").expect(2, "--layer")


def records_of(path):
    """(where its payload begins, how long it is) for each record of one file."""
    log = path.read_bytes()
    at = 16 + struct.unpack_from("<8sII", log)[2]
    while at < len(log):
        (size,) = struct.unpack_from("<I", log, at)
        yield at + 24, size
        at += (24 + size + 7) // 8 * 8


def files_of(run):
    return sorted(Path(run).glob("orders.log*"), key=lambda path: path.stat().st_mtime_ns)


@test
def two_runs_of_the_same_work_have_the_same_orders_and_others_are_told_apart(workspace):
    requests = requests_of(workspace, 12)
    runs = {}
    for name, options in {"a": (), "b": (), "c": ("--mini-batch-tokens", "128")}.items():
        output = workspace / f"{name}.jsonl"
        workspace.run(requests, output, "--max-num-seqs", "6", *options).expect(0)
        runs[name] = Path(f"{output}.poise")
    diff = ["inspect", "--diff", runs["a"]]
    workspace.poise(*diff, runs["b"]).expect(0)
    told = json.loads(workspace.poise(*diff, runs["b"] / "orders.log", "--json").expect(0).out)
    expect(told["equal"] and told["equal_iterations"] > 5 and told["difference"] is None, told)
    workspace.poise(*diff, runs["b"], "--times").expect(1)
    first = json.loads(workspace.poise(*diff, runs["c"], "--json").expect(1).out)["difference"]
    expect(first["where"] and first["field"] and first["a"] != first["b"], first)
    cut = workspace / "cut.log"
    (start, _), *_ = list(records_of(runs["a"] / "orders.log"))[-3:]
    cut.write_bytes((runs["a"] / "orders.log").read_bytes()[: start - 24])
    told = workspace.poise(*diff, cut).expect(1).out
    expect("the log ends" in told, told)
    workspace.poise(*diff).expect(2, "--diff compares two logs")
    workspace.poise("inspect", runs["a"], runs["b"]).expect(2, "--diff")
    workspace.poise(*diff, runs["b"], "--check").expect(2, "--check")
    workspace.poise(*diff, workspace / "none").expect(2, "no such file")


@test
def a_limited_log_keeps_the_last_orders_and_says_what_it_lacks(workspace):
    requests = requests_of(workspace, 40)
    few = ("--max-num-seqs", "4")
    for name, options in {"whole": (), "limited": ("--orders-log-size", "64KiB")}.items():
        workspace.run(requests, workspace / f"{name}.jsonl", *few, *options).expect(0)
    whole, limited = workspace / "whole.jsonl.poise", workspace / "limited.jsonl.poise"
    expect(sum(path.stat().st_size for path in files_of(limited)) < (80 << 10) < (whole / "orders.log").stat().st_size, "sizes")
    expect("were stored before" in check(workspace, limited), "a check that does not say what it took on trust")
    told = workspace.poise("inspect", limited).expect(0).out
    expect("the log begins with segment" in told and "configured at" in told, told[:500])
    workspace.poise("inspect", limited, "--iteration", "1").expect(2, "not in this log")
    for what in (limited, limited / "orders.log"):  # the log's name, though its first segment is gone
        workspace.poise("replay", what, "--model", DEMO_MODEL, "--device", "cpu").expect(2, "--orders-log-size", "begins with segment")
    told = json.loads(workspace.poise("inspect", "--diff", "--json", whole, limited).expect(0).out)
    expect(told["equal_iterations"] > 3 and told["from_iteration"] > 1, told)
    newest = files_of(limited)[-1]
    start, size = list(records_of(newest))[-2]
    log = bytearray(newest.read_bytes())
    log[start + size // 2] ^= 1
    newest.write_bytes(log)
    workspace.poise("inspect", "--check", limited).expect(2, "damaged")


@test
def what_the_log_keeps_may_change_with_each_resume(workspace):
    """Interrupted with each choice, resumed with the next: the answers are those of one run, and each reader says what is missing."""
    requests = requests_of(workspace, 60)
    few = ("--max-num-seqs", "4")
    oracle = workspace / "oracle.jsonl"
    workspace.run(requests, oracle, *few).expect(0)
    output = workspace / "results.jsonl"
    run = Path(f"{output}.poise")
    partial = run / "results.jsonl.partial"
    done = 0
    for options in ((), ("--orders-log", "tables"), ("--orders-log", "off"), ("--orders-log-size", "64KiB")):
        words = [*few, *options, *(["--resume"] if done else [])]
        if options != ("--orders-log-size", "64KiB"):
            words += workspace.paced(4)
            process = workspace.start(*workspace.run_words(requests, output, *words))
            done = wait_until(lambda: partial.exists() and (now := partial.read_bytes().count(b"\n")) > done + 2 and now, "results")
            process.send_signal(signal.SIGTERM)
            workspace.finish(process, 60).expect(75)
            check(workspace, run)
            lacks = {"tables": "--orders-log tables", "off": "where --orders-log off was given"}
            told = workspace.poise("inspect", run).expect(0).out
            expect(not options or lacks[options[1]] in told, told[:600])
            expect(("no reports (--orders-log tables): they are left out" in told) == bool(options), told[-600:])
        else:
            workspace.run(requests, output, *words).expect(0)
    expect_equal(comparable(output), comparable(oracle), "the answers")
    expect("begins with segment" in check(workspace, run), "the gap is not told")
    workspace.poise("replay", run, "--device", "cpu").expect(2, "begins with segment")
    workspace.run(requests, output, "--overwrite", "--orders-log", "off").expect(0)
    expect_equal([path.name for path in files_of(run)], ["orders.log"], "an earlier run's orders are gone")
    for command in (("inspect",), ("inspect", "--check"), ("inspect", "--diff", run), ("replay", "--device", "cpu")):
        workspace.poise(*command, run).expect(2, "--orders-log off")


@test
def planners_go_on_with_a_limited_log(workspace):
    requests = requests_of(workspace, 40)
    output = workspace / "results.jsonl"
    run = Path(f"{output}.poise")
    words = ("--max-num-seqs", "4", "--orders-log-size", "128KiB", "--restarts", "1", *workspace.paced(8))
    process = workspace.start(*workspace.run_words(requests, output, *words))
    partial = run / "results.jsonl.partial"
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 3, "results")
    workspace.poise("restart", "planner", run).expect(0)
    count = partial.read_bytes().count(b"\n") if partial.exists() else 0
    wait_until(lambda: not partial.exists() or partial.read_bytes().count(b"\n") > count + 1, "more results")
    if (pid := workspace.children(run).get("planner")) is not None:
        os.kill(pid, signal.SIGKILL)
    workspace.finish(process, 60).expect(0)
    check(workspace, run)
    expect(sum(path.stat().st_size for path in files_of(run)) < 160 << 10, "it is larger than its limit")


@test
def a_choice_that_cannot_be_is_refused(workspace):
    requests = requests_of(workspace, 2)
    for options, words in (
        (("--orders-log", "some"), "--orders-log"),
        (("--orders-log-size", "1KiB"), "at least 64"),
        (("--orders-log", "tables", "--trace"), "--trace is made of the reports"),
    ):
        workspace.run(requests, workspace / "out.jsonl", *options).expect(2, words)
        expect(not (workspace / "out.jsonl.poise").exists(), "a directory is left")


@test
def what_is_no_log_of_orders_is_refused_in_a_sentence(workspace):
    path = workspace / "orders.log"
    path.write_bytes(b"POISELOG" + bytes(100))
    workspace.poise("inspect", "--check", path).expect(2)
    workspace.poise("inspect", "--check", "--json", path).expect(2, "--check")


if __name__ == "__main__":
    raise SystemExit(harness.main())
