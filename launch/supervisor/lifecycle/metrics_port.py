"""`run --metrics-port`: a process beside those of the run that shows Prometheus how far it is (launch/server/watch.py).

It only reads. If it dies, another one takes its place, a few times; the run does not depend on it.
"""

import select
import signal

from ..shared.trouble import Refusal, say
from . import front, processes
from .supervision import DeathPipe, Supervision

_ADDRESS = "127.0.0.1"
_MOST = 5  # of them in a run
_LATE = 5.0  # seconds more than it may linger


class MetricsPort:
    """Where a run's metrics are, if anywhere."""

    def __init__(self, given):
        self._given = given
        self._listener = self._interpreter = None

    @classmethod
    def of(cls, given):
        port = cls(given)
        if given.metrics_port is None:
            if given.metrics_linger is not None:
                raise Refusal("--metrics-linger goes with --metrics-port")
            return port
        port._listener = front.listening(_ADDRESS, given.metrics_port, "--metrics-port")
        port._interpreter = front.python()
        return port

    def supervision(self, arguments, interrupts, line, loader):
        if self._listener is None:
            return Supervision(arguments, interrupts, line, loader)
        say(f"metrics at http://{_ADDRESS}:{self._listener.getsockname()[1]}/metrics")
        return _WatchedSupervision(arguments, interrupts, line, loader, self._listener, self._interpreter)

    def close(self):
        if self._listener is not None:
            self._listener.close()


class _WatchedSupervision(Supervision):
    def __init__(self, arguments, interrupts, line, loader, listener, interpreter):
        super().__init__(arguments, interrupts, line, loader)
        self._listener = listener
        self._interpreter = interpreter
        self._left = _MOST
        self._own_pipe = DeathPipe()  # it outlives the others

    def _run(self):
        self._start_watch()
        return super()._run()

    def _start_watch(self):
        arguments, given = self._arguments, self._arguments.given
        settings = {
            "kind": "run", "run_dir": str(arguments.directory.path), "run_id": arguments.run_id, "names": [given.served_model_name or given.model],
            "listen_fd": self._listener.fileno(), "death_fd": self._own_pipe.read_end, "linger": given.metrics_linger or 0.0,
        }  # fmt: skip
        inherited = [self._listener.fileno(), self._own_pipe.read_end, *arguments.inherited_locks()]
        # A run may have ended before that process waits for signals: SIGTERM then waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self._beside = [front.Front(self._interpreter, settings, inherited)]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._left -= 1

    def _attend(self):
        if self._beside and self._beside[0].returncode() is not None:
            own = self._beside.pop()
            self._arguments.keep_words(own)
            own.close()
            if self._left > 0:
                self._start_watch()

    def _end_all(self):
        """The last counts can be read as long as it lingers, and only if the run has come to its end."""
        try:
            super()._end_all()
        finally:
            lingers = 0.0 if self._interrupts.count else self._arguments.given.metrics_linger or 0.0
            if self._beside:
                self._end_watch(lingers + _LATE if lingers else 0.0)
            self._own_pipe.close()

    def _end_watch(self, seconds):
        own = self._beside.pop()
        if own.returncode() is None:
            own.signal(signal.SIGTERM if seconds else signal.SIGKILL)
            self._interrupts.drain()
            patience = 0.0 if self._interrupts.count else seconds
            if own.descriptor not in select.select([own.descriptor, self._interrupts.descriptor], [], [], patience)[0]:
                own.signal(signal.SIGKILL)
                processes.wait_gone([own.descriptor], 10)
        own.returncode()
        self._arguments.keep_words(own)
        own.close()
