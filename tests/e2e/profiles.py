#!/usr/bin/env python3
"""Measured costs: on a CPU device whose speeds are set, so that nearly all of the time is sleeping."""

import json
import re
import shutil
import statistics
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import harness
from harness import DEMO, DEMO_MODEL, ROOT, expect, expect_equal, request, test
from supervisor.measure.record import read_record

LINK, COMPUTE, HOST = 0.1, 3.0, 0.08  # GB/s, GFLOP/s, GB/s of host cores
SLOW = ("--link-gbps", 0.08, "--compute-gflops", 3.0)  # so slow that threads' waking is small beside it
SET = ("--device", "cpu", "--threads", "1", "--link-gbps", LINK, "--compute-gflops", COMPUTE, "--host-gbps", HOST)
HIDDEN, HEADS, WIDTH, BLOCK = 128, 4, 2, 16  # the demo model's, float16


def measured(workspace, *options):
    workspace.poise("profile", "--model", DEMO_MODEL, *SET, "-o", workspace / "profile.json", *options).expect(0)
    return json.loads((workspace / "profile.json").read_text())


def near(value, wanted, share, what):
    if abs(value - wanted) > share * wanted:
        raise harness.Failed(f"{what}: {value:.4g}, {wanted:.4g} wanted within {share:.0%}")


@test
def profile_finds_the_speeds_that_were_set(workspace):
    the_speeds_are_found(workspace)
    kept = list((workspace / "cache" / "poise" / "profiles").iterdir())
    expect_equal(sorted(path.suffix for path in kept), [".json", ".svg"], "what is kept")
    picture = next(path for path in kept if path.suffix == ".svg").read_text()
    circles = sum(1 for one in xml.fromstring(picture).iter() if one.tag.endswith("circle"))
    expect(circles >= 60, f"{circles} points drawn")


def r_squared(points):
    mean = statistics.mean(seconds for _, seconds, _ in points)
    return 1 - sum(left**2 for *_, left in points) / sum((seconds - mean) ** 2 for _, seconds, _ in points)


def the_speeds_are_found(workspace):
    profile = measured(workspace)
    act = BLOCK * HIDDEN * WIDTH / (LINK * 1e9)
    near(profile["load_act"]["b"], act, 0.05, "seconds an ACT block over the link")
    near(profile["load_kv"]["b"], 2 * act, 0.05, "seconds a KV block over the link")
    near(profile["kv_gen"]["b"], BLOCK * 4 * HIDDEN * HIDDEN / (COMPUTE * 1e9), 0.05, "seconds to make a block's K and V")
    weights = 12 * HIDDEN * HIDDEN
    near(profile["forward"]["b"], 2 * weights / (COMPUTE * 1e9), 0.05, "seconds a row in a layer")
    near(profile["load_w"]["b"], weights * WIDTH / (LINK * 1e9), 0.06, "seconds a layer's weights")
    near(profile["host_attention"]["b"], 2 * act * LINK / HOST, 0.05, "seconds that host cores attend a KV block")
    # Each position is multiplied twice with a row of the hidden size for each head.
    near(profile["absorb"]["b"], BLOCK * 4 * HEADS * HIDDEN / (COMPUTE * 1e9), 0.1, "seconds to attend an ACT block as it is")
    expect(profile["host_attention"]["alone"]["points"], "host cores were measured alone, too")
    for name in ("load_act", "load_kv", "kv_gen", "forward", "host_attention"):
        points = profile[name]["points"]
        near(profile[name]["r2"], 1, 0.004, f"R² of {name}")
        expect(len(points) >= 6, f"{name}: {len(points)} points")
        expect(abs(profile[name]["r2"] - r_squared(points)) < 1e-6, f"R² of {name}: {profile[name]['r2']} for {points}")
    # By the machine's clock, whatever its mood: how much is a matter of bench/predictions.py.
    expect(profile["between"] > 0, f"between iterations pass {profile['between']} s")
    expect_equal(profile["event_latency"], 0, "seconds until a stream of a set speed, which is never late, goes on")


