"""How a command ends, and the one line that says why. Mirrors common/trouble.h."""

import contextlib
import errno
import os
import sys

DONE = 0  # every input line has its result line
CANNOT_START = 2  # options, model or input file are wrong
INTERNAL = 70  # a defect of ours
OUTPUT = 73  # the output cannot be written
LOCKED = 74  # another run holds this directory
INTERRUPTED = 75  # resumable with --resume
HANDED_OVER = 77  # a planner left its work to the next one; no command ends so
FOREIGN = 76  # the run directory is of another build, model or input


class Refusal(Exception):
    """The world is not as it must be: a sentence that names culprit, rule and remedy, and the exit code."""

    def __init__(self, sentence, code=CANNOT_START):
        super().__init__(sentence)
        self.sentence = sentence
        self.code = code


def shown(name):
    """A path or text as it may stand in one line of a message."""
    text = str(name)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def brief(path):
    """A path relative to where the user stands, if it is below."""
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
    sys.stdout.write(f"{text}\n")  # at once: several threads of `test` tell
    sys.stdout.flush()


def nothing_kept(command):
    """After a run in a temporary folder, whose advice to resume it does not hold."""
    say(f"`{command}` keeps nothing of a run that failed: start it again (TMPDIR says where its files go meanwhile)")


@contextlib.contextmanager
def naming(path):
    """What the system says of a write names no file: this names it."""
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
    culprit = problem.filename2 if problem.filename2 and code == OUTPUT else problem.filename  # of a copy: where to
    where = f"{shown(culprit)}: " if culprit else ""
    return Refusal(f"{where}{reason}", code)
