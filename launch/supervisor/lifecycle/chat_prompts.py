"""The prompts of chat lines: rendered once, before the run, by a process of its own (chat_worker.py), and kept in a file for the planner.

The file, chat.jsonl in the run directory, begins with what it was made of. A resumed run takes it as it is, so that a template that
writes the date gives the same prompts; it goes when the run is finished. A file without chat lines needs neither it nor jinja2.
"""

import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from ..shared.files import publish_file, read_first_line, remove
from ..shared.trouble import FOREIGN, INTERRUPTED, OUTPUT, Refusal, naming, of_system, shown
from .chat_worker import CHAT_LINE, MOST_ENDED, SECONDS

NAMES = ("chat.jsonl", "chat.jsonl.new")
_OF_THE_TEMPLATE = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
_BLOCK = 1 << 20
_OVERLAP = 32  # more than what CHAT_LINE matches


def prepare(given, folder, interrupts=None, line=None, keep=False):
    """The file with the prompts of the chat lines of `given.input`; None if it has no chat line, or the run has no tokenizer.

    `keep`: of the unfinished run in `folder`; its file is taken if it is there. `interrupts`, `line`: as of a run."""
    if given.skip_tokenizer_init or not has_chat_lines(given.input):
        return None
    path = Path(folder) / NAMES[0]
    header = _made_of(given)
    if keep and (kept := read_first_line(path)):
        if kept != header:
            other = "another input" if kept.get("input") != header["input"] else "another chat template"
            raise Refusal(
                f"{shown(folder)} belongs to {other}; resume with what it was started with, or use another run directory", FOREIGN
            )
        return path
    fresh = Path(folder) / NAMES[1]
    remove(fresh)
    with naming(fresh), open(fresh, "x", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(header) + "\n")
    try:
        _Rendering(given, fresh, interrupts, line).run()
        publish_file(fresh, path)
    finally:
        remove(fresh)
    return path


def forget(folder):
    for name in NAMES:
        remove(Path(folder) / name)


def has_chat_lines(source):
    with open(source, "rb") as file:
        end = b""
        while block := file.read(_BLOCK):
            if CHAT_LINE.search(end + block):
                return True
            end = block[-_OVERLAP:]
    return False


def _made_of(given):
    template = hashlib.sha256()
    more = Path(given.model) / "additional_chat_templates"
    names = [*_OF_THE_TEMPLATE, *(f"{more.name}/{name}" for name in (sorted(os.listdir(more)) if more.is_dir() else []))]
    for name in names:
        path = os.path.join(given.model, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                template.update(f"{name}\n".encode() + hashlib.file_digest(file, "sha256").digest())
    with open(given.input, "rb") as file:
        return {"version": 1, "input": hashlib.file_digest(file, "sha256").hexdigest(), "template": template.hexdigest()}


class _Rendering:
    """One pass over the input. The worker that dies on a line is replaced by one that begins behind it."""

    def __init__(self, given, output, interrupts, line):
        self._given = given
        self._output = output
        self._interrupts = interrupts
        self._line = line
        self._number = self._offset = 0  # of the line that is being rendered, and what is behind it
        self._rendered = 0
        self._ended = 0

    def run(self):
        offset, number = 0, 1
        while not self._one_worker(offset, number):
            offset, number = self._offset, self._number + 1

    def _one_worker(self, offset, number):
        """True if the worker came to the end; False if it died on line self._number, which has its error now."""
        words = [sys.executable, "-s", str(Path(__file__).with_name("chat_worker.py"))]
        words += [self._given.model, self._given.input, self._output, offset, number, "yes" if self._ended < MOST_ENDED else "no"]
        self._number = 0
        with subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        ) as worker:  # fmt: skip
            try:
                said = self._follow(worker)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
        if worker.returncode == 0:
            return True
        words = said.decode(errors="replace").strip().splitlines()
        if worker.returncode == 2 and words:
            raise Refusal(shown(words[-1]))
        if worker.returncode > 0:  # Python's own words: most likely the disk is full
            full = any(os.strerror(number) in said.decode(errors="replace") for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
            reason = shown(words[-1]) if words else f"it ended with {worker.returncode}"
            raise Refusal(f"the chat lines cannot be rendered into {shown(self._output)}: {reason}", OUTPUT if full else 2)
        self._died(-worker.returncode)
        return False

    def _follow(self, worker):
        """Reads the worker's progress to its end; returns what it said on stderr."""
        pipes = {worker.stdout.fileno(): b"", worker.stderr.fileno(): b""}
        open_pipes = set(pipes)
        waiting = [self._interrupts.descriptor] if self._interrupts else []
        while open_pipes:
            ready, _, _ = select.select([*open_pipes, *waiting], [], [], 0.25)
            if self._interrupts and self._interrupts.count:
                raise Refusal("interrupted while the prompts of chat lines were rendered; nothing else was started: start it again", INTERRUPTED)
            if self._interrupts:
                self._interrupts.drain()
            for descriptor in open_pipes & set(ready):
                block = os.read(descriptor, 1 << 16)
                if not block:
                    open_pipes.discard(descriptor)
                pipes[descriptor] = (pipes[descriptor] + block)[-(1 << 16) :]
                if descriptor == worker.stdout.fileno():
                    pipes[descriptor] = self._note(pipes[descriptor])
            if self._line and self._line.due() and self._rendered:
                self._line.show(f"rendering the prompts of chat lines: {self._rendered}")
        worker.wait()
        return pipes[worker.stderr.fileno()]

    def _note(self, text):
        *whole, rest = text.split(b"\n")
        self._rendered += len(whole)
        if whole:
            self._number, self._offset = map(int, whole[-1].split())
        return rest

    def _died(self, number):
        took = f"took more than {SECONDS} s of computing" if number == signal.SIGPROF else "ended the process that renders it"
        if self._number == 0:
            raise Refusal(f"the model's chat template {took} to compile" if number == signal.SIGPROF else
                          "the process that renders chat lines was ended before the first one")  # fmt: skip
        self._ended += 1
        entry = {"error": f"the chat template {took} on this line", "param": "messages", "code": "chat_template_error"}
        try:
            with naming(self._output), open(self._output, "a", encoding="utf-8") as file:
                file.write(json.dumps({"line": self._number, **entry}) + "\n")
        except OSError as problem:
            raise of_system(problem) from None
