"""`poise policy` and `poise restart`: changes to a run that goes on. Tokens do not change by them."""

import json
import os
import signal
import time
from pathlib import Path

from . import processes, quantities
from .locks import Lock
from .options import normalised, parser
from .quantities import counted
from .restarts import ANSWER, ASKED
from .run_directory import RunDirectory, read_json
from .trouble import CANNOT_START, DONE, INTERRUPTED, Refusal, brief, say, shown, tell

_WAIT = 120.0  # seconds for an iteration to end
_LOOK = 0.02


def add_policy(to):
    to.add_argument("--act-share", type=quantities.share, metavar="0..1", help="share of ACT blocks, for hybrid and kvpr")
    to.add_argument("--recompute-share", type=quantities.share, metavar="0..1", help="for token-recompute")
    to.add_argument("--machine", metavar="NAME", help="whose costs the policy decides by (default: as the run was told)")


def _options(given):
    """Those of the policy that were given."""
    values = {name: getattr(given, name) for name in ("act_share", "recompute_share", "machine")}
    return {name: value for name, value in values.items() if value is not None}


def policy(words):
    made = parser(
        "policy",
        "Another policy for a run that goes on, from its next iteration; without NAME, the one in force.\n\n"
        "What is stored stays valid; nothing is loaded again; the tokens do not change.",
    )
    made.add_argument("words", nargs="+", metavar="[NAME] RUN", help="a policy (see policies), a run directory")
    made.add_argument("--json", action="store_true", help="as one JSON object")
    add_policy(made)
    made.usage = "poise policy [-h] [--json] [--act-share 0..1] [--recompute-share 0..1] [--machine NAME] [NAME] RUN"
    given = made.parse_mixed(normalised(words))
    if len(given.words) > 2:
        made.error(f"there is no argument {shown(given.words[2])}")
    directory = RunDirectory(Path(given.words[-1]))
    directory.require_a_run()
    if len(given.words) == 1:
        if _options(given):
            made.error("--act-share and the like go with the NAME of a policy")
        return _tell(directory.status(), given.json)
    serial = _wish(_living(directory), given.words[0], _options(given))
    return _answer_to_wish(directory, serial, given)


def _living(directory):
    if not directory.lives():
        raise Refusal(f"nothing runs in {shown(directory.path)}")
    if directory.record().get("measures"):
        raise Refusal(f"in {shown(directory.path)} a profile is being measured, all with one policy and the same processes: let it end")
    return directory


def _wish(directory, name, options):
    """Leaves the wish for the planner; returns its serial, which is above those of all wishes before."""
    until = time.monotonic() + _WAIT
    while (lock := Lock.take(directory.path / "policy.lock")) is None:
        if time.monotonic() > until:
            raise Refusal(f"{shown(directory.path / 'policy.lock')} is held: another command is asking for a policy and does not go on")
        time.sleep(_LOOK)
    try:
        before = read_json(directory.path / "policy.json").get("serial")
        serial = max(time.time_ns(), before + 1 if isinstance(before, int) else 0)
        directory.write("policy.json", json.dumps({"serial": serial, "policy": name, **options}))
        return serial
    finally:
        lock.give_back()


def answer_to(serial, status):
    """What became of a wish: (its answer, ""), or (None, why it is not fulfilled); (None, "") until that is known."""
    answers = status.get("policy_answers", [])
    own = next((answer for answer in answers if answer["serial"] == serial), None)
    if own and own["refusal"]:
        return None, f"{own['refusal']}; {own['policy']} stays in force"
    if not own and any(answer["serial"] > serial for answer in answers):
        return None, f"a later wish took the place of this one; {status.get('policy')} is in force"
    return own, ""


def _answer_to_wish(directory, serial, given):
    until = time.monotonic() + _WAIT
    while time.monotonic() < until:
        status = directory.status()
        granted, why_not = answer_to(serial, status)
        if why_not:
            raise Refusal(why_not)
        if granted:
            return _tell(status, given.json, granted)
        if not directory.lives():
            raise Refusal(f"the run in {shown(directory.path)} ended before its next iteration")
        time.sleep(_LOOK)
    status = directory.status()
    say(
        f"{given.words[0]} takes effect at the next iteration boundary; iteration {status.get('iteration', 0)} has been "
        f"under way for long ({brief(directory.path)}: {status.get('state', 'starting')})"
    )
    return DONE


