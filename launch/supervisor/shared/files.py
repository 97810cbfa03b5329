"""Reading and removing files of ours that may be missing, half written, or gone by now."""

import json
import os
import shutil
import stat


def read_json(path):
    """The JSON object in `path`; {} if the file is missing or is no JSON object, for example because it is half written."""
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
