"""How a command ends, and the one line that says why.

The exit codes are those of common/trouble.h and of the table in launch/README.md (tests/e2e/house_rules.py compares). How a run ends
follows from those of its processes: `reason` in lifecycle/children.py, `_root_cause` and `_conclude` in lifecycle/supervision.py, then
`_run_in` in commands/run.py.
"""

import contextlib
import errno
import os
import sys

DONE = 0  # every input line has its result line
DIFFERENT = 1  # `inspect --check`, `inspect --diff` or `replay` found something that is not as it should be
CANNOT_START = 2  # options, model or input file are wrong
INTERNAL = 70  # a defect of ours; of a run's process: 75
OUTPUT = 73  # the output cannot be written
LOCKED = 74  # another run holds this directory
INTERRUPTED = 75  # resumable with --resume
FOREIGN = 76  # the run directory is of another build, model or input
HANDED_OVER = 77  # a planner or loader handed its work to the next one; no command ends with it
DEVICE_FAILED = 78  # a gpu_executor's device does no more work; no command ends with it
UNPACKABLE = 79  # a loader's weights cannot be packed, and another one loads them plain; no command ends with it
# How a run may end, and what a process of it may end with and be believed.
RUN_ENDS = {
    DONE: "every line has its result",
    CANNOT_START: "nothing could start",
    OUTPUT: "the output cannot be written",
    LOCKED: "another run holds the directory",
    INTERRUPTED: "interrupted, go on with --resume",
    FOREIGN: "the directory is of another run",
}


class Refusal(Exception):
    """We cannot go on, and the cause is outside our code: one sentence that names culprit, rule and remedy; an exit code."""

    def __init__(self, sentence, code=CANNOT_START):
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def shown(name):
    """A path or text with control characters escaped, so that it fits in one line of a message."""
    text = str(name)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def brief(path):
    """The path relative to the working directory if it lies below that; else absolute."""
    near = os.path.relpath(path)
    return shown(os.path.abspath(path) if near.startswith("..") else near)


def say(sentence):
    """One line on stderr. A terminal that is gone does not matter."""
    try:
        sys.stderr.write(f"poise: {sentence}\n")
        sys.stderr.flush()
    except OSError:
        pass


def tell(text):
    """What was asked for, on stdout."""
    sys.stdout.write(f"{text}\n")  # one write: several threads of `test` print
    sys.stdout.flush()


def nothing_kept(command):
    """Printed after a failed run in a temporary folder: the advice to resume it does not apply, since the folder is removed."""
    say(f"`{command}` keeps nothing of a run that failed: start it again (TMPDIR says where its files go meanwhile)")


@contextlib.contextmanager
def naming(path):
    """Adds `path` to an OSError that names no file, as those of write(2) do not."""
    try:
        yield
    except OSError as problem:
        problem.filename = problem.filename or os.fspath(path)
        raise


def of_system(problem):
    """A Refusal from what the operating system said."""
    reason = problem.strerror or str(problem)
    writing = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
    code = OUTPUT if problem.errno in writing else CANNOT_START
    culprit = problem.filename2 if problem.filename2 and code == OUTPUT else problem.filename  # the target of a copy
    where = f"{shown(culprit)}: " if culprit else ""
    return Refusal(f"{where}{reason}", code)
