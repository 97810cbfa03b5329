"""`poise restart`: another loader, planner or gpu_executor for a run that goes on."""

import json
import os
import signal
import time
from pathlib import Path

from ..lifecycle import live_changes, processes, segments
from ..lifecycle.restarts import ANSWER, ASKED
from ..lifecycle.run_directory import RunDirectory
from ..shared.files import read_json
from ..shared.options import add_json, normalised, parser
from ..shared.trouble import CANNOT_START, DONE, INTERRUPTED, Refusal, say, shown, tell


def restart(words):
    made = parser(
        "restart",
        "Ends a process of a living run, and starts another in its place.\n\n"
        "Nothing is read again, the tokens do not change. A planner leaves between two iterations, and the next one goes on\n"
        "with every block; one that is killed leaves nothing, and what was unfinished is computed again. The next loader adopts\n"
        "weights and context where they are.",
    )
    made.add_argument("what", metavar="loader|planner|gpu_executor", help="which process")
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("--policy", metavar="NAME", help="of the planner that takes over (see policies)")
    made.add_argument("--kill", action="store_true", help="do not wait for a good moment")
    add_json(made)
    live_changes.add_policy_options(made)
    given = made.parse_mixed(normalised(words))
    if given.what not in ("loader", "planner", "gpu_executor"):
        made.error(f"there is no process {shown(given.what)}; there are loader, planner and gpu_executor")
    if given.what != "planner" and given.policy is not None:
        made.error("--policy goes with planner")
    if given.policy is None and live_changes.policy_options(given):
        made.error("--act-share and the like go with --policy")
    directory = RunDirectory(Path(given.run))
    directory.require_a_run()
    supervisor = _supervisor(live_changes.require_living(directory))
    try:
        serial = live_changes.wish_for_policy(directory, given.policy, live_changes.policy_options(given)) if given.policy else 0
        return _restarted(directory, supervisor, given, serial)
    finally:
        os.close(supervisor)


def _supervisor(directory):
    """The supervisor's pidfd."""
    owner = directory.owner()
    descriptor = None
    if isinstance(owner.get("pid"), int) and owner.get("takes_requests"):
        descriptor = processes.open_verified(owner["pid"], owner.get("started"), processes.is_supervisor)
    if descriptor is None:
        raise Refusal(f"{shown(directory.path)} is in use, but not by a process that can be asked from here")
    return descriptor


def _restarted(directory, supervisor, given, wish):
    began = time.monotonic()
    serial = time.time_ns()
    control = segments.ControlView(directory.record().get("run_id"))
    before = control.which
    directory.write(ASKED.format(serial), json.dumps({"serial": serial, "what": given.what, "kill": given.kill}))
    processes.send(supervisor, signal.SIGUSR1)
    while time.monotonic() - began < live_changes.WAIT:
        answers = read_json(directory.path / ANSWER)
        answer = answers.get("answers", {}).get(str(serial))
        if answer:
            if "refused" in answer:
                raise Refusal(answer["refused"])
            pids = answers["pids"][given.what]  # another restart may have followed
            control.close()  # one that begins anew makes another segment
            at_work = (
                control.which[1] > 0 and control.which != before
                if given.what == "loader"
                else _at_work(directory.status(), given.what, pids[pids.index(answer["pid"]) :])
            )
            if at_work:
                return _tell_restart(directory.status(), given, answer, time.monotonic() - began, wish)
        if not directory.lives():
            say(f"the run in {shown(directory.path)} ended before the {given.what} was back")
            return INTERRUPTED
        time.sleep(live_changes.LOOK)
    if given.json:
        tell(json.dumps({"what": given.what, "pid": None, "at_work": False}))
        return DONE
    when = "once it has ended" if given.what == "loader" else "at the next iteration boundary; this iteration takes long"
    say(f"the {given.what} is restarted {when}")
    return DONE


def _at_work(status, what, pids):
    return status.get("pids", {}).get(what) in pids and status.get("state") in ("running", "done")


def _tell_restart(status, given, answer, seconds, wish):
    if given.json:
        facts = {"what": given.what, "pid": answer["pid"], "at_work": True, "seconds": round(seconds, 3)}
        tell(json.dumps(facts | {"policy": status.get("policy"), "iteration": status.get("iteration", 0) + 1}))
    begun = f", policy {status['policy']}, iteration {status.get('iteration', 0) + 1}" if status.get("policy") else ""
    if not given.json:
        tell(f"the {given.what} is process {answer['pid']} now, at work {seconds:.2f} s after it was asked for{begun}")
    _, why_not = live_changes.answer_to(wish, status) if wish else (None, "")
    if why_not:
        say(why_not)
        return CANNOT_START
    return DONE
