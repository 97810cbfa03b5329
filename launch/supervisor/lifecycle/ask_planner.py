"""Asking poise-planner for something that needs no run: costs, plans, simulations."""

import os
import signal
import subprocess

from ..shared.options import planner_arguments
from ..shared.paths import PLANNER, program
from ..shared.trouble import INTERNAL, Refusal
from .children import own_sentence

# What the planner may refuse whatever the run's device and requests.
DECIDING = (
    *("policy", "act_share", "recompute_share", "machine", "profile", "min_num_seqs"),
    *("schedule", "resident_layers", "percent", "gpu_blocks", "host_attention", "absorption"),
)


def ask(*words):
    """Runs poise-planner with `words` and returns its stdout. If it refuses, we refuse with its sentence."""
    ended = subprocess.run(
        [str(program(PLANNER)), *(str(word) for word in words)], capture_output=True, text=True, errors="replace", check=False
    )
    if ended.returncode:
        sentence = own_sentence(PLANNER, ended.stderr) or f"the planner ended with {ended.returncode} and gave no reason"
        raise Refusal(sentence, ended.returncode if ended.returncode > 0 else INTERNAL)
    return ended.stdout


def plan_words(given):
    """The words of `poise-planner plan` for a run with these options."""
    words = ["plan", "--model", given.model, "-i", given.input, "--dtype", given.dtype, "--device", given.device]
    words += ["--quantization", given.quantization, "--pack-weights", given.pack_weights]
    return [*words, *planner_arguments(given)]


def check_decisions(given):
    """Refuses an impossible policy, or costs that are not there, before minutes of loading; the sentence is the planner's."""
    if given.device == "cuda" and given.host_gbps is not None:
        raise Refusal("--host-gbps: only the CPU device rehearses host cores of a set speed; leave it out, or use --device cpu")
    if any(getattr(given, name) is not None for name in DECIDING):
        ask(*plan_words(given), "--check")


def become_planner(*words):
    """Replaces this process by the planner (exec). Its messages begin with the name we give it: poise. SIGINT and SIGTERM wait until it
    handles them."""
    path = program(PLANNER)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        os.execv(path, ["poise", *words])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
