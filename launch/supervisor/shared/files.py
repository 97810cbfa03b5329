"""Small looks at files of ours: JSON that may be missing, sockets, and what may be gone already."""

import json
import os
import shutil
import stat


def read_json(path):
    """A JSON object of ours, or {} where there is none (yet) or it is torn."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(1 << 20))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def is_socket(path):
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass


def remove_tree(folder):
    shutil.rmtree(folder, ignore_errors=True)
