#!/usr/bin/env python3
"""Compares the tokenizer with HuggingFace `tokenizers` on random text, random ids and random patterns.

    tokenizer_equality.py TOOL [--strings N] [--seed S] [--live] [--keep]

TOOL is the built poise-tokenizer-tool.  Needs the package tokenizers.  Exit code 0: everything equal;
1: it prints the first difference of each kind.

golden/tokenizer/equality.json keeps digests of what `tokenizers` answered to the texts of the seed 1, by a digest of vocabulary,
task and texts: an answer with that digest is equal, and `tokenizers` need not answer again.  For everything else, and with --live
for everything, it does.  --keep writes the digests anew from its answers."""

import argparse
import hashlib
import json
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
DIGESTS = GOLDEN / "tokenizer" / "equality.json"
EVERY = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def records(data, code):
    at, out = 0, []
    while at < len(data):
        (count,) = struct.unpack_from("<I", data, at)
        out.append(data[at + 4: at + 4 + count] if code == "s" else list(struct.unpack_from(f"<{count}i", data, at + 4)))
        at += 4 + count * (1 if code == "s" else 4)
    return out


def packed(inputs):
    return b"".join(
        struct.pack("<I", len(i)) + (i if isinstance(i, bytes) else struct.pack(f"<{len(i)}i", *i)) for i in inputs)


def run_tool(tool, argument, task, inputs):
    """What the tool answers to `inputs` (packed), packed; or the line it fails with."""
    done = subprocess.run([tool, argument, task], input=inputs, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr.decode().strip()


def unpacked(answer, task):
    return answer if isinstance(answer, str) else records(answer, "s" if task.startswith("decode") else "i")


class Digests:
    """Of what the reference answered, by what it was asked."""

    def __init__(self, live, keep):
        kept = json.loads(DIGESTS.read_text()) if DIGESTS.exists() and not live and not keep else {}
        self._known = kept.get("answers", {})
        self._keep = keep
        self.found = 0

    def question(self, vocabulary, task, inputs):
        return _digest(f"{vocabulary} {task} ".encode() + inputs)

    def says_equal(self, question, answer):
        equal = not isinstance(answer, str) and self._known.get(question) == _digest(answer)
        self.found += equal
        return equal

    def note(self, question, reference):
        if self._keep:
            self._known[question] = _digest(packed(reference))

    def write(self):
        if self._keep:
            DIGESTS.write_text(json.dumps({"tokenizers": tokenizers.__version__, "answers": self._known}, indent=0) + "\n")


def _digest(data):
    return hashlib.blake2b(data, digest_size=12).hexdigest()


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


def compare_directory(tool, name, shared, seed, digests):
    directory = GOLDEN / "tokenizer" / name
    vocabulary = _digest(b"".join(path.read_bytes() for path in sorted(directory.iterdir())))
    reference = oracle.load(directory)
    texts = shared
    if name in IN_CONTEXT:
        texts = shared + ["".join(EVERY)] + groups(IN_CONTEXT[name].format(c=c) for c in EVERY)
    ids = list(random_text.id_lists(seed + 1, len(shared) // 4, reference.get_vocab_size() + 50))

    def compare(task, inputs, raw, answers):
        """(differences, what the tool answers); `answers()` are the reference's."""
        given = packed(raw)
        got, question = run_tool(tool, str(directory), task, given), digests.question(vocabulary, task, given)
        if digests.says_equal(question, got):
            return 0, got
        expected = answers()
        digests.note(question, expected)
        return first_difference(f"{name} {task}", inputs, expected, unpacked(got, task)), got

    for start in range(0, len(texts), CHUNK):
        chunk = texts[start: start + CHUNK]
        raw = [t.encode() for t in chunk]
        # What is put around a text does not depend on it, so the first texts show it.
        for task, special in (("encode", True), ("encode-plain", False))[0 if start == 0 else 1:]:
            differences, got = compare(
                task, chunk, raw, lambda: [e.ids for e in reference.encode_batch_fast(chunk, add_special_tokens=special)])
            if differences:
                return differences
        ids += unpacked(got, task) if start == 0 else []
    differences = 0
    for task, skip in (("decode-all", False), ("decode", True), ("decode-stream", True)):
        differences += compare(
            task, ids, ids, lambda: [t.encode() for t in reference.decode_batch(ids, skip_special_tokens=skip)])[0]
    print(f"{name}: {len(texts)} texts, {len(ids)} lists of ids, {differences} differences")
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
    raw = packed(t.encode() for t in texts)
    differences = refused = 0
    for number in range(count + len(KNOWN_PATTERNS)):
        known = number < len(KNOWN_PATTERNS)
        pattern = KNOWN_PATTERNS[number] if known else random_pattern(r)
        got = unpacked(run_tool(tool, pattern, "cut", raw), "cut")
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
    parser.add_argument("--live", action="store_true", help="ask the reference everything")
    parser.add_argument("--keep", action="store_true", help="ask it everything, and keep the digests of its answers")
    options = parser.parse_args()
    print(f"tokenizers {tokenizers.__version__}, seed {options.seed}")
    differences = compare_patterns(options.tool, options.patterns, options.seed)
    shared = texts_for_all(options.strings, options.seed)
    digests = Digests(options.live, options.keep)
    for name in SPECIALS:
        differences += compare_directory(options.tool, name, shared, options.seed, digests)
    print(f"{digests.found} lists of answers have the digests that were kept of the reference's")
    if not differences:
        digests.write()
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
