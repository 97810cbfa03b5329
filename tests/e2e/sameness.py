#!/usr/bin/env python3
"""The policy changes the time, never the tokens: bit-equal results for every split, policy, order and number of threads."""

import json
import math
import os
import shutil
import signal
import struct
import time

import harness
from harness import ROOT, comparable, expect, expect_equal, first_layers, request, rewrite_tensors, test, wait_until
from mixed_requests import good_request

ROUNDS = 14
GROWING = 8
LAYERS = 4  # of the demo model's: on a device of the size of all weights, some stream
LONGEST = 100  # tokens of an answer
CONTEXT = 600_000  # bytes of the longest request's, about


def work(random, count):
    """Requests whose answers do not depend on their line: sampled ones carry a seed."""
    lines = []
    for number in range(count):
        line = good_request(random, number, longest=random.choice((3, 30, 60)))
        if random.random() < 0.5:
            line["body"] |= {"max_tokens": random.randrange(30, LONGEST), "ignore_eos": True}
        if line["body"].get("temperature"):
            line["body"]["seed"] = random.randrange(1 << 31)
        lines.append(line)
    # Together these outgrow the smallest pool, so that some give their blocks back.
    lines += [request(f"grows{i}", "Rosa lives in", max_tokens=LONGEST, ignore_eos=True) for i in range(GROWING)]
    return lines


def work_in_ids(random, count):
    """The same for a model of a few dozen tokens that has no tokenizer."""
    lines = []
    for number in range(count):
        prompt = [random.randrange(3, 61) for _ in range(random.choice((1, 16, 30, 64, 65, 150)))]
        body = {"max_tokens": random.choice((1, 20, 60)), "ignore_eos": random.random() < 0.5, "return_token_ids": True}
        if random.random() < 0.3:
            body |= {"temperature": 1.0, "seed": random.randrange(1 << 31), "logprobs": 3}
        lines.append(request(number, prompt, **body))
    return lines


def way_to_run(random, round_number, width, weights, pool):
    """`width`: of a stored value, in those of the checkpoint. `pool`: bytes that the longest request's context takes, about."""
    if round_number == 0:
        return []
    if round_number == 1:  # pools and device as small as the longest request allows
        memory = ["--host-memory", str(int((weights + 1.1 * pool) * width)), "--gpu-memory", str(weights * width)]
        return ["--policy", "kv-only", *memory]
    if round_number == 2:  # host cores attend: a pool that runs out, prompts in parts, few requests a mini-batch
        memory = ["--host-memory", str(int((weights + 1.4 * pool) * width)), "--mini-batch-tokens", "200"]
        return ["--policy", "host-kv", "--host-threads", "2", *memory]
    policy = random.choice((*harness.policies(), "hybrid"))
    options = ["--policy", policy]
    if policy in ("hybrid", "kvpr"):
        shares = ("0", "0.1", "0.25", "0.5", "0.75", "0.9", "1")
        machines = ("rtx4090-pcie4", "a100-pcie4", "h200-pcie5", "l4-pcie4")
        by_costs = random.random() < 0.3
        options += ["--machine", random.choice(machines)] if by_costs else ["--act-share", random.choice(shares)]
    if policy == "token-recompute":
        options += ["--recompute-share", random.choice(("0.1", "0.25", "0.5", "1"))]
    if policy == "three-way":
        options += ["--machine", str(ROOT / "tests" / "planner" / "profiles" / "host_machine.json")]
    if policy == "optimal":
        options += ["--machine", random.choice(("rtx4090-pcie4", "a100-pcie4", "h200-pcie5", "l4-pcie4"))]
    if random.random() < 0.7:
        options += ["--mini-batch-tokens", str(random.choice((64, 128, 500, 2048, 8192)))]
    if random.random() < 0.7:
        options += ["--max-num-seqs", str(random.choice((1, 2, 7, 16, 64, 256)))]
    if random.random() < 0.7:
        options += ["--threads", str(random.randint(1, 4))]
    if random.random() < 0.6:  # small pools: requests wait, and give their blocks back
        options += ["--host-memory", str(int(weights * width + random.choice((1.1, 1.4, 2, 5)) * width * pool))]
    if policy != "token-recompute" and random.random() < 0.6:  # a small device: weights stream, prompts and mini-batches are cut
        options += ["--gpu-memory", str(int(weights * width * random.choice((1, 1.3, 1.8, 4))))]
    return options


