"""Checks options and files before anything starts, so that what cannot work is refused at once, in one line."""

import errno
import os
import resource
import stat
import time
from pathlib import Path

from ..shared import machine
from ..shared.paths import command_line
from ..shared.quantities import bytes_text
from ..shared.trouble import OUTPUT, Refusal, say, shown
from . import leftovers
from .run_directory import FINISHED, UNFINISHED

_GROWTH = 64 << 20  # of free memory; a smaller change comes from other processes
_COMING = 1 << 30  # of shared memory without a name: from here on we take it for a large file being freed
FEWEST_FILES = 256  # sockets and logs, beside the files of the model; libzmq aborts a process that runs out of descriptors


def check_limits(model):
    """Raises the limit of open files to what we need; refuses if the hard limit is lower. The loader opens all of a model's files."""
    try:
        needed = FEWEST_FILES + sum(name.endswith(".safetensors") for name in os.listdir(model))
    except OSError:
        needed = FEWEST_FILES  # check_model says what is wrong with the model
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise Refusal(f"only {hard} open files are allowed, {needed} are needed: raise `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode):
    """The kind of a file that is not regular, in the words of common/files/regular_file.cpp; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def check_model(model):
    if not os.path.isdir(model):
        hint = ": a directory is wanted, or a name on HuggingFace's hub, such as facebook/opt-1.3b"
        raise Refusal(f"--model {shown(model)}: {'not a directory' if os.path.lexists(model) else 'not there'}{hint}")
    config = os.path.join(model, "config.json")
    if not os.path.lexists(config):
        raise Refusal(f"--model {shown(model)}: no config.json in it, so it is not a HuggingFace model directory")
    try:
        kind = kind_of(os.stat(config).st_mode)
    except OSError as problem:
        kind = {
            errno.ELOOP: "a symbolic link that leads back to itself",
            errno.ENOENT: "a symbolic link to a file that is not there (fetch the model again)",
        }.get(problem.errno)
        if kind is None:
            raise Refusal(f"--model {shown(model)}: its config.json cannot be opened: {problem.strerror}") from None
    if kind is not None:
        raise Refusal(f"--model {shown(model)}: its config.json is {kind}; a file is needed")


def check_input(path):
    try:
        status = os.stat(path)
    except OSError as problem:
        raise Refusal(f"input {shown(path)}: {problem.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(f"input {shown(path)} is not a regular file: a resumed run must be able to read it again")
    if not os.access(path, os.R_OK):
        raise Refusal(f"input {shown(path)} may not be read: Permission denied")


def check_output(given, directory):
    """The checks of planner/results/results_output.h, made before a model is loaded."""
    output = Path(given.output)
    if not given.output or output.name in ("", ".", "..") or given.output.endswith("/"):
        raise Refusal(f"output '{shown(given.output)}' names no file")
    if os.path.exists(output) and os.path.samefile(output, given.input):
        raise Refusal(f"{shown(output)} is input and output at once: name another output")
    if not os.path.isdir(output.parent):
        raise Refusal(f"output {shown(output)}: the directory {shown(output.parent)} is not there: make it first")
    if os.path.exists(output) and not os.path.isfile(output):
        raise Refusal(f"output {shown(output)} is not a regular file: name another output")
    if os.path.lexists(output) and not given.overwrite and not _written_by(directory, output, given.resume):
        raise Refusal(f"output {shown(output)} exists already: say --overwrite, or name another output")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise Refusal(f"output {shown(output)} cannot be written: {_why_not(output.parent)}", OUTPUT)


def check_written(option, path, *others):
    """Before long work: refuses `path` if no file can be made there, or if it is one of `others` (what it is, its path)."""
    if os.path.isdir(path):
        raise Refusal(f"{option} {shown(path)}: a directory; name a file")
    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        raise Refusal(f"{option} {shown(path)}: the directory {shown(parent)} is not there: make it first")
    for what, other in others:
        if os.path.realpath(path) == os.path.realpath(other) or (os.path.exists(path) and _same_file(path, other)):
            raise Refusal(f"{option} {shown(path)} is {what}, too: name another file")
    if not os.access(path if os.path.exists(path) else parent, os.W_OK):
        raise Refusal(f"{option} {shown(path)} cannot be written: {_why_not(parent)}", OUTPUT)


def _same_file(one, other):
    return os.path.exists(other) and os.path.samefile(one, other)


def _why_not(folder):
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return f"{shown(folder)} is on a read-only file system" if read_only else f"no permission in {shown(folder)}"


def _written_by(directory, output, resume):
    published = directory.published()
    return resume and published is not None and os.path.abspath(published) == os.path.abspath(output)


def check_run_directory(given, directory):
    """Nothing of an unfinished run is touched unless --resume says so."""
    if directory.state() == UNFINISHED and not given.resume:
        raise Refusal(
            f"{shown(directory.path)} holds an unfinished run: go on with it (--resume), or use another directory "
            "(--run-dir)"
        )
    if directory.state() == FINISHED and given.resume:
        published = directory.published()
        if not os.path.exists(published):
            raise Refusal(
                f"the run in {shown(directory.path)} is finished, but its output {shown(published)} is gone: "
                "start anew without --resume"
            )
        if os.path.abspath(published) != os.path.abspath(given.output):
            raise Refusal(
                f"the run in {shown(directory.path)} is finished, its output is {shown(published)}: "
                "copy that, or start anew with another --run-dir"
            )


def clip_memory(given, held=None, interrupted=lambda: False):
    """--host-memory and --gpu-memory are caps: lowers them to what the machine has, and says so.

    `held` returns the bytes that a kept loader already holds; the run will use them. After a run of that loader has ended,
    the kernel needs seconds to free tens of GiB: we wait while free memory grows, until `interrupted` (signals are only
    counted by now)."""
    leftovers.await_memory(interrupted)
    taken = held or (lambda: 0)
    available = machine.available_memory() + taken()
    if taken() and given.host_memory and given.host_memory > available:
        available = _once_returned(given.host_memory, lambda: machine.available_memory() + taken(), interrupted)
    if given.host_memory and given.host_memory > available:
        say(f"--host-memory {bytes_text(given.host_memory)}: this machine has {bytes_text(available)} free; using that")
        given.host_memory = available
    total = machine.total_memory()
    if given.gpu_memory and not machine.gpus() and given.gpu_memory > total:
        say(f"--gpu-memory {bytes_text(given.gpu_memory)}: this machine has {bytes_text(total)} of memory; using that")
        given.gpu_memory = total


def _once_returned(wanted, room, interrupted, still=1.0, patience=30.0):
    """The free memory, once it is as large as `wanted` or has not grown for `still` seconds.

    The kernel unmaps all pages of a large file before it frees the first one, which takes seconds. While such a file is
    being removed, we wait five times as long."""
    now, began = room(), time.monotonic()
    most, grew = now, began
    while now < wanted and time.monotonic() - began < patience and not interrupted():
        waited = time.monotonic() - grew
        if waited >= still and (waited >= 5 * still or machine.unnamed_shared_memory() < _COMING):
            break
        time.sleep(0.05)
        now = room()
        if now >= most + _GROWTH:
            most, grew = now, time.monotonic()
    return now


def resume_command(words):
    """The command that goes on with this run, as the user typed it."""
    words = list(words)
    return command_line("run", *words) + ("" if "--resume" in words else " --resume")


def command_again(words):
    """The command that tries again what changed nothing of a finished run. What may overwrite that run would not resume it."""
    return command_line("run", *(word for word in words if word != "--resume" or "--overwrite" not in words))
