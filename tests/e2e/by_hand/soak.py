#!/usr/bin/env python3
"""A run of hours on the CPU device: a process killed and the policy swapped again and again; memory, descriptors and segments
stay level, and the answers are those of an undisturbed run. Not part of `launch/poise test`.

    tests/e2e/by_hand/soak.py [--minutes 60] [--kill-every 20] [--swap-every 30] [--seed N]
"""

import argparse
import os
import random as randoms
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import DEMO_MODEL, comparable, expect, expect_equal  # noqa: E402
from mixed_requests import good_request  # noqa: E402
from supervisor.lifecycle import live_changes  # noqa: E402
from supervisor.lifecycle.run_directory import RunDirectory  # noqa: E402
from supervisor.shared.trouble import Refusal  # noqa: E402

REQUESTS = 3000  # of one run; the next one begins when it is done
GROWN_UP = 5.0  # seconds after which a process has all that it will need
MOST_MIB_AN_HOUR = 8.0  # by which a process that lives on may grow
VICTIMS = ("loader", "planner", "gpu_executor")


def slope(points):
    """Least squares through (x, y)."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def resident_mib(pid):
    """Without shared pages: those are the segments', which are counted by themselves."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(dict(line.split(":", 1) for line in file)["RssAnon"].split()[0]) / 1024


class Samples:
    """Memory and descriptors of each kind of process, over the time of the soak."""

    def __init__(self):
        self.began = time.monotonic()
        self.memory, self.descriptors, self.segments = {}, {}, []
        self._seen = {}

    def take(self, run, processes):
        now = time.monotonic()
        for name, pid in processes.items():
            if now - self._seen.setdefault(pid, now) < GROWN_UP:
                continue
            try:
                memory, descriptors = resident_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))
            except (OSError, KeyError):  # it has just ended
                continue
            self.memory.setdefault(name, []).append((now - self.began, memory))
            self.descriptors.setdefault(name, []).append((now - self.began, descriptors))
        names = harness.segments_of(harness._json(run / "run.json").get("run_id", "-"))
        self.segments.append((now - self.began, len(names)))

    def report(self):
        """Prints the figures; returns what is not level."""
        complaints = []
        print(f"{'':14} {'samples':>8} {'least':>8} {'most':>8} {'an hour':>9}")
        rows = [(f"{name}, MiB", points, MOST_MIB_AN_HOUR) for name, points in sorted(self.memory.items())]
        rows += [(f"{name}, fds", points, 1.0) for name, points in sorted(self.descriptors.items())]
        rows += [("segments", self.segments, 1.0)]
        hours = (time.monotonic() - self.began) / 3600
        for name, points, most in rows:
            values = [value for _, value in points]
            if not values:
                complaints.append(f"{name}: no samples")
                continue
            grown = slope(points) * 3600
            print(f"{name:18} {len(values):4} {min(values):8.1f} {max(values):8.1f} {grown:+9.2f}")
            if grown > most and grown * hours > most:  # a short soak has no slope that means anything
                complaints.append(f"{name} grows by {grown:.1f} an hour")
        return complaints


class Soak:
    def __init__(self, workspace, given):
        self.workspace = workspace
        self.random = randoms.Random(given.seed)
        self.given = given
        self.samples = Samples()
        self.kills = self.swaps = self.runs = 0
        lines = [good_request(self.random, i) for i in range(given.requests)]
        for line in lines:
            if line["body"].get("temperature"):
                line["body"]["seed"] = self.random.randrange(1 << 31)
        self.requests = workspace.write_requests("in.jsonl", lines)
        workspace.run(self.requests, workspace / "oracle", timeout=1800).expect(0)
        self.oracle = comparable(workspace / "oracle")

    def run_until(self, end):
        """Run after run, disturbed; the last one is interrupted and then completed at full speed."""
        while time.monotonic() < end:
            self.runs += 1
            output = self.workspace / f"out{self.runs}"
            options = ("--max-num-seqs", "8", "--compute-gflops", f"{self.given.gflops}", "--restarts", "1000000")
            process = self.workspace.start(*self.workspace.run_words(self.requests, output, *options))
            self.disturb(process, Path(f"{output}.poise"), end)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            ended = self.workspace.finish(process, timeout=60)
            expect(ended.code in (0, 75), f"run {self.runs} ended with {ended.code}:\n{ended.err[-2000:]}")
            if ended.code == 75:
                expect(time.monotonic() >= end, f"run {self.runs} ended by itself:\n{ended.err[-2000:]}")
                self.workspace.run(self.requests, output, "--resume", timeout=1800).expect(0)
            expect_equal(comparable(output), self.oracle, f"the answers of run {self.runs}")
            output.unlink()

    def disturb(self, process, run, end):
        next_kill = time.monotonic() + self.given.kill_every
        next_swap = time.monotonic() + self.given.swap_every
        while process.poll() is None and time.monotonic() < end:
            time.sleep(1)
            there = self.workspace.children(run)
            self.samples.take(run, {"supervisor": process.pid, **there})
            if time.monotonic() > next_kill and len(there) == 3:
                next_kill += self.given.kill_every
                os.kill(there[self.random.choice(VICTIMS)], signal.SIGKILL)
                self.kills += 1
            if time.monotonic() > next_swap:
                next_swap += self.given.swap_every
                self.swap(run)

    def swap(self, run):
        name = self.random.choice(harness.policies())
        machines = {"optimal": "a100-pcie4", "three-way": str(harness.ROOT / "tests" / "planner" / "profiles" / "host_machine.json")}
        options = {"machine": machines[name]} if name in machines else {}
        try:
            live_changes.wish_for_policy(RunDirectory(run), name, options)
            self.swaps += 1
        except Refusal:  # the run is over
            pass


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=60)
    options.add_argument("--kill-every", type=float, default=20, metavar="SECONDS")
    options.add_argument("--swap-every", type=float, default=30, metavar="SECONDS")
    options.add_argument("--requests", type=int, default=REQUESTS)
    options.add_argument("--gflops", type=float, default=1.0, help="speed of the CPU device, so that a run lasts")
    options.add_argument("--seed", type=harness.seed_of, default="random")
    given = options.parse_args()
    print(f"seed {given.seed}", flush=True)
    workspace = harness.Workspace(given.seed)
    complaints = []
    try:
        soak = Soak(workspace, given)
        soak.run_until(time.monotonic() + 60 * given.minutes)
        print(f"{soak.runs} runs of {given.requests} requests, {soak.kills} kills, {soak.swaps} policies asked for")
        complaints = soak.samples.report()
    except harness.Failed as problem:
        complaints.append(str(problem))
    try:
        workspace.close()
    except harness.Failed as problem:
        complaints.append(str(problem))
    print("\n".join(complaints) or "level")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
