"""Version and commit of the sources: from the checkout, or from a bundle's bundle.json."""

import re
import subprocess

from .files import read_json
from .paths import BUNDLE, ROOT


def version():
    noted = read_json(BUNDLE).get("version")
    if noted:
        return noted
    try:
        text = (ROOT / "CMakeLists.txt").read_text()
    except OSError:
        return "?"
    number = re.search(r"project\(poise VERSION ([0-9.]+)", text)
    return number.group(1) if number else "?"


def commit():
    """None outside a git checkout, unless a bundle notes it."""
    noted = read_json(BUNDLE).get("commit")
    if noted:
        return noted
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
