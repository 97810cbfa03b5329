#!/usr/bin/env python3
"""Makes tests/golden/tokenizer/: small BPE vocabularies in the shapes of the families, byte-level and of
text with byte fallback, trained on text this script makes itself, and for each of them strings with the
ids, and ids with the text, that HuggingFace gives.

    make_tokenizer_golden.py             writes a folder for each shape, and golden.json
    make_tokenizer_golden.py --tables    writes planner/tokenizer/unicode_tables.cpp

Needs the packages tokenizers and transformers (the second only to compare).  The result depends on
the versions of `tokenizers`, which golden.json names, and on nothing else.
"""

import argparse
import json
import pathlib
import random
import sys

HERE = pathlib.Path(__file__).resolve().parent / "tokenizer"
sys.path.insert(0, str(HERE))

import oracle
import random_text
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LLAMA_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_PATTERN = LLAMA_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIALS = {
    "opt": ["</s>", "<pad>", "<s>", "<unk>", "madeupword0001"],
    "llama": ["<|begin|>", "<|end|>", "<|endless|>", "<mask>", "<right>", "whole", "two words", "Ġ", "naïve", "<|rare|>"],
    "mixed": ["<s>", "</s>", "<mask>", "<unk>", " spaced "],
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "é", "e\u0301"],
    "llama2": ["<s>", "</s>", "<unk>", "<0x0A>", "whole", "<pad>", "▁"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "<|assistant|>", "▁", "<0xF0>"],
    "metaspace": ["<s>", "<unk>", "two words", "--", "naïve", "<0x41>"],
}


