"""Packages of PyPI for the commands that need some: each command has an environment of its own, made when it is first used."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from ..shared.files import remove, remove_tree
from ..shared.paths import ROOT, cache_folder, is_bundle
from ..shared.trouble import OUTPUT, Refusal, of_system, say, shown
from .locks import Lock

_LOOK = 0.2  # seconds


def environment(name, variable, needs, what, examples):
    """The folder of an environment with the packages that the file `needs` lists. It is made the first time, for each Python and each
    list: its name says for which. An environment variable may name a folder instead, which is made again where it is of another."""
    folder, digest = _place(name, variable, needs)
    if not _is_there(folder, digest):
        lock = _locked(folder, what)
        try:
            if not _is_there(folder, digest):  # nor made by whom we waited for
                _make(folder, digest, needs, what, examples)
        finally:
            remove(lock.path)
            lock.give_back()
    return folder


def there(name, variable, needs):
    """The folder of that environment if it has been made; else None."""
    folder, digest = _place(name, variable, needs)
    return folder if _is_there(folder, digest) else None


def _place(name, variable, needs):
    digest = hashlib.sha256(needs.read_bytes() + sys.version.encode()).hexdigest()
    ours = cache_folder() if is_bundle() else ROOT / "build"
    return Path(os.environ.get(variable) or ours / f"{name}-{digest[:12]}"), digest


def _is_there(folder, digest):
    try:
        return (folder / "installed").read_text() == digest
    except OSError:
        return False


def _locked(folder, what):
    """Two commands may need it at the same time; the second one waits."""
    path, waits = folder.with_name(f"{folder.name}.lock"), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := Lock.take(path)) is None:
            if not waits:
                say(f"another command installs {what} into {shown(folder)}; waiting for it")
            waits = True
            time.sleep(_LOOK)
    except OSError as problem:
        raise of_system(problem) from None
    return lock


def _make(folder, digest, needs, what, examples):
    try:
        import ensurepip  # noqa: F401  # pylint: disable=unused-import,import-outside-toplevel
    except ImportError:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise Refusal(f"{what} cannot be installed: this Python has no ensurepip; Debian: apt-get install {python}-venv") from None
    say(f"installing {what} into {shown(folder)} ({examples}, from PyPI; once)")
    remove_tree(folder)
    for words in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-r", str(needs)],
    ):
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode:
            last = (ended.stderr.strip() or ended.stdout.strip() or "it gave no reason").splitlines()[-1]
            raise Refusal(f"{what} cannot be installed: {shown(last)}")
    mark = folder / "installed"
    try:
        mark.write_text(digest)
    except OSError as problem:
        raise Refusal(f"{shown(mark)} cannot be written: {problem.strerror}", OUTPUT) from None