@test
def a_run_takes_as_long_as_was_planned_and_predicted(workspace):
    prompt = [workspace.random.randrange(4, 1300) for _ in range(150)]
    requests = workspace.write_requests(
        "in.jsonl", [request(i, prompt, max_tokens=6, ignore_eos=True) for i in range(10)]
    )
    profile = measured(workspace, *SLOW)
    for policy, *more in (("kv-only",), ("act-only",), ("act-only", "--absorption", "on")):
        words = ("--model", DEMO_MODEL, "-i", requests, *SET, *SLOW, "--policy", policy, *more, "--gpu-memory", "6MiB")
        planned = json.loads(workspace.poise("plan", *words, "--json").expect(0).out)
        output = workspace / f"{policy}{''.join(more)}.jsonl"
        directory = Path(f"{output}.poise")
        workspace.poise("run", *words, "-o", output, "--trace").expect(0, "were predicted")
        status = json.loads((directory / "status.json").read_text())
        whole, decoding = by_the_device(directory / "orders.log", profile["between"])
        near(planned["seconds"], whole, 0.1, f"{policy}: the whole run")
        near(status["predicted"]["decode_iteration_seconds"], decoding, 0.1, f"{policy}: an iteration")
        expect_equal(planned["bytes"]["stores"], status["link_bytes"]["stores"], f"{policy}: bytes of stores")
        expect((directory / "profile.json").exists(), f"{policy}: no profile.json")


def by_the_device(log, between):
    """Seconds of a traced run, and of a decoding iteration, by the device's clock; `between` stands for each time without an order,
    which is the machine's mood."""
    iterations = read_record(log).iterations
    ends = [max(span["end_s"] for order in one.orders for span in order.spans) for one in iterations]
    begin = min(span["begin_s"] for order in iterations[0].orders for span in order.spans)
    rests = [one.orders[0].rested for one in iterations]
    decoding = [
        end - before - rest + between for one, end, before, rest in zip(iterations[1:], ends[1:], ends, rests[1:]) if one.decode
    ]
    return ends[-1] - begin - sum(rests) + len(ends) * between, statistics.mean(decoding)


def fetches(workspace, directory):
    """Of each layer order: its bytes, and behind which mini-batch each piece of weights is fetched."""
    lines = workspace.poise("inspect", directory, "--json").expect(0).out.splitlines()
    orders = [order for order in map(json.loads, lines) if order.get("type") == "layer"]
    return [(order["ordered_bytes"], [fetch["after_mini_batch"] for fetch in order["fetch"]]) for order in orders]


@test
def weights_are_fetched_when_the_link_is_idle_where_costs_are_known(workspace):
    prompts = [[workspace.random.randrange(4, 1300) for _ in range(10 + 20 * (i % 4))] for i in range(16)]
    requests = workspace.write_requests("in.jsonl", [request(i, one, max_tokens=4, ignore_eos=True) for i, one in enumerate(prompts)])
    words = ("--policy", "kv-only", "--resident-layers", 0, "--mini-batch-tokens", 128, "--prompt-rows", 64, "--gpu-memory", "6MiB")
    evenly = workspace / "evenly.jsonl"
    workspace.run(requests, evenly, *words).expect(0)  # no profile is kept yet
    measured(workspace)
    idle = workspace / "idle.jsonl"
    workspace.run(requests, idle, *words, *SET[2:], "--profile", workspace / "profile.json").expect(0, "were predicted")
    before, now = (fetches(workspace, f"{output}.poise") for output in (evenly, idle))
    expect_equal([volume for volume, _ in now], [volume for volume, _ in before], "bytes of the orders")
    expect([places for _, places in now] != [places for _, places in before], "pieces are where they are without costs")


