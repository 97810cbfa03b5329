#!/usr/bin/env python3
"""Asks a trained demo model held-out questions through transformers and prints its scores by kind.

    exam.py [--model DIR] [--dtype float32] [--times 1] [--seed 20011]

With the defaults it asks what questions.jsonl asks; --times 10 asks ten times as many (of facts,
all that are held out), and another seed asks others. The margin of an answer is the least distance,
over its tokens, between the best and the second-best logit: what rounding must move to change it.
"""

import argparse
from collections import Counter
from pathlib import Path

import text
import torch


def ids_of(tokenizer, question):
    """Token ids of the prompt (with the leading </s>) and of the answer (with its newline)."""
    answer = tokenizer.encode(f" {question.answer}\n", add_special_tokens=False).ids
    return tokenizer.encode(question.prompt).ids, answer


def scores(asked, right):
    by_kind = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    percent = 100 * right.total() / asked.total()
    return f"  {by_kind}\n  {percent:.2f} % right ({right.total()} of {asked.total()})"


def look(model, tokenizer, questions):
    """Scores by one pass over prompt and answer: greedy is right exactly where each step is."""
    asked, right = Counter(), Counter()
    device = next(model.parameters()).device
    for question in questions:
        prompt, answer = ids_of(tokenizer, question)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer], device=device)).logits
        asked[question.kind] += 1
        right[question.kind] += logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    print(scores(asked, right), flush=True)


def examine(model, tokenizer, questions):
    """Scores by transformers' generate: greedy, its own cache, up to the newline."""
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
    asked, right, margins = Counter(), Counter(), []
    for question in questions:
        ids = torch.tensor([ids_of(tokenizer, question)[0]])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False,
            eos_token_id=newline, return_dict_in_generate=True, output_scores=True,
        )
        said = tokenizer.decode(made.sequences[0, ids.shape[1] :].tolist()).partition("\n")[0]
        asked[question.kind] += 1
        right[question.kind] += said == f" {question.answer}"
        if said != f" {question.answer}":
            print(f"  wrong: {question.prompt[-60:]!r}: {said!r}, not {question.answer!r}")
        best = torch.stack(made.scores, 1)[0].float().topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
    margins.sort()
    print(scores(asked, right) + "; least margins " + " ".join(f"{m:.2f}" for m in margins[:6]))


def main():
    from tokenizers import Tokenizer
    from transformers import OPTForCausalLM

    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, default=Path(__file__).resolve().parent / "model")
    options.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    options.add_argument("--times", type=int, default=1)
    options.add_argument("--seed", type=int, default=text.QUESTION_SEED)
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    torch.set_num_threads(given.threads)

    model = OPTForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype))
    counts = {kind: given.times * count for kind, count in text.ASKED.items()}
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    examine(model, tokenizer, text.questions(counts, given.seed))


if __name__ == "__main__":
    main()
