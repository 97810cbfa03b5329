#!/usr/bin/env python3
"""`poise inspect --check` accepts the orders of real runs under every policy, and refuses a damaged log."""

import json
import signal
from pathlib import Path

import harness
from harness import DEMO_MODEL, expect, test, wait_until
from mixed_requests import good_request

WEIGHTS = (DEMO_MODEL / "model.safetensors").stat().st_size


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
    small = ["--host-memory", str(WEIGHTS + (2 << 20)), "--gpu-memory", str(int(WEIGHTS * 1.3))]
    for name in names:
        output = workspace / f"{name}.jsonl"
        workspace.run(requests, output, "--policy", name, "--mini-batch-tokens", "256", *small).expect(0)
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
    log.write_bytes(log.read_bytes()[:-5])
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


@test
def what_is_no_log_of_orders_is_refused_in_a_sentence(workspace):
    path = workspace / "orders.log"
    path.write_bytes(b"POISELOG" + bytes(100))
    workspace.poise("inspect", "--check", path).expect(2)
    workspace.poise("inspect", "--check", "--json", path).expect(2, "--check")


if __name__ == "__main__":
    raise SystemExit(harness.main())
