"""Asks `tokenizers` what every code point is to it, and writes the answer as C++ tables.  Its patterns
go to Oniguruma, its digits to Rust's standard library and its word characters to Rust's regex crate,
each with a Unicode version of its own; a Unicode library's tables would differ by thousands of letters.
Its normal forms come from a fourth; Python's own only names the classes of marks, which never change."""

import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn".split()
WORD = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"}
SURROGATES = range(0xD800, 0xE000)
CODE_POINTS = [c for c in range(0x110000) if c not in SURROGATES]


def ranges(code_points):
    found = []
    for c in sorted(code_points):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def matching(pattern):
    text = "".join(map(chr, CODE_POINTS))
    kept = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed", invert=True).pre_tokenize_str(text)
    return {c for _, (first, last) in kept for c in CODE_POINTS[first:last]}


def word_characters():
    tokenizer = Tokenizer(models.BPE(vocab={"unused": 0}, merges=[]))
    tokenizer.add_tokens([AddedToken("##", single_word=True)])
    return {c for c in CODE_POINTS if not tokenizer.encode(chr(c) + "##").ids}


def numeric_characters():
    digits = pre_tokenizers.Digits(individual_digits=False)
    return {c for c in CODE_POINTS if len(digits.pre_tokenize_str("x" + chr(c))) == 2}


def decompositions():
    """(whole, first, second or 0, whether C joins them) of every character that form D changes, by character."""
    to_c, to_d = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str
    found = []
    for c in CODE_POINTS:
        apart = to_d(chr(c))
        if apart == chr(c) or 0xAC00 <= c < 0xD7A4:
            continue
        parts = [int(part, 16) for part in unicodedata.decomposition(chr(c)).split()]
        assert len(parts) in (1, 2) and to_d("".join(map(chr, parts))) == apart, hex(c)
        joined = len(parts) == 2 and to_c("".join(map(chr, parts))) == chr(c)
        assert len(parts) == 1 or to_d(chr(parts[1])) == chr(parts[1]), hex(c)
        assert joined == (to_c(chr(c)) == chr(c)), hex(c)
        found.append((c, parts[0], parts[1] if len(parts) == 2 else 0, joined))
    return found


def combining_classes():
    """{character: class} of those that form D moves before a mark of class 240, or behind one of class 1."""
    to_d = normalizers.NFD().normalize_str
    low, high = "\u0334", "\u0345"
    found = {}
    for c in map(chr, CODE_POINTS):
        if to_d(c) == c and (to_d(high + c) == c + high or to_d(c + low) == low + c):
            found[ord(c)] = unicodedata.combining(c)
            assert found[ord(c)] > 0, hex(ord(c))
        elif to_d(c) == c and unicodedata.combining(c) == 1:
            found[ord(c)] = 1
    return found


def combining_runs(classes):
    runs = []
    for c, value in sorted(classes.items()):
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == value:
            runs[-1][1] = c
        else:
            runs.append([c, c, value])
    return runs


def lines(items, width=98):
    line, out = "   ", []
    for item in items:
        if len(line) + len(item) + 1 > width:
            out.append(line)
            line = "   "
        line += " " + item
    return "\n".join(out + [line])


def range_table(name, code_points, comment):
    body = lines(f"{{{a:#x}, {b:#x}}}," for a, b in ranges(code_points))
    return f"// {comment}\nconst CodePointRange {name}[] = {{\n{body}\n}};\nconst std::size_t {name}Count = std::size({name});\n"


def write(path):
    category = ["Cn"] * 0x110000
    for name in CATEGORIES:
        if name not in ("Cn", "Cs"):
            for c in matching(rf"\p{{{name}}}"):
                assert category[c] == "Cn", (hex(c), name, category[c])
                category[c] = name
    for c in SURROGATES:
        category[c] = "Cs"
    # What the engine that matches patterns calls \s, \d and \w must follow from the categories.
    assert matching(r"\d") == {c for c in CODE_POINTS if category[c] == "Nd"}
    spaces = matching(r"\s")
    for group in "LMNPSZ":
        assert matching(rf"\p{{{group}}}") == {c for c in CODE_POINTS if category[c][0] == group}, group

    runs = [(c, category[c]) for c in range(0x110000) if c == 0 or category[c] != category[c - 1]]
    words = word_characters()
    by_category = {c for c in CODE_POINTS if category[c] in WORD}
    numbers = {c for c in CODE_POINTS if category[c][0] == "N"}
    numeric = numeric_characters()
    assert by_category <= words and numbers <= numeric
    path.write_text(f"""// clang-format off
// Made by tests/golden/make_tokenizer_golden.py --tables from tokenizers {tokenizers.__version__}; not to be edited.
#include "planner/tokenizer/unicode_tables.h"

#include <iterator>

namespace poise {{
namespace {{
using enum Category;
}}

// Each run has the category up to the next run's first code point.
const CategoryRun kCategoryRuns[] = {{
{lines(f"{{{c:#x},{name}}}," for c, name in runs)}
}};
const std::size_t kCategoryRunsCount = std::size(kCategoryRuns);

{range_table("kSpaces", spaces, "White space.")}
{range_table("kWordsBeyond", words - by_category, "Word characters that are not letters, marks, numbers Nd or Nl, or Pc.")}
{range_table("kNumericBeyond", numeric - numbers, "Numeric to the pre-tokenizer Digits though not yet numbers to patterns.")}
const Decomposition kDecompositions[] = {{
{lines(f"{{{c:#x},{first:#x},{second:#x},{int(joined)}}}," for c, first, second, joined in decompositions())}
}};
const std::size_t kDecompositionsCount = std::size(kDecompositions);

const CombiningRun kCombiningRuns[] = {{
{lines(f"{{{first:#x},{last:#x},{value}}}," for first, last, value in combining_runs(combining_classes()))}
}};
const std::size_t kCombiningRunsCount = std::size(kCombiningRuns);
}}  // namespace poise
""", encoding="utf-8")