@test
def costs_are_measured_once_where_a_policy_decides_by_them(workspace):
    requests = workspace.write_requests("in.jsonl", [request("a", [5, 6, 7])])
    said = []
    for number in range(2):
        options = ("--policy", "hybrid", "--resume") if number == 0 else ("--policy", "hybrid")
        said.append(workspace.run(requests, workspace / f"{number}.jsonl", *options).expect(0).err)
    expect("measuring it once" in said[0], said[0])
    expect("measuring it once" not in said[1], said[1])
    # The run is planned with the memory of the pool that was measured with.
    log = (workspace / "0.jsonl.poise" / "logs" / "planner.log").read_text()
    spare, planned = (re.search(pattern, log) for pattern in (r"given back: [1-9][0-9]* bytes are spare", "policy hybrid: up to"))
    expect(spare and planned and spare.start() < planned.start(), log)


@test
def costs_that_another_build_measured_are_measured_again(workspace):
    requests = workspace.write_requests("in.jsonl", [request("a", [5, 6, 7])])
    measured(workspace)
    words = ("--model", DEMO_MODEL, "-i", requests, *SET)
    run = ("run", *words, "--policy", "hybrid", "--overwrite", "-o", workspace / "out.jsonl")
    said = workspace.poise(*run).expect(0).err
    expect("measuring it" not in said, said)

    (kept,) = (workspace / "cache" / "poise" / "profiles").glob("*.json")
    profile = json.loads(kept.read_text())
    expect(profile["build"].startswith("poise "), f"it names the build {profile['build']}")
    kept.write_text(json.dumps(profile | {"build": "poise 0.0.1"}))
    refused = workspace.poise("plan", *words).expect(2, "another build (poise 0.0.1)", "poise profile")
    expect(f"--profile {kept}" in refused.err, refused.err)
    workspace.poise("plan", *words, "--profile", kept).expect(0)

    said = workspace.poise(*run).expect(0).err
    expect("was measured by another build; measuring it again" in said, said)
    expect_equal(json.loads(kept.read_text())["build"], profile["build"], "the build that measured what is kept")


@test
def a_plan_takes_the_kept_costs_of_its_device_or_the_machine_exported_from_them(workspace):
    """A kept profile of the CPU device is not used for a GPU; its machine in a file gives the same plan."""
    requests = workspace.write_requests("in.jsonl", [request("a", [5, 6, 7])])
    measured(workspace)
    words = ("plan", "--model", DEMO_MODEL, "-i", requests)
    expect("costs measured" in workspace.poise(*words, "--device", "cpu").expect(0).out, "the kept costs were not taken")
    workspace.poise(*words, "--device", "cuda").expect(2, "on a GPU", "poise profile")
    profile = ("--profile", workspace / "profile.json")
    said = workspace.poise(*words, "--device", "cuda", *profile).expect(0).out
    expect("--device cuda: the costs given are those of cpu" in said, said)

    exported = workspace / "machine.json"
    workspace.poise("profile", "--model", DEMO_MODEL, "--device", "cpu", "--export", exported).expect(0, "machine.json is written")
    plans = [
        workspace.poise(*words, "--device", "cpu", "--policy", "hybrid", *named, "--json").expect(0).out
        for named in ((), ("--machine", exported))
    ]
    expect_equal(plans[1], plans[0], "the plan by the exported machine, and by the kept profile")
    machine = json.loads(exported.read_text())
    near(machine["link_gbps"], LINK, 0.1, "the link's speed")
    near(machine["compute_tflops"], COMPUTE / 1000, 0.1, "the speed of products")
    workspace.poise("profile", "--model", DEMO_MODEL, "--device", "cuda", "--export", exported).expect(2, "on a GPU", "poise profile")
    other = ("--quantization", "int8", "--export", exported)
    workspace.poise("profile", "--model", DEMO_MODEL, "--device", "cpu", *other).expect(2, "poise profile")
    workspace.poise("profile", "--model", DEMO_MODEL, "--profile", exported).expect(2, "--export")


