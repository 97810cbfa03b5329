#!/usr/bin/env python3
"""The papers' systems, run as they are: weights, context and batches where their authors have them; the tokens are the same."""

import json
import re

import harness
from harness import DEMO_MODEL, comparable, expect, expect_equal, test
from mixed_requests import good_request

LAYERS = 6  # the demo model's
WEIGHTS = (DEMO_MODEL / "model.safetensors").stat().st_size
ROOMY = ("--gpu-memory", str(WEIGHTS * 4))
# Options, layers on the device, and whether it has ACT and KV blocks.
SYSTEMS = {
    "FlexGen": (("--policy", "kv-only", "--percent", "50,50,25,75,100,0"), 3, False, True),
    "FlexGen without context on the device": (("--policy", "kv-only", "--percent", "100,0,0,100,100,0"), 6, False, False),
    "CAPTURE": (("--policy", "hybrid", "--machine", "rtx4090-pcie4", "--resident-layers", "0", "--gpu-blocks", "act"), 0, True, False),
    "KVPR, latency": (("--policy", "kvpr", "--schedule", "row-by-row", "--machine", "a100-pcie4", "--percent", "100,0,0,100,100,0"), 6, False, False),
    "KVPR, throughput": (("--policy", "kvpr", "--act-share", "0.5", "--percent", "0,100,0,100,100,0"), 0, False, False),
    "DeepSpeed-Inference": (("--policy", "row-by-row", "--resident-layers", "0", "--gpu-blocks", "none"), 0, False, False),
}


@test
def each_has_its_own_placement_and_the_same_tokens(workspace):
    lines = [good_request(workspace.random, number, longest=30) for number in range(24)]
    for line in lines:
        line["body"].setdefault("seed", 7)
    requests = workspace.write_requests("requests.jsonl", lines)
    workspace.run(requests, workspace / "oracle").expect(0)
    for number, (name, (options, layers, act, kv)) in enumerate(SYSTEMS.items()):
        output = workspace / f"{number}.out"
        said = workspace.run(requests, output, *ROOMY, *options).expect(0).err
        expect_equal(comparable(output), comparable(workspace / "oracle"), f"answers of {name}")
        status = json.loads(workspace.poise("status", f"{output}.poise", "--json").expect(0).out)
        expect_equal(status["resident_layers"], layers, f"layers on the device of {name}")
        found = re.search(r", and (\d+) ACT and (\d+) KV blocks? on the device", said)
        there = tuple(int(count) > 0 for count in found.groups()) if found else (False, False)
        expect_equal(there, (act, kv), f"kinds of blocks on the device of {name}")
        workspace.poise("inspect", "--check", f"{output}.poise").expect(0)


@test
def what_cannot_be_is_refused_before_anything_is_loaded(workspace):
    requests = workspace.write_requests("requests.jsonl", [good_request(workspace.random, 0)])
    run = ["run", "--model", DEMO_MODEL, "-i", requests, "-o", workspace / "out"]
    for words, *fragments in (
        (("--resident-layers", str(LAYERS + 1)), f"--resident-layers {LAYERS + 1}", f"has {LAYERS} layers"),
        (("--percent", "20,60,0,100,100,0"), "--percent", "no disk is used"),
        (("--percent", "0,100,0,100,0,100"), "--percent", "end it with 100,0"),
        (("--percent", "0,100,0,100,100,0", "--resident-layers", "3"), "--percent and --resident-layers"),
        (("--percent", "0,100,50,50,100,0", "--device", "cpu"), "--percent", "--gpu-memory"),
        (("--gpu-blocks", "kv"), "--gpu-blocks kv", "all, act and none"),
        (("--schedule", "row-by-row", "--policy", "hybrid"), "hybrid has no such schedule", "--policy kvpr"),
    ):
        workspace.poise(*run, *words).expect(2, *fragments)
    expect(not (workspace / "out.poise").exists(), "a run directory was made")


if __name__ == "__main__":
    raise SystemExit(harness.main())
