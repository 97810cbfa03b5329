"""The table of commands. Every command ends with one line and an exit code, never with a traceback."""

import importlib
import os
import signal
import sys

from .shared.options import parser_made_by
from .shared.paths import command_name
from .shared.trouble import CANNOT_START, DONE, INTERNAL, INTERRUPTED, Refusal, of_system, say, shown, tell

# Command: (module, function, what it does). A module is imported only when its command is called, so that `run` starts fast.
COMMANDS = {
    "demo": ("commands.demo", "demo", "sets up, builds, answers prompts and chats with bundled tiny models"),
    "test": ("development.tests", "test", "sets up, builds, runs every test"),
    "setup": ("development.setup", "setup", "installs what is missing and builds"),
    "run": ("commands.run", "run", "answers every line of a file of requests"),
    "serve": ("commands.serve", "serve", "answers requests over HTTP, as OpenAI's servers do"),
    "bench": ("commands.bench", "bench", "makes requests, runs them, and reports the speed beside the link's limit"),
    "plan": ("commands.plan_command", "plan", "what a run would do and how fast: memory, speed, bytes; no GPU, no weights"),
    "profile": ("commands.profile", "profile", "measures what loading, computing and storing cost on this machine, and keeps it"),
    "load": ("commands.load", "load", "loads a model and keeps it in memory for the runs to come"),
    "status": ("commands.status", "status", "how far a run is; without RUN: what is running"),
    "policy": ("commands.policy", "policy", "another policy for a run that goes on; without NAME: the one in force"),
    "restart": ("commands.restart", "restart", "another process for a run that goes on, the loader too"),
    "stop": ("commands.stop", "stop", "ends a run; without RUN: the kept loaders"),
    "bundle": ("development.bundle", "bundle", "makes a directory of programs and libraries that runs on another machine"),
    "retry": ("commands.retry", "retry", "the lines of a finished run that failed, once more"),
    "tail": ("commands.tail", "tail", "the result lines of a run, as they are finished"),
    "inspect": ("commands.inspect", "inspect", "shows the orders of a run, as a table or as JSON"),
    "report": ("commands.report", "report", "writes one page about a run, with curves, for a browser"),
    "replay": ("commands.replay", "replay", "gives a run's orders to an executor again, and compares every answer"),
    "policies": ("commands.policies", "policies", "lists the ways to keep context, each with its source"),
    "simulate": ("commands.simulate", "simulate", "plays the papers' experiments in virtual time, without a GPU"),
    "doctor": ("commands.doctor", "doctor", "checks the machine, removes leftovers; with --model: what the model needs"),
    "completion": ("commands.completion", "completion", "what bash, zsh or fish needs to complete commands and options"),
    "man": ("commands.completion", "man", "the manual page"),
    "version": ("commands.version", "version", "prints the version"),
    "help": (None, None, "explains a command"),
}
_OF_ALL_COMMANDS = ("completion", "man")
_OTHER_NAMES = {"build": "setup", "--help": "help", "-h": "help", "--version": "version", "-V": "version"}


def main(words):
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        say(refusal.sentence)
        return refusal.code
    except SystemExit as end:  # argparse, after --help
        return end.code or DONE
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output (`| head`) has closed it
        _forget_stdout()
        return DONE
    except OSError as problem:
        _forget_stdout()
        refusal = of_system(problem)
        _trace()
        say(refusal.sentence)
        return refusal.code
    except Exception as problem:  # pylint: disable=broad-except
        _trace()
        say(f"a defect of poise: {type(problem).__name__}: {shown(problem)} (POISE_TRACE=1 shows where)")
        return INTERNAL


def _forget_stdout():
    """Points stdout to /dev/null: Python would try to write the rest again at exit, fail, and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trace():
    if os.environ.get("POISE_TRACE"):
        import traceback  # pylint: disable=import-outside-toplevel

        traceback.print_exc()


def _dispatch(words):
    if not words:
        say(f"which command? {_list()}")
        return CANNOT_START
    name = _OTHER_NAMES.get(words[0], words[0])
    if name == "help":
        return _help(words[1:])
    if name not in COMMANDS:
        raise Refusal(f"there is no command '{shown(words[0])}'; there are: {_list()}")
    return _call(name, words[1:])


def _call(name, words):
    module, function, _ = COMMANDS[name]
    more = (_described,) if name in _OF_ALL_COMMANDS else ()
    return getattr(importlib.import_module("." + module, __package__), function)(words, *more)


def _described():
    """Of each command: its name, what it does, its parser or None."""
    return [
        (name, meaning, parser_made_by(lambda: _call(name, [])) if module else None) for name, (module, _, meaning) in COMMANDS.items()
    ]


def _list():
    return ", ".join(COMMANDS)


def _help(words):
    if words:
        name = _OTHER_NAMES.get(words[0], words[0])
        if name not in COMMANDS:
            raise Refusal(f"there is no command '{shown(words[0])}'; there are: {_list()}")
        if name != "help":
            return _dispatch([name, "--help"])
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {meaning}" for name, (_, _, meaning) in COMMANDS.items()]
    tell(
        "poise: offline LLM inference on one GPU too small for the model\n\n"
        + "\n".join(lines)
        + f"\n\n{command_name()} help COMMAND lists its options; behaviour and exit codes: launch/README.md"
    )
    return DONE
