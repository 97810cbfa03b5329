"""`poise policy`: another policy for a run that goes on, or which one is in force."""

import json
import time
from pathlib import Path

from ..lifecycle import live_changes
from ..lifecycle.run_directory import RunDirectory
from ..shared.options import normalised, parser
from ..shared.quantities import counted
from ..shared.trouble import DONE, Refusal, brief, say, shown, tell


def policy(words):
    made = parser(
        "policy",
        "Another policy for a living run, from its next iteration; without NAME, the one in force.\n\n"
        "What is stored stays valid; nothing is loaded again; the tokens do not change. The pools keep their size, so a policy\n"
        "may get fewer requests at a time, blocks or layers on the device than a run that starts with it: the answer says\n"
        "which. --rebuild makes the pools anew for it. Every request under way is then computed again.",
    )
    made.add_argument("words", nargs="+", metavar="[NAME] RUN", help="a policy (see policies), a run directory")
    made.add_argument("--json", action="store_true", help="as one JSON object")
    made.add_argument("--rebuild", action="store_true", help="make the pools anew; compute requests under way again")
    live_changes.add_policy_options(made)
    made.usage = "poise policy [-h] [--json] [--rebuild] [--act-share 0..1] [--recompute-share 0..1] [--machine NAME|FILE] [NAME] RUN"
    given = made.parse_mixed(normalised(words))
    if len(given.words) > 2:
        made.error(f"there is no argument {shown(given.words[2])}")
    directory = RunDirectory(Path(given.words[-1]))
    directory.require_a_run()
    options = live_changes.policy_options(given)
    if len(given.words) == 1:
        if options or given.rebuild:
            made.error("--rebuild, --act-share and the like go with the NAME of a policy")
        return _tell(directory, directory.status(), given)
    serial = live_changes.wish_for_policy(live_changes.require_living(directory), given.words[0], options, given.rebuild)
    return _answer_to_wish(directory, serial, given)


def _answer_to_wish(directory, serial, given):
    until = time.monotonic() + live_changes.WAIT
    while time.monotonic() < until:
        status = directory.status()
        granted, why_not = live_changes.answer_to(serial, status)
        if why_not:
            raise Refusal(why_not)
        if granted:
            return _tell(directory, status, given, granted)
        if not directory.lives():
            raise Refusal(f"the run in {shown(directory.path)} ended before its next iteration")
        time.sleep(live_changes.LOOK)
    status = directory.status()
    say(
        f"{given.words[0]} takes effect at the next iteration boundary; iteration {status.get('iteration', 0)} has been "
        f"running for long ({brief(directory.path)}: {status.get('state', 'starting')})"
    )
    return DONE


def _tell(directory, status, given, granted=None):
    """The policy in force; or the one that was `granted`, which another may have followed by now."""
    now = {"policy": status.get("policy"), "since": status.get("policy_since")}
    told = {name: granted[name] for name in now} if granted else now
    followed = told != now
    held_back = granted.get("held_back", "") if granted else live_changes.held_back_now(status)
    blocks = status.get("blocks", {})
    if given.json:
        tell(json.dumps({**told, "iteration": status.get("iteration"), "blocks": blocks, "held_back": held_back}))
    elif told["policy"]:
        begins = f"{told['policy']}, from iteration {told['since']} on"
        begins += f" ({now['policy']} followed, from iteration {now['since']} on)" if followed else ""
        tell(f"{begins}; {_what_of_the_pool(blocks, given.rebuild)}")
        if held_back and not followed:
            tell(held_back)
            tell(f"to make them anew: {live_changes.rebuild_command(directory, told['policy'])} (every request under way is then computed again)")
    else:
        tell("no policy yet: the run is being prepared")
    return DONE


def _what_of_the_pool(blocks, rebuild):
    if rebuild:
        return "the pools are made anew for it, and every request under way is computed again"
    on_host = f"{blocks.get('act', 0)} ACT and {counted(blocks.get('kv', 0), 'KV block')}"
    return f"the host's pool has {on_host} now, and follows as blocks free up"
