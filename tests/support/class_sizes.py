"""Counts a C++ class's private (and protected) methods and members, from its source.

No parser of C++: enough of one for this project's clang-formatted sources.
"""

import re

_CLASS = re.compile(r"\b(class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^{;()]*)?\s*\{")
_ACCESS = re.compile(r"\s*(public|protected|private)\s*:(?!:)")
_NO_MEMBER = re.compile(r"(friend|using|static_assert|static constexpr|enum)\b|(class|struct)\s+\w+\s*(final)?\s*(:[^{]*)?(\{|$)")


def classes(text):
    """(name, number of private methods and members) of each class that the text defines."""
    text = _bare(text)
    for found in _CLASS.finditer(text):
        if re.search(r"\benum\s*$", text[: found.start()]):
            continue
        access = "private" if found.group(1) == "class" else "public"
        body = text[found.end() : _end_of_body(text, found.end() - 1)]
        yield found.group(2), sum(_count(one) for access_of, one in _declarations(body, access) if access_of != "public")


def _bare(text):
    """Without comments, strings and the preprocessor's lines."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"^\s*#.*(?:\\\n.*)*", "", text, flags=re.MULTILINE)


def _end_of_body(text, start):
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def _declarations(body, access):
    """(access, text) of what a class declares at its own level."""
    i = since = depth = parentheses = 0
    while i < len(body):
        outside = depth == 0 and parentheses == 0
        label = _ACCESS.match(body, i) if outside and not body[since:i].strip() else None
        if label:
            access, i = label.group(1), label.end()
            since = i
            continue
        char = body[i]
        parentheses += {"(": 1, ")": -1}.get(char, 0)
        depth += {"{": 1, "}": -1}.get(char, 0)
        ends_function = char == "}" and depth == 0 and parentheses == 0 and not re.match(r"\s*[;,]", body[i + 1 :])
        if ends_function or (char == ";" and outside):
            declaration = body[since : i + 1].strip().rstrip(";").strip()
            if declaration:
                yield access, declaration
            since = i + 1
        i += 1


def _count(declaration):
    """Of `int a, b = 2;` there are two."""
    if _NO_MEMBER.match(declaration):
        return 0
    if "(" in declaration.split("=")[0].split("{")[0]:
        return 1
    flat = declaration
    while flat != (flat := re.sub(r"<[^<>]*>|\{[^{}]*\}|\[[^\]]*\]|\([^()]*\)", "", flat)):
        pass
    return 1 + flat.count(",")
