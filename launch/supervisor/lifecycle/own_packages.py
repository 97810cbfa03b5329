"""Packages of PyPI for the commands that need some: each command has an environment of its own, made when it is first used."""

import contextlib
import hashlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from ..shared.files import remove, remove_tree
from ..shared.paths import ROOT, cache_folder, is_bundle
from ..shared.trouble import INTERRUPTED, OUTPUT, Refusal, of_system, say, shown
from .locks import Lock

_LOOK = 0.2  # seconds
_GOES = 5.0  # seconds for an installation to end that was told to
_INSTALLER = Path(__file__).with_name("installer.py")
_MOST_SAID = 1 << 20


def environment(name, variable, needs, what, examples, interrupts=None):
    """The folder of an environment with the packages that the file `needs` lists. It is made the first time, for each Python and each
    list: its name says for which. An environment variable may name a folder instead, which is made again where it is of another.
    `interrupts`: of a command that counts its signals; the first one ends an installation, and this with INTERRUPTED."""
    folder, digest = _place(name, variable, needs)
    if not _is_there(folder, digest):
        lock = _locked(folder, what, interrupts)
        try:
            if not _is_there(folder, digest):  # nor made by whom we waited for
                _make(folder, digest, needs, what, examples, interrupts)
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


def _locked(folder, what, interrupts):
    """Two commands may need it at the same time; the second one waits."""
    path, waits = folder.with_name(f"{folder.name}.lock"), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := Lock.take(path)) is None:
            if not waits:
                say(f"another command installs {what} into {shown(folder)}; waiting for it")
            waits = True
            _heed(interrupts, what)
            time.sleep(_LOOK)
    except OSError as problem:
        raise of_system(problem) from None
    return lock


def _heed(interrupts, what):
    if interrupts and interrupts.count:
        raise Refusal(f"interrupted before {what} was installed; nothing else was started: start it again", INTERRUPTED)


def _make(folder, digest, needs, what, examples, interrupts):
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
        code, said = _installer(words, what, interrupts)
        if code:
            last = (said.strip() or "it gave no reason").splitlines()[-1]
            raise Refusal(f"{what} cannot be installed: {shown(last)}")
    mark = folder / "installed"
    try:
        mark.write_text(digest)
    except OSError as problem:
        raise Refusal(f"{shown(mark)} cannot be written: {problem.strerror}", OUTPUT) from None


def _installer(words, what, interrupts):
    """(exit code, what it said) of a command. It ends, with all that it started, with us, however we end, and when we are interrupted."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)  # its end of file tells installer.py
    said = os.memfd_create("installer", os.MFD_CLOEXEC)
    process = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-s", str(_INSTALLER), str(read_end), *words],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[read_end], start_new_session=True,
        )  # fmt: skip
        os.close(read_end)
        read_end = -1
        descriptor = os.pidfd_open(process.pid)
        try:
            waiting = [descriptor] + ([interrupts.descriptor] if interrupts else [])
            while process.poll() is None:
                _heed(interrupts, what)
                select.select(waiting, [], [], _LOOK)
                if interrupts:
                    interrupts.drain()
        finally:
            os.close(descriptor)
        return process.returncode, os.pread(said, _MOST_SAID, 0).decode(errors="replace")
    finally:
        os.close(write_end)
        if process and process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GOES)
            process.kill()
            process.wait()
        for descriptor in (read_end, said):
            if descriptor >= 0:
                os.close(descriptor)
