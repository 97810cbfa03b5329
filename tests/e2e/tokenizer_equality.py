#!/usr/bin/env python3
"""Compares the tokenizer with HuggingFace `tokenizers` on random text, random ids and random patterns.

    tokenizer_equality.py TOOL [--strings N] [--seed S]

TOOL is the built poise-tokenizer-tool.  Needs the package tokenizers.  Exit code 0: everything equal;
1: it prints the first difference of each kind."""

import argparse
import pathlib
import random
import struct
import subprocess
import sys

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
sys.path[:0] = [str(GOLDEN), str(GOLDEN / "tokenizer")]
sys.dont_write_bytecode = True

import oracle
import random_text
import tokenizers
from make_tokenizer_golden import LLAMA_PATTERN, SPECIALS

CHUNK = 5000
EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def records(data, code):
    at, out = 0, []
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        out.append(data[at + 4: at + 4 + count] if code == "s" else list(struct.unpack_from(f"<{count}i", data, at + 4)))
        at += 4 + count * (1 if code == "s" else 4)
    return out


def run_tool(tool, argument, task, inputs):
    """What the tool answers to `inputs` (bytes or lists of ids), or the line it fails with."""
    packed = b"".join(
        struct.pack("<I", len(i)) + (i if isinstance(i, bytes) else struct.pack(f"<{len(i)}i", *i)) for i in inputs)
    done = subprocess.run([tool, argument, task], input=packed, capture_output=True, check=False)
    if done.returncode != 0:
        return done.stderr.decode().strip()
    return records(done.stdout, "s" if task.startswith("decode") else "i")


def first_difference(what, inputs, expected, got):
    """Prints it and returns 1, or returns 0."""
    if isinstance(got, str):
        print(f"{what}: {got}")
        return 1
    assert len(expected) == len(got) == len(inputs), what
    for given, want, have in zip(inputs, expected, got):
        if want != have:
            print(f"{what} differs on {given!r}:\n  reference {want!r}\n  ours      {have!r}")
            return 1
    return 0


def texts_for_all(count, seed):
    """The texts that every vocabulary encodes."""
    specials = list(dict.fromkeys(token for tokens in SPECIALS.values() for token in tokens))
    texts = list(random_text.strings(seed, count, specials))
    # Many characters by themselves, between letters and among marks.
    return texts + groups(f"a{c}a {c}{c}1{c}\u0301\u0323{c}\u11a8 " for c in EVERY[::64])


def groups(parts, size=16):
    parts = list(parts)
    return ["".join(parts[n: n + size]) for n in range(0, len(parts), size)]


# Where each character counts: patterns and normal forms.
IN_CONTEXT = {"llama": "a{c} {c}1", "qwen": "{c}\u0301\u0323{c}", "llama2": "{c}"}


def compare_directory(tool, name, shared, seed):
    directory = GOLDEN / "tokenizer" / name
    reference = oracle.load(directory)
    texts = shared
    if name in IN_CONTEXT:
        texts = shared + ["".join(EVERY)] + groups(IN_CONTEXT[name].format(c=c) for c in EVERY)
    ids = list(random_text.id_lists(seed + 1, len(shared) // 4, reference.get_vocab_size() + 50))
    differences, tokens = 0, 0
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start: start + CHUNK]
        raw = [t.encode() for t in chunk]
        # What is put around a text does not depend on it, so the first texts show it.
        for task, special in (("encode", True), ("encode-plain", False))[0 if start == 0 else 1:]:
            expected = [e.ids for e in reference.encode_batch_fast(chunk, add_special_tokens=special)]
            tokens += sum(map(len, expected))
            differences += first_difference(f"{name} {task}", chunk, expected, run_tool(tool, str(directory), task, raw))
        ids += expected if start == 0 else []
        if differences:
            return differences
    for task, skip in (("decode-all", False), ("decode", True), ("decode-stream", None)):
        if skip is not None:
            expected = [t.encode() for t in reference.decode_batch(ids, skip_special_tokens=skip)]
        differences += first_difference(f"{name} {task}", ids, expected, run_tool(tool, str(directory), task, ids))
    print(f"{name}: {len(texts)} texts ({tokens} ids), {len(ids)} lists of ids, {differences} differences")
    return differences


KNOWN_PATTERNS = [
    LLAMA_PATTERN,
    LLAMA_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"(?=(\d{3})+(?!\d))", r"[0-9][0-9][0-9]", r"\s?\p{P}+", r"[^\S\n]+|\P{^Lu}", r"(?:a|ab|abc)+?(?=b)|\x{e9}\u0301?",
    r"(?>\s+|a+)b|(?:ab?){2,3}|[^\D5]+?x",
]


def random_pattern(r, depth=0):
    """An expression of the syntax that is taken, and a few that are not."""
    atoms = ["a", "b", "s", "1", " ", "é", "'", r"\p{L}", r"\p{N}", r"\p{Lu}", r"\s", r"\S", r"\d", r"\r", r"\n", ".",
             r"[^\s\p{L}]", "[a-c]", r"[^\r\n]", r"[\p{M}\p{L}_-]", r"\P{L}", r"(?i:s|t)", "(?i:k)", "(?i:[a-z])"]
    def branch():
        out = ""
        for _ in range(r.randint(1, 4)):
            kind = r.random()
            atom = r.choice(atoms)
            if depth < 3 and kind < 0.25:
                atom = r.choice(["(?:", "(", "(?>", "(?=", "(?!"]) + random_pattern(r, depth + 1) + ")"
            out += atom
            if not atom.startswith(("(?=", "(?!")):
                out += r.choice(["", "", "", "?", "*", "+", "+?", "*?", "++", "?+", "{2}", "{1,2}", "{2,}", "{,2}", "{0,3}?"])
        return out
    return "|".join(branch() for _ in range(r.choice([1, 1, 2, 3])))


def compare_patterns(tool, count, seed):
    r = random.Random(seed)
    texts = list(random_text.strings(seed, 60, ["abc"])) + [
        "".join(r.choices("aabbcs1 'é\n\rſKA_\u0301", k=r.randint(1, 12))) for _ in range(60)]
    texts = [t for t in texts if 0 < len(t) < 200]
    raw = [t.encode() for t in texts]
    differences = refused = 0
    for number in range(count + len(KNOWN_PATTERNS)):
        known = number < len(KNOWN_PATTERNS)
        pattern = KNOWN_PATTERNS[number] if known else random_pattern(r)
        got = run_tool(tool, pattern, "cut", raw)
        if isinstance(got, str) and (not known or "$" in pattern):
            refused += 1
            continue
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        expected = []
        for text in texts:
            starts = [offsets[0] for _, offsets in split.pre_tokenize_str(text)]
            expected.append([len(text[:start].encode()) for start in starts if start > 0])
        differences += first_difference(f"pattern {pattern}", texts, expected, got)
        if differences > 5:
            break
    print(f"patterns: {count} random ones ({refused} refused) on {len(texts)} texts, {differences} differences")
    return differences


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--strings", type=int, default=100_000, help="for each vocabulary")
    parser.add_argument("--patterns", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"tokenizers {tokenizers.__version__}, seed {options.seed}")
    differences = compare_patterns(options.tool, options.patterns, options.seed)
    shared = texts_for_all(options.strings, options.seed)
    for name in SPECIALS:
        differences += compare_directory(options.tool, name, shared, options.seed)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
