#!/usr/bin/env python3
"""`poise bench` and `--trace`: the figures add up, the timeline is complete and nests, the datasets are as documented."""

import gzip
import json
import random
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import harness
from harness import DEMO, DEMO_MODEL, expect, expect_equal, test
from supervisor.measure import bench_requests, link_gap, memory_watch
from supervisor.measure.record import STREAMS

SHAPE = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "torch_dtype": "float32", "hidden_size": 128,
    "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 500,
    "max_position_embeddings": 256, "do_layer_norm_before": True, "activation_function": "relu", "dropout": 0.0,
    "attention_dropout": 0.0, "layerdrop": 0.0, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
LAYER_BYTES = 4 * (4 * 128 * 129 + 128 * 512 * 2 + 512 + 128 + 4 * 128)
PROMPTS, INPUT, OUTPUT = 6, 40, 9


def bench(workspace, *options, model=("--config",)):
    config = workspace / "shape.json"
    config.write_text(json.dumps(SHAPE))
    words = ["bench", *model, *([config] if model == ("--config",) else []), "--output-json", workspace / "figures.json"]
    ended = workspace.poise(*words, "--device", "cpu", "--threads", "1", *options).expect(0)
    return ended, json.loads((workspace / "figures.json").read_text())


def fixed(*more):
    return ("--num-prompts", PROMPTS, "--input-len", INPUT, "--output-len", OUTPUT, "--mini-batch-tokens", "128", *more)


@test
def figures_are_those_of_the_work(workspace):
    ended, got = bench(workspace, *fixed("--policy", "kv-only", "--link-gbps", "0.2", "--runs", "2"))
    expect_equal(ended.out.count("Throughput: "), 2, "a line for each run")
    expect_equal(got["num_requests"], PROMPTS, "num_requests")
    expect_equal(got["total_num_tokens"], PROMPTS * (INPUT + OUTPUT), "total_num_tokens")
    expect_equal(got["tokens_per_second"], got["total_num_tokens"] / got["elapsed_time"], "tokens_per_second")
    expect_equal(got["requests_per_second"], PROMPTS / got["elapsed_time"], "requests_per_second")
    expect_equal(len(got["runs"]), 2, "runs")
    decode, prefill = got["phases"]["decode"], got["phases"]["prefill"]
    expect_equal(prefill["rows"], PROMPTS * INPUT, "each prompt token passes once")
    expect_equal(prefill["sampled_tokens"], PROMPTS, "a prompt's last iteration brings the first token")
    expect_equal(decode["sampled_tokens"], PROMPTS * (OUTPUT - 1), "decode brings the others")
    # Every generated row is stored, and every earlier row of the request is loaded, in each layer.
    row = 2 * 4 * SHAPE["hidden_size"] * SHAPE["num_hidden_layers"]
    contexts = [INPUT + step for step in range(OUTPUT - 1)]
    expect_equal(decode["link_bytes"]["kv"], PROMPTS * row * sum(contexts), "KV loaded")
    expect_equal(decode["link_bytes"]["act"], 0, "ACT loaded by kv-only")
    expect_equal(decode["link_bytes"]["stores"], PROMPTS * row * (OUTPUT - 1), "stores")
    expect_equal(got["link_peak_source"], "--link-gbps", "whose link peak")
    roofline = decode["link_bytes_in"] / 0.2e9
    expect(abs(decode["roofline_seconds"] - roofline) < 1e-9, f"roofline {decode['roofline_seconds']}, not {roofline}")
    expect(0.05 < decode["efficiency"] <= 1.0, f"efficiency {decode['efficiency']}")
    # The link takes at least its bytes' time, and is not busy longer than there was time.
    expect(decode["efficiency"] <= decode["busy_share"]["copy_in"] <= 1.01, f"busy {decode['busy_share']}")
    for phase in (decode, prefill):
        expect(0 <= phase["between_iterations_share"] < 1, "between iterations")
        # Messages come on top of what the planner does.
        rests, between = phase["device_rests_share"], phase["between_iterations_share"]
        expect(between <= rests < 1, f"the device rests for {rests:.4f} of the time, {between:.4f} lies between iterations")
    expect(decode["seconds"] + prefill["seconds"] <= got["elapsed_time"] * 1.01 + 0.01, "phases are parts of the whole")
    expect(got["host_memory_peak_bytes"] != 0, "host memory: a run that was never seen has no peak")


