"""Changes to a run that goes on: what `poise policy` and `poise restart` share. Tokens do not change by them.

A wish for a policy is RUN/policy.json, which the planner reads between two iterations; its answer stands in status.json
under the wish's serial.
"""

import json
import os
import time

from ..shared import quantities
from ..shared.files import read_json
from ..shared.paths import command_line
from ..shared.trouble import Refusal, brief, shown
from .locks import Lock

WAIT = 120.0  # seconds for an iteration to end
LOOK = 0.02


def add_policy_options(to):
    to.add_argument("--act-share", type=quantities.share, metavar="0..1", help="share of ACT blocks, for hybrid and kvpr")
    to.add_argument("--recompute-share", type=quantities.share, metavar="0..1", help="for token-recompute")
    to.add_argument("--machine", metavar="NAME|FILE", help="whose costs the policy decides by (default: as the run was told)")


_OPTIONS = ("act_share", "recompute_share", "machine")


def policy_options(given):
    """The policy's options that were given."""
    values = {name: getattr(given, name) for name in _OPTIONS}
    if values["machine"] is not None and os.path.isfile(values["machine"]):
        values["machine"] = os.path.abspath(values["machine"])  # the planner may have another working directory
    return {name: value for name, value in values.items() if value is not None}


def require_living(directory):
    if not directory.lives():
        raise Refusal(f"nothing runs in {shown(directory.path)}")
    if directory.record().get("measures"):
        raise Refusal(
            f"in {shown(directory.path)} a profile is being measured, which takes one policy and the same processes throughout: "
            "wait for its end"
        )
    if "replays" in directory.record():
        raise Refusal(f"{shown(directory.path)} is of a replay, which does what its log says, with the same processes throughout")
    return directory


def wish_for_policy(directory, name, options, rebuild=False):
    """Writes the wish for the planner. Returns its serial, which is higher than those of all earlier wishes. `rebuild`: with
    pools made anew for it."""
    until = time.monotonic() + WAIT
    while (lock := Lock.take(directory.path / "policy.lock")) is None:
        if time.monotonic() > until:
            raise Refusal(f"{shown(directory.path / 'policy.lock')} is held: another command asks for a policy and is stuck")
        time.sleep(LOOK)
    try:
        before = read_json(directory.path / "policy.json").get("serial")
        serial = max(time.time_ns(), before + 1 if isinstance(before, int) else 0)
        directory.write("policy.json", json.dumps({"serial": serial, "policy": name, **options, "rebuild": rebuild}))
        return serial
    finally:
        lock.give_back()


def answer_to(serial, status):
    """What became of a wish: (its answer, "") if it was granted, (None, reason) if not; (None, "") until the planner answers."""
    answers = status.get("policy_answers", [])
    own = next((answer for answer in answers if answer["serial"] == serial), None)
    if own and own["refusal"]:
        return None, f"{own['refusal']}; {own['policy']} stays in force"
    if not own and any(answer["serial"] > serial for answer in answers):
        return None, f"a later request replaced this one; {status.get('policy')} is in force"
    return own, ""


def held_back_now(status):
    """What the policy in force cannot have until the pools are made anew; "" if there is nothing, or it is not known."""
    granted = [answer for answer in status.get("policy_answers", []) if not answer["refusal"]]
    return granted[-1].get("held_back", "") if granted else ""


def rebuild_command(directory, name):
    """The command that makes the pools anew for `name`, the policy in force, with the options it was granted with."""
    granted = read_json(directory.path / "policy.in_force.json")
    options = granted if granted.get("policy") == name else {}
    words = [word for key in _OPTIONS if key in options for word in ("--" + key.replace("_", "-"), options[key])]
    return command_line("policy", name, brief(directory.path), *words, "--rebuild")
