"""Folders in the temporary directory that a command works in, `poise-COMMAND-…`. A command that is killed leaves its folder; the next
one removes it."""

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path

from ..shared.files import remove_tree
from ..shared.paths import is_private
from .locks import Lock, is_held

_NAME = re.compile(r"poise-(bench|demo|plan|profile|replay)-\w{8}")
_LOCK = "owner.lock"  # held while the command lives
_STARTS = 60  # seconds that a command may take from making the folder to taking its lock


@contextlib.contextmanager
def folder(command):
    """A new one, removed at the end."""
    path, lock = None, None
    while lock is None:  # again if another command swept it between the two
        path = Path(tempfile.mkdtemp(prefix=f"poise-{command}-"))
        with contextlib.suppress(FileNotFoundError):
            lock = Lock.take(path / _LOCK)
    try:
        yield path
    finally:
        remove_tree(path)
        lock.give_back()


def sweep():
    """Removes those of commands that were killed, once the processes of their runs have ended, too."""
    for path in Path(tempfile.gettempdir()).glob("poise-*-*"):
        if _NAME.fullmatch(path.name) and is_private(path):
            _sweep(path)


def _sweep(path):
    try:
        if not (path / _LOCK).exists() and time.time() - os.lstat(path).st_mtime < _STARTS:
            return
        lock = Lock.take(path / _LOCK)
    except OSError:  # gone by now
        return
    if lock is not None:
        if not any(is_held(children) for children in path.glob("*/children.lock")):
            remove_tree(path)
        lock.give_back()
