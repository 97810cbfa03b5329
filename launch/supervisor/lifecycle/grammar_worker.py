"""Says which tokens may come next in answers that have a form, by llguidance, in a process of its own: a grammar is a program of strangers.

    grammar_worker.py       started by the planner (planner/links/grammar_link.h says what passes over its socket, which is stdin)

A grammar is compiled once and kept; each answer has a matcher of its own. The kernel ends the process where one answer's next token, with
the compilation of its grammar if it is the first, takes more than SECONDS of computing, and refuses it memory beyond a bound. An answer
that another process began is gone through token by token, masks included, so that each has the time that it had before. It ends when the
planner does.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys

# What strangers' grammars may cost (launch/README.md, Answers of a form).
SECONDS = 1.2  # of computing, for one answer's next token: with the start of the next process, an error within two seconds
START_SECONDS = 60  # likewise, for the model's tokenizer
MEMORY = 4 << 30  # of this process's address space
_MOST_KEPT = 256  # compiled grammars
_LONGEST_REASON = 300
_ANY_OBJECT = {"type": "object"}


class BadGrammar(Exception):
    pass


def in_a_line(text):
    """Part of a message: printable and short, without llguidance's own state."""
    text = str(text).partition("<state>")[0][:_LONGEST_REASON]
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


# ---- frames


def read_exactly(stream, size):
    data = bytearray()
    while len(data) < size:
        block = stream.recv(min(size - len(data), 1 << 20))
        if not block:
            os._exit(0)  # the planner has ended
        data += block
    return bytes(data)


def read_frame(stream):
    (size,) = struct.unpack("<I", read_exactly(stream, 4))
    return json.loads(read_exactly(stream, size))


def framed(kind, payload):
    return struct.pack("<I", 1 + len(payload)) + kind + payload


def send(stream, frames):
    try:
        stream.sendall(b"".join(frames))
    except OSError:
        os._exit(0)


# ---- what a request asks for, as llguidance writes it


def definition_of(asked, llguidance):
    """`asked`: {"response_format": …} or {"structured_outputs": …}, checked by planner/requests/request_grammar.cpp."""
    matcher = llguidance.LLMatcher
    if "response_format" in asked:
        given = asked["response_format"]
        schema = _ANY_OBJECT if given["type"] == "json_object" else given["json_schema"]["schema"]
        return matcher.grammar_from_json_schema(json.dumps(schema))
    given = {name: value for name, value in asked["structured_outputs"].items() if value is not None}
    if "json" in given or given.get("json_object"):
        schema = given.get("json", _ANY_OBJECT)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as problem:
                raise BadGrammar(f"has a \"json\" that is no JSON: {problem}") from None
        if given.get("disable_additional_properties"):
            close_objects(schema)
        flexible = not given.get("disable_any_whitespace")
        return matcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": flexible})
    if "regex" in given:
        return matcher.grammar_from_regex(given["regex"])
    if "choice" in given:
        return llguidance.grammar_from("choice", json.dumps(given["choice"]))
    return llguidance.grammar_from("grammar", given["grammar"])


def close_objects(schema):
    """Objects that name their properties have no others, unless they say so."""
    if isinstance(schema, dict):
        for value in schema.values():
            close_objects(value)
        if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
    elif isinstance(schema, list):
        for value in schema:
            close_objects(value)


# ---- grammars and answers


def allow_computing(seconds):
    """From now on; 0: for ever."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def why_it_stopped(matcher):
    """Everything but a token that the grammar bars is a bound of llguidance's own, whose stop_reason() tells them not apart."""
    error = in_a_line(matcher.get_error())
    if "satisfy the grammar" in error:
        return f"does not allow what was answered: {error}"
    return f"is too large or too costly: llguidance gave up: {error}"


class Grammars:
    def __init__(self, hello):
        try:
            import llguidance
        except ImportError:
            raise BadGrammar(
                "needs the package llguidance, which is not installed here: `pip install llguidance` in the environment of poise, or run "
                "once where PyPI can be reached"
            ) from None
        self._llguidance = llguidance
        path = os.path.join(hello["model"], "tokenizer.json")
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            raise BadGrammar(
                "needs the model's tokenizer.json, which cannot be read; make it with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            ) from None
        try:
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=hello["vocab_size"], eos_token=hello["eos"])
        except Exception as problem:
            raise BadGrammar(f"cannot be followed: llguidance does not take the model's tokenizer: {in_a_line(problem)}") from None
        self._words = (hello["vocab_size"] + 31) // 32
        self._compiled = {}  # by a grammar's text: a matcher at its beginning
        self._answers = {}  # by the request's number

    def drop(self, numbers):
        for number in numbers:
            self._answers.pop(number, None)

    def mask(self, wish):
        number, tokens = wish["id"], wish["tokens"]
        allow_computing(SECONDS)
        if "grammar" in wish:
            self._answers[number] = self._begun(wish["grammar"]).deep_copy()
        matcher = self._answers[number]
        mask = self._next(matcher) if "grammar" in wish or not tokens else None
        for token in tokens:
            allow_computing(SECONDS)
            if not matcher.consume_tokens([token]):
                raise BadGrammar(why_it_stopped(matcher))
            mask = self._next(matcher)
        return mask[: 4 * self._words]

    @staticmethod
    def _next(matcher):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise BadGrammar(why_it_stopped(matcher))
        return mask

    def _begun(self, text):
        found = self._compiled.get(text)
        if found is None:
            try:
                definition = definition_of(json.loads(text), self._llguidance)
            except (ValueError, RecursionError) as problem:
                raise BadGrammar(f"does not compile: {in_a_line(problem) or type(problem).__name__}") from None
            found = self._llguidance.LLMatcher(self._tokenizer, definition, log_level=0)
            if found.is_error():
                raise BadGrammar(f"does not compile: {in_a_line(found.get_error())}")
            if len(self._compiled) >= _MOST_KEPT:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[text] = found
        return found


def serve(stream):
    hello = read_frame(stream)
    allow_computing(START_SECONDS)
    try:
        grammars = Grammars(hello)
    except BadGrammar as bad:
        send(stream, [framed(b"e", str(bad).encode())])
        return
    allow_computing(0)
    send(stream, [framed(b"m", b"")])
    while True:
        frame = read_frame(stream)
        grammars.drop(frame["drop"])
        frames = []  # sent together: a switch between two processes takes longer than a mask
        for wish in frame["wishes"]:
            try:
                frames.append(framed(b"m", grammars.mask(wish)))
            except BadGrammar as bad:
                frames.append(framed(b"e", str(bad).encode()))
            allow_computing(0)
        send(stream, frames)


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    serve(socket.socket(fileno=sys.stdin.fileno()))


if __name__ == "__main__":
    main()
