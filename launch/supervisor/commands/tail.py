"""`poise tail`: the result lines of a run, as they are finished."""

import os
import sys
import time
from collections import deque
from pathlib import Path

from ..lifecycle.run_directory import RunDirectory
from ..shared.options import parser
from ..shared.quantities import count
from ..shared.trouble import DONE, Refusal

_LOOK = 0.1  # seconds


def tail(words):
    made = parser("tail", "Prints the last result lines of a run, and each further one as soon as it is finished, until the run ends.")
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("-n", "--lines", type=lambda text: count(text, 0), default=10, metavar="N", help="of those that are there (default: 10)")
    made.add_argument("--all", action="store_true", help="all that are there")
    made.add_argument("--no-follow", action="store_true", help="only what is there")
    given = made.parse_args(words)
    directory = RunDirectory(Path(given.run))
    directory.require_a_run()
    results = _Results(directory)
    there = list(results.further()) if given.all else deque(results.further(), maxlen=given.lines)
    _print(there)
    if results.file is None and not directory.lives():
        raise Refusal(f"{directory.path}: no result is there yet, and no process works on the run")
    while not given.no_follow:
        lives = directory.lives()  # asked first: what comes before the end is printed
        _print(results.further())
        if not lives:
            break
        time.sleep(_LOOK)
    return DONE


def _print(lines):
    for line in lines:
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


class _Results:
    """The whole lines of the results, wherever they are by now: the planner renames its file, and a resumed run makes it anew."""

    def __init__(self, directory):
        self._directory = directory
        self._seen, self._rest = 0, b""
        self.file, self._is_partial = None, False

    def further(self):
        path, is_partial = self._path()
        if path and (self.file is None or os.fstat(self.file.fileno()).st_ino != os.stat(path).st_ino):
            yield from self._read()
            # Behind published results a partial file is another run's, which overwrites them.
            skipped = 0 if is_partial and self.file and not self._is_partial else self._seen
            self._is_partial = is_partial
            self.file, self._rest, self._seen = open(path, "rb"), b"", 0
            for line in self._read():
                if self._seen > skipped:
                    yield line
        else:
            yield from self._read()

    def _path(self):
        partial = self._directory.path / "results.jsonl.partial"
        published = self._directory.published()
        path = next((path for path in (partial, published) if path and os.path.exists(path)), None)
        return path, path == partial

    def _read(self):
        while self.file and (block := self.file.read(1 << 20)):
            *whole, self._rest = (self._rest + block).split(b"\n")
            for line in whole:
                self._seen += 1
                yield line + b"\n"
