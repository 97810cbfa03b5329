#!/usr/bin/env python3
"""Makes tests/golden/sampling.json: the demo model's greedy tokens under transformers' logits processors, for the fields of requests
that change logits, what its warpers keep for the fields that cut, and the log probabilities of prompts.

    python3 tests/golden/make_sampling_golden.py     (needs torch and transformers)

In float32. Penalties of presence and frequency have no processor there: they are computed here as OpenAI and vLLM define them. Every
step's best logit is clear of the second by MARGIN, so that another order of sums gives the same tokens."""

import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process as processors

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parent.parent / "launch" / "demo" / "model"
MARGIN = 5e-4
TOKENS = 24
PROMPTS = ("Q: What does the owl say?\nA:", "Rosa lives in", "Once there was a swan who")


def penalties(presence, frequency, prompt):
    def process(ids, scores):
        answer = ids[0, prompt:]
        counts = torch.bincount(answer, minlength=scores.shape[-1]).to(scores.dtype)
        return scores - frequency * counts - presence * (counts > 0).to(scores.dtype)

    return process


def processors_of(body, prompt, tokenizer, eos, vocabulary):
    """In vLLM's order: what bars, then biases, then penalties."""
    chain = []
    if "allowed_token_ids" in body:
        chain.append(processors.PrefixConstrainedLogitsProcessor(lambda *_: body["allowed_token_ids"], 1))
    if "bad_words" in body:
        words = []
        for word in body["bad_words"]:
            plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word))
            words += [plain] + [spaced] * (spaced[0] != plain[0] and len(spaced) == len(plain))
        chain.append(processors.NoBadWordsLogitsProcessor(words))
    if "min_tokens" in body:
        stops = [eos, *body.get("stop_token_ids", [])]
        chain.append(processors.MinNewTokensLengthLogitsProcessor(prompt, body["min_tokens"], stops))
    if "logit_bias" in body:
        chain.append(processors.SequenceBiasLogitsProcessor([[[int(t)], float(b)] for t, b in body["logit_bias"].items()]))
    if "repetition_penalty" in body:
        chain.append(processors.RepetitionPenaltyLogitsProcessor(body["repetition_penalty"]))
    chain.append(penalties(body.get("presence_penalty", 0), body.get("frequency_penalty", 0), prompt))
    return chain


@torch.no_grad()
def greedy(model, ids, chain, stops, ignore_eos):
    tokens, margin = [], float("inf")
    while len(tokens) < TOKENS:
        scores = model(ids).logits[:, -1].float()
        for process in chain:
            scores = process(ids, scores)
        best = torch.topk(scores[0], 2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
        ids = torch.cat([ids, best.indices[:1].view(1, 1)], dim=1)
        if tokens[-1] in stops and not ignore_eos:
            break
    return tokens, margin


def kept_by(model, ids, body):
    """Ids and shares that are left, warped in vLLM's order."""
    scores = model(ids).logits[:, -1].float() / body["temperature"]
    for field, warper in (("min_p", processors.MinPLogitsWarper), ("top_k", processors.TopKLogitsWarper), ("top_p", processors.TopPLogitsWarper)):
        if field in body:
            scores = warper(body[field])(ids, scores)
    shares = torch.softmax(scores[0], dim=-1)
    kept = torch.isfinite(scores[0]).nonzero().flatten()
    return {str(i): float(f"{shares[i].item():.6g}") for i in kept.tolist()}


@torch.no_grad()
def prompt_of(model, tokenizer, prompt):
    """Of each token but the first: its log probability, its rank, and the best four."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    scores = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    rows = []
    for row, token in zip(scores, ids[0, 1:].tolist()):
        best = torch.topk(row, 4)
        pairs = [[i, float(f"{v:.6g}")] for i, v in zip(best.indices.tolist(), best.values.tolist())]
        rows.append({"token": token, "logprob": float(f"{row[token].item():.6g}"), "rank": int((row >= row[token]).sum()), "best": pairs})
    return {"prompt": prompt, "rows": rows}


def bodies(tokenizer, vocabulary):
    some = list(range(30, vocabulary, 11))
    that = tokenizer.encode(" the", add_special_tokens=False)
    yield {"repetition_penalty": 1.3}
    yield {"repetition_penalty": 0.7}
    yield {"presence_penalty": 1.5}
    yield {"frequency_penalty": 0.6}
    yield {"presence_penalty": -1, "frequency_penalty": -0.4}
    yield {"logit_bias": {str(that[0]): 4, "60": -100, "75": 2.5}}
    yield {"bad_words": ["the", "Q:", "in", "was"]}
    yield {"allowed_token_ids": some}
    yield {"min_tokens": 20, "ignore_eos": False}
    yield {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": that}
    yield {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {str(some[3]): 3, str(some[9]): -2},
           "allowed_token_ids": some, "bad_words": ["was"], "min_tokens": 9, "ignore_eos": False}


def main():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    eos, vocabulary = model.config.eos_token_id, model.config.vocab_size
    cases, changed = [], 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        plain, _ = greedy(model, ids, [], [eos], True)
        for body in bodies(tokenizer, vocabulary):
            stops = [eos, *body.get("stop_token_ids", [])]
            chain = processors_of(body, ids.shape[1], tokenizer, eos, vocabulary)
            tokens, margin = greedy(model, ids, chain, stops, body.get("ignore_eos", True))
            if margin < MARGIN:
                print(f"left out, {margin:.1e} between two logits: {prompt!r} {body}")
                continue
            changed += tokens != plain[: len(tokens)]
            cases.append({"prompt": prompt, "body": {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **body}, "tokens": tokens})
    assert len(cases) >= 25 and changed >= 20, (len(cases), changed)
    cuts = []
    for body in ({"temperature": 1.0, "min_p": 0.05}, {"temperature": 2.0, "min_p": 0.02, "top_k": 6}, {"temperature": 1.5, "min_p": 0.01, "top_p": 0.8}):
        ids = tokenizer(PROMPTS[2], return_tensors="pt").input_ids
        cuts.append({"prompt": PROMPTS[2], "body": body, "kept": kept_by(model, ids, body)})
        print(f"{body}: {len(cuts[-1]['kept'])} tokens kept")
    text = json.dumps({"cases": cases, "cuts": cuts, "prompts": [prompt_of(model, tokenizer, prompt) for prompt in PROMPTS]}, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"')
    (HERE / "sampling.json").write_text(text + "\n")
    print(f"{len(cases)} cases, of which {changed} differ from plain greedy; {len(text)} bytes")


if __name__ == "__main__":
    main()
