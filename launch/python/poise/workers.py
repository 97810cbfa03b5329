"""Two small processes that answer one question at a time: the planner's tokenizer, and the renderer of chat templates."""

import json
import signal
import struct
import subprocess
import sys

from . import programs

_CHAT_SECONDS, _MOST_ENDED = 1.5, 8  # launch/supervisor/lifecycle/chat_worker.py has the bounds


class Tokens:
    """Texts to ids and back, as the planner does it."""

    def __init__(self, model):
        self._words = [programs.planner(), "encode", "--model", model]
        self._process = None
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
        if self._process is None:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        process, self._process = self._process, None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except BaseException:  # an interrupt, too: its answer must not become the next one's
            _end(process)
            raise
        self._process = process
        if isinstance(answer, dict):
            raise ValueError(answer["error"])
        return answer

    def close(self):
        if self._process is not None:
            _end(self._process)
            self._process = None


class ChatRenderer:
    """The prompts of chat lines, with the bounds that a run has (launch/README.md, Chat lines)."""

    def __init__(self, model):
        self._words = [sys.executable, "-s", str(programs.ROOT / "launch" / "server" / "chat_process.py"), model]
        self._process = None
        self._ended = 0  # lines that ended the process

    def entry(self, line):
        """What planner/requests/chat_prompts.h has of a batch line: JSON bytes, a prompt or an error."""
        if self._ended >= _MOST_ENDED:
            return _error("the chat template was ended on too many lines before this one")
        if self._process is None:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        process, self._process = self._process, None
        try:
            process.stdin.write(struct.pack("<I", len(line)) + line)
            process.stdin.flush()
            head = process.stdout.read(4)
            entry = process.stdout.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None
        except BrokenPipeError:
            entry = None
        except BaseException:
            _end(process)
            raise
        if entry is not None:
            self._process = process
            return entry
        return self._of_ended(process)

    def _of_ended(self, process):
        said = process.stderr.read().decode(errors="replace").strip()
        code = process.wait()
        _end(process)
        if code == 2 and said:  # the template itself is of no use
            raise ValueError(said.splitlines()[-1])
        self._ended += 1
        how = f"took more than {_CHAT_SECONDS} s of computing" if code == -signal.SIGPROF else "ended the process that renders it"
        return _error(f"the chat template {how} on this line")

    def close(self):
        if self._process is not None:
            _end(self._process)
            self._process = None


def _error(message):
    return json.dumps({"error": message, "param": "messages", "code": "chat_template_error"}).encode()


def _end(process):
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass  # what it did not take any more
