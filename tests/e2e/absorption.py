#!/usr/bin/env python3
"""`--absorption on`: rows of answers attend activations as they are. What it gives beside HuggingFace is in goldens.py."""

import json
import signal
from pathlib import Path

import harness
from harness import DEMO_MODEL, ROOT, comparable, expect, expect_equal, read_results, request, test, wait_until

ON = ("--absorption", "on")
MODELS = ROOT / "tests" / "golden" / "models"
WAYS = (("act-only",), ("hybrid", "--act-share", "0.5"), ("kvpr", "--act-share", "0.5"), ("host-kv", "--host-threads", "2"))


def requests_of(workspace, count, longest=60):
    random = workspace.random
    lines = [
        request(number, [random.randrange(5, 400) for _ in range(random.choice((1, 15, 33, 60)))], max_tokens=longest, ignore_eos=True, logprobs=2, return_token_ids=True)
        for number in range(count)
    ]
    return workspace.write_requests("requests.jsonl", lines)


def absorbed(workspace, run):
    """ACT blocks that rows attended as they are, and slots that were regenerated, of all mini-batches of a run."""
    blocks = slots = 0
    for line in workspace.poise("inspect", run, "--json").expect(0).out.splitlines():
        for batch in json.loads(line).get("mini_batches", ()):
            if isinstance(batch, dict):  # of an iteration's tables; layers name theirs by number
                blocks += batch["absorbed"]
                slots += sum(one["count"] for one in batch["regenerate"])
    return blocks, slots


@test
def the_same_command_gives_the_same_tokens_and_the_schedule_decides_what_is_absorbed(workspace):
    requests = requests_of(workspace, 20)
    workspace.run(requests, workspace / "off", "--policy", "kv-only").expect(0)
    off = comparable(workspace / "off")
    for number, policy in enumerate(WAYS):
        first, second = workspace / f"{number}.first", workspace / f"{number}.second"
        said = workspace.run(requests, first, "--policy", *policy, *ON, "--threads", "1").expect(0).err
        expect_equal("attend ACT blocks as they are (--absorption on)" in said, policy[0] != "host-kv", said)
        workspace.run(requests, second, "--policy", *policy, *ON, "--threads", "2").expect(0)
        expect_equal(comparable(second), comparable(first), f"answers of {' '.join(policy)}")
        workspace.poise("inspect", "--check", f"{first}.poise").expect(0)
        workspace.replay(f"{first}.poise")
        blocks, slots = absorbed(workspace, f"{first}.poise")
        keeps_act = policy[0] != "host-kv"
        expect((blocks > 500) == keeps_act, f"{policy}: {blocks} blocks were absorbed")
        if policy[0] == "act-only":
            expect_equal(slots, 0, "prompts of one chunk and rows that absorb regenerate nothing")
        if not keeps_act:
            expect_equal(comparable(first), off, "nothing is absorbed without ACT blocks")
        same = sum(a == b for a, b in zip(tokens_of(first), tokens_of(workspace / "off"), strict=True))
        print(f"{' '.join(policy)}: {same} of {len(off)} answers have the tokens of kv-only")
        expect(same >= 0.9 * len(off), f"{policy}: {same} of {len(off)} answers are the same")


def tokens_of(output):
    return [harness.choice(result)["token_ids"] for _, result in sorted(read_results(output).items())]


@test
def what_does_not_absorb_is_refused_in_one_sentence(workspace):
    requests = workspace.write_requests("requests.jsonl", [request(0, [5, 6, 7])])
    for model, options, fragment in (
        (MODELS / "llama_grouped2", (), "its keys are rotated by their position"),
        (DEMO_MODEL, ("--kv-cache-dtype", "int8"), "--kv-cache-dtype"),
        (DEMO_MODEL, ("--quantization", "int8"), "its W_K and W_V are packed"),
    ):
        ended = workspace.run(requests, workspace / "out", "--skip-tokenizer-init", "--policy", "act-only", *ON, *options, model=model)
        ended.expect(2, "--absorption on", fragment, "leave --absorption out")
    workspace.run(requests, workspace / "out", "--absorption", "auto").expect(2, "--absorption")


@test
def absorption_is_planned_for_gpus(workspace):
    requests = workspace.write_requests("requests.jsonl", [request(0, [5, 6, 7])])
    for words in (("--machine", "h200-pcie5"), ("--device", "cuda", "--machine", "l4-pcie4")):
        workspace.poise("plan", "--model", DEMO_MODEL, "-i", requests, "--policy", "act-only", *ON, *words).expect(0)


@test
def a_run_is_resumed_as_it_was_started(workspace):
    requests, output = requests_of(workspace, 60), workspace / "results.jsonl"
    words = ("--policy", "act-only", "--max-num-seqs", "4")
    process = workspace.start(*workspace.run_words(requests, output, *words, *ON))
    partial = Path(f"{output}.poise") / "results.jsonl.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 0, "the first results")
    process.send_signal(signal.SIGTERM)
    workspace.finish(process, 60).expect(75)
    workspace.run(requests, output, *words, "--resume").expect(76, "--absorption")
    workspace.run(requests, output, *words, *ON, "--resume").expect(0)
    expect_equal(len(read_results(output)), 60, "answers")
    workspace.poise("inspect", "--check", f"{output}.poise").expect(0)


@test
def swaps_and_deaths_leave_orders_that_hold_and_answers_for_all(workspace):
    """ACT blocks of an earlier policy are attended as they are under the next one, too, and by another executor."""
    requests, output = requests_of(workspace, 40), workspace / "results.jsonl"
    workspace.run(requests, workspace / "off", "--policy", "kv-only").expect(0)
    run, fired = f"{output}.poise", workspace / "fired"
    fired.mkdir()
    dies = {"POISE_FAILPOINTS": "executor.computing:kill@700,planner.order_sent:kill@300", "POISE_FAILPOINTS_FIRED": str(fired)}
    words = workspace.run_words(requests, output, "--policy", "act-only", "--max-num-seqs", "6", "--prefill-tokens", "32", "--restarts", "5", *workspace.paced(2), *ON)
    process = workspace.start(*words, env=dies)
    asked = 0
    for policy in (("kv-only",), ("hybrid", "--act-share", "0.5"), ("act-only",)):
        partial, before = Path(run) / "results.jsonl.partial", asked
        size = partial.stat().st_size if partial.exists() else 0
        wait_until(lambda: process.poll() is not None or (partial.exists() and partial.stat().st_size > size), "more results")
        asked += process.poll() is None and workspace.poise("policy", *policy, run).code == 0
        expect(asked > before, f"{policy} did not come into force")
    workspace.finish(process, 120).expect(0)
    expect(len(list(fired.iterdir())) == 2, "one of them did not die")
    workspace.poise("inspect", "--check", run).expect(0)
    blocks, slots = absorbed(workspace, run)
    expect(blocks > 500 and slots > 0, f"{blocks} blocks were absorbed, {slots} regenerated")
    same = sum(a == b for a, b in zip(tokens_of(output), tokens_of(workspace / "off"), strict=True))
    expect(same >= 0.9 * 40, f"{same} of 40 answers have the tokens of kv-only")


if __name__ == "__main__":
    raise SystemExit(harness.main())