def same_however(workspace, dtype):
    random = workspace.random
    model = first_layers(LAYERS, workspace / "model")
    weights = (model / "model.safetensors").stat().st_size
    lines = work(random, 40)
    oracle, preemptions, streamed = None, 0, 0
    rounds = ROUNDS // 2 if dtype else ROUNDS
    for round_number in range(rounds):
        shuffled = lines[:]
        if round_number:
            random.shuffle(shuffled)
        requests = workspace.write_requests(f"{round_number}.jsonl", shuffled)
        output = workspace / f"{round_number}.out"
        options = way_to_run(random, round_number, 2 if dtype == "float32" else 1, weights, CONTEXT)
        options += ["--dtype", dtype] if dtype else []
        workspace.run(requests, output, *options, model=model).expect(0)
        workspace.poise("inspect", "--check", f"{output}.poise").expect(0)
        status = json.loads(workspace.poise("status", f"{output}.poise", "--json").expect(0).out)
        if status["preemptions"] and not preemptions:
            workspace.replay(f"{output}.poise")
        preemptions += status["preemptions"]
        streamed += status["resident_layers"] < status["layers"]
        results = comparable(output)
        oracle = oracle or results
        if results != oracle:
            pairs = ((a, b) for a, b in zip(oracle, results) if a != b)
            first, other = next(pairs, (f"{len(oracle)} results", f"{len(results)} results"))
            expect_equal(json.loads(other), json.loads(first), f"with {' '.join(options)}")
    expect(preemptions > 0, "no request ever gave its blocks back: the pools were too large to test anything")
    expect(streamed > 0, "no weights were streamed: the device was too large to test anything")


@test
def tokens_text_and_logprobs_are_bit_equal_however_the_work_is_done(workspace):
    same_however(workspace, None)


@test
def they_are_in_float32(workspace):
    same_however(workspace, "float32")


@test
def they_are_in_bfloat16(workspace):
    same_however(workspace, "bfloat16")


def rotated_heads(name, rounds, kept="auto"):
    """A tiny checkpoint whose keys are rotated: by KV Gen as they were when they were stored, wherever a prompt was cut. `kept`: how
    keys and values are; codes of them and of weights are replayed too."""

    def same_for_rotated_heads(workspace):
        random = workspace.random
        model = ROOT / "tests" / "golden" / "models" / name
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        lines, oracle = work_in_ids(random, 24), None
        for round_number in range(rounds):
            random.shuffle(lines)
            requests = workspace.write_requests(f"{round_number}.jsonl", lines)
            output = workspace / f"{round_number}.out"
            policy = ["--policy", ("kv-only", "act-only", "host-kv")[round_number - 1]] if 0 < round_number < 4 else None
            policy = [] if round_number == 0 else policy
            options = policy if policy is not None else way_to_run(random, round_number, 1, max(weights, 1 << 19), 1 << 16)
            options += ["--mini-batch-tokens", random.choice(("32", "48", "200"))] if "--mini-batch-tokens" not in options else []
            options += ["--kv-cache-dtype", kept]
            workspace.run(requests, output, "--skip-tokenizer-init", *options, model=model).expect(0)
            workspace.poise("inspect", "--check", f"{output}.poise").expect(0)
            if (kept != "auto" or name.startswith("packed")) and round_number == 2:
                workspace.replay(f"{output}.poise")
            results = comparable(output)
            oracle = oracle or results
            for first, other in zip(oracle, results, strict=True):
                expect_equal(json.loads(other), json.loads(first), f"with {' '.join(options)}")

    same_for_rotated_heads.__name__ = f"they_are_for_{name}" + ("" if kept == "auto" else f"_with_context_of_{kept}")
    same_for_rotated_heads.__module__ = __name__
    return test(same_for_rotated_heads)


# Grouped queries; frequencies by the prompt's length; a window shorter than most prompts.
for golden in ("llama_grouped2", "llama_dynamic", "mistral_window"):
    rotated_heads(golden, 6)
# Codes in place of weights, with groups in the order of activations; codes in place of keys and values.
rotated_heads("packed_gptq_order", 4)
rotated_heads("llama_grouped2", 5, "int8")
rotated_heads("mistral_window", 5, "int4")


