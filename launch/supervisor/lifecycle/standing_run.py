"""The run that a directory holds while another attempt begins there. An attempt writes facts of its own long before it is known whether
it belongs there; if it ends without having changed the run, the run's facts are put back. Those of a finished run are noted in a file,
too: the next attempt puts them back behind a supervisor that was killed."""

import contextlib
import json
import os

from ..shared.files import parsed_json, publish_file, remove
from ..shared.trouble import DONE, INTERRUPTED, OUTPUT, Refusal
from . import chat_prompts
from .moments import FILE as TIMES
from .run_directory import FACTS, FINISHED, KEPT, KEPT_ASIDE, STANDING, STATUS, UNFINISHED


class StandingRun:
    """Made before the attempt writes anything. `end` is called once, whatever came of the attempt."""

    def __init__(self, directory):
        self._directory = directory
        self.state = directory.state()
        self._is_noted = False
        self._publication = directory.publication()
        noted = directory.noted()
        self._facts = {name: _bytes(noted.get(name)) if noted else self._read(name) for name in FACTS}
        if not noted or self._put_all_back():
            self._forget()
        self.record, self.status = parsed_json(self._facts["run.json"]), parsed_json(self._facts[STATUS])

    def note(self):
        """Before the attempt writes anything of its own."""
        if self.state == FINISHED and not self._is_noted:
            facts = {name: _text(content) for name, content in self._facts.items()}
            self._directory.write(STANDING, json.dumps({"version": 1, "publication": self._publication, "facts": facts}) + "\n", durable=True)
            self._is_noted = True

    def set_aside(self, name):
        """Just before the attempt replaces or removes a file of KEPT_ASIDE. A rename: there need not be room for a copy, nor hard links."""
        self.note()
        kept = self._directory.path / (name + KEPT)
        if self.state == FINISHED and not os.path.lexists(kept):
            with contextlib.suppress(FileNotFoundError):
                publish_file(self._directory.path / name, kept)

    def stands(self, code):
        """Whether the run is the one it was, behind an attempt that ended with `code`."""
        if self._directory.state() != self.state:
            return False
        if self.state == FINISHED:  # an attempt that begins anew removes the publication first, once its planner can begin
            return self._directory.publication() == self._publication
        return self.state == UNFINISHED and not self._was_taken_up(code)

    def was_done(self):
        """After an attempt that found the run finished: puts back what the run's own work was like."""
        if self.status.get("state") == "done":
            self._put_back(STATUS, TIMES)

    def end(self, code):
        if code != DONE and self.stands(code) and not self._put_all_back():
            return  # the next attempt tries again, with what is noted
        self._forget()

    def _was_taken_up(self, code):
        """Whether the attempt's planner has gone on with the results: it does so as soon as it knows the model, unless it refuses. With
        other codes it may have refused, unless it has come to an iteration."""
        if self._read(STATUS) == self._facts[STATUS]:
            return False
        status = self._directory.status_of(self._directory.record().get("run_id"))
        knows_the_model = code in (DONE, INTERRUPTED, OUTPUT) and "model" in (status.get("moments") or {})
        return knows_the_model or status.get("iteration", 0) > 0

    def _put_all_back(self):
        """Whether all of it is back."""
        whole = self._put_back(*self._facts)
        if self.state == FINISHED:
            chat_prompts.forget(self._directory.path)
            for name in KEPT_ASIDE:
                try:
                    publish_file(self._directory.path / (name + KEPT), self._directory.path / name)
                except FileNotFoundError:
                    pass  # it was not set aside
                except OSError:
                    whole = False
        return whole

    def _forget(self):
        """The note last: behind a kill in between, what is left is still known to be of this run."""
        for name in KEPT_ASIDE:
            remove(self._directory.path / (name + KEPT))
        remove(self._directory.path / STANDING)

    def _put_back(self, *names):
        """Whether they are back."""
        whole = True
        for name in names:
            before = self._facts[name]
            if before is None:
                remove(self._directory.path / name)
            elif self._read(name) != before:
                try:
                    self._directory.write(name, _text(before), durable=True)  # before the note goes
                except Refusal:
                    whole = False
        return whole

    def _read(self, name):
        try:
            return (self._directory.path / name).read_bytes()
        except OSError:
            return None


def _text(content):
    return None if content is None else content.decode("utf-8", "surrogateescape")


def _bytes(text):
    return None if text is None else text.encode("utf-8", "surrogateescape")
