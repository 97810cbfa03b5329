"""Text to train and to test tokenizers with, made from a seed: words of an invented language to learn
from, and strings of every script, spacing, sign and oddity to be encoded.  Standard library only."""

import random

# First and last code point of letters that make words, one line a script.
SCRIPTS = {
    "latin": (0x61, 0x7A),
    "latin-1": (0xC0, 0xFF),
    "latin-extended": (0x100, 0x24F),
    "greek": (0x391, 0x3C9),
    "cyrillic": (0x410, 0x44F),
    "armenian": (0x531, 0x556),
    "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x620, 0x64A),
    "devanagari": (0x904, 0x94D),
    "bengali": (0x985, 0x9CD),
    "tamil": (0xB85, 0xBCD),
    "thai": (0xE01, 0xE3A),
    "georgian": (0x10D0, 0x10FA),
    "hangul": (0xAC00, 0xD7A3),
    "ethiopic": (0x1200, 0x1248),
    "cherokee": (0x13A0, 0x13F5),
    "khmer": (0x1780, 0x17D3),
    "hiragana": (0x3041, 0x3096),
    "katakana": (0x30A1, 0x30FA),
    "han": (0x4E00, 0x9FFF),
    "gothic": (0x10330, 0x1034A),
    "deseret": (0x10400, 0x1044F),
    "mathematical": (0x1D400, 0x1D7FF),
    "new letters": (0x16D40, 0x16D6C),
    "han extension": (0x31350, 0x323AF),
}
SPACES = [chr(c) for c in (*range(0x09, 0x0E), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028,
                           0x2029, 0x202F, 0x205F, 0x3000)] + ["\r\n", "\u180e", "\u200b", "\ufeff"]
DIGITS = [0x30, 0x660, 0x966, 0xE50, 0xFF10, 0x1D7CE, 0x10D40]
NUMBERS = "²³¹¼½¾ⅠⅡⅻ①⑳〇㊿𐄇"
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "🇺🇳", "1️⃣", "❤️", "❤", "🧑🏿‍🚀", "☃", "🫠", "🪿", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"]
MARKS = [chr(c) for c in (*range(0x300, 0x316), 0x345, 0x483, 0x5B0, 0x64B, 0x93C, 0xE38, 0x20D0, 0x20DD, 0x3099, 0xFE0F)]
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'M", "'lL", "'D", "'ſ", "’s",
                "'", "''s", "'x", "'r", "'v", "'l", "s'", "'\u017f\u017f"]
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡¿«»„“”…—–·•€£¥©®™°§¶†‡←→∀∑√≠≤⊕⌘█▓☆♠✓、。「」，！？；："

_SYLLABLES = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "", "n", "s", "r")]
_common = random.Random(20)
WORDS = ["the", "of", "and", "a", "to", "in", "is", "it", "was", "he", "she", "they", "don't", "it's", "we'll", "I'd"] + [
    "".join(_common.choices(_SYLLABLES, k=_common.randint(1, 4))) for _ in range(900)]


def word(r):
    """A word of the invented language, common ones far more often, sometimes capital."""
    w = WORDS[min(int(r.expovariate(1) * 90), len(WORDS) - 1)]
    return r.choice([w, w, w, w, w.capitalize(), w.upper()])


def sentence(r):
    words = [word(r) for _ in range(r.randint(2, 14))]
    if r.random() < 0.3:
        words[r.randrange(len(words))] = str(r.randint(0, 10 ** r.randint(1, 9)))
    if r.random() < 0.2:
        words.insert(r.randrange(len(words)), ",")
    return " ".join(words).replace(" ,", ",") + r.choice([".", ".", "?", "!", ";", "...", ".\n", "\n\n"])


