"""`poise serve`: checks the options, listens, supervises the processes of a server until it is interrupted. With `--front`: until its stdin ends."""

import contextlib
import ipaddress
import os
from pathlib import Path

from ..lifecycle import front, grammars, inputs, leftovers, loaders
from ..lifecycle.ask_planner import check_decisions
from ..lifecycle.interrupts import Interrupts
from ..lifecycle.run_directory import RunDirectory
from ..lifecycle.serving import OwnedSupervision, ServeArguments, ServeLine, ServeSupervision, key_of, url_of
from ..shared.build_facts import version
from ..shared.files import remove
from ..shared.options import normalised, serve_parser
from ..shared.paths import PROGRAMS, program
from ..shared.trouble import CANNOT_START, DONE, FOREIGN, INTERRUPTED, Refusal, brief, of_system, say, shown

_NO_FILES = {"input": None, "output": None, "resume": False, "overwrite": False, "verify": False, "trace": None}


def serve(words):
    given = serve_parser().parse_args(normalised(words))
    vars(given).update(_NO_FILES)
    given.api_key = key_of(given)
    if given.api_key is not None and (not given.api_key.isascii() or not given.api_key.isprintable() or " " in given.api_key or not given.api_key):
        raise Refusal("--api-key: printable ASCII without spaces is wanted, because it stands in a header")
    if given.max_body > 64 << 20:
        raise Refusal("--max-body: at most 64MiB, the longest line that poise reads")
    inputs.check_limits(given.model)
    inputs.check_model(given.model)
    for name in PROGRAMS:
        program(name)
    check_decisions(given)
    if given.front:
        return _serve(given, None)
    listener = front.listening(given.host, given.port)
    try:
        return _serve(given, listener)
    finally:
        listener.close()


def _serve(given, listener):
    interpreter = front.python() if listener else None
    given.grammar_python = grammars.python_at_hand(interpreter)
    directory = RunDirectory(Path(os.path.abspath(given.run_dir)))
    interrupts = Interrupts()
    try:
        directory.enter()
    except OSError as problem:
        raise of_system(problem) from None
    code = INTERRUPTED
    try:
        code = _serve_in(directory, given, listener, interpreter, interrupts)
    except Refusal as refusal:
        code = refusal.code
        raise
    finally:
        directory.leave(forget=given.front or code in (CANNOT_START, FOREIGN))
        if given.front:
            _remove_socket(given.front)
    return code


def _remove_socket(path):
    """The other program may have been killed: then no one else removes its socket, and the folder that it made for it."""
    remove(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def _serve_in(directory, given, listener, interpreter, interrupts):
    if directory.state() != "fresh":
        raise Refusal(f"{shown(directory.path)} is of a run with a file: name another directory with --run-dir")
    leftovers.sweep()
    inputs.clip_memory(given, loaders.Home.of(given).held_bytes, lambda: interrupts.count > 0)
    if given.front:
        return _serve_another(directory, given, interrupts)
    url = url_of(given.host, listener.getsockname()[1])
    if given.api_key is None and not _is_loopback(listener.getsockname()[0]):
        say(f"whoever reaches {shown(given.host)} can use this server, and it has no key: --api-key gives it one")
    line = ServeLine()
    arguments = ServeArguments(directory, given, url)
    try:
        kept = arguments.choose_loader()
        arguments.begin()
        say(f"run directory {brief(directory.path)}")
        outcome = ServeSupervision(arguments, interrupts, line, kept, listener, interpreter, version()).run()
    finally:
        line.clear()
        arguments.end()
    if outcome.code == INTERRUPTED and interrupts.count:
        say("the server has ended")
        return DONE if interrupts.count == 1 else INTERRUPTED
    say(outcome.sentence)
    return outcome.code


def _serve_another(directory, given, interrupts):
    """The front is the program that started this one, and holds the other end of its stdin."""
    line = ServeLine()
    arguments = ServeArguments(directory, given, "")
    try:
        kept = arguments.choose_loader()
        arguments.begin()
        outcome = OwnedSupervision(arguments, interrupts, line, kept).run()
    finally:
        line.clear()
        arguments.end()
    if outcome.code != DONE:
        say(outcome.sentence)
    return outcome.code


def _is_loopback(address):
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