def _tell(status, as_json, granted=None):
    """The policy in force; or the one that was `granted`, which another may have followed by now."""
    now = {"policy": status.get("policy"), "since": status.get("policy_since")}
    told = {name: granted[name] for name in now} if granted else now
    name = told["policy"]
    facts = {**told, "iteration": status.get("iteration")}
    facts["blocks"] = status.get("blocks", {})
    if as_json:
        tell(json.dumps(facts))
    elif name:
        blocks = facts["blocks"]
        on_host = f"{blocks.get('act', 0)} ACT and {counted(blocks.get('kv', 0), 'KV block')}"
        followed = f" ({now['policy']} followed, from iteration {now['since']} on)" if told != now else ""
        tell(f"{name}, from iteration {facts['since']} on{followed}; the host's pool has {on_host} now, and follows as blocks free up")
    else:
        tell("no policy yet: the run is being prepared")
    return DONE


def restart(words):
    made = parser(
        "restart",
        "Ends the planner or the gpu_executor of a run that goes on, and starts another in its place.\n\n"
        "The loader stays, nothing is read again, the tokens do not change. A planner leaves between two iterations, and "
        "the next one goes on\nwith every block; one that is killed leaves nothing, and what was unfinished is computed "
        "again.",
    )
    made.add_argument("what", metavar="planner|gpu_executor", help="which process")
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("--policy", metavar="NAME", help="of the planner that takes over (see policies)")
    made.add_argument("--kill", action="store_true", help="do not wait for a good moment")
    add_policy(made)
    given = made.parse_mixed(normalised(words))
    if given.what == "loader":
        made.error("weights and context lie in the loader, which stays as long as the run; `stop` and `run --resume`")
    if given.what not in ("planner", "gpu_executor"):
        made.error(f"there is no process {shown(given.what)}; there are planner and gpu_executor")
    if given.what != "planner" and given.policy is not None:
        made.error("--policy goes with planner")
    if given.policy is None and _options(given):
        made.error("--act-share and the like go with --policy")
    directory = RunDirectory(Path(given.run))
    directory.require_a_run()
    supervisor = _supervisor(_living(directory))
    try:
        serial = _wish(directory, given.policy, _options(given)) if given.policy else 0
        return _restarted(directory, supervisor, given, serial)
    finally:
        os.close(supervisor)


def _supervisor(directory):
    """Its pidfd."""
    owner = directory.owner()
    descriptor = None
    if isinstance(owner.get("pid"), int) and owner.get("takes_requests"):
        descriptor = processes.open_verified(owner["pid"], owner.get("started"))
    if descriptor is None:
        raise Refusal(f"{shown(directory.path)} is in use, but not by a process that can be asked from here")
    return descriptor


def _restarted(directory, supervisor, given, wish):
    began = time.monotonic()
    serial = time.time_ns()
    directory.write(ASKED.format(serial), json.dumps({"serial": serial, "what": given.what, "kill": given.kill}))
    processes.send(supervisor, signal.SIGUSR1)
    while time.monotonic() - began < _WAIT:
        answers = read_json(directory.path / ANSWER)
        answer = answers.get("answers", {}).get(str(serial))
        if answer:
            if "refused" in answer:
                raise Refusal(answer["refused"])
            pids = answers["pids"][given.what]  # somebody else's restart may have followed
            if _at_work(directory.status(), given.what, pids[pids.index(answer["pid"]) :]):
                return _tell_restart(directory.status(), given, answer, time.monotonic() - began, wish)
        if not directory.lives():
            say(f"the run in {shown(directory.path)} ended before the {given.what} was back")
            return INTERRUPTED
        time.sleep(_LOOK)
    say(f"the {given.what} is restarted at the next iteration boundary; this one takes long")
    return DONE


def _at_work(status, what, pids):
    return status.get("pids", {}).get(what) in pids and status.get("state") in ("running", "done")


def _tell_restart(status, given, answer, seconds, wish):
    tell(
        f"the {given.what} is process {answer['pid']} now, at work {seconds:.2f} s after it was asked for, "
        f"policy {status.get('policy')}, iteration {status.get('iteration', 0) + 1}"
    )
    _, why_not = answer_to(wish, status) if wish else (None, "")
    if why_not:
        say(why_not)
        return CANNOT_START
    return DONE