@test
def a_profile_that_is_none_is_refused(workspace):
    requests = workspace.write_requests("in.jsonl", [request("a", [5, 6, 7])])
    (workspace / "other.json").write_text('{"gpu_memory": 1}')
    broken = json.loads((harness.ROOT / "tests" / "planner" / "profiles" / "h200_opt_6.7b.json").read_text())
    del broken["between"]
    (workspace / "broken.json").write_text(json.dumps(broken))
    for words, said in (
        (("--profile", workspace / "other.json"), ("other.json", "is no profile", "poise profile")),
        (("--profile", workspace / "broken.json"), ("broken.json", "between")),
        (("--machine", "abacus"), ("abacus", "h200-pcie5")),
        (("--machine", workspace / "other.json"), ("other.json", "name", "is missing")),
    ):
        ended = workspace.run(requests, workspace / "o.jsonl", *words).expect(2, *said)
        expect("run directory" not in ended.err, f"the run began before it was refused: {ended.err}")


def a_large_model(workspace):
    folder = workspace / "opt-175b"
    folder.mkdir()
    shutil.copyfile(harness.ROOT / "bench" / "models" / "opt-175b.json", folder / "config.json")
    return folder


@test
def a_plan_of_the_largest_model_and_100000_requests_takes_two_seconds_of_a_core(workspace):
    body = json.dumps(request("X", [workspace.random.randrange(4, 50000) for _ in range(128)], max_tokens=64))
    with open(workspace / "in.jsonl", "w") as file:
        for number in range(100_000):
            file.write(body.replace('"X"', f'"{number}"') + "\n")
    words = ("plan", "--model", a_large_model(workspace), "-i", workspace / "in.jsonl", "--skip-tokenizer-init")
    ended = workspace.poise(*words, "--machine", "rtx4090-pcie4").expect(0)
    for words in ("100000 requests, 12800000 prompt", "KV blocks", "GPU memory", "decoding iteration", "tokens/s"):
        expect(words in ended.out, f"{words!r} is not said:\n{ended.out}")
    expect(ended.cpu_seconds < 2, f"it took {ended.cpu_seconds:.1f} s of a core")


@test
def a_profile_under_way_is_no_run_that_could_be_steered(workspace):
    process = workspace.start("profile", "--model", DEMO_MODEL, *SET, env={"TMPDIR": workspace.folder})
    try:
        until = time.monotonic() + 60
        while not (found := [path for path in workspace.folder.glob("poise-profile-*/run") if (path / "status.json").exists()]):
            expect(process.poll() is None and time.monotonic() < until, "nothing is being measured")
            time.sleep(0.02)
        for words in (("restart", "planner"), ("policy", "kv-only")):
            workspace.poise(*words, found[0]).expect(2, "a profile is being measured")
        shares = [0.0]
        while (found[0] / "status.json").exists():
            try:
                status = json.loads((found[0] / "status.json").read_text())
            except FileNotFoundError:  # it is over
                break
            expect_equal(status["state"], "measuring", "the state")
            shares += [status["measured"]] if status["measured"] != shares[-1] else []
            time.sleep(0.05)
        expect(shares == sorted(shares) and shares[-1] > 0.5 and len(shares) > 3, f"shares of what is measured: {shares}")
    finally:
        workspace.finish(process, 120).expect(0)


