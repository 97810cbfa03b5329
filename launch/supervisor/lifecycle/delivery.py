"""Where a run's results go. The planner makes a plain file: the output itself, or for standard output and packed files one in the run
directory, which is delivered when it is whole."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from ..shared.compressed import kind_by_name, pack, require
from ..shared.files import publish_file, remove
from ..shared.trouble import OUTPUT, Refusal, brief, shown
from . import inputs
from .run_directory import OUTPUT_NAMES

STDOUT = "-"
_FOLDER = "stdout.poise"  # of the run, in the working directory


def run_folder(given):
    """The run directory, absolute."""
    beside = _FOLDER if given.output == STDOUT else f"{given.output}.poise"
    return Path(os.path.abspath(given.run_dir or beside))


class Delivery:
    def __init__(self, output, folder):
        """`folder`: the run directory."""
        self.output = output
        self._folder = folder
        self._kind = None if output == STDOUT else kind_by_name(output)
        self.later = output == STDOUT or self._kind is not None
        # The file that the planner makes.
        self.planners = str(Path(folder) / OUTPUT_NAMES[0]) if self.later else output
        if self._kind:
            require(self._kind)

    def check(self, given, directory, sources):
        """Before anything is made. `given.output` is the planner's by now."""
        for path in sources.paths[1:]:
            if os.path.exists(self.output) and os.path.samefile(path, self.output):
                raise Refusal(f"{shown(self.output)} is input and output at once: name another output")
        first = os.devnull if sources.from_stdin else sources.paths[0]
        if self.output != STDOUT:
            overwrite = given.overwrite or (self.later and given.resume)
            wanted = SimpleNamespace(output=self.output, input=first, overwrite=overwrite, resume=given.resume)
            inputs.check_output(wanted, directory)

    def begin(self, resumes, set_aside):
        """A run that begins anew makes its file anew. `set_aside` is called with the name of that file before it is removed."""
        if self.later and not resumes:
            set_aside(OUTPUT_NAMES[0])
            remove(self.planners)

    def called(self):
        return "standard output" if self.output == STDOUT else brief(self.output)

    def deliver(self, again, whole=None):
        """The whole results, to where they were wanted. `whole`: the file that has them, if that is not the planner's by now.
        `again`: the command that delivers them, if that fails now."""
        if not self.later:
            return
        try:
            with open(whole or self.planners, "rb") as source:
                if self.output == STDOUT:
                    self._to_stdout(source)
                else:
                    self._to_file(source)
        except OSError as problem:
            where = "" if self.output == STDOUT else f"{self.called()}: "
            raise Refusal(f"{where}{_why(problem)}; the results are safe in {brief(self._folder)}; deliver them with: {shown(again)}", OUTPUT) from None

    @staticmethod
    def _to_stdout(source):
        try:
            pack(None, source, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest again at its exit
            raise

    def _to_file(self, source):
        fresh = f"{self.output}.new"
        try:
            with open(fresh, "wb") as target:
                pack(self._kind, source, target)
            publish_file(fresh, self.output)
        finally:
            remove(fresh)


def _why(problem):
    if isinstance(problem, BrokenPipeError):
        return "whoever read standard output has closed it before the end"
    return f"the results cannot be delivered: {problem.strerror or problem}"
