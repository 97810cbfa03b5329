"""The requests of a run: one plain file is read where it lies. Standard input, several files, patterns and packed files are
written into one file in the run directory first, which the planner reads and a resumed run finds again."""

import glob
import os
import select
import stat
import sys
from pathlib import Path

from ..shared.compressed import blocks_of, check_readable, kind_by_content
from ..shared.files import publish_file, remove
from ..shared.trouble import INTERRUPTED, Refusal, naming, shown
from . import inputs
from .run_directory import INPUT_NAMES

STDIN = "-"
_BLOCK = 1 << 20


class Sources:
    """What `-i` named. Refuses, before anything is made, what cannot be read."""

    def __init__(self, words):
        self.paths = [path for word in words for path in self._meant_by(word)]
        self.from_stdin = STDIN in self.paths
        if self.from_stdin and len(self.paths) > 1:
            raise Refusal("-i -: standard input is read alone; name it without other files")
        for path in [] if self.from_stdin else self.paths:
            inputs.check_input(path)
            check_readable(path)

    @staticmethod
    def _meant_by(word):
        if word == STDIN or os.path.lexists(word) or not glob.has_magic(word):
            return [word]
        found = sorted(path for path in glob.glob(word) if os.path.isfile(path))
        if not found:
            raise Refusal(f"-i {shown(word)}: no file matches this pattern")
        return found

    def plain(self):
        """The one file that can be read where it lies, or None."""
        if self.from_stdin or len(self.paths) > 1 or kind_by_content(self.paths[0]):
            return None
        return self.paths[0]

    def shown(self):
        """For `status` and messages."""
        return "standard input" if self.from_stdin else ", ".join(shown(path) for path in self.paths)

    def prepare(self, folder, interrupted=lambda: False, keep=False, set_aside=lambda name: None):
        """The path of the file that the planner reads. `keep`: of an unfinished run in `folder`, whose standard input is gone by now.
        `set_aside` is called with the name of a file in `folder` before it is replaced."""
        if self.plain():
            return self.plain()
        path, fresh = (Path(folder) / name for name in INPUT_NAMES)
        if self.from_stdin and keep:
            if not path.exists():
                raise Refusal(f"{shown(folder)} has no copy of standard input: the run read other files; name them with -i")
            return str(path)
        remove(fresh)
        try:
            with naming(fresh), open(fresh, "xb", buffering=0) as file:
                os.fchmod(file.fileno(), 0o600)
                self._write(file, interrupted)
            set_aside(path.name)
            publish_file(fresh, path)
        finally:
            remove(fresh)
        return str(path)

    def _write(self, file, interrupted):
        for source in self.paths:
            last = b"\n"
            for block in _stdin() if self.from_stdin else blocks_of(source):
                if interrupted():
                    raise Refusal("interrupted while the input was read; nothing was started", INTERRUPTED)
                if block:
                    _write_all(file, block)
                    last = block[-1:]
            if last != b"\n":  # the next file's first line is a line of its own
                _write_all(file, b"\n")


def _write_all(file, block):
    view = memoryview(block)
    while view:
        view = view[file.write(view) :]


def _stdin():
    """Blocks as they come; an empty one now and then while nothing comes, for the sake of Ctrl-C."""
    try:
        descriptor = sys.stdin.fileno()
        unfit = stat.S_ISDIR(os.fstat(descriptor).st_mode) or os.isatty(descriptor)
    except (AttributeError, OSError, ValueError):  # it was closed
        unfit = True
    if unfit:
        raise Refusal("-i -: standard input is no file and no pipe: end the command with `< requests.jsonl`")
    while True:
        if select.select([descriptor], [], [], 0.2)[0]:
            block = os.read(descriptor, _BLOCK)
            if not block:
                return
            yield block
        else:
            yield b""