def train(pre_tokenizer, size, seed, alphabet):
    """(vocabulary in order of id, merges) of a BPE model trained on the corpus of `seed`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, limit_alphabet=256, show_progress=False)
    tokenizer.train_from_iterator(random_text.corpus(seed, 12000), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].get), merges


def write_json(path, value, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, **({"ensure_ascii": False, "indent": 1} | how)) + "\n", encoding="utf-8")


def make_opt(directory):
    """As facebook/opt-*: four control words first, three made-up words last, BOS is </s>."""
    words, merges = train(pre_tokenizers.ByteLevel(add_prefix_space=False), 2000, 1,
                          pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "<pad>", "</s>", "<unk>"] + words + [f"madeupword000{n}" for n in range(3)]
    write_json(directory / "vocab.json", {w: n for n, w in enumerate(words)}, indent=None)
    text = "".join(f"{a} {b}\n" for a, b in merges)
    (directory / "merges.txt").write_text("#version: 0.2\n" + text, encoding="utf-8")
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    write_json(directory / "special_tokens_map.json", names)
    write_json(directory / "tokenizer_config.json", names | {
        "errors": "replace", "add_prefix_space": False, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"})
    write_json(directory / "config.json", {"model_type": "opt"})


def added(number, content, **flags):
    return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False} | flags


BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def tokenizer_json(directory, words, merges, model, added_tokens, pre_tokenizer, post_processor, normalizer=None,
                   decoder=None):
    vocabulary = {w: n for n, w in enumerate(words)}
    next_ids = iter(range(len(words), len(words) + len(added_tokens)))
    tokens = [added(vocabulary[content] if content in vocabulary else next(next_ids), content, **flags)
              for content, flags in added_tokens]
    write_json(directory / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor,
        "decoder": decoder or BYTE_LEVEL_DECODER,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": merges} | model}, indent=None)
    return {t["content"]: t["id"] for t in tokens}


def byte_level(use_regex, add_prefix_space=False):
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def make_llama(directory):
    """As Llama 3: its pattern, whole words looked up before merging, merges as strings, a template."""
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA_PATTERN), "isolated")
    words, merges = train(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        3000, 2, pre_tokenizers.ByteLevel.alphabet())
    # The last merges go, their words stay: only ignore_merges finds them.
    added_tokens = [("<|begin|>", {"special": True}), ("<|end|>", {"special": True}), ("<|endless|>", {"special": True}),
                    ("<mask>", {"special": True, "lstrip": True}), ("<right>", {"rstrip": True}),
                    ("whole", {"single_word": True, "normalized": True}), ("two words", {"normalized": True}),
                    ("naïve", {"lstrip": True, "rstrip": True}), ("<|rare|>", {"special": True, "single_word": True})]
    ids = tokenizer_json(
        directory, words, [" ".join(m) for m in merges[:-200]], {"ignore_merges": True}, added_tokens,
        {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA_PATTERN}, "behavior": "Isolated", "invert": False},
            byte_level(use_regex=False)]},
        {"type": "Sequence", "processors": [byte_level(use_regex=True), {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [len(words)], "tokens": ["<|begin|>"]}}}]})
    write_json(directory / "tokenizer_config.json", {
        "bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    return ids


def make_mixed(directory):
    """What the other two lack: a chain of pre-tokenizers, a prefix space, merges as pairs, Roberta's
    post-processor, and an alphabet without half of the bytes, so that there is an unknown token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = random.Random(3).sample(alphabet, 128)
    chain = [
        {"type": "Split", "pattern": {"String": "=="}, "behavior": "Removed", "invert": False},
        {"type": "Split", "pattern": {"Regex": r"\p{Lu}\p{Ll}*"}, "behavior": "MergedWithNext", "invert": False},
        {"type": "Split", "pattern": {"Regex": r"[.,;]+"}, "behavior": "MergedWithPrevious", "invert": False},
        {"type": "Split", "pattern": {"Regex": r"\P{M}"}, "behavior": "Contiguous", "invert": True},
        {"type": "Digits", "individual_digits": True},
        byte_level(use_regex=True, add_prefix_space=True)]
    words, merges = train(pre_tokenizers.ByteLevel(), 1500, 3, kept)
    lost = set(alphabet) - set(kept)
    words = ["<s>", "</s>", "<unk>"] + [w for w in words if not lost & set(w)]
    merges = [m for m in merges if not lost & set(m[0] + m[1])]
    tokenizer_json(
        directory, words, merges, {"unk_token": "<unk>"},
        [("<s>", {"special": True}), ("</s>", {"special": True}), ("<mask>", {"special": True, "lstrip": True}),
         (" spaced ", {"normalized": True})],
        {"type": "Sequence", "pretokenizers": chain},
        {"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0], "trim_offsets": True, "add_prefix_space": True})


def make_qwen(directory):
    """As Qwen 2, 2.5 and 3: normal form C, digits one by one, no BOS; two added tokens are the same once normalized."""
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    words, merges = train(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        2000, 4, pre_tokenizers.ByteLevel.alphabet())
    tokenizer_json(
        directory, words, [" ".join(m) for m in merges], {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
        [("<|endoftext|>", {"special": True}), ("<|im_start|>", {"special": True}), ("<|im_end|>", {"special": True}),
         ("<tool_call>", {}), ("e\u0301", {"normalized": True, "single_word": True})],
        {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False},
            byte_level(use_regex=False)]},
        byte_level(use_regex=False), normalizer={"type": "NFC"})
    write_json(directory / "tokenizer_config.json", {
        "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})


def text_words(size, seed, split, bytes_from=0):
    """(vocabulary, merges) of text, with the bytes from a number on as "<0x..>" behind the first three."""
    words, merges = train(pre_tokenizers.Metaspace(prepend_scheme="always", split=split), size, seed, [])
    return ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(bytes_from, 256)] + words, merges


def bos_template(name, number):
    return {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}}}


