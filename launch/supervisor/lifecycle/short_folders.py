"""Folders for the sockets of runs whose own directory has too long a path: `run-RUN_ID` in this user's private folder."""

import os
import time

from ..shared.files import remove_tree
from ..shared.paths import make_private, private_folder, private_folder_is_ours, private_folder_path
from . import processes

_PREFIX = "run-"
_STARTS = 60  # seconds that a supervisor may take from making the folder to starting the first process


def make(run_id):
    return make_private(private_folder() / f"{_PREFIX}{run_id}")


def sweep():
    """Removes the folders of runs that were killed: they are not new, and no living process was started with their run id."""
    if not private_folder_is_ours():
        return
    folders = [path for path in private_folder_path().glob(_PREFIX + "*") if _age(path) > _STARTS]
    living = {process.run_id for process in processes.running()} if folders else set()
    for folder in folders:
        if folder.name.removeprefix(_PREFIX) not in living:
            remove_tree(folder)


def _age(path):
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0
