"""A server's processes: those of a run, and the front (front.py) beside them.

Or the front is the program that started the server (`--front`). One of ours that dies is replaced; what its clients waited for is lost with their connections, and the planner drops it. If another process dies,
the front keeps the requests and sends them again. The first interrupt lets open requests finish, the second ends everything at once.
"""

import os
import select
import signal
import time

from ..shared.options import orders_log_arguments, planner_arguments
from ..shared.paths import profile_folder
from ..shared.progress import ProgressLine
from ..shared.trouble import DONE, INTERRUPTED, say
from . import front, processes, segments
from .children import own_sentence
from .process_arguments import ProcessArguments
from .supervision import Outcome, Supervision

_MOST_FRONTS, _WITHIN = 5, 60.0  # so many fronts may die in so many seconds
_MORE_DRAINING = 5.0  # seconds, after which a front that drains is killed


class ServeArguments(ProcessArguments):
    """As of a run, but requests come over a socket."""

    def __init__(self, directory, given, url):
        super().__init__(directory, given)
        self.url = url

    def record(self):
        return {**super().record(), "url": self.url}

    @property
    def front_socket(self):
        if self.given.front:
            return os.path.abspath(self.given.front)
        return self.executor_socket.with_name("front.sock")

    def planner_arguments(self, takes_over=False):
        given = self.given
        words = [*self.planner_links(), "--model", given.model, "--front-socket", self.front_socket, *planner_arguments(given)]
        words += ["--profile-dir", profile_folder(), *orders_log_arguments(given), *self._grammar_arguments()]
        return words + (["--takes-over"] if takes_over else [])

    def progress_text(self, control):
        status = self.directory.status_of(self.run_id)
        if control.loader_state == segments.SEALED and status.get("state") == "running":
            running, waiting = status.get("running", 0), status.get("waiting", 0)
            return f"{status.get('done', 0)} answered, {running} running, {waiting} waiting"
        return super().progress_text(control)


class ServeLine(ProgressLine):
    """Where it cannot be redrawn, a server's progress is not printed: its log would have a line every 5 s for ever."""

    def show(self, text):
        if self.terminal:
            super().show(text)
        else:
            self._last = time.monotonic()


class ServeSupervision(Supervision):
    def __init__(self, arguments, interrupts, line, loader, listener, interpreter, version):
        super().__init__(arguments, interrupts, line, loader)
        self._listener = listener
        self._interpreter = interpreter
        self._version = version
        self._fronts_died = 0
        self._died_lately = []  # when
        self._draining_since = None
        self._told = False

    def _run(self):
        self._start_front()
        return super()._run()

    def _start_front(self):
        arguments = self._arguments
        death = self._death_pipe.read_end
        settings = front.settings_of(arguments.given, arguments, self._listener, death, self._version, self._fronts_died)
        inherited = [self._listener.fileno(), death, *arguments.inherited_locks()]
        self._beside = [front.Front(self._interpreter, settings, inherited)]

    def _attend(self):
        own = self._beside[0]
        if not self._told and self._own_status().get("state") == "running":
            self._told = True
            self._line.clear()
            say(f"serving at {self._arguments.url}")
        if own.returncode() is None or self._draining_since:
            return None
        now = time.monotonic()
        self._fronts_died += 1
        self._died_lately = [then for then in self._died_lately if now - then < _WITHIN] + [now]
        sentence = _why(own)
        self._arguments.keep_words(own)
        own.close()
        if len(self._died_lately) > _MOST_FRONTS:
            self._beside = []
            return Outcome(INTERRUPTED, f"{sentence}, {len(self._died_lately)} times within {_WITHIN:.0f} s")
        self._line.clear()
        say(f"{sentence}; another one goes on")
        self._start_front()
        return None

    def _obey_interrupts(self):
        if self._interrupts.count != 1 or not self._beside or self._deadline:
            return super()._obey_interrupts()
        now = time.monotonic()
        if self._draining_since is None:
            self._draining_since = now
            self._line.clear()
            say("stopping: open requests are being answered (interrupt again to end at once)")
            self._listener.close()
            self._beside[0].signal(signal.SIGTERM)
        if self._beside[0].returncode() is None and now < self._draining_since + self._arguments.given.drain_timeout + _MORE_DRAINING:
            return None
        return super()._obey_interrupts()

    def _end_all(self):
        for own in self._beside:
            if own.returncode() is None:
                own.signal(signal.SIGKILL)
            processes.wait_gone([own.descriptor], 10)
            own.returncode()
            self._arguments.keep_words(own)
            own.close()
        self._beside = []
        super()._end_all()


class _Owner:
    """The program that is the front, as supervision.py looks at processes beside the three: it has ended once our stdin has."""

    descriptor = 0

    def __init__(self):
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)
        self._ended = False

    def returncode(self):
        while not self._ended and self._poll.poll(0):
            self._ended = not os.read(self.descriptor, 4096)
        return 0 if self._ended else None


class OwnedSupervision(Supervision):
    """The processes work for the front that started them. Once it has ended, or has closed our stdin, all end at once: no one waits for answers."""

    def _run(self):
        self._beside = [_Owner()]
        return super()._run()

    def _attend(self):
        if self._beside[0].returncode() is None:
            return None
        self._killed_at_once = True
        return Outcome(DONE)

    def _end_all(self):
        self._beside = []
        super()._end_all()


def _why(own):
    """In a sentence, why a front ended that nobody had asked to."""
    code = own.returncode()
    if code < 0:
        return f"front {'was killed' if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) else 'crashed'}"
    last = own_sentence(own.name, own.said()) or next(iter(own.said().strip().splitlines()[-1:]), "")
    return f"front ended with {code}{f': {last}' if last else ''} (a defect of poise)"


def url_of(host, port):
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def key_of(given):
    return given.api_key if given.api_key is not None else os.environ.get("POISE_API_KEY") or None
