"""plotly.min.js, which draws the pages: the wheel of plotly has it."""

import sys
from pathlib import Path

from ..shared.quantities import bytes_text
from ..shared.trouble import Refusal, shown

_LIBRARY = "lib/python3*/site-packages/plotly/package_data/plotly.min.js"
_LARGEST = 64 << 20


def library_in(folder):
    """Of an environment that has plotly."""
    found = sorted(Path(folder).glob(_LIBRARY))
    if not found:
        raise Refusal(f"{shown(folder)} has no plotly.min.js: remove the folder, then it is made again")
    return read_library(found[0], shown(found[0]))


def installed_library():
    """Of the environment that runs us."""
    return library_in(sys.prefix)


def read_library(path, what):
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST + 1)
    except OSError as problem:
        raise Refusal(f"{what}: {problem.strerror}") from None
    if not text or len(text) > _LARGEST:
        raise Refusal(f"{what}: a file of at most {bytes_text(_LARGEST)} is wanted, and not an empty one")
    return text
