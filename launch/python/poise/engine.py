"""The programs that answer, started once: `poise serve --front`, whose front is this process.

planner/links/front_link.h has the messages. A planner that starts, because the one before it died, gets all open requests again and
computes the same answers.
"""

import collections
import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import weakref

import zmq

from . import programs

_protocol = programs.shared("planner_protocol")

_LONGEST_SOCKET = 107  # bytes of a Unix socket's path
_AT_ONCE = 256  # requests that are read before they are sent
_ENDS_WITHIN = 30.0  # seconds


class EngineError(RuntimeError):
    """The programs could not start, or have ended: one sentence."""


class _Request(_protocol.OpenRequest):
    def __init__(self, place, line, chat_entry, finished):
        super().__init__(line, chat_entry, place + 1)
        self._place, self._finished = place, finished

    def put(self, event):
        """A result line, or the EngineError that there is instead."""
        self._finished.put((self, self._place, event))


class _Link:
    """The planner's socket. One thread has it; others leave work for that thread."""

    def __init__(self, socket, ended, reason):
        """`ended`: the programs' pidfd. `reason()`: their last sentence."""
        self._socket, self._ended, self._reason = socket, ended, reason
        self._protocol = _protocol.PlannerProtocol(lambda peer, frames: socket.send_multipart([peer, *frames]))
        self._work = collections.deque()
        self._wakes, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._over = None  # the EngineError with which it ended
        self.greeted = queue.SimpleQueue()  # what became of the start: None or an EngineError
        threading.Thread(target=self._run, name="poise", daemon=True).start()

    @property
    def context(self):
        return self._protocol.facts["context"]

    def submit(self, requests):
        self._leave(lambda: self._protocol.submit(requests), requests)

    def cancel(self, requests):
        self._leave(lambda: self._protocol.cancel(requests), ())

    def close(self):
        """Ends the thread, and waits for that."""
        ended = threading.Event()
        if self._leave(lambda: self._end("this LLM is closed", ended), ()):
            ended.wait()

    def _leave(self, work, requests):
        """Whether the thread will do it. If it has ended, `requests` get its reason."""
        with self._lock:
            if self._over is None:
                self._work.append(work)
                os.write(self._woken, b"x")
                return True
        for request in requests:
            request.put(self._over)
        return False

    # ---- the thread

    def _run(self):
        try:
            self._serve()
        except Exception as problem:  # pylint: disable=broad-except
            self._end(f"a defect of poise: {type(problem).__name__}: {problem}")

    def _serve(self):
        poller = zmq.Poller()
        for one in (self._socket, self._ended, self._wakes):
            poller.register(one, zmq.POLLIN)
        while self._over is None:
            found = dict(poller.poll())
            if self._wakes in found:
                os.read(self._wakes, 4096)
            while self._work and self._over is None:
                self._work.popleft()()
            if self._over is None and self._socket in found:
                self._take_all()
            if self._over is None and self._ended in found:
                self._end(self._reason())

    def _take_all(self):
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            new = not self._protocol.facts
            self._protocol.take(peer, frames)
            if new and self._protocol.facts:
                self.greeted.put(None)

    def _end(self, reason, ended=None):
        if ended is not None:
            ended.set()
        if self._over is not None:
            return
        with self._lock:  # from here on nobody leaves work
            self._over = EngineError(reason)
            for one in (self._wakes, self._woken):
                os.close(one)
        for work in self._work:
            work()  # what it brings is among the open requests then
        self._socket.close()
        self.greeted.put(self._over)
        for request in list(self._protocol.open.values()):
            request.put(self._over)


class Engine:
    """Any thread may ask."""

    def __init__(self, words, verbose):
        """`words`: options of `poise serve`."""
        self._folder = folder = _short_folder()
        socket = os.path.join(folder, "front.sock")
        context = zmq.Context()
        bound = context.socket(zmq.ROUTER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            bound.setsockopt(option, 0)  # bounded by the requests that are open
        bound.bind(f"ipc://{socket}")
        said = None if verbose else tempfile.TemporaryFile()
        process = subprocess.Popen(
            programs.poise("serve", "--front", socket, "--run-dir", os.path.join(folder, "run"), *words),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            env={**os.environ, "POISE_COMMAND": os.environ.get("POISE_COMMAND", "poise")},
        )  # fmt: skip
        ended = os.pidfd_open(process.pid)
        self._link = _Link(bound, ended, lambda: _reason(process, said))
        self.close = weakref.finalize(self, _end, os.getpid(), self._link, process, context, ended, folder)  # at the interpreter's exit, too
        try:
            problem = self._link.greeted.get()
            if problem is not None:
                raise problem
        except BaseException:
            self.close()
            raise

    @property
    def context(self):
        """Tokens of prompt and answer together."""
        return self._link.context

    def answers(self, lines, window):
        """(place, result line) of each (place, batch line, rendered chat prompt or None) as they are finished; at most `window` are open."""
        lines = iter(lines)
        finished, opened = queue.SimpleQueue(), set()
        try:
            more = True
            while more or opened:
                while more and len(opened) < window and finished.empty():
                    part = [_Request(place, line, entry, finished) for place, line, entry in itertools.islice(lines, min(_AT_ONCE, window - len(opened)))]
                    more = bool(part)
                    opened.update(part)
                    self._link.submit(part)
                if opened:
                    request, place, line = finished.get()
                    opened.discard(request)
                    if isinstance(line, EngineError):
                        self.close()
                        raise EngineError(*line.args)
                    yield place, line
        finally:
            if opened:
                self._link.cancel(list(opened))

    def model_folder(self):
        """Where the model lies; it may have been named by its name on the hub."""
        with open(os.path.join(self._folder, "run", "run.json"), encoding="utf-8") as file:
            return json.load(file)["model"]


def _reason(process, said):
    """The last sentence of programs that have ended."""
    code = process.wait()
    if code < 0:
        return f"poise was ended by {signal.Signals(-code).name}"
    if said is None:
        return f"poise has ended with {code}; it has said why on stderr"
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.startswith("poise: ")]
    return lines[-1].removeprefix("poise: ") if lines else f"poise has ended with {code} and gave no reason"


def _short_folder():
    folder = tempfile.mkdtemp(prefix="poise-")
    if len(os.fsencode(folder)) + len("/front.sock") <= _LONGEST_SOCKET:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="poise-", dir="/tmp")


def _end(owner, link, process, context, ended, folder):
    """Closes the programs' stdin, at which they end; waits for that."""
    if os.getpid() != owner:
        return  # a fork: the programs are its parent's
    link.close()
    process.stdin.close()
    try:
        process.wait(_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.close(ended)
    context.term()
    until = time.monotonic() + (_ENDS_WITHIN if process.returncode < 0 else 0)
    while True:  # the children of a supervisor that was killed end by themselves, and write until then
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder) or time.monotonic() >= until:
            return
        time.sleep(0.02)