def code(r):
    name = lambda: r.choice(["_", "", "x"]).join([word(r), word(r)])
    indent = r.choice(["  ", "    ", "\t"]) * r.randint(0, 4)
    return r.choice([
        f"{indent}for (int {name()} = 0; {name()} < {r.randint(0, 4096)}; ++{name()}) {{\n",
        f"{indent}def {name()}(self, {name()}: str = '{word(r)}') -> None:\n{indent}    return {name()}[{r.random():.4f}]\n",
        f"{indent}// {sentence(r)}\n",
        f'{{"{name()}": [{r.randint(-99, 99)}, null, "{word(r)}"]}}\r\n',
        f"https://{word(r)}.example/{name()}?{word(r)}={r.randint(0, 999)}#{word(r)}",
        f"{indent}{name()} += {name()} * 0x{r.getrandbits(32):08X};\n",
    ])


def foreign(r):
    first, last = r.choice(list(SCRIPTS.values()))
    letters = [r.randint(first, last) for _ in range(12)]
    word_ = lambda: "".join(chr(r.choice(letters)) for _ in range(r.randint(1, 9)))
    return " ".join(word_() for _ in range(r.randint(1, 6)))


def corpus(seed, lines):
    """Lines to train on: mostly the invented language and code, with a share of every script."""
    r = random.Random(seed)
    for _ in range(lines):
        kind = r.random()
        yield sentence(r) if kind < 0.6 else code(r) if kind < 0.85 else foreign(r) if kind < 0.97 else "".join(
            r.choices(EMOJI, k=3))


def any_character(r):
    while True:
        c = r.choice([r.randrange(0x110000), r.randrange(0x3000), r.randrange(0x10000), r.randrange(0x1F000, 0x1FB00),
                      r.randrange(0x10000, 0x20000)])
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def _run(r):
    unit = r.choice([" ", "a", "\n", "0", "^", "'", "é", "한", "😀", "\u0301", "ab", " a", "\r\n", "\t", "=", any_character(r)])
    longest = 20 if r.random() < 0.7 else 300 if r.random() < 0.95 else 6000
    return unit * r.randint(1, longest)


def piece(r, specials):
    kinds = [
        lambda: sentence(r),
        lambda: code(r),
        lambda: foreign(r),
        lambda: "".join(any_character(r) for _ in range(r.randint(1, 12))),
        lambda: "".join(r.choices(SPACES, k=r.randint(1, 8))),
        lambda: r.choice([" ", "\n", "  "]) * r.randint(1, 6),
        lambda: "".join(chr(r.choice(DIGITS) + r.randrange(10)) for _ in range(r.randint(1, 9))),
        lambda: str(r.getrandbits(r.randint(1, 60))),
        lambda: "".join(r.choices(NUMBERS, k=r.randint(1, 3))),
        lambda: "".join(r.choices(EMOJI, k=r.randint(1, 4))),
        lambda: "".join(word(r)[0] + "".join(r.choices(MARKS, k=r.randint(0, 4))) for _ in range(r.randint(1, 5))),
        lambda: chr(r.randrange(0x20)) * r.randint(1, 3) + chr(r.randrange(0x7F, 0xA0)),
        lambda: word(r) + r.choice(CONTRACTIONS) + r.choice(["", " ", word(r)]),
        lambda: "".join(r.choices(SIGNS, k=r.randint(1, 6))),
        lambda: _run(r),
        lambda: r.choice(["", " ", "  ", "\n"]) + r.choice(specials) + r.choice(["", " ", "  ", "\t"]),
        lambda: r.choice(specials)[: r.randint(1, 4)] + word(r),
        lambda: "ΑΣ ﬁ ß ẞ İ ı ſ K Å ǆ ǅ"[r.randrange(20):],
    ]
    return r.choice(kinds)()


def strings(seed, count, specials):
    """`count` strings to encode; `specials` are token contents to write inside them."""
    r = random.Random(seed)
    for _ in range(count):
        pieces = r.choice([1, 1, 2, 3, 5, r.randint(0, 20)])
        yield "".join(piece(r, specials) for _ in range(pieces))


def id_lists(seed, count, rows):
    """`count` lists of ids to decode, most of them not what any text encodes to."""
    r = random.Random(seed)
    for _ in range(count):
        yield [r.randrange(min(rows, r.choice([300, rows]))) for _ in range(r.choice([0, 1, 2, 3, 8, 40]))]
