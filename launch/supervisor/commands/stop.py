"""`poise stop`: ends a run in order, or the kept loaders."""

import json
import signal
from pathlib import Path

from ..lifecycle import loaders, processes
from ..lifecycle.leftovers import clean_up
from ..lifecycle.run_directory import RunDirectory
from ..shared.options import add_json, parser
from ..shared.trouble import DONE, INTERRUPTED, LOCKED, Refusal, say, shown, tell

_END = 40  # seconds; a run has 30 of them to end in order


def stop(words):
    made = parser("stop", "Ends the run in RUN in order (it can be resumed); without RUN, ends the kept loaders.")
    made.add_argument("run", nargs="?", metavar="RUN", help="a run directory")
    made.add_argument("--all", action="store_true", help="also the loaders that were kept under another XDG_RUNTIME_DIR")
    add_json(made)
    given = made.parse_args(words)
    if given.run is not None and given.all:
        raise Refusal("stop: RUN is one run, --all is for kept loaders: leave one of them out")
    ended = []  # what has ended
    code = _stop_run(RunDirectory(Path(given.run)), ended) if given.run is not None else _stop_loaders(given.all, ended)
    clean_up()
    if given.json:
        tell(json.dumps({"exit_code": code, "ended": ended}))
    return code


def _stop_run(directory, ended):
    directory.require_a_run()
    if not directory.lives():
        say(f"nothing runs in {shown(directory.path)}")
        return DONE
    owner = directory.owner()
    descriptor = None
    if isinstance(owner.get("pid"), int):
        descriptor = processes.open_verified(owner["pid"], owner.get("started"), processes.is_supervisor)
    if descriptor is None:
        raise Refusal(f"{shown(directory.path)} is in use, but not by a process that can be seen from here")
    processes.send(descriptor, signal.SIGTERM)
    if processes.wait_gone([descriptor], _END):
        processes.send(descriptor, signal.SIGINT)  # a second signal: the run ends at once
        if processes.wait_gone([descriptor], 10):
            say(f"the run in {shown(directory.path)} does not end (process {owner['pid']})")
            return INTERRUPTED
    ended.append({"run": str(directory.path)})
    say(f"the run in {shown(directory.path)} has ended")
    return DONE


def _stop_loaders(everywhere, ended):
    elsewhere = loaders.Home.elsewhere()
    code = DONE
    for home in [*loaders.Home.all(), *(elsewhere if everywhere else [])]:
        model = str(home.record.get("model") or home.folder)
        stopped = _stop_loader(home)
        if stopped is None:
            code = LOCKED
        elif stopped:
            ended.append({"loader_of": model})
    if not ended and code == DONE:
        say("no loader was kept")
    for home in [] if everywhere else elsewhere:
        say(f"a loader lives on that was kept under another XDG_RUNTIME_DIR ({shown(home.folder)}); --all ends it, too")
    return code


def _stop_loader(home):
    """Whether there was one and it has ended; None if a run uses it."""
    model = home.record.get("model") or home.folder
    try:
        attached = home.take()
    except FileNotFoundError:  # it has just ended, and its home was removed
        return False
    if attached is None:
        say(f"the kept loader of {shown(model)} is in use by a run: stop that first")
        return None
    ended = home.stop()
    attached.give_back()
    if ended:
        say(f"ended the loader of {shown(model)}")
    return ended
