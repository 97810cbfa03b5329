#!/usr/bin/env python3
"""Compares a results file with answers.json: prints percent right, exits 1 under 95 %.

    score.py RESULTS.jsonl [--answers answers.json] [--at-least 95]

Each line of RESULTS is an OpenAI batch result, of completions or of chat (--answers
chat_answers.json); a missing or failed one counts as wrong.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path


def answer_texts(path):
    texts = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            result = json.loads(line)
            body = (result.get("response") or {}).get("body") or {}
            choices = body.get("choices") or [{}]
            message = choices[0].get("message") or {}
            texts[result.get("custom_id")] = choices[0].get("text", message.get("content"))
    return texts


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("results", type=Path)
    options.add_argument(
        "--answers", type=Path, default=Path(__file__).resolve().parent / "answers.json"
    )
    options.add_argument("--at-least", type=float, default=95.0, metavar="PERCENT")
    given = options.parse_args()

    expected = json.loads(given.answers.read_text(encoding="utf-8"))
    texts = answer_texts(given.results)
    asked, right = Counter(), Counter()
    for custom_id, answer in expected.items():
        kind = custom_id.partition(" ")[2]  # "017 addition"
        asked[kind] += 1
        if texts.get(custom_id) == answer:
            right[kind] += 1
        else:
            print(f"wrong: {custom_id}: expected {answer!r}, got {texts.get(custom_id)!r}")
    for kind in asked:
        print(f"{kind:14} {right[kind]:4} of {asked[kind]}")
    percent = 100.0 * right.total() / asked.total()
    print(f"{percent:.1f} % right ({right.total()} of {asked.total()})")
    return 0 if percent >= given.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
