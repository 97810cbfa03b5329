"""Paths: the repository, the programs, the private folders for sockets and kept loaders, kept profiles."""

import os
import shlex
import stat
import sys
from pathlib import Path

from .trouble import Refusal, shown

ROOT = Path(__file__).resolve().parents[3]
BUNDLE = ROOT / "bundle.json"  # only `poise bundle` makes it
LOADER, PLANNER, EXECUTOR = "poise-loader", "poise-planner", "poise-gpu-executor"
PROGRAMS = (LOADER, PLANNER, EXECUTOR)
# Their names in messages and for `poise restart`; the source folders are called the same.
PLAIN_NAMES = {LOADER: "loader", PLANNER: "planner", EXECUTOR: "gpu_executor"}

SOCKET_PATH_LIMIT = 107  # bytes of sun_path, less the NUL


def command_name():
    """`poise`, as the user typed it."""
    return os.environ.get("POISE_COMMAND") or str(ROOT / "launch" / "poise")


def command_line(*words):
    return shlex.join([command_name(), *(str(word) for word in words)])


def binary_folder():
    ours = ROOT / "bin" if is_bundle() else ROOT / "build" / "release" / "bin"
    return Path(os.environ.get("POISE_BIN") or ours)


def is_bundle():
    return BUNDLE.exists()


def program(name):
    path = binary_folder() / name
    if not os.access(path, os.X_OK):
        remedy = "make the bundle again" if is_bundle() else f"run {command_line('setup')}"
        raise Refusal(f"{name} is not {'there' if is_bundle() else 'built'} (looked in {shown(path.parent)}): {remedy}")
    return path


def private_folder_path():
    """Where this user's private folder is: short, and the same for each command of one session."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if os.path.isabs(base) and is_private(base):
        return Path(base) / "poise"
    return Path("/tmp") / f"poise-{os.geteuid()}"


def private_folder_is_ours():
    """Asked before anything in it is believed: without XDG_RUNTIME_DIR anybody may make a folder of that name."""
    return is_private(private_folder_path())


def private_folder():
    """A folder that only this user may enter, with a short path."""
    return make_private(private_folder_path())


def make_private(folder):
    """Makes `folder` with mode 0700, or checks that an existing one is ours alone."""
    try:
        folder.mkdir(mode=0o700, parents=False, exist_ok=True)
    except FileExistsError:
        pass  # a file or a link: refused below
    if not is_private(folder):
        raise Refusal(
            f"{shown(folder)} is not a folder that you own with mode 0700: remove it, "
            "or set XDG_RUNTIME_DIR to a folder that is"
        )
    return folder


def is_private(folder):
    """Whether it is a directory, no link, that only this user may enter."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def profile_folder():
    """Where measured profiles are kept."""
    return cache_folder() / "profiles"


def cache_folder():
    """What is kept between runs. In a container a user may have no home; then the private folder holds it."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if os.path.isabs(cache):
        return Path(cache) / "poise"
    return Path(home) / ".cache" / "poise" if os.path.isabs(home) else private_folder()


def fits_a_socket(path):
    return len(os.fsencode(path)) <= SOCKET_PATH_LIMIT


def on_terminal():
    try:
        return sys.stderr.isatty()
    except (OSError, ValueError):
        return False
