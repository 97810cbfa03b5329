#!/usr/bin/env python3
"""`poise run` against HuggingFace: tiny checkpoints of every family, greedy tokens equal, logprobs within the stated tolerance.

tests/golden/models/README.md says where the numbers and the tolerance come from.
"""

import json

import harness
from harness import ROOT, choice, comparable, expect, expect_equal, read_results, request

MODELS = ROOT / "tests" / "golden" / "models"
WAYS = (
    ("--policy", "kv-only"),
    ("--policy", "act-only", "--mini-batch-tokens", "64"),
    ("--policy", "hybrid", "--act-share", "0.5", "--max-num-seqs", "3"),
)

# Of models whose keys are linear in what their ACT blocks hold.
ABSORBING = tuple((*options, "--absorption", "on") for options in WAYS[1:])


def golden_requests(cases):
    for number, case in enumerate(cases):
        body = {"max_tokens": len(case["tokens"]), "logprobs": 5, "echo": True, "return_token_ids": True}
        yield request(number, case["prompt"], ignore_eos=True, **body)


def check_against(golden, results):
    """The largest error of a logprob seen, as a share of what is allowed."""
    allowed, worst = 2 * golden["tolerance"], 0.0
    for number, case in enumerate(golden["cases"]):
        answer = choice(results[str(number)])
        expect_equal(answer["token_ids"], case["tokens"], f"greedy tokens after {len(case['prompt'])} ids")
        got = answer["logprobs"]["token_logprobs"]
        expect(got[0] is None, "the first token of a prompt has no logprob")
        wanted = case["prompt_logprobs"] + [chosen_logprob(step) for step in zip(case["tokens"], case["steps"])]
        expect_equal(len(got) - 1, len(wanted), "logprobs")
        for position, (have, want) in enumerate(zip(got[1:], wanted), 1):
            error = abs(have - want)
            expect(error <= allowed, f"position {position} of case {number}: {have}, HuggingFace has {want} (± {allowed})")
            worst = max(worst, error / allowed)
    return worst


def chosen_logprob(step):
    token, logits = step
    return logits["logits"][logits["ids"].index(token)] - logits["logsumexp"]


def equals_huggingface(model):
    def run(workspace):
        golden = json.loads((model / "golden.json").read_text())
        fewest = 8 if json.loads((model / "config.json").read_text())["model_type"] == "opt" else 6
        expect(len(golden["cases"]) >= fewest, "fewer cases than there should be")
        requests = workspace.write_requests("requests.jsonl", golden_requests(golden["cases"]))
        for number, options in enumerate(WAYS):
            output = workspace / f"{number}.out"
            words = ("--skip-tokenizer-init", *golden.get("options", ()), *options)
            workspace.run(requests, output, *words, model=model).expect(0)
            check_against(golden, read_results(output))
            expect_equal(comparable(output), comparable(workspace / "0.out"), " ".join(options))
        absorbs = json.loads((model / "config.json").read_text())["model_type"] in ("opt", "gpt2") and not model.name.startswith("packed")
        for number, options in enumerate(ABSORBING if absorbs else ()):
            output = workspace / f"{number}.absorbed"
            words = ("--skip-tokenizer-init", *golden.get("options", ()), *options)
            workspace.run(requests, output, *words, model=model).expect(0)
            check_against(golden, read_results(output))
            expect(comparable(output) != comparable(workspace / "0.out"), "nothing was absorbed")

    run.__name__ = f"{model.name}_equals_huggingface"
    run.__module__ = "__main__"
    return harness.test(run)


@harness.test
def fields_that_change_logits_give_the_tokens_of_huggingfaces_processors(workspace):
    golden = json.loads((MODELS.parent / "sampling.json").read_text())
    lines = [request(i, case["prompt"], return_token_ids=True, logprobs=1, **case["body"]) for i, case in enumerate(golden["cases"])]
    draws = 40
    for number, cut in enumerate(golden["cuts"]):
        body = {"max_tokens": 1, "return_token_ids": True, **cut["body"]}
        lines += [request(f"cut{number}.{seed}", cut["prompt"], seed=seed, **body) for seed in range(draws)]
    lines.append(request("barred", "Rosa", allowed_token_ids=[7], min_tokens=2, stop_token_ids=[7]))
    requests = workspace.write_requests("requests.jsonl", lines)
    for options in ((), ("--policy", "hybrid", "--act-share", "0.5", "--max-num-seqs", "7")):
        output = workspace / f"{len(options)}.out"
        workspace.run(requests, output, "--dtype", "float32", *options).expect(0)
        results = read_results(output)
        expect_equal(results["barred"]["response"]["body"]["error"]["code"], "no_token_allowed", "a line with no token left")
        for number, case in enumerate(golden["cases"]):
            expect_equal(choice(results[str(number)])["token_ids"], case["tokens"], f"tokens of {case['prompt']!r} with {case['body']}")
        for number, cut in enumerate(golden["cuts"]):
            drawn = [str(choice(results[f"cut{number}.{seed}"])["token_ids"][0]) for seed in range(draws)]
            expect(set(drawn) <= set(cut["kept"]), f"with {cut['body']} only {cut['kept']} are left, not all of {set(drawn)}")
            for token, share in cut["kept"].items():  # fixed seeds: a number, no chance
                expect(abs(drawn.count(token) - share * draws) <= 12, f"{token} was drawn {drawn.count(token)} times of {draws}: {share}")


@harness.test
def prompts_have_the_logprobs_and_ranks_of_huggingface(workspace):
    golden = json.loads((MODELS.parent / "sampling.json").read_text())["prompts"]
    lines = [request(f"{number}.{best}", one["prompt"], prompt_logprobs=best, max_tokens=2, **more)
             for number, one in enumerate(golden) for best, more in ((4, {}), (1, {"n": 2, "temperature": 1.0}), (0, {"echo": True, "logprobs": 0}))]
    requests = workspace.write_requests("requests.jsonl", lines)
    workspace.run(requests, workspace / "out", "--dtype", "float32", "--prefill-tokens", "16").expect(0)
    results = read_results(workspace / "out")
    for number, one in enumerate(golden):
        for best in (4, 1, 0):
            for answer in results[f"{number}.{best}"]["response"]["body"]["choices"]:
                first, *told = answer["prompt_logprobs"]
                expect(first is None and len(told) == len(one["rows"]), f"{len(told)} of {len(one['rows'])} tokens")
                for row, entry in zip(one["rows"], told):
                    wanted = dict([[str(row["token"]), row["logprob"]], *((str(token), value) for token, value in row["best"][:best])])
                    expect_equal(set(entry), set(wanted), f"tokens beside {row['token']}")
                    for token, value in wanted.items():
                        expect(abs(entry[token]["logprob"] - value) < 1e-3, f"{token} has {entry[token]}, HuggingFace has {value}")
                    for rank, (token, _) in enumerate(row["best"][:best], 1):
                        expect_equal(entry[str(token)]["rank"], rank, f"rank of {token}")
                    expect(entry[str(row["token"])]["rank"] in (row["rank"], None), f"{entry} of rank {row['rank']}")
                    expect(isinstance(entry[str(row["token"])]["decoded_token"], str), "no text of a token")


if __name__ == "__main__":
    for folder in sorted(MODELS.iterdir()):
        if folder.is_dir():
            equals_huggingface(folder)
    raise SystemExit(harness.main())
