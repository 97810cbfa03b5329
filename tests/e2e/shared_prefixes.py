#!/usr/bin/env python3
"""Prompts that begin alike are computed once (`--prefix-sharing on`): the same bits as without, fewer rows, every order right; also
while executors and planners are killed, and in any policy."""

import json
import time

import harness
from harness import ROOT, comparable, expect, expect_equal, first_layers, request, short_model, test
from mixed_requests import good_request
from sameness import CONTEXT, LAYERS, way_to_run
from supervisor.commands import policy as policy_command
from supervisor.commands import restart as restart_command
from swaps import policy_words, undisturbed, with_blocks_on_the_device

ROUNDS = 9
SHARING = ("--prefix-sharing", "on")
BEGINNINGS = (
    "You are a helpful owl. Answer in one sentence, and say what you know of lamps, figs and the harbour of Kelden. ",
    "Q: 47 + 38 = ?\nA: 85\nQ: 12 + 30 = ?\nA: 42\nQ: 9 + 9 = ?\nA: 18\nQ: 20 + 61 = ?\nA: 81\n",
)


def work(random, count):
    """Requests of which most begin alike, with what users ask for besides: samples, logprobs, echoes, several choices."""
    lines = []
    for number in range(count):
        line = good_request(random, number, longest=random.choice((3, 30)))
        if isinstance(line["body"]["prompt"], str) and random.random() < 0.8:
            line["body"]["prompt"] = random.choice(BEGINNINGS) + line["body"]["prompt"]
        if line["body"].get("temperature"):
            line["body"]["seed"] = random.randrange(1 << 31)
        lines.append(line)
    context = [random.randrange(4, 400) for _ in range(75)]
    for number in range(4):  # four answers to one question
        ending = [random.randrange(4, 400) for _ in range(6)]
        lines.append(request(f"scored{number}", context + ending, score_from=len(context), max_tokens=0))
    lines.append(request("choices", BEGINNINGS[0] + "Rosa lives in", n=4, temperature=1.0, seed=5, max_tokens=20))
    return lines


def shared_tokens(workspace, output):
    return json.loads(workspace.poise("status", f"{output}.poise", "--json").expect(0).out)["shared_prompt_tokens"]


@test
def answers_are_bit_equal_with_and_without_sharing_in_any_policy(workspace):
    random = workspace.random
    model = first_layers(LAYERS, workspace / "model")
    weights = (model / "model.safetensors").stat().st_size
    lines = work(random, 40)
    workspace.run(workspace.write_requests("alone.jsonl", lines), workspace / "alone.out", model=model).expect(0)
    oracle, shared = comparable(workspace / "alone.out"), 0
    expect_equal(shared_tokens(workspace, workspace / "alone.out"), 0, "tokens shared without the option")
    for round_number in range(ROUNDS):
        random.shuffle(lines)
        requests, output = workspace.write_requests(f"{round_number}.jsonl", lines), workspace / f"{round_number}.out"
        options = way_to_run(random, round_number, 1, weights, CONTEXT)
        workspace.run(requests, output, *options, *SHARING, model=model).expect(0)
        results = comparable(output)
        for first, other in zip(oracle, results, strict=True):
            expect_equal(json.loads(other), json.loads(first), f"with {' '.join(options)}")
        workspace.poise("inspect", "--check", f"{output}.poise").expect(0)
        taken_over = shared_tokens(workspace, output)
        if taken_over and not shared:
            workspace.replay(f"{output}.poise")
        shared += taken_over
    expect(shared > 2000, f"only {shared} tokens were shared")


@test
def they_are_for_grouped_queries_and_context_in_codes(workspace):
    """Rotary keys; where frequencies depend on the prompt's length, or a window leaves blocks out, nothing is shared."""
    random = workspace.random
    for name, kept, shares in (
        ("llama_grouped2", "auto", True), ("llama_grouped2", "int8", True), ("llama_dynamic", "auto", False), ("mistral_window", "auto", False),
    ):  # fmt: skip
        model = ROOT / "tests" / "golden" / "models" / name
        beginning = [random.randrange(3, 61) for _ in range(70)]
        lines = [
            request(n, beginning + [random.randrange(3, 61) for _ in range(random.randrange(1, 30))], max_tokens=12, return_token_ids=True)
            for n in range(12)
        ]
        requests, answers = workspace.write_requests(f"{name}.jsonl", lines), []
        for options in ((), (*SHARING, "--policy", "kv-only"), (*SHARING, "--policy", "act-only")):
            output = workspace / f"{name}{kept}{len(answers)}.out"
            words = ("--skip-tokenizer-init", "--kv-cache-dtype", kept, "--max-num-seqs", "6", *options)
            workspace.run(requests, output, *words, model=model).expect(0)
            answers.append(comparable(output))
            expect_equal(answers[-1], answers[0], f"answers of {name} with {' '.join(words)}")
            workspace.poise("inspect", "--check", f"{output}.poise").expect(0)
            expect_equal(shared_tokens(workspace, output) > 0, shares and bool(options), f"whether {name} shares with {' '.join(words)}")