@test
def memory_is_that_of_living_processes_alone(workspace):
    (workspace / "run.json").write_text('{"run_id": "a"}')
    watch = memory_watch.MemoryWatch(workspace.folder)
    seen = []
    for held in (0, 3 << 20, 5 << 20, 4 << 20, 0):
        with mock.patch.object(memory_watch, "_host_used", lambda _, held=held: held):
            watch.look()
        seen.append(watch.host)
    expect_equal(seen, [None, 3 << 20, 5 << 20, 5 << 20, 5 << 20], "the peak after each sample")


@test
def streamed_weights_cross_once_an_iteration(workspace):
    _, got = bench(workspace, *fixed("--policy", "act-only", "--gpu-memory", "4MiB"))
    expect(got["resident_layers"] < SHAPE["num_hidden_layers"], "the cap leaves layers to be streamed")
    whole = got["phases"]["whole"]
    streamed = SHAPE["num_hidden_layers"] - got["resident_layers"]
    expect_equal(whole["link_bytes"]["weights"], whole["iterations"] * streamed * LAYER_BYTES, "weights over the link")
    expect_equal(whole["link_bytes"]["kv"], 0, "KV loaded by act-only")
    expect(got["device_memory_bytes"] <= 4 << 20, f"device memory {got['device_memory_bytes']}")
    expect_equal((got["link_peak_bytes_per_second"], whole["efficiency"]), (None, None), "no peak is made up")
    _, given = bench(workspace, *fixed("--policy", "act-only", "--gpu-memory", "4MiB", "--link-peak", "10"))
    expect_equal((given["link_peak_bytes_per_second"], given["link_peak_source"]), (10e9, "--link-peak"), "given peak")


