"""Packages of PyPI for the commands that need some: each command has an environment of its own, made when it is first used."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from ..shared.files import remove_tree
from ..shared.paths import ROOT, cache_folder, is_bundle
from ..shared.trouble import OUTPUT, Refusal, say, shown


def folder_of(name, variable):
    """Where the environment of that name is; an environment variable may say so."""
    ours = cache_folder() / name if is_bundle() else ROOT / "build" / name
    return Path(os.environ.get(variable) or ours)


def interpreter(folder, needs, what, examples):
    """The interpreter of `folder`, which has the packages that the file `needs` lists. It is made the first time, and again when the list
    or the Python that runs us has changed.
    """
    wanted = hashlib.sha256(needs.read_bytes() + sys.version.encode()).hexdigest()
    mark = folder / "installed"
    try:
        if mark.read_text() == wanted:
            return folder / "bin" / "python"
    except OSError:
        pass
    say(f"installing {what} into {shown(folder)} ({examples}, from PyPI; once)")
    remove_tree(folder)
    for words in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-r", str(needs)],
    ):
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode:
            last = (ended.stderr.strip() or ended.stdout.strip() or "it gave no reason").splitlines()[-1]
            hint = "; Debian: apt-get install python3-venv" if "ensurepip" in ended.stdout + ended.stderr else ""
            raise Refusal(f"{what} cannot be installed: {shown(last)}{hint}")
    try:
        mark.write_text(wanted)
    except OSError as problem:
        raise Refusal(f"{shown(mark)} cannot be written: {problem.strerror}", OUTPUT) from None
    return folder / "bin" / "python"
