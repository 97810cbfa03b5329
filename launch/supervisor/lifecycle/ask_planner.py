"""What the planner can be asked without a model, a machine or a run; it answers itself."""

import os
import subprocess

from ..shared.options import planner_arguments
from ..shared.paths import PLANNER, program
from ..shared.trouble import INTERNAL, Refusal
from .children import own_sentence


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


def become_planner(*words):
    """The planner in place of this process. It refuses under the name it is called by."""
    os.execv(program(PLANNER), ["poise", *words])