def tracks_of(trace):
    """{name of a track: its slices}, and {name: events that are no slices}."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"
    }
    slices, others = {name: [] for name in names.values()}, []
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[names[event["pid"], event["tid"]]].append(event)
        elif event["ph"] != "M":
            others.append(event)
    return slices, others


def depths(slices, what):
    """How deep each slice lies; slices of one track must nest or lie apart."""
    open_ends, found = [], []
    for one in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        end = one["ts"] + one["dur"]
        while open_ends and open_ends[-1] <= one["ts"] + 1e-6:
            open_ends.pop()
        expect(not open_ends or end <= open_ends[-1] + 2e-3, f"{what}: {one['name']} at {one['ts']} does not nest")
        open_ends.append(end)
        found.append((len(open_ends), one))
    return found


@test
def a_timeline_holds_everything_and_nests(workspace):
    options = fixed("--policy", "hybrid", "--act-share", "0.5", "--gpu-memory", "4MiB", "--link-gbps", "0.1")
    _, got = bench(workspace, *options, "--trace", workspace / "trace.json.gz", "--run-dir", workspace / "kept")
    with gzip.open(workspace / "trace.json.gz", "rt") as file:
        slices, others = tracks_of(json.load(file))
    orders = [json.loads(line) for line in workspace.poise("inspect", workspace / "kept" / "run-1", "--json").out.splitlines()]
    orders = [line for line in orders if line.get("type") == "layer"]
    expect_equal(Counter(event["ph"] for event in others), {"b": len(orders), "e": len(orders)}, "orders on the host's track")
    computed = Counter(
        (one["args"]["layer"], one["name"]) for one in slices["compute"] if one["name"].startswith("mini-batch")
    )
    attending = [line for line in orders if line["name"] != "head"]  # its rows are those of all mini-batches together
    wanted = Counter((line["name"], f"mini-batch {batch}") for line in attending for batch in line["mini_batches"])
    expect_equal(computed, wanted, "every layer's mini-batches, as often as ordered")
    expect(max(batch for line in orders for batch in line["mini_batches"]) >= 1, "more than one mini-batch")
    layers = Counter(one["name"] for one in slices["compute"] if "iteration" in one.get("args", {}))
    expect_equal(layers, Counter(line["name"] for line in orders), "every layer, as often as ordered")
    for kind in ("KV Gen", "QKV", "Attention", "Projection", "FC1", "FC2", "Head", "Embed"):
        expect(any(one["name"] == kind for one in slices["compute"]), f"no slice {kind}")
    loaded = [one["name"] for one in slices["copy in"] if one["name"].startswith("W layer")]
    fetched = [f"W layer {fetch['layer']} piece {fetch['piece']}" for line in orders for fetch in line["fetch"]]
    expect_equal(Counter(loaded), Counter(fetched), "pieces of weights")
    for stream in STREAMS:
        name = "host cores" if stream == "host" else stream.replace("_", " ")
        depth = depths(slices.get(name, []), name)
        # What lies in a layer but holds nothing itself is work; the rest are its covers.
        work = [one for _, one in depth if not one["name"].startswith(("layer", "embedding", "head", "mini-batch"))]
        total = sum(one["dur"] for one in work) * 1e-6
        busy = sum((line.get(stream, {}).get("busy_ms", 0.0) for line in orders), 0.0) * 1e-3
        expect(busy * 0.99 <= total <= busy * 1.2 + 0.05, f"{name}: slices of {total} s, busy {busy} s")
    for name in ("planner decides", "iterations"):
        depths(slices[name], name)
        expect(len(slices[name]) >= got["phases"]["whole"]["iterations"] - 1, name)
    for one in slices["compute"]:
        expect(one["dur"] >= 0, "time runs forward")
    spans = slices["iterations"]
    first, last = min(one["ts"] for one in spans), max(one["ts"] + one["dur"] for one in spans)
    for stream in STREAMS:
        for one in slices.get("host cores" if stream == "host" else stream.replace("_", " "), []):
            inside = first - 1 <= one["ts"] and one["ts"] + one["dur"] <= last + 1
            expect(inside, f"{stream} {one['name']} lies outside of the iterations: the clocks are not one")
    gap = got["phases"]["decode"]["link_gap"]
    expect_equal(set(gap), {"slow_copies", "waits_for_compute", "between_iterations", "other"}, "what the gap is made of")
    expect(abs(sum(gap.values()) + got["phases"]["decode"]["efficiency"] - 1) < 1e-6, f"the gap's parts: {gap}")
    expect(all(share >= -0.02 for share in gap.values()), f"a part below nothing: {gap}")
    shares = got["phases"]["decode"]["compute_share_by_kind"]
    expect(abs(sum(shares.values()) - got["phases"]["decode"]["busy_share"]["compute"]) < 0.15, f"by kind {shares}")


@test
def a_run_writes_its_timeline_beside_its_record(workspace):
    output = workspace / "out.jsonl"
    words = workspace.run_words(DEMO / "show.jsonl", output, "--trace")
    workspace.poise(*words).expect(0, "the trace is")
    slices, _ = tracks_of(json.loads((workspace / "out.jsonl.poise" / "trace.json").read_text()))
    expect(slices["compute"] and slices["copy in"], "an empty timeline")
    workspace.poise(*workspace.run_words(DEMO / "show.jsonl", workspace / "2.jsonl")).expect(0)
    expect(not (workspace / "2.jsonl.poise" / "trace.json").exists(), "a timeline that was not asked for")


@test
def intervals_are_cut_as_sets_are(workspace):
    draw = workspace.random
    for _ in range(300):
        two = []
        for _ in range(2):
            begins = [draw.randrange(40) for _ in range(draw.randrange(6))]
            two.append([(begin, begin + draw.randrange(8)) for begin in begins])
        these, those = ({n for begin, end in some for n in range(begin, end)} for some in two)
        made = [link_gap.union(some) for some in two]
        for got, wanted in (
            (made[0], these),
            (link_gap.within(*made), these & those),
            (link_gap.without(*made), these - those),
        ):
            expect_equal({n for begin, end in got for n in range(begin, end)}, wanted, f"of {two}")
            expect_equal(link_gap.length(got), len(wanted), f"length of {two}")


def asked(**more):
    defaults = {"seed": 3, "num_prompts": 40, "input_len": 100, "output_len": 20, "random_range_ratio": 0.3}
    defaults |= {"prefix_repetition_prefix_len": 30, "prefix_repetition_suffix_len": 5, "prefix_repetition_num_prefixes": 4}
    defaults |= {"prefix_repetition_output_len": 7, "dataset_path": None, "skip_tokenizer_init": True, "output_len_given": True}
    return SimpleNamespace(**(defaults | more))


@test
def datasets_are_what_their_names_say(workspace):
    def make(name, **more):
        return bench_requests.make_requests(asked(dataset_name=name, **more), 300, 4096)

    expect_equal({(len(prompt), answer) for prompt, answer in make("fixed")}, {(100, 20)}, "fixed lengths")
    expect_equal(make("fixed"), make("fixed"), "one seed, one file")
    expect(make("fixed") != make("fixed", seed=4), "another seed, another file")
    for prompt, _ in make("random"):
        expect(70 <= len(prompt) <= 130 and all(0 <= token < 300 for token in prompt), "random lengths and ids")
    expect(len({len(prompt) for prompt, _ in make("random")}) > 5, "random lengths differ")
    prefixes = Counter(tuple(prompt[:30]) for prompt, _ in make("prefix_repetition"))
    expect_equal(sorted(prefixes.values()), [10, 10, 10, 10], "each prefix equally often")
    expect_equal({(len(prompt), answer) for prompt, answer in make("prefix_repetition")}, {(35, 7)}, "prefix lengths")
    talk = [
        {"conversations": [{"from": "human", "value": "w" * n}, {"from": "gpt", "value": "a" * (2 * n)}]} for n in range(1, 200)
    ]
    path = workspace / "talk.json"
    path.write_text(json.dumps([*talk, {"conversations": [{"value": "alone"}]}]))
    made = make("sharegpt", dataset_path=path, output_len_given=False)
    expect_equal(len(made), 40, "as many as asked for")
    for prompt, answer in made:
        expect(answer in (2 * len(prompt), 2 * len(prompt) - 1), f"lengths {len(prompt)}, {answer} of no conversation")


@test
def sharegpt_texts_go_through_the_models_tokenizer(workspace):
    draw = random.Random(1)
    words = ["Paris", "is", "the", "capital", "of", "France", "what", "colour", "1 + 2", "é"]
    talk = [{"conversations": [{"value": " ".join(draw.choices(words, k=9))}, {"value": "yes it is so"}]} for _ in range(5)]
    path = workspace / "talk.json"
    path.write_text(json.dumps(talk))
    options = ("--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", "4")
    _, got = bench(workspace, *options, model=("--model", DEMO_MODEL))
    expect_equal(got["num_requests"], 4, "num_requests")
    expect(got["work"]["input_len"][0] >= 9, f"prompts of {got['work']['input_len']} tokens")


@test
def what_cannot_be_measured_is_refused_in_a_sentence(workspace):
    shape = workspace / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    for words, culprit in (
        (("--config", workspace / "none.json"), "none.json"),
        ((), "--model"),
        (("--config", shape, "--dataset-name", "sharegpt"), "--dataset-path"),
        (("--config", shape, "--input-len", "250", "--output-len", "50"), "256 positions"),
        (("--config", shape, "--dataset-name", "sonnet"), "sonnet"),
        (("--config", shape, "--num-prompts", "0"), "--num-prompts"),
        (("--config", shape, "--model", DEMO_MODEL), "not allowed"),
    ):
        workspace.poise("bench", *words).expect(2, culprit)


@test
def the_loader_is_measured_alone(workspace):
    ended = workspace.poise("bench", "--stage", "loader", "--model", DEMO_MODEL, "--output-json", workspace / "figures.json").expect(0)
    got = json.loads((workspace / "figures.json").read_text())
    files = {path.name: path.stat().st_size for path in DEMO_MODEL.glob("*.safetensors")}
    expect_equal({file["name"]: file["bytes"] for file in got["files"]}, files, "files")
    rates = [got["digest_bytes_per_s"], got["memory_copied_bytes_per_s"], got["memory_read_bytes_per_s"]]
    expect(all(rate > 1e6 for rate in rates + [file["read_bytes_per_s"] for file in got["files"]]), got)
    expect("in the page cache" in ended.out or "page cache: unknown" in ended.out, ended.out)
    expect("digest (SHA-256) alone" in ended.out and "memory copied" in ended.out, ended.out)
    workspace.poise("bench", "--stage", "loader", "--config", DEMO_MODEL / "config.json").expect(2, "--model DIR")
    workspace.poise("bench", "--stage", "loader", "--model", workspace / "none").expect(2, "not there")


@test
def the_planner_is_measured_alone(workspace):
    figures = workspace / "figures.json"
    words = ["bench", "--stage", "planner", "--machine", "h200-pcie5", "--output-json", figures]
    shape = workspace / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    ended = workspace.poise(*words, "--config", shape, *fixed("--policy", "hybrid", "--gpu-memory", "2GiB")).expect(0)
    got = json.loads(figures.read_text())
    expect_equal(got["prefill"]["rows"] + got["decode"]["rows"], PROMPTS * (INPUT + OUTPUT - 1), "rows: of each token but the last")
    for phase in ("prefill", "decode"):
        expect(all(seconds > 0 for seconds in got[phase]["seconds"].values()) and len(got[phase]["seconds"]) == 6, got[phase])
        expect(got[phase]["predicted_seconds"] > 0 and got[phase]["message_bytes"] > 500 * got[phase]["iterations"], got[phase])
    expect("serialise: messages" in ended.out and "1 % of the iteration's time" in ended.out, ended.out)
    bench(workspace, *fixed("--policy", "kv-only", "--run-dir", workspace / "runs"))
    workspace.poise("bench", "--stage", "planner", "--machine", "h200-pcie5", workspace / "runs/run-1").expect(2)  # its model is gone
    workspace.poise("bench", "--stage", "planner").expect(2, "needs a model")


@test
def the_gpu_executor_is_measured_alone(workspace):
    prompts = workspace.write_requests("requests.jsonl", [harness.request(str(i), "Rosa lives in", max_tokens=6) for i in range(4)])
    workspace.run(prompts, workspace / "out.jsonl").expect(0)
    run = workspace / "out.jsonl.poise"
    figures = workspace / "figures.json"
    words = ["bench", "--stage", "gpu_executor", run, "--device", "cpu", "--runs", "2", "--output-json", figures]
    ended = workspace.poise(*words, "--link-gbps", "0.5", "--compute-gflops", "50").expect(0)
    got = json.loads(figures.read_text())
    expect(got["equal"] and len(got["replayed_s"]) == 2, got)
    expect_equal(got["link_peak"], got["link_bytes_per_s"], "the link that was set")
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    hidden, ffn, layers = config["hidden_size"], config["ffn_dim"], config["num_hidden_layers"]
    expect_equal(got["limits"]["layers"]["compute_s"], 2 * got["rows"] * layers * (4 * hidden**2 + 2 * hidden * ffn) / 50e9, "limit")
    moved = [sum(stage["replayed"][way] for stage in got["stages"][1:-1]) for way in ("bytes_in", "bytes_out")]
    expect_equal(got["limits"]["layers"]["link_s"], max(moved) / got["link_peak"], "limit")
    expect("all, with gaps" in ended.out and "recorded" in ended.out, ended.out)
    workspace.poise("bench", "--stage", "gpu_executor").expect(2, "name a run directory")
    workspace.poise("bench", run).expect(2, "--stage")
    workspace.poise("bench").expect(2, "--model DIR")
    workspace.poise("bench", "--stage", "gpu_executor", workspace / "none").expect(2, "no such file")


@test
def without_the_whole_log_there_is_throughput_alone(workspace):
    for options in (("--orders-log", "off"), ("--orders-log", "tables")):
        ended, got = bench(workspace, *fixed("--policy", "kv-only", *options))
        expect("no figures by phase" in ended.err and got["output_tokens_per_second"] > 0, ended.err)
        expect(all(phase is None for phase in got["phases"].values()), got["phases"])


if __name__ == "__main__":
    raise SystemExit(harness.main())
