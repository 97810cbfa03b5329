"""Decides which process of a living run is replaced: one that died, as long as `--restarts` allows, or one that `poise restart`
names. The supervisor then starts another one in its place (supervision.py).

`poise restart` (commands/restart.py) writes RUN/restart.SERIAL.json and sends SIGUSR1 to the supervisor, which answers in
RUN/restarted.json. That file keeps the last answers, because several commands may ask at once. A planner is asked to hand
over (SIGUSR1): it ends at the next iteration boundary and leaves a journal, with which the next planner continues. With
`kill` it is killed, and unfinished requests are computed again. An executor finishes the orders it has. A loader leaves its
segments, weights and context in them, to the next one, which adopts them. Killed or not, nothing is
read again once the weights were whole; before that the run begins anew (supervision.py).
"""

import json
import signal
import time

from ..shared.files import read_json, remove
from ..shared.paths import EXECUTOR, LOADER, PLAIN_NAMES, PLANNER
from ..shared.trouble import DEVICE_FAILED, HANDED_OVER, INTERRUPTED

ASKED, ANSWER = "restart.{}.json", "restarted.json"
_ANSWERS = 16  # kept for commands that have not read theirs yet
_PATIENCE = 10.0  # seconds for an executor to finish what it has, and for a loader
_PROGRAMS = {PLAIN_NAMES[name]: name for name in (LOADER, PLANNER, EXECUTOR)}
_HAND_OVER = (LOADER, PLANNER)


class Restarts:
    """`spare`: how many processes that die without having been asked to are replaced as well."""

    def __init__(self, directory, spare=0):
        self._directory = directory
        self._spare = spare
        self._child = None  # the one being replaced
        self._serials = []  # of the requests for it
        self._answers = {}
        self._pids = {}  # plain name: all processes that replaced another
        self._since = 0.0
        self._killed = False

    def begin(self, children):
        """Reads the requests and begins to carry them out; answers those that cannot be."""
        for path in sorted(self._directory.path.glob(ASKED.format("*"))):
            asked = read_json(path)
            remove(path)
            self._begin(asked, asked.get("serial"), children)

    def _begin(self, asked, serial, children):
        name = _PROGRAMS.get(asked.get("what"))
        child = next((child for child in children if child.name == name), None)
        if child is None:
            self._answer([serial], refused=f"the run has no {asked.get('what')} yet: ask again in a moment")
            return
        if self._child is not None and self._child is not child:
            self._answer([serial], refused=f"the {self._child.plain_name} is being restarted just now: ask again after that")
            return
        if self._child is None:
            self._child, self._since = child, time.monotonic()
        self._serials.append(serial)
        if asked.get("kill"):
            self._kill()
        else:
            child.signal(signal.SIGUSR1 if name in _HAND_OVER else signal.SIGTERM)

    def hurry(self):
        """Kills an executor or a loader that has not ended in time. A planner is given time: an iteration can be long."""
        late = time.monotonic() - self._since > _PATIENCE
        if self._child and self._child.name != PLANNER and late and not self._killed:
            self._kill()

    def _kill(self):
        self._killed = True
        self._child.signal(signal.SIGKILL)

    def pending(self):
        return self._child is not None

    def happened(self):
        return bool(self._pids)

    def replaceable(self, ended, searching=False):
        """`ended`, if all of these processes are to be replaced; [] if the run is over. `searching`: the planner looks for a request
        that kills executors, and each death brings it nearer; these deaths are not counted."""
        if not self.has_spare(ended, searching) or not all(self._may_be_replaced(child) for child in ended):
            return []
        self._spare -= self._counted(ended, searching)
        return ended

    def has_spare(self, children, searching=False):
        """Whether so many may be replaced."""
        return self._counted(children, searching) <= self._spare

    def _counted(self, children, searching):
        return sum(child is not self._child and not (searching and child.name == EXECUTOR) for child in children)

    def _may_be_replaced(self, child):
        code = child.returncode()
        if child is self._child:
            return code < 0 or code in ((HANDED_OVER,) if child.name in _HAND_OVER else (0, INTERRUPTED))
        return code < 0 or code == DEVICE_FAILED

    def asked_for(self, child):
        """Whether it was asked to end."""
        return child is self._child

    def replaced(self, old, new):
        """Notes the replacement and answers the requests for it; false if it was not asked for."""
        self._pids.setdefault(new.plain_name, []).append(new.pid)
        if old is not self._child:
            self._answer([])
            return False
        self._answer(self._serials, pid=new.pid, seconds=time.monotonic() - self._since, killed=self._killed)
        self._forget()
        return True

    def ended_with_all(self, children):
        """These were ended without being replaced: the run begins anew. Answers requests for one of them."""
        if self._child in children:
            self._answer(self._serials, refused=f"the run begins anew just now, with another {self._child.plain_name}")
            self._forget()

    def _forget(self):
        self._child, self._serials, self._killed = None, [], False

    def _answer(self, serials, **facts):
        self._answers |= {str(serial): facts for serial in serials}
        self._answers = dict(list(self._answers.items())[-_ANSWERS:])
        self._directory.write(ANSWER, json.dumps({**facts, "answers": self._answers, "pids": self._pids}))
