#!/usr/bin/env python3
"""Variants of one run at the same time on the CPU device, of which one computes at a time, for a moment each.

Other work on the host, which changes from second to second, slows all variants alike: so ratios of 1 or 2 % show where runs one after
the other scatter by 10 %. All executors but one are stopped (SIGSTOP); they take turns, in a new order each time. A variant's time is
the sum of its turns in which its executor computed. The work is that of transformers_cpu.py:

    bench/side_by_side.py --shape llama --variants bfloat16,bfloat16+int8,bfloat16+int4 [--rounds 14] [--json FILE]
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from transformers_cpu import SHAPES, poise_command, prompts

PATIENCE = 60.0  # seconds for the start and the end of a run
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid):
    """Of all threads of a process. Raises OSError if there is no such process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def executor_of(run_dir, process):
    """The process number of a run's executor, as soon as there is one."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has ended meanwhile
            if words[0].endswith("poise-gpu-executor") and any(str(run_dir) in word for word in words):
                return int(folder.name)
        time.sleep(0.005)
    sys.exit(f"{run_dir}: no executor was started")


class Variant:
    """One run. Its executor is stopped except in its turns."""

    def __init__(self, work, name, folder, threads):
        self.name, self.folder, self.seconds = name, folder, 0.0
        folder.mkdir()
        command, run_dir = poise_command(work, name, folder, threads, 0)
        with open(folder / "stderr", "w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        self.executor = executor_of(run_dir, self.process)
        os.kill(self.executor, signal.SIGSTOP)

    def turn(self, length):
        """False: the executor has ended."""
        try:
            used, began = cpu_seconds(self.executor), time.perf_counter()
            os.kill(self.executor, signal.SIGCONT)
            time.sleep(length)
            os.kill(self.executor, signal.SIGSTOP)
            took = time.perf_counter() - began
            if cpu_seconds(self.executor) - used >= took / 2:
                self.seconds += took
            return True
        except OSError:
            if self.process.wait(timeout=PATIENCE) != 0:
                sys.exit(f"poise ended with {self.process.returncode}: {(self.folder / 'stderr').read_text().strip()}")
            return False


def one_round(work, options):
    """{variant: seconds in which it computed}"""
    with tempfile.TemporaryDirectory() as folder:
        variants = []
        try:
            for name in options.variants.split(","):
                variants.append(Variant(work, name, pathlib.Path(folder) / name, options.threads))
            time.sleep(options.settle)  # loaders and planners prepare
            running = list(variants)
            while running:
                random.shuffle(running)
                running = [variant for variant in running if variant.turn(options.turn_ms / 1000)]
        finally:
            for variant in variants:
                if variant.process.poll() is None:  # not after a whole round
                    os.kill(variant.executor, signal.SIGCONT)
                    variant.process.send_signal(signal.SIGINT)
                    variant.process.wait()
        return {variant.name: variant.seconds for variant in variants}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=tuple(SHAPES), default="llama")
    options.add_argument("--variants", default="bfloat16,bfloat16+int8,bfloat16+int4", help="the first is what the others are compared with")
    options.add_argument("--rounds", type=int, default=14)
    options.add_argument("--turn-ms", type=float, default=120)
    options.add_argument("--settle", type=float, default=3, help="seconds")
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--num-prompts", type=int, default=32)
    options.add_argument("--input-len", type=int, default=128)
    options.add_argument("--output-len", type=int, default=64)
    options.add_argument("--policy", default="kv-only")
    options.add_argument("--json", type=pathlib.Path)
    options = options.parse_args()

    work = {"prompts": prompts(options.num_prompts, options.input_len), "output_len": options.output_len,
            "policy": options.policy, "shape": SHAPES[options.shape]}
    rounds = []
    for number in range(options.rounds):
        rounds.append(one_round(work, options))
        print(f"round {number}, seconds: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in rounds[-1].items()), flush=True)
    base, *others = rounds[0]
    speeds = {name: sorted(one[base] / one[name] for one in rounds) for name in others}
    result = {"base": base, "rounds": rounds,
              "speed": {name: {"median": statistics.median(all_), "least": all_[0], "most": all_[-1]} for name, all_ in speeds.items()}}
    print(json.dumps(result["speed"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
