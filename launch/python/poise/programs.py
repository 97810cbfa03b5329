"""Where the programs and the supervisor lie: in an installed package beside this file, else in the checkout around it."""

import importlib.util
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


def shared(name):
    """A module that the server has, too: a file of launch/server that needs the standard library alone."""
    whole = f"{__package__}._{name}"
    if whole not in sys.modules:
        spec = importlib.util.spec_from_file_location(whole, ROOT / "launch" / "server" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[whole] = module
    return sys.modules[whole]


def lm_eval():
    """The command `poise-lm-eval` of an installed package."""
    try:
        from .lm_eval import main as evaluate
    except ModuleNotFoundError as missing:
        raise SystemExit(f"poise-lm-eval: the package {missing.name} is not there; pip install 'poise[lm-eval]' brings it") from None
    evaluate()


def main():
    """The command `poise` of an installed package."""
    os.environ.setdefault("POISE_COMMAND", "poise")
    words = poise(*sys.argv[1:])
    os.execv(words[0], words)
