"""Where the programs and the supervisor lie: in an installed package beside this file, else in the checkout around it."""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT = _HERE / "programs" if (_HERE / "programs" / "bundle.json").exists() else _HERE.parents[2]


def planner():
    ours = ROOT / "bin" if (ROOT / "bundle.json").exists() else ROOT / "build" / "release" / "bin"
    return str(Path(os.environ.get("POISE_BIN") or ours) / "poise-planner")


def poise(*words):
    """The command line of `poise WORDS`."""
    return [sys.executable, "-s", str(ROOT / "launch" / "start.py"), *map(str, words)]


def main():
    """The command `poise` of an installed package."""
    os.environ.setdefault("POISE_COMMAND", "poise")
    words = poise(*sys.argv[1:])
    os.execv(words[0], words)
