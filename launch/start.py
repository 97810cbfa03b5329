"""Where the shell part of `poise` hands over. Written so that an old Python can still say that it is too old."""

import os
import signal
import sys


def interrupted(*_):
    sys.stderr.write("poise: interrupted\n")
    sys.stderr.flush()
    os._exit(75)


# Until a command has begun, Ctrl-C ends us with a sentence and the code of an interruption; then it is an exception, so
# that what was begun is cleaned up, or what the command makes of it.
signal.signal(signal.SIGINT, interrupted)

if sys.version_info < (3, 11):
    sys.stderr.write(
        "poise: Python 3.11 or newer is needed, %s is %d.%d: set POISE_PYTHON to a newer one\n"
        % (sys.executable, sys.version_info[0], sys.version_info[1])
    )
    sys.exit(2)

# A closed stdin, stdout or stderr must not become somebody's file, nor that of a program we turn into.
for number, name in enumerate(("stdin", "stdout", "stderr")):
    if getattr(sys, name) is None:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, "r" if number == 0 else "w"))

sys.path[0] = os.path.dirname(os.path.abspath(__file__))

from supervisor.command_table import main  # noqa: E402

try:
    code = main(sys.argv[1:])
except KeyboardInterrupt:  # another one, while the first was seen to
    interrupted()
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(code)
