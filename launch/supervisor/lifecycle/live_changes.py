"""Changes to a run that goes on: what `poise policy` and `poise restart` share. Tokens do not change by them.

A wish for a policy is RUN/policy.json, which the planner reads between two iterations; its answer stands in status.json
under the wish's serial.
"""

import json
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
    to.add_argument("--machine", metavar="NAME", help="whose costs the policy decides by (default: as the run was told)")


_OPTIONS = ("act_share", "recompute_share", "machine")


def policy_options(given):
    """Those of the policy that were given."""
    values = {name: getattr(given, name) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def require_living(directory):
    if not directory.lives():
        raise Refusal(f"nothing runs in {shown(directory.path)}")
    if directory.record().get("measures"):
        raise Refusal(f"in {shown(directory.path)} a profile is being measured, all with one policy and the same processes: let it end")
    return directory


def wish_for_policy(directory, name, options, rebuild=False):
    """Leaves the wish for the planner; returns its serial, which is above those of all wishes before. `rebuild`: the pools
    are to be made anew for it."""
    until = time.monotonic() + WAIT
    while (lock := Lock.take(directory.path / "policy.lock")) is None:
        if time.monotonic() > until:
            raise Refusal(f"{shown(directory.path / 'policy.lock')} is held: another command is asking for a policy and does not go on")
        time.sleep(LOOK)
    try:
        before = read_json(directory.path / "policy.json").get("serial")
        serial = max(time.time_ns(), before + 1 if isinstance(before, int) else 0)
        directory.write("policy.json", json.dumps({"serial": serial, "policy": name, **options, "rebuild": rebuild}))
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


def held_back_now(status):
    """What the policy in force cannot have until the pools are made anew; "" where that is nothing, or not known."""
    granted = [answer for answer in status.get("policy_answers", []) if not answer["refusal"]]
    return granted[-1].get("held_back", "") if granted else ""


def rebuild_command(directory, name):
    """What has the pools made anew for the policy `name` that is in force, with the options it was granted with."""
    granted = read_json(directory.path / "policy.in_force.json")
    options = granted if granted.get("policy") == name else {}
    words = [word for key in _OPTIONS if key in options for word in ("--" + key.replace("_", "-"), options[key])]
    return command_line("policy", name, brief(directory.path), *words, "--rebuild")