def replace(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


SENTENCEPIECE_DECODER = {"type": "Sequence", "decoders": [
    replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
CONTROLS = [("<unk>", {"special": True}), ("<s>", {"special": True}), ("</s>", {"special": True})]


def make_llama2(directory):
    """As Llama 2, TinyLlama and Mistral 0.1: a space before every stretch of text by the normalizer, no words."""
    words, merges = text_words(1500, 5, split=True)
    tokenizer_json(
        directory, words, [" ".join(m) for m in merges],
        {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
        [*CONTROLS, ("whole", {"normalized": True, "lstrip": True}), ("<pad>", {"normalized": True, "rstrip": True})],
        None, bos_template("<s>", 1), decoder=SENTENCEPIECE_DECODER,
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]})
    write_json(directory / "tokenizer_config.json", {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True, "tokenizer_class": "PreTrainedTokenizerFast"})


def make_mistral(directory):
    """As Mistral since 0.2, Llama 2 without `legacy` and Phi-3: a space before the very first text alone."""
    words, merges = text_words(1500, 6, split=True)
    tokenizer_json(
        directory, words, merges, {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
        [*CONTROLS, ("[INST]", {"special": True}), ("[/INST]", {"special": True}),
         ("<|assistant|>", {"special": True, "rstrip": True})],
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        bos_template("<s>", 1), decoder=SENTENCEPIECE_DECODER)
    write_json(directory / "tokenizer_config.json", {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"})


def make_metaspace(directory):
    """What the other two lack: words of text, half of the bytes alone, so that there are unknown tokens, each by
    itself, a chain of normalizers, whole words before merges, the decoder Metaspace."""
    words, merges = text_words(1500, 7, split=True, bytes_from=0x80)
    tokenizer_json(
        directory, words, merges[:-100], {"unk_token": "<unk>", "byte_fallback": True, "ignore_merges": True},
        [*CONTROLS, ("two words", {"normalized": True}), ("naïve", {"normalized": True, "single_word": True})],
        {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "prepend_scheme": "always"},
        bos_template("<s>", 1), normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, replace("--", "—")]},
        decoder={"type": "Sequence", "decoders": [
            {"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}]})


def compare_with_transformers(texts):
    """AutoTokenizer must read each directory as we say it does; OPT's form has no other definition."""
    import transformers
    for name in ("opt", "llama", "qwen", "llama2", "mistral"):
        reference, auto = oracle.load(HERE / name), transformers.AutoTokenizer.from_pretrained(str(HERE / name))
        for text in texts[name]:
            ours, theirs = reference.encode(text).ids, auto(text)["input_ids"]
            assert ours == theirs, (name, text, ours, theirs)
            assert reference.decode(ours) == auto.decode(theirs, skip_special_tokens=True), (name, text)
    print(f"equal to transformers {transformers.__version__}")


def make_golden():
    texts, cases = {}, {}
    for name, specials in SPECIALS.items():
        reference = oracle.load(HERE / name)
        rows = reference.get_vocab_size() + 8
        count = 300 if name in ("opt", "llama", "mixed") else 120
        texts[name] = [""] + [t for t in random_text.strings(11, 600, specials) if len(t) <= 80][:count]
        cases[name] = {
            "rows": rows,
            "encode": [{"text": t, "ids": reference.encode(t).ids,
                        "plain": reference.encode(t, add_special_tokens=False).ids} for t in texts[name]],
            "decode": [{"ids": ids, "text": reference.decode(ids), "all": reference.decode(ids, skip_special_tokens=False)}
                       for ids in random_text.id_lists(12, 100 if count == 300 else 60, rows)],
        }
    write_json(HERE / "golden.json", {"tokenizers": tokenizers.__version__, "cases": cases},
               indent=None, separators=(",", ":"), ensure_ascii=True)
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="write planner/tokenizer/unicode_tables.cpp")
    if parser.parse_args().tables:
        import unicode_tables
        unicode_tables.write(HERE.parents[2] / "planner" / "tokenizer" / "unicode_tables.cpp")
        return
    make_opt(HERE / "opt")
    make_llama(HERE / "llama")
    make_mixed(HERE / "mixed")
    make_qwen(HERE / "qwen")
    make_llama2(HERE / "llama2")
    make_mistral(HERE / "mistral")
    make_metaspace(HERE / "metaspace")
    compare_with_transformers(make_golden())


if __name__ == "__main__":
    main()
