"""Runs a command that ends, with all that it started, no later than the process that wants it.

    installer.py DESCRIPTOR WORD…       started by own_packages.py, in a session of its own

DESCRIPTOR is the read end of a pipe that reads as end of file once that process has ended, or wants the command no more.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys

_POLITE_END = 3.0  # seconds, in which pip removes its temporary files


def run(wanted, words):
    command = subprocess.Popen(words, process_group=0)
    ended = os.pidfd_open(command.pid)
    if ended not in select.select([ended, wanted], [], [])[0]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGINT)
        select.select([ended], [], [], _POLITE_END)
        with contextlib.suppress(ProcessLookupError):  # others of the group may outlive the command
            os.killpg(command.pid, signal.SIGKILL)
    code = command.wait()
    return code if code >= 0 else 1


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
