"""The programs that answer, started once: `poise serve --front`, whose front is this process.

planner/links/front_link.h has the messages. A planner that starts, because the one before it died, gets all open requests again and
computes the same answers.
"""

import collections
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref

import zmq

from . import programs

_LONGEST_SOCKET = 107  # bytes of a Unix socket's path
_LAST_ID = (1 << 32) - 1
_AT_ONCE = 256  # requests of a message
_ENDS_WITHIN = 30.0  # seconds


class EngineError(RuntimeError):
    """The programs could not start, or have ended: one sentence."""


class _Request:
    __slots__ = ("header", "frames", "finished")

    def __init__(self, number, line, chat_entry, place, finished):
        self.header = {"id": number, "line": place + 1, "stream": False, "chat": chat_entry is not None}
        self.frames = [line] if chat_entry is None else [line, chat_entry]
        self.finished = finished  # where its result goes


class Engine:
    """Any thread may ask; each call reads the socket for all of them."""

    def __init__(self, words, verbose):
        """`words`: options of `poise serve`."""
        self._lock = threading.RLock()
        self._front = secrets.token_hex(8)
        self._planner = self._peer = None
        self._open = {}
        self._next_id = 1
        self.context = 0  # tokens of prompt and answer together
        self._folder = folder = _short_folder()
        socket = os.path.join(folder, "front.sock")
        self._zmq = zmq.Context()
        self._socket = self._zmq.socket(zmq.ROUTER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)  # bounded by the requests that are open
        self._socket.bind(f"ipc://{socket}")
        self._said = None if verbose else tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            programs.poise("serve", "--front", socket, "--run-dir", os.path.join(folder, "run"), *words),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True,
            env={**os.environ, "POISE_COMMAND": os.environ.get("POISE_COMMAND", "poise")},
        )  # fmt: skip
        self._ended = os.pidfd_open(self._process.pid)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._ended, select.POLLIN)
        resources = (self._process, self._socket, self._zmq, self._ended, folder)
        self.close = weakref.finalize(self, _end, os.getpid(), *resources)  # at the interpreter's exit, too
        try:
            while self._peer is None:
                self._pump()
        except BaseException:
            self.close()
            raise

    def answers(self, lines, window):
        """(place, result line) of each (place, batch line, rendered chat prompt or None) as they are finished; at most `window` are open."""
        lines = iter(lines)
        finished, opened = collections.deque(), set()
        try:
            more = True
            while more or opened:
                while more and len(opened) < window and not finished:
                    part = list(itertools.islice(lines, min(_AT_ONCE, window - len(opened))))
                    more = bool(part)
                    opened |= self._submit(part, finished)
                with self._lock:
                    if opened and not finished:
                        self._pump()
                while finished:
                    number, place, line = finished.popleft()
                    opened.discard(number)
                    yield place, line
        finally:
            self._cancel(opened)

    def _submit(self, part, finished):
        with self._lock:
            requests = [_Request(self._number(), line, entry, place, finished) for place, line, entry in part]
            numbers = {request.header["id"] for request in requests}
            if requests:
                self._check_alive()
                self._send_requests(requests)
            return numbers

    def _number(self):
        while self._next_id in self._open:
            self._next_id = self._next_id % _LAST_ID + 1
        number = self._next_id
        self._next_id = number % _LAST_ID + 1
        self._open[number] = None
        return number

    def _cancel(self, numbers):
        if not numbers or not self.close.alive:
            return
        with self._lock:
            for number in numbers:
                self._open.pop(number, None)
            self._send({"cancel": sorted(numbers)})

    def model_folder(self):
        """Where the model lies; it may have been named by its name on the hub."""
        with open(os.path.join(self._folder, "run", "run.json"), encoding="utf-8") as file:
            return json.load(file)["model"]

    # ---- messages

    def _pump(self):
        """Waits until something came, and hands it out."""
        if not dict(self._poller.poll(1000)).get(self._socket):
            self._check_alive()
            return
        while True:
            try:
                peer, first, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._take(peer, json.loads(first), frames)

    def _take(self, peer, message, frames):
        if "planner" in message:
            self.context = message["context"]
            if (message["planner"], peer) != (self._planner, self._peer):
                anew = message["planner"] != self._planner
                self._planner, self._peer = message["planner"], peer
                self._send({"front": self._front})
                if anew:
                    self._send_requests([request for request in self._open.values() if request is not None])
        elif peer == self._peer:
            for event in message.get("events", ()):
                request = self._open.pop(event["id"], None) if "frame" in event else None
                if request is not None:
                    request.finished.append((event["id"], request.header["line"] - 1, frames[event["frame"] - 1]))

    def _send_requests(self, requests):
        self._open |= {request.header["id"]: request for request in requests}
        for begin in range(0, len(requests), _AT_ONCE):
            part = requests[begin : begin + _AT_ONCE]
            self._send({"submit": [request.header for request in part]}, [frame for request in part for frame in request.frames])

    def _send(self, message, frames=()):
        # A ROUTER never blocks here: what is for a planner that has gone is dropped, and the next one gets it again.
        if self._peer is not None:
            self._socket.send_multipart([self._peer, json.dumps(message).encode(), *frames])

    # ---- the process

    def _check_alive(self):
        if not self.close.alive:
            raise EngineError("this LLM is closed")
        if self._process.poll() is not None:
            reason = self._reason()
            self.close()
            raise EngineError(reason)

    def _reason(self):
        """Its last sentence."""
        if self._said is None:
            return f"poise has ended with {self._process.returncode}; it has said why on stderr"
        self._said.seek(0)
        lines = [line for line in self._said.read().decode(errors="replace").splitlines() if line.startswith("poise: ")]
        return lines[-1].removeprefix("poise: ") if lines else f"poise has ended with {self._process.returncode} and gave no reason"


def _short_folder():
    folder = tempfile.mkdtemp(prefix="poise-")
    if len(os.fsencode(folder)) + len("/front.sock") <= _LONGEST_SOCKET:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="poise-", dir="/tmp")


def _end(owner, process, socket, context, ended, folder):
    """Closes its stdin, at which it ends everything; waits for that."""
    if os.getpid() != owner:
        return  # a fork: the programs are its parent's
    process.stdin.close()
    try:
        process.wait(_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.close(ended)
    socket.close()
    context.term()
    shutil.rmtree(folder, ignore_errors=True)
