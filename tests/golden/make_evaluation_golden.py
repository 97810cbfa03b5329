#!/usr/bin/env python3
"""Makes evaluation/hf.json: what lm-evaluation-harness says of small models with its own `hf` backend, in float32 with softmax_dtype=float64.

    python -m venv ENV && ENV/bin/pip install lm-eval==0.4.13 torch==2.13.0 transformers==5.24.0 accelerate
    ENV/bin/python tests/golden/make_evaluation_golden.py

Also makes the tasks' data and the tokenizer of the tiny models. tests/e2e/clients/evaluation.py compares poise with it, and takes from here
which models and tasks there are and how a task is run.
"""

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "evaluation"
HF = FOLDER / "hf.json"
CHOICES, TEXTS, GENERATED = ("choice", "joined"), ("rolling",), ("generate",)
TASKS, LONG_ONES = CHOICES + TEXTS + GENERATED, ("joined", "rolling")
# Of each model: its folder, whether the tiny tokenizer is put beside it, tokens of its context, and whether chats are evaluated, too.
MODELS = {
    "demo": (ROOT / "launch" / "demo" / "model", False, 512, False),
    "chat": (ROOT / "launch" / "demo" / "chat_model", False, 512, True),
    "opt": (ROOT / "tests" / "golden" / "models" / "pre_norm_head32", True, 320, False),
    "llama": (ROOT / "tests" / "golden" / "models" / "llama_grouped2", True, 640, False),
}
# LONG_ONES are also run with windows that are shorter than the context: clients of an API cannot use all of it.
LESS = 2


def assembled(name, scratch):
    """The model's folder, with a tokenizer."""
    folder, tiny, _, _ = MODELS[name]
    if not tiny:
        return folder
    made = Path(scratch) / name
    if not made.exists():
        shutil.copytree(folder, made)
        for path in (FOLDER / "tokenizer").iterdir():
            shutil.copy(path, made)
        if name == "llama":  # it has a BOS, which only stands for an empty context
            config = json.loads((made / "tokenizer_config.json").read_text())
            (made / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    return made


def evaluated(model, options, tasks, chat=False):
    """{task: {"metrics", "resps"}} of tasks of this folder; `resps` in the order of the documents."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with contextlib.chdir(FOLDER):  # the tasks name their data from here
        said = lm_eval.simple_evaluate(
            model=model, model_args=options, tasks=list(tasks), task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
            apply_chat_template=chat, bootstrap_iters=0, device="cpu", batch_size=8,
        )  # fmt: skip
    found = {}
    for task in tasks:
        metrics = {name: value for name, value in said["results"][task].items() if isinstance(value, float) and "stderr" not in name}
        samples = sorted(said["samples"][task], key=lambda sample: sample["doc_id"])
        found[task] = {"metrics": metrics, "resps": [_plain(sample["resps"]) for sample in samples]}
    return found


def _plain(value):
    """Lists, texts and numbers; a likelihood is [logprob, whether greedy decoding gives it]."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _texts(draw, words):
    return " ".join(draw.choice(("where", "is", "the", "cat", "in", "this", "house", "?", "Q: 3 + 4 = ?", "one", "A: 12")) for _ in range(words))


def write_data():
    draw = random.Random(5)
    choices, joined, texts, asked = [], [], [], []
    for number in range(24):
        first, second = draw.randrange(100), draw.randrange(100)
        wrong = draw.sample((-20, -10, -2, -1, 1, 2, 9, 10, 11), 3)
        answers = [str(first + second), *(str(abs(first + second + less)) for less in wrong)]
        order = draw.sample(range(4), 4)
        choices.append({"question": f"Q: {first} + {second} = ?\nA:", "answers": [answers[at] for at in order], "right": order.index(0)})
        asked.append({"question": choices[-1]["question"], "answer": answers[0]})
    # Context and continuation share a token, the context ends with spaces, is empty, or is longer than a model's.
    for number, stem in enumerate(("wh", "where is t", "the cat ", "", "it is  ", "Q: 1", "", "one of th", "cat\n", "where is the cat?\n\n")):
        ends = ["ere", "he", "in the house", "is", "0 + 3 = ?\nA: 13", "e other"]
        joined.append({"stem": stem, "ends": ends[number % 3 :], "right": number % 2})
    for words in (150, 400):
        joined.append({"stem": _texts(draw, words) + " ", "ends": ["the cat", "12", _texts(draw, 30)], "right": 2})
        asked.append({"question": _texts(draw, words), "answer": "the cat"})
    for words in (1, 2, 60, 100, 230, 500):
        texts.append({"text": _texts(draw, words)})
    for name, rows in (("choice", choices), ("joined", joined), ("rolling", texts), ("generate", asked)):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokenizer():
    """Byte pairs of the letters that the data has; it adds nothing before a text."""
    vocab = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz0123456789ĠĊ.?=+:QA"]
    merges = ["t h", "th e", "Ġ t", "Ġ i", "i n", "i s", "Ġ 1", "e r", "a n", "o n", "Ġ the", "c a"]
    vocab += [merge.replace(" ", "") for merge in merges]
    special = [{"id": at, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for at, text in enumerate(vocab[:3])]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False, "vocab": {text: at for at, text in enumerate(vocab)}, "merges": merges,
        },
    }  # fmt: skip
    folder = FOLDER / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")
    config = {"eos_token": "</s>", "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main():
    write_data()
    write_tokenizer()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HF_DATASETS_CACHE"] = scratch
        for name, (_, _, context, chats) in MODELS.items():
            options = {"pretrained": str(assembled(name, scratch)), "dtype": "float32", "softmax_dtype": "float64"}
            found[name] = {
                "whole": evaluated("hf", options, TASKS),
                "less": evaluated("hf", {**options, "max_length": context - LESS}, LONG_ONES),
            }
            if chats:
                found[name]["chats"] = evaluated("hf", options, ("choice", "generate"), chat=True)
    HF.write_text(json.dumps(found, indent=None, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
