"""How a run ended, as facts for programs, and the command of --notify that is told of it."""

import os
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


def notify(command, facts):
    """Runs `command` in a shell, with the facts in its environment. Whatever comes of it, the run ends as it ended."""
    told = {"run_dir": "POISE_RUN", "output": "POISE_OUTPUT", "exit_code": "POISE_EXIT_CODE", "outcome": "POISE_OUTCOME"}
    told |= {"sentence": "POISE_SENTENCE", "done": "POISE_RESULTS", "errors": "POISE_ERRORS"}
    environment = os.environ | {variable: str(facts.get(name, "")) for name, variable in told.items()}
    try:
        ended = subprocess.run(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, timeout=_PATIENCE, check=False
        )
        if ended.returncode:
            say(f"--notify: the command ended with {ended.returncode}: {shown(command)}")
    except subprocess.TimeoutExpired:
        say(f"--notify: the command was ended, it took more than {_PATIENCE} s: {shown(command)}")
    except (OSError, ValueError) as problem:
        say(f"--notify: the command could not be started: {shown(problem)}")
