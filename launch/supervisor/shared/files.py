"""Files of ours: reading and removing those that may be missing, half written, or gone by now; replacing them whole."""

import errno
import json
import os
import re
import shutil
import stat
from glob import escape
from pathlib import Path

from .failpoints import failpoint
from .trouble import naming

_NUMBERED = re.compile(r"\.[1-9][0-9]{0,8}$")


def read_json(path):
    """The JSON object in `path`; {} if the file is missing or is no JSON object, for example because it is half written."""
    try:
        with open(path, "rb") as file:
            return parsed_json(file.read(1 << 20))
    except OSError:
        return {}


def parsed_json(text):
    """The JSON object that `text` is; {} if it is none."""
    try:
        value = json.loads(text or "null")
        return value if isinstance(value, dict) else {}
    except (ValueError, RecursionError):
        return {}


def replace_file(path, text, suffix=".new", durable=False):
    """Writes a file beside `path` and renames it: readers see the old or the new one, never a part. Errors name the file; the one beside
    it is then removed. `durable`: it outlives a power failure from then on.

    Writers that may come at the same time need a `suffix` each.
    """
    fresh = f"{path}{suffix}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with naming(fresh), os.fdopen(os.open(fresh, flags, 0o600), "w", encoding="utf-8", errors="surrogateescape") as file:
            failpoint("supervisor.write")
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
        if durable:
            sync_directory(os.path.dirname(path))
    except OSError:
        remove(fresh)
        raise


def sync_directory(folder):
    """Makes the names in it durable."""
    descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # some file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def segments_of(log):
    """The files of an order log that are there, by number, as common/files/order_log_segments.h names them."""
    log = Path(log)
    numbered = [(int(path.name[len(log.name) + 1 :]), path) for path in log.parent.glob(f"{escape(log.name)}.*") if _NUMBERED.search(path.name)]
    return ([log] if log.exists() else []) + [path for _, path in sorted(numbered)]


def publish_file(fresh, path):
    """Gives a file that is whole its name, in place of an older one."""
    with naming(fresh), open(fresh, "rb") as file:
        os.fsync(file.fileno())
    os.replace(fresh, path)


def read_first_line(path):
    """The JSON object in the first line of `path`; {} as for read_json."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.readline(1 << 20))
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
