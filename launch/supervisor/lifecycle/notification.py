"""How a run ended, as facts for programs, and the command of --notify that is told of it."""

import os
import select
import signal
import subprocess
import sys

from ..shared.trouble import RUN_ENDS, say, shown
from .delivery import STDOUT

_PATIENCE = 60  # seconds
_FACTS = ("requests", "done", "errors", "prompt_tokens", "generated_tokens", "elapsed_seconds", "policy", "device")


def how_it_ended(directory, delivery, code, sentence):
    status = directory.status()
    facts = {"exit_code": code, "outcome": RUN_ENDS.get(code, ""), "sentence": sentence, "run_dir": str(directory.path)}
    facts["output"] = STDOUT if delivery.output == STDOUT else os.path.abspath(delivery.output)
    return facts | {name: status[name] for name in _FACTS if name in status}


def notify(command, facts, interrupts, patience=_PATIENCE):
    """Runs `command` in a shell, with the facts in its environment. Whatever comes of it, the run ends as it ended. The command has a group
    of its own: what takes too long, or is interrupted, is ended with all that it started."""
    told = {"run_dir": "POISE_RUN", "output": "POISE_OUTPUT", "exit_code": "POISE_EXIT_CODE", "outcome": "POISE_OUTCOME"}
    told |= {"sentence": "POISE_SENTENCE", "done": "POISE_RESULTS", "errors": "POISE_ERRORS"}
    environment = os.environ | {variable: str(facts.get(name, "")) for name, variable in told.items()}
    try:
        process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, process_group=0)
    except (OSError, ValueError) as problem:
        say(f"--notify: the command could not be started: {shown(problem)}")
        return
    before = interrupts.count
    interrupts.drain()
    if not _ends(process, interrupts, patience if interrupts.count == before else 0.0):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        why = "the run was interrupted" if interrupts.count > before else f"it took more than {patience} s"
        say(f"--notify: the command was ended, {why}: {shown(command)}")
    elif process.wait():
        say(f"--notify: the command ended with {process.returncode}: {shown(command)}")


def _ends(process, interrupts, patience):
    """Whether it ended by itself, in time, and before the next signal to us. It stays to be waited for: so its number is still its own."""
    descriptor = os.pidfd_open(process.pid)
    try:
        return descriptor in select.select([descriptor, interrupts.descriptor], [], [], patience)[0]
    finally:
        os.close(descriptor)