@test
def a_plan_refuses_with_numbers_what_cannot_fit(workspace):
    requests = workspace.write_requests("in.jsonl", [request("a", [5] * 100)])
    words = ("plan", "--model", a_large_model(workspace), "-i", requests, "--skip-tokenizer-init")
    workspace.poise(*words, "--machine", "l4-pcie4").expect(2, "host memory", "325.2", "128.0")
    workspace.poise(*words, "--machine", "rtx4090-pcie4", "--gpu-memory", "4GiB").expect(2, "device memory", "4.0 GiB")
    workspace.poise(*words).expect(2, "--machine", "poise profile", "h200-pcie5")
    small = ("plan", "--model", DEMO_MODEL, "-i", requests, "--machine", "h200-pcie5", "--host-memory", "2TiB")
    more = workspace.poise(*small, "--gpu-memory", "200GiB").expect(0).out
    for sentence in ("--gpu-memory 200.0 GiB: h200-pcie5 has", "--host-memory 2.0 TiB: h200-pcie5 has", "1 request,"):
        expect(sentence in more, f"{sentence!r} is not said:\n{more}")
    workspace.poise(*words, "--machine", "abacus").expect(2, "abacus")
    shares = ("--policy", "token-recompute", "--recompute-share", "0.5")
    workspace.poise(*words, "--machine", "l4-pcie4", *shares).expect(2, "host memory")  # and not the share
    workspace.poise(*words, "--machine", "l4-pcie4", "--profile", requests).expect(2, "--profile", "--machine")
    on_host = ("plan", "--model", DEMO_MODEL, "-i", requests, "--policy", "host-kv", "--device", "cuda")
    workspace.poise(*on_host, "--machine", "l4-pcie4").expect(2, "host_gbps")
    workspace.poise(*on_host, "--machine", ROOT / "tests" / "planner" / "profiles" / "host_machine.json").expect(0)


@test
def doctor_says_what_packed_weights_and_context_take(workspace):
    """And a plan and an export know a dummy whose config says that its checkpoint is quantised, and --quantization."""
    told = workspace.poise("doctor", "--model", DEMO_MODEL).out
    expect("of weights as float16\n" in told and "3.0 KiB a token as KV, 1.5 KiB as ACT" in told, told)
    told = workspace.poise("doctor", "--model", DEMO_MODEL, "--quantization", "int4", "--kv-cache-dtype", "int8").out
    expect("as float16, matrices of the layers as int4\n" in told, told)
    expect("1.7 KiB a token as KV of int8, 1.5 KiB as ACT" in told, told)  # 4 heads of 32 codes, a scale and an offset, twice; 6 layers
    packed = ROOT / "tests" / "golden" / "models" / "packed_awq"
    told = workspace.poise("doctor", "--model", packed, "--load-format", "dummy").out
    expect("as float16, matrices of the layers as int4\n" in told, told)
    dummy = workspace / "dummy"
    dummy.mkdir()
    (dummy / "config.json").write_text((packed / "config.json").read_text())
    requests = workspace.write_requests("ids.jsonl", [request(n, [5 + n] * 20, max_tokens=8, ignore_eos=True) for n in range(4)])
    words = ("--load-format", "dummy", "--skip-tokenizer-init")
    workspace.run(requests, workspace / "out.jsonl", *words, model=dummy).expect(0)
    workspace.run(requests, workspace / "no.jsonl", *words, "--quantization", "int8", model=dummy).expect(2, "quantised already")
    plain = ROOT / "tests" / "golden" / "models" / "packed_int4"
    told = workspace.poise("doctor", "--model", plain, "--pack-weights", "auto").out
    expect("as bfloat16, matrices of the layers as bfloat12\n" in told, told)
    weights = {}
    for name in ("none", "int8"):
        words = ("--quantization", name)
        workspace.poise("plan", "--model", dummy, "-i", requests, "--skip-tokenizer-init", *words).expect(2, "quantised already")
        planned = workspace.poise("plan", "--model", DEMO_MODEL, "-i", DEMO / "show.jsonl", "--machine", "h200-pcie5", "--json", *words)
        weights[name] = json.loads(planned.expect(0).out)["memory"]["host"]["weights"]
    expect(weights["int8"] < 0.7 * weights["none"], f"a plan knows --quantization: {weights}")
    for name in ("off", "auto"):
        words = ("--machine", "h200-pcie5", "--skip-tokenizer-init", "--json", "--pack-weights", name)
        planned = json.loads(workspace.poise("plan", "--model", plain, "-i", requests, *words).expect(0).out)
        weights[name] = planned["weights"]
    expect_equal((weights["off"], weights["auto"]), ("bfloat16", "bfloat12"), "what a plan says of weights")


if __name__ == "__main__":
    raise SystemExit(harness.main())