@test
def contexts_far_longer_than_a_window_take_the_memory_of_windows(workspace):
    """Every layer's window is 24 tokens. Each request's context fills 38 blocks, and the pool has about 28 for all of them: it is enough
    for several at a time, for parts of prompts and preemptions, and for an executor that dies with blocks on its device."""
    random, model = workspace.random, ROOT / "tests" / "golden" / "models" / "mistral_window"
    lines = [
        request(n, [random.randrange(3, 61) for _ in range(random.randrange(540, 570))], max_tokens=40, ignore_eos=True, return_token_ids=True)
        for n in range(6)
    ]
    requests = workspace.write_requests("requests.jsonl", lines)
    common = ("--skip-tokenizer-init",)
    workspace.run(requests, workspace / "oracle.jsonl", *common, "--policy", "kv-only", "--max-num-seqs", "1", model=model).expect(0)
    oracle = comparable(workspace / "oracle.jsonl")
    for number, options in enumerate((("kv-only",), ("act-only",), ("hybrid", "--act-share", "0.5"), ("host-kv", "--host-threads", "2"))):
        output = workspace / f"{number}.jsonl"
        words = (*common, "--host-memory", "180000", "--prefill-tokens", random.choice(("48", "300", "8192")), "--policy", *options)
        workspace.run(requests, output, *words, model=model).expect(0)
        expect_equal(comparable(output), oracle, f"answers with {' '.join(words)}")
        workspace.poise("inspect", "--check", f"{output}.poise").expect(0)
    workspace.replay(f"{output}.poise", "--model", model)
    output = workspace / "killed.jsonl"
    words = (*common, "--policy", "kv-only", "--gpu-memory", "900000", "--max-num-seqs", "2", "--restarts", "3")
    (workspace / "fired").mkdir()
    dies = {"POISE_FAILPOINTS": "executor.computing:kill@40", "POISE_FAILPOINTS_FIRED": str(workspace / "fired")}
    workspace.run(requests, output, *words, model=model, env=dies).expect(0)
    expect(any((workspace / "fired").iterdir()), "no executor died")
    expect_equal(comparable(output), oracle, "answers behind an executor that died")


