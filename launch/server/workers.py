"""Two small processes that answer one question at a time: the planner's tokenizer, and the renderer of chat templates. The server and the
Python package both use them; of the standard library alone."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading

_CHAT_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "chat_process.py")
_CHAT_SECONDS = 1.5  # of computing that a line may take: supervisor/lifecycle/chat_worker.py has the bounds


class WorkerEnded(Exception):
    """The process has ended; the next question gets another one."""


class _Worker:
    """Any thread may ask; one at a time."""

    _stderr = subprocess.PIPE  # what it says when it ends

    def __init__(self, words):
        self._words = words
        self._process = None
        self._lock = threading.Lock()

    def _asked(self, process, question):
        raise NotImplementedError

    def _ask(self, question):
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
                )
            process = self._process
            try:
                return self._asked(process, question)
            except (OSError, ValueError, struct.error):
                self._process = None
                raise WorkerEnded(*_reason(process)) from None
            except BaseException:  # an interrupt: its answer must not become the next one's
                self._process = None
                _end(process)
                raise

    def close(self):
        process = self._process
        if process is not None:
            process.kill()  # whoever waits for its answer
        with self._lock:
            if self._process is not None:
                _end(self._process)
                self._process = None


class Tokens(_Worker):
    """Texts to token ids and back, as the planner does it."""

    _stderr = subprocess.DEVNULL

    def __init__(self, program, model):
        super().__init__([program, "encode", "--model", model])
        self._texts = {}

    def encode(self, text, add_special_tokens=True):
        return self._ask({"text": text, "add_special_tokens": add_special_tokens})

    def decode(self, ids):
        return self._ask({"ids": list(ids)})

    def text_of(self, number):
        """The text of one token, kept."""
        if number not in self._texts:
            self._texts[number] = self.decode([number])
        return self._texts[number]

    def _ask(self, question):
        """ValueError: what the tokenizer says is wrong with it."""
        try:
            answer = super()._ask(question)
        except WorkerEnded:  # somebody killed it: it may be started again
            answer = super()._ask(question)
        if isinstance(answer, dict):
            raise ValueError(answer["error"])
        return answer

    def _asked(self, process, question):
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


class BadTemplate(Exception):
    """The template itself is of no use: why."""


class ChatTemplate(_Worker):
    """The prompts of chat lines, with the bounds that a run has (launch/README.md, Chat lines)."""

    def __init__(self, model):
        super().__init__([sys.executable, "-s", _CHAT_PROGRAM, model])

    def entry(self, line):
        """(what planner/requests/chat_prompts.h has of a batch line: JSON bytes, a prompt or an error; whether the line ended the process)."""
        try:
            return self._ask(line), False
        except WorkerEnded as ended:
            code, said = ended.args
            if code == 2 and said:
                raise BadTemplate(said.splitlines()[-1]) from None
            how = f"took more than {_CHAT_SECONDS} s of computing" if code == -signal.SIGPROF else "ended the process that renders it"
            return chat_error(f"the chat template {how} on this line"), True

    def _asked(self, process, question):
        process.stdin.write(struct.pack("<I", len(question)) + question)
        process.stdin.flush()
        (size,) = struct.unpack("<I", process.stdout.read(4))
        entry = process.stdout.read(size)
        if len(entry) < size:
            raise ValueError("torn")
        return entry


def chat_error(message):
    return json.dumps({"error": message, "param": "messages", "code": "chat_template_error"}).encode()


def _reason(process):
    """(return code, its words) of a process that has ended, or makes no sense and is ended now."""
    process.stdout.close()
    try:
        process.stdin.close()
    except OSError:
        pass  # what it did not take any more
    said = b"" if process.stderr is None else process.stderr.read()
    code = process.wait()
    if process.stderr is not None:
        process.stderr.close()
    return code, said.decode(errors="replace").strip()


def _end(process):
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:
            pass
