#!/usr/bin/env python3
"""Makes structured.json: what transformers answers, greedily and in float32, with a logits processor that is llguidance itself.

    make_structured_golden.py        needs torch, transformers and llguidance (make_sampling_golden.py says which versions)

The forms and the model are those of tests/e2e/clients/structured_outputs.py.
"""

import json
import sys
from pathlib import Path

import llguidance
import torch
import transformers

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "e2e"), str(HERE.parent / "e2e" / "clients")]
from structured_outputs import EOS, FORMS, MODEL, PROMPTS, VOCABULARY, definition  # noqa: E402

TOKENS = 60


class OfAForm(transformers.LogitsProcessor):
    def __init__(self, tokenizer, name, prompt):
        self._matcher = llguidance.LLMatcher(tokenizer, definition(name))
        self._seen = len(prompt)

    def __call__(self, ids, scores):
        for token in ids[0, self._seen :].tolist():
            assert self._matcher.consume_token(token)
        self._seen = ids.shape[1]
        mask = self._matcher.compute_bitmask()
        allowed = torch.tensor([bool(mask[token // 8] >> token % 8 & 1) for token in range(scores.shape[1])])
        return scores.masked_fill(~allowed, float("-inf"))


def main():
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer = llguidance.LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=VOCABULARY, eos_token=EOS)
    cases = []
    for name in FORMS:
        for text in PROMPTS:
            prompt = words(text)["input_ids"]
            made = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt))), max_new_tokens=TOKENS, do_sample=False, eos_token_id=EOS,
                logits_processor=transformers.LogitsProcessorList([OfAForm(tokenizer, name, prompt)]),
            )  # fmt: skip
            cases.append({"form": name, "prompt": prompt, "tokens": made[0, len(prompt) :].tolist()})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    (HERE / "structured.json").write_text(json.dumps({**versions, "max_tokens": TOKENS, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