def written_otherwise(workspace, name, change):
    """A copy of a golden checkpoint with another config: `change` alters "quantization_config" and may alter the tensors' bytes."""
    folder = workspace / f"{name}-{len(list(workspace.folder.iterdir()))}"
    shutil.copytree(ROOT / "tests" / "golden" / "models" / name, folder)
    config = json.loads((folder / "config.json").read_text())
    change(folder / "model.safetensors", config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@test
def a_quantised_checkpoint_means_the_same_in_another_form(workspace):
    """AWQ with zero points that are all 8, and without them; compressed-tensors of one group, and of several."""
    requests = workspace.write_requests("requests.jsonl", work_in_ids(workspace.random, 6))

    def answers(model):
        output = workspace / f"{model.name}.out"
        workspace.run(requests, output, "--skip-tokenizer-init", "--served-model-name", "one", model=model).expect(0)
        return comparable(output)

    def eights(tensors):
        return {name: (d, s, b"\x88" * len(c) if name.endswith(".qzeros") else c) for name, (d, s, c) in tensors.items()}

    def without_zeros(tensors):
        return {name: told for name, told in tensors.items() if not name.endswith(".qzeros")}

    wanted = answers(written_otherwise(workspace, "packed_awq", lambda file, _: rewrite_tensors(file, eights)))
    symmetric = {"zero_point": False}
    for change in (eights, without_zeros):
        made = written_otherwise(workspace, "packed_awq", lambda file, config: (rewrite_tensors(file, change), config.update(symmetric)))
        expect(answers(made) == wanted, "other answers: AWQ without zero points")
    refused = written_otherwise(workspace, "packed_awq", lambda _, config: config.update(symmetric))
    workspace.run(requests, workspace / "refused", "--skip-tokenizer-init", model=refused).expect(2, '"zero_point" is false')

    def in_groups(bits):
        def change(_, config):
            (group,) = config["config_groups"].values()
            other = json.loads(json.dumps(group))
            group["targets"], other["targets"] = ["re:.*self_attn.*"], ["re:.*(gate|up|down)_proj$"]
            other["weights"]["num_bits"] = bits
            config["config_groups"] = {"attention": group, "mlp": other}

        return change

    wanted = answers(written_otherwise(workspace, "packed_compressed_4", lambda *_: None))
    grouped = answers(written_otherwise(workspace, "packed_compressed_4", in_groups(4)))
    expect(grouped == wanted, "other answers: several groups of one format")
    refused = written_otherwise(workspace, "packed_compressed_4", in_groups(8))
    workspace.run(requests, workspace / "refused", "--skip-tokenizer-init", model=refused).expect(2, "groups of one format")


def of_many_sizes(workspace, power):
    """A copy of a plain bfloat16 checkpoint, each matrix's number i times 2 ** power(i)."""
    folder = workspace / "model"
    shutil.copytree(ROOT / "tests" / "golden" / "models" / "packed_int4", folder)

    def change(tensors):
        for name, (dtype, shape, content) in tensors.items():
            halves = [content[at : at + 2] for at in range(0, len(content) if len(shape) == 2 else 0, 2)]
            numbers = (math.ldexp(*struct.unpack("<f", b"\0\0" + half), power(i)) for i, half in enumerate(halves))
            content = b"".join(struct.pack("<f", number)[2:] for number in numbers) or content
            tensors[name] = (dtype, shape, content)
        return tensors

    rewrite_tensors(folder / "model.safetensors", change)
    return folder


@test
def bfloat16_weights_packed_without_loss_give_the_same_tokens_and_logprobs(workspace):
    """Every 300th weight is so small that its exponent is an escape."""
    model = of_many_sizes(workspace, lambda i: -30 if i % 300 == 7 else 0)
    requests = workspace.write_requests("requests.jsonl", work_in_ids(workspace.random, 10))
    common, packs = ("--skip-tokenizer-init",), ("--pack-weights", "auto")
    workspace.run(requests, workspace / "plain", *common, model=model).expect(0)
    for policy in ("kv-only", "act-only"):
        output = workspace / policy
        workspace.run(requests, output, *common, *packs, "--policy", policy, model=model).expect(0)
        expect_equal(comparable(output), comparable(workspace / "plain"), f"answers of {policy} with packed weights")
    workspace.poise("inspect", "--check", f"{output}.poise").expect(0)
    workspace.replay(f"{output}.poise")
    workspace.poise("replay", f"{output}.poise", "--device", "cpu", "--pack-weights", "off").expect(2, "--pack-weights")
    workspace.run(requests, output, *common, "--resume", model=model).expect(76, "another --pack-weights (auto, now off)")


@test
def a_model_whose_weights_cannot_be_packed_is_loaded_as_it_is(workspace):
    model = of_many_sizes(workspace, lambda i: i % 50 - 25)
    requests = workspace.write_requests("requests.jsonl", work_in_ids(workspace.random, 2))
    common, packs, said = ("--skip-tokenizer-init",), ("--pack-weights", "auto"), "cannot be packed without loss"
    workspace.run(requests, workspace / "plain", *common, model=model).expect(0)
    workspace.run(requests, workspace / "packed", *common, *packs, model=model).expect(0, said, "loaded without packing")
    workspace.poise("load", "--model", model, *packs).expect(0, said, "kept until")
    workspace.run(requests, workspace / "kept", *common, *packs, model=model).expect(0, "using the kept loader")
    workspace.poise("stop").expect(0)
    workspace.run(requests, workspace / "keeps", *common, *packs, "--keep-loader", model=model).expect(0, said)
    workspace.run(requests, workspace / "kept2", *common, *packs, model=model).expect(0, "using the kept loader")
    workspace.poise("stop").expect(0)
    # The loader takes its time to give memory back: planner and executor end before it.
    fired = workspace / "fired"
    fired.mkdir()
    halted = {"POISE_FAILPOINTS": "loader/loader.weight_copy:stop,loader/loader.unlinked:stop", "POISE_FAILPOINTS_FIRED": str(fired)}
    process = workspace.start(*workspace.run_words(requests, workspace / "slow", *common, *packs, model=model), env=halted)
    children = lambda: workspace.children(workspace / "slow.poise")
    wait_until(lambda: (fired / "0").exists() and len(children()) == 3, "all processes while the loader loads")
    loader = children()["loader"]
    os.kill(loader, signal.SIGCONT)
    wait_until(lambda: (fired / "1").exists() and list(children()) == ["loader"], "the loader alone")
    time.sleep(1)
    os.kill(loader, signal.SIGCONT)
    workspace.finish(process).expect(0, said, "loaded without packing")
    for name in ("packed", "kept", "keeps", "kept2", "slow"):
        expect_equal(comparable(workspace / name), comparable(workspace / "plain"), f"answers of {name}")


if __name__ == "__main__":
    raise SystemExit(harness.main())
