"""Which Python the planner starts for answers of a form (grammar_worker.py): one that has llguidance. A run without such lines needs none."""

import re
import sys
from pathlib import Path

from ..shared.trouble import INTERRUPTED, Refusal, say
from . import own_packages
from .front import SERVER

WORKER = Path(__file__).with_name("grammar_worker.py")
_NEEDS = SERVER / "grammar_requirements.txt"
# Text and null are no forms.
_NO_FORM = rb'"\s*:\s*(?:null|\{\s*"type"\s*:\s*"text"\s*\})'
_FIELDS = re.compile(rb"(?:response_format|structured_outputs)(?!" + _NO_FORM + rb")")
_BLOCK, _OVERLAP = 1 << 20, 128  # more than what _FIELDS looks at, but for much white space


def python_for(source, interrupts=None):
    """For the lines of a file: this Python or an environment, made if a line wants a form. None where none is needed or can be made."""
    if not _wants_one(source):
        return None
    return _this_one() or _made(interrupts)


def python_at_hand(interpreter=None):
    """For requests that are still to come. `interpreter`: of the front, which says by its being there that packages can be installed."""
    return _this_one() or (_made() if interpreter else _there())


def _this_one():
    return sys.executable if any((Path(folder) / "llguidance").is_dir() for folder in sys.path) else None


def _made(interrupts=None):
    try:
        return _python_in(own_packages.environment(*_ENVIRONMENT, interrupts))
    except Refusal as refusal:
        if refusal.code == INTERRUPTED:
            raise
        say(f"{refusal.sentence}; lines with response_format or structured_outputs get errors")
        return None


def _there():
    folder = own_packages.there(*_ENVIRONMENT[:3])
    return _python_in(folder) if folder else None


_ENVIRONMENT = ("grammar-venv", "POISE_GRAMMAR_VENV", _NEEDS, "what answers of a form need", "llguidance")


def _python_in(folder):
    return str(folder / "bin" / "python")


def _wants_one(source):
    with open(source, "rb") as file:
        text = b""
        while True:
            block = file.read(_BLOCK)
            text += block
            sure = max(len(text) - _OVERLAP, 0) if block else len(text)  # what follows these is known
            if any(found.start() < sure for found in _FIELDS.finditer(text)):
                return True
            if not block:
                return False
            text = text[sure:]