@test
def four_answers_to_a_question_compute_it_once(workspace):
    """The rows that the orders name. Of a question's tokens the last runs for each answer, since it says how likely the answer's first is;
    the last token of an answer is never fed. A question may be shorter than a block."""
    random = workspace.random
    for question in (65, 15):
        lines = []
        for number in range(6):
            context = [random.randrange(4, 400) for _ in range(question)]
            for answer in range(4):
                ending = [random.randrange(4, 400) for _ in range(8)]
                lines.append(request(f"{number}-{answer}", context + ending, score_from=question, max_tokens=0))
        requests = workspace.write_requests(f"{question}.jsonl", lines)
        for sharing, rows in (("off", 24 * (question + 7)), ("on", 6 * (question + 7) + 18 * 8)):
            output = workspace / f"{question}{sharing}.out"
            workspace.run(requests, output, "--policy", "kv-only", "--prefix-sharing", sharing, model=short_model()).expect(0)
            said = workspace.poise("inspect", "--check", f"{output}.poise").expect(0).out
            expect(f" {rows} rows in" in said, f"{rows} rows with {sharing}: {said}")
        workspace.replay(f"{output}.poise", "--model", short_model())
        expect_equal(comparable(workspace / f"{question}on.out"), comparable(workspace / f"{question}off.out"), "scores")


@test
def planners_and_executors_are_killed_while_requests_share_blocks(workspace):
    random = workspace.random
    lines = work(random, 16)
    lines += [
        request(f"long{i}", random.choice(BEGINNINGS) + "Rosa lives in", max_tokens=random.randrange(50, 150), ignore_eos=True, logprobs=i % 3)
        for i in range(24)
    ]
    requests = workspace.write_requests("requests.jsonl", lines)
    oracle = undisturbed(workspace, requests)
    run = with_blocks_on_the_device(workspace, requests, "--policy", "hybrid", "--act-share", "0.5", *SHARING)
    for number in range(8):
        time.sleep(random.uniform(0, 0.15))
        run.ask(restart_command.restart, ("gpu_executor", "planner")[number % 2], *(["--kill"] if number % 4 > 1 else []))
        name, share = policy_words(random)
        run.ask(policy_command.policy, name, *share)
    expect(run.lives(), "the run was over before it was disturbed enough")
    said = run.finish(oracle).err
    expect("contradicts itself" not in said, said)
    expect(run.status()["shared_prompt_tokens"] > 0, "nothing was shared")
    workspace.poise("inspect", "--check", run.run).expect(0)
    run.replay()


@test
def a_resumed_run_may_share_what_the_one_before_did_not(workspace):
    requests = workspace.write_requests("requests.jsonl", work(workspace.random, 20))
    oracle = undisturbed(workspace, requests)
    for number, (before, after) in enumerate((("off", "on"), ("on", "off"))):
        output = workspace / f"{number}.out"
        words = (requests, output, "--max-num-seqs", "4", "--prefix-sharing")
        dies = {"POISE_FAILPOINTS": "planner.order_sent:kill@200"}
        workspace.run(*words, before, model=short_model(), env=dies).expect(75)
        workspace.run(*words, after, "--resume", model=short_model()).expect(0)
        expect_equal(comparable(output), oracle, f"answers of a run with {before}, resumed with {after}")


@test
def requests_that_wait_for_a_beginning_go_on_when_its_executor_dies(workspace):
    lines = [request(n, BEGINNINGS[n % 2] * 3 + f"Number {n}", max_tokens=8) for n in range(12)]
    requests = workspace.write_requests("requests.jsonl", lines)
    oracle = undisturbed(workspace, requests)
    for number, point in enumerate((1, 3, 9, 30)):
        output, fired = workspace / f"{number}.out", workspace / f"fired{number}"
        fired.mkdir()
        dies = {"POISE_FAILPOINTS": f"executor.computing:kill@{point}", "POISE_FAILPOINTS_FIRED": str(fired)}
        words = (*SHARING, "--prefill-tokens", "32", "--restarts", "3")
        workspace.run(requests, output, *words, model=short_model(), env=dies).expect(0)
        expect(any(fired.iterdir()), "no executor died")
        expect_equal(comparable(output), oracle, "answers")
        workspace.poise("inspect", "--check", f"{output}.poise").expect(0)


if __name__ == "__main__":
    raise SystemExit(harness.main())
