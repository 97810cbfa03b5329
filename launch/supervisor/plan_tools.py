"""What the planner can be asked without a model, a machine or a run; it answers itself."""

import json
import os
import subprocess

from . import inputs
from .children import own_sentence
from .options import normalised, parser, planner_arguments
from .paper_figures import DRAWN, NOT_DRAWN, draw
from .places import PLANNER, program
from .trouble import DONE, INTERNAL, Refusal, naming, of_system, tell


def policies(words):
    made = parser("policies", "Lists the ways to keep context (--policy), each with its source.")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    given = made.parse_args(normalised(words))
    _ask("policies", *(["--json"] if given.json else []))


def simulate(words):
    made = parser(
        "simulate",
        "Plays the planner's own decisions in virtual time, with no GPU and no weights: the papers' experiments by name.",
    )
    made.add_argument("name", metavar="NAME", help=f"one of {', '.join((*DRAWN, *NOT_DRAWN))}; the last takes a minute and has no picture")
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--svg", metavar="FILE", help="draw it, too, as the paper does")
    given = made.parse_args(normalised(words))
    if not given.name:
        made.error("missing: NAME")
    if given.svg is None:
        return _ask("simulate", *(["--json"] if given.json else []), "--", given.name)
    if given.name in NOT_DRAWN:
        raise Refusal(f"there is no picture of {given.name}; there are pictures of {', '.join(DRAWN)}")
    inputs.check_written("--svg", given.svg)
    table, _, played = ask("simulate", "--json", "--table", "--", given.name).rstrip("\n").rpartition("\n")
    _write(given.svg, draw(given.name, json.loads(played)))
    tell(played if given.json else table)
    return DONE


def _write(path, text):
    try:
        with naming(path), open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise of_system(problem) from None


def ask(*words):
    """What the planner answers on stdout; its refusal is ours."""
    ended = subprocess.run(
        [str(program(PLANNER)), *(str(word) for word in words)], capture_output=True, text=True, errors="replace", check=False
    )
    if ended.returncode:
        sentence = own_sentence(PLANNER, ended.stderr) or f"the planner ended with {ended.returncode} and no word"
        raise Refusal(sentence, ended.returncode if ended.returncode > 0 else INTERNAL)
    return ended.stdout


def plan_words(given):
    """Of `poise-planner plan`, for a run with these options."""
    words = ["plan", "--model", given.model, "-i", given.input, "--dtype", given.dtype, "--device", given.device]
    return [*words, *planner_arguments(given)]


def check_decisions(given):
    """Refuses a policy or costs that cannot be had before minutes of loading, with the planner's own words."""
    if any(getattr(given, name) is not None for name in ("policy", "act_share", "recompute_share", "machine", "profile", "min_num_seqs")):
        ask(*plan_words(given), "--check")


def _ask(*words):
    os.execv(program(PLANNER), ["poise", *words])  # the planner refuses under the name it is called by
