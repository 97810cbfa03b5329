"""This user's processes as /proc shows them, and signals that cannot reach the wrong process."""

import collections
import os
import select
import signal
import time

from ..shared.paths import LOADER, PROGRAMS

_COMMAND = 15  # characters of a program's name that the kernel keeps


class Found(collections.namedtuple("Found", "pid program arguments parent")):
    """A process of poise, found by its command line. `program`: its name; `parent`: the number of its parent process."""

    __slots__ = ()

    def option(self, name):
        """The value of --name VALUE or --name=VALUE."""
        for index, argument in enumerate(self.arguments):
            if argument == name and index + 1 < len(self.arguments):
                return self.arguments[index + 1]
            if argument.startswith(name + "="):
                return argument[len(name) + 1 :]
        return None

    @property
    def run_id(self):
        return self.option("--run-id")

    @property
    def orphaned(self):
        """A supervisor started it, and that supervisor has ended."""
        return self.option("--death-fd") is not None and not is_supervisor(self.parent)


def command_line_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def is_supervisor(pid):
    return any(word.endswith("/launch/start.py") for word in command_line_of(pid)[:4])


def stat_fields(pid):
    """The fields of /proc/PID/stat from the third on (state, parent, …), or nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def start_time(pid):
    """In clock ticks after boot. Pid and start time together are unique."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def is_stopped(pid):
    """Halted by a signal or a debugger."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] in (b"T", b"t")


def waits_for_a_disk(pid):
    """In a system call that no signal interrupts: it writes to a disk that stands still, or waits until one has written."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] == b"D"


def cpu_seconds(pid):
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def running():
    """Every living loader, planner and executor of this user."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
        except OSError:
            continue
        words = command_line_of(entry.name)
        name = os.path.basename(words[0]) if words else ""
        fields = stat_fields(entry.name) if name in PROGRAMS else None
        if fields and fields[0] not in (b"Z", b"X"):
            found.append(Found(int(entry.name), name, words[1:], int(fields[1])))
    return found


def ending():
    """(pid, program) of every process of this user whose run has ended, and which still gives its memory back: its supervisor is gone,
    or the kernel is taking its memory apart and it has no command line any more."""
    found = [(process.pid, process.program) for process in running() if process.orphaned and not is_stopped(process.pid)]
    names = {name[:_COMMAND]: name for name in PROGRAMS}
    for entry in os.scandir("/proc"):
        try:
            name = names.get(_command_of(entry.name)) if entry.name.isdigit() else None
            if name and entry.stat().st_uid == os.geteuid() and not command_line_of(entry.name) and not _is_dead(entry.name):
                found.append((int(entry.name), name))
        except OSError:
            continue
    return found


def _command_of(pid):
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().rstrip("\n")


def _is_dead(pid):
    """Whether all threads have ended; one that is not the first may still hold the memory."""
    fields = stat_fields(pid)
    return not fields or (fields[0] in (b"Z", b"X") and int(fields[17]) <= 1)


def is_kept_loader(pid, home):
    """Whether `pid` is a loader whose home is that folder. A file that names it proves nothing."""
    return any(p.pid == pid and p.program == LOADER and p.option("--home") == str(home) for p in running())


def open_verified(pid, started, proven=lambda pid: True):
    """A pidfd for the process `pid` that started at `started` and for which `proven` holds; None otherwise."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if start_time(pid) != started or not proven(pid):
        os.close(descriptor)
        return None
    return descriptor


def send(descriptor, number):
    """Signals the process behind a pidfd; does nothing if it has ended."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        pass


def wait_gone(descriptors, seconds):
    """Waits until every process behind these pidfds has ended; returns those that have not."""
    left = set(descriptors)
    deadline = time.monotonic() + seconds
    while left:
        poll = select.poll()
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        remaining = deadline - time.monotonic()
        for descriptor, _ in poll.poll(max(remaining, 0) * 1000):
            left.discard(descriptor)
        if remaining <= 0:
            break
    return left


def end(found, patience):
    """SIGTERM, then after `patience` seconds SIGKILL, to processes found in /proc. Returns how many there were."""
    held = {}
    for process in found:
        started = start_time(process.pid)
        descriptor = open_verified(process.pid, started) if started is not None else None
        if descriptor is not None and command_line_of(process.pid)[1:] == process.arguments:
            held[descriptor] = process
        elif descriptor is not None:
            os.close(descriptor)
    for descriptor in held:
        send(descriptor, signal.SIGTERM if patience > 0 else signal.SIGKILL)
    for descriptor in wait_gone(held, patience):
        send(descriptor, signal.SIGKILL)
    wait_gone(held, 10)
    for descriptor in held:
        os.close(descriptor)
    return len(held)
