"""The run that a directory holds while another attempt begins there. An attempt writes facts of its own long before it is known whether
it belongs there; if it ends without having changed the run, the run's facts are put back."""

import contextlib
import os

from ..shared.files import publish_file, remove
from ..shared.trouble import DONE, INTERRUPTED, OUTPUT, Refusal
from . import chat_prompts
from .moments import FILE as TIMES
from .run_directory import FINISHED, KEPT, KEPT_ASIDE, STATUS, UNFINISHED

_RECORD = "run.json"


class StandingRun:
    """Made before the attempt writes anything. `end` is called once, whatever came of the attempt."""

    def __init__(self, directory):
        self._directory = directory
        self.state = directory.state()
        self._publication = self._publication_now()
        self._facts = {name: self._read(name) for name in (_RECORD, STATUS, TIMES)}
        self.record, self.status = directory.record(), directory.status()
        for name in KEPT_ASIDE:
            remove(directory.path / (name + KEPT))
            if self.state == FINISHED:
                with contextlib.suppress(OSError):
                    os.link(directory.path / name, directory.path / (name + KEPT))

    def stands(self, code):
        """Whether the run is the one it was, behind an attempt that ended with `code`."""
        if self._directory.state() != self.state:
            return False
        if self.state == FINISHED:  # an attempt that begins anew first removes the publication
            return self._publication_now() == self._publication
        return self.state == UNFINISHED and not (code in (DONE, INTERRUPTED, OUTPUT) and self._was_taken_up())

    def was_done(self):
        """After an attempt that found the run finished: puts back what the run's own work was like."""
        if self.status.get("state") == "done":
            self._put_back(STATUS, TIMES)

    def end(self, code):
        if code != DONE and self.stands(code):
            self._put_back(*self._facts)
            if self.state == FINISHED:
                chat_prompts.forget(self._directory.path)
                for name in KEPT_ASIDE:
                    with contextlib.suppress(OSError):
                        publish_file(self._directory.path / (name + KEPT), self._directory.path / name)
        for name in KEPT_ASIDE:
            remove(self._directory.path / (name + KEPT))

    def _was_taken_up(self):
        """Whether the attempt's planner has gone on with the results: it does so as soon as it knows the model, unless it refuses."""
        changed = self._read(STATUS) != self._facts[STATUS]
        status = self._directory.status_of(self._directory.record().get("run_id"))
        return changed and "model" in (status.get("moments") or {})

    def _put_back(self, *names):
        for name in names:
            before = self._facts[name]
            if before is None:
                remove(self._directory.path / name)
            elif self._read(name) != before:
                with contextlib.suppress(Refusal):
                    self._directory.write(name, before.decode("utf-8", "surrogateescape"))

    def _read(self, name):
        try:
            return (self._directory.path / name).read_bytes()
        except OSError:
            return None

    def _publication_now(self):
        try:
            status = os.lstat(self._directory.path / "results.jsonl.published")
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
