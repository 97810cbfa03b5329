"""The shell part of `poise` ends by running this file. It avoids new syntax, so that an old Python can report that it is too old."""

import os
import signal
import sys


def interrupted(*_):
    sys.stderr.write("poise: interrupted\n")
    sys.stderr.flush()
    os._exit(75)


# Until a command has begun, SIGINT and SIGTERM print one sentence and exit with the code of an interruption. From then on they raise
# KeyboardInterrupt, so that the command can clean up; `run`, `load` and `profile` install handlers of their own.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, interrupted)
if hasattr(signal, "pthread_sigmask"):  # the shell part had them wait
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))

if sys.version_info < (3, 11):
    sys.stderr.write(
        "poise: Python 3.11 or newer is needed, %s is %d.%d: set POISE_PYTHON to a newer one\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
    sys.exit(2)

# If stdin, stdout or stderr is closed, the next file opened would take its number. Open /dev/null there, for us and for the
# programs we start.
for number, name in enumerate(("stdin", "stdout", "stderr")):
    if getattr(sys, name) is None:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, "r" if number == 0 else "w"))

sys.path[0] = os.path.dirname(os.path.abspath(__file__))

sys.dont_write_bytecode, _as_it_was = True, sys.dont_write_bytecode
import bytecode_cache  # noqa: E402, F401

sys.dont_write_bytecode = _as_it_was

from supervisor.command_table import main  # noqa: E402

try:
    code = main(sys.argv[1:])
    # The command has ended as it has ended: Python would give back their defaults to signals that have handlers now.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
except KeyboardInterrupt:  # a second Ctrl-C while the first is being handled
    interrupted()
sys.exit(code)
