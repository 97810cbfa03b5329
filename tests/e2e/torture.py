#!/usr/bin/env python3
"""Faults at every point of a run: each ends with a sentence and a right exit code, and a resume gives the same answers.

Without arguments: a share of all cases, drawn by the seed. `--full`: all of them. `--minutes M`: random ones for that long.
`--case 'CASE'` repeats one. Cases are described in faults.py, failpoints in common/testing/failpoint.h.
"""

import argparse
import concurrent.futures
import random as randoms
import re
import shlex
import sys
import threading
import time
import traceback

import faults
import harness
from harness import expect, expect_equal, test

AT_ONCE = 6  # cases: they wait more than they compute
EXTRA_KILLS = 6  # of the kill matrix, beside one for each point
RANDOM_KILLS = 20
ALL_RANDOM_KILLS = 200
CALLS = 26
MESSAGES = 10
SOME = 12  # how often a tiny run comes to a point that it passes often



def complaint_of(case, seed):
    """(whether the fault came to pass, None or what went wrong)."""
    workspace = harness.Workspace(seed)
    fired, complaint = False, None
    try:
        if str(case).startswith("random-kills"):
            fired = True
            name, kills = case.split("=")
            faults.killed_at_random(randoms.Random(f"{seed} {name}"), workspace, int(kills))
        else:
            fired = faults.survives(case, workspace)
    except harness.Failed as problem:
        complaint = str(problem)
    except Exception:  # pylint: disable=broad-except
        complaint = traceback.format_exc()
    try:
        workspace.close()
    except harness.Failed as problem:
        complaint = f"{complaint}\n{problem}" if complaint else str(problem)
    return fired, complaint


class Torture:
    """Runs cases, a few at a time, and keeps what went wrong. Any thread may call `try_case`."""

    def __init__(self, seed, talks=False):
        self.seed = seed
        self.tried = 0
        self.complaints = []
        self._talks = talks
        self._lock = threading.Lock()

    def try_case(self, case, must_fire=True):
        """Whether its fault came to pass."""
        fired, complaint = complaint_of(case, self.seed)
        if complaint is None and must_fire and not fired:
            complaint = "the run never came to that point: the case tests nothing"
        with self._lock:
            self.tried += 1
            if complaint:
                self.complaints.append(f"{case}\n{complaint}\nrepeat it: {repetition(case, self.seed)}")
            if self._talks:
                print(f"{'FAILED' if complaint else 'ok    '} {case}{'' if fired else ' (nothing came of it)'}", flush=True)
                if complaint:
                    print(self.complaints[-1], flush=True)
        return fired

    def try_all(self, cases):
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self.try_case, cases))

    def try_each_time(self, calls):
        """Each call fails the first, the second … time, until a run does not come to that time."""

        def one(call):
            nth = 1
            while self.try_case(faults.nth_case(*call, nth), must_fire=nth == 1) and not self._too_many():
                nth += 1

        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, calls))

    def _too_many(self):
        return len(self.complaints) > 20

    def expect_nothing_wrong(self, least):
        expect(not self.complaints, "\n\n".join(self.complaints[:5]) + f"\n\n{len(self.complaints)} of {self.tried} cases")
        expect(self.tried >= least, f"only {self.tried} cases")


def repetition(case, seed):
    return f"tests/e2e/torture.py --seed {seed} --case {shlex.quote(str(case))}"


# ---- the share that every test run has


@test
def killed_or_halted_at_every_kill_point_a_run_loses_no_answer(workspace):
    random = workspace.random
    points = [*faults.kill_points().values()]
    drawn = points + random.sample(points, EXTRA_KILLS)
    torture = Torture(workspace.seed)
    torture.try_all([faults.kill_case(random, point, random.choice(faults.SIGNALS), random.randrange(4)) for point in drawn])
    torture.expect_nothing_wrong(len(drawn))


@test
def a_call_that_fails_ends_the_run_with_a_sentence_and_resume_completes_it(workspace):
    random = workspace.random
    calls = random.sample(faults.failing_calls(), CALLS)
    torture = Torture(workspace.seed)
    torture.try_all([faults.nth_case(*call, 1) for call in calls])
    torture.expect_nothing_wrong(len(calls))


@test
def messages_lost_repeated_or_late_never_change_an_answer(workspace):
    random = workspace.random
    torture = Torture(workspace.seed)
    messages = [random.choice(faults.failing_messages()) for _ in range(MESSAGES)]
    cases = [faults.nth_case(*message, random.randint(1, 2 if message[0] == "loader" else SOME)) for message in messages]
    torture.try_all(cases)
    torture.expect_nothing_wrong(MESSAGES)


@test
def processes_killed_at_random_times_lose_no_answer(workspace):
    torture = Torture(workspace.seed)
    torture.try_all([f"random-kills{i}={RANDOM_KILLS // 4}" for i in range(4)])
    torture.expect_nothing_wrong(4)


@test
def a_request_whose_logits_are_no_numbers_is_an_error_line_and_the_others_go_on(workspace):
    torture = Torture(workspace.seed)
    torture.try_case(faults.nan_case(workspace.random))
    torture.expect_nothing_wrong(1)


def only(workspace, text):
    torture = Torture(workspace.seed)
    torture.try_case(faults.Case.of(text))
    torture.expect_nothing_wrong(1)


@test
def a_loader_that_halts_while_it_moves_the_border_is_noticed(workspace):
    """The planner waits for it; that is no progress."""
    only(workspace, "planner/planner.between_iterations:stop@4,loader.border_moved:stop work=small policy=act-only")


@test
def a_run_whose_first_file_cannot_be_written_says_so(workspace):
    only(workspace, "supervisor.write:errno=EIO work=tiny")


@test
def what_is_no_failpoint_is_refused(workspace):
    requests = workspace.write_requests("in.jsonl", faults.tiny())
    for words in ("nowhere:kill", "results.sync:short=3", "results.write:kill@0", "supervisor.steady:drop", "results.write"):
        ended = workspace.run(requests, workspace / "out", *faults.OPTIONS, model=faults.MODEL, env={"POISE_FAILPOINTS": words})
        ended.expect(2, "POISE_FAILPOINTS", words)


@test
def every_failpoint_has_its_place_and_every_kill_point_its_failpoint(_):
    wanted = [f"{letter}{i}" for letter, last in (("L", 10), ("P", 5), ("E", 8), ("W", 3), ("S", 2)) for i in range(1, last + 1)]
    expect_equal(sorted(faults.kill_points()), sorted(wanted), "the kill points")
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("common", "loader", "planner", "gpu_executor", "launch/supervisor")
        for path in (harness.ROOT / folder).rglob("*")
        if path.suffix in (".cpp", ".py")
    )
    reached = set(re.findall(r'(?:failpoint|fails_at|write_at|expect_no_fault)\(\s*"([\w.]+)"', text))
    expect_equal(reached, {*faults.points(), *faults.SUPERVISOR_POINTS}, "the failpoints in the sources")


# ---- all of it, or as long as wanted


def full(torture):
    """Everything; each part says how long it took."""
    random = randoms.Random(torture.seed)
    often = [("gpu_executor", "device.stream", "fail")]  # some hundred times, all alike
    for what, part in (
        ("kill matrix", lambda: torture.try_all(faults.kill_matrix(random))),
        ("random kills", lambda: torture.try_all([f"random-kills{i}=10" for i in range(ALL_RANDOM_KILLS // 10)])),
        ("failing calls", lambda: torture.try_each_time([call for call in faults.failing_calls() if call not in often])),
        ("work on a stream", lambda: torture.try_all([faults.nth_case(*often[0], nth) for nth in random.sample(range(1, 90), 20)])),
        ("messages", lambda: torture.try_each_time(faults.failing_messages())),
        ("no numbers", lambda: torture.try_all([faults.nan_case(random) for _ in range(8)])),
    ):
        began, cpu, tried = time.monotonic(), harness.cpu_of_children(), torture.tried
        part()
        seconds, cpu = time.monotonic() - began, harness.cpu_of_children() - cpu
        print(f"--- {what}: {torture.tried - tried} cases, {seconds:.0f} s, {cpu:.0f} s of a core", flush=True)


def drawn(random):
    """Any case, and whether its fault must come to pass."""
    kind = random.random()
    if kind < 0.5:
        point = random.choice([*faults.kill_points().values()])
        return faults.kill_case(random, point, random.choice(faults.SIGNALS), random.randrange(4)), True
    if kind < 0.7:
        return faults.nth_case(*random.choice(faults.failing_calls()), random.choice((1, 1, 2, 3, 4))), False
    if kind < 0.85:
        return faults.nth_case(*random.choice(faults.failing_messages()), random.randint(1, SOME)), False
    if kind < 0.9:
        return faults.nan_case(random), True
    return f"random-kills{random.randrange(1 << 30)}=10", True


def for_minutes(torture, minutes):
    random, lock, until = randoms.Random(torture.seed), threading.Lock(), time.monotonic() + 60 * minutes

    def work(_):
        while time.monotonic() < until:
            with lock:
                case = drawn(random)
            torture.try_case(*case)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(work, range(AT_ONCE)))


def main():
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--full", action="store_true")
    options.add_argument("--minutes", type=float)
    options.add_argument("--case")
    options.add_argument("--seed", type=harness.seed_of, default="random")
    given, rest = options.parse_known_args()
    if not (given.full or given.minutes or given.case):
        return harness.main()
    if rest:
        options.error(f"there is no {rest[0]} beside --full, --minutes and --case")
    torture = Torture(given.seed, talks=True)
    print(f"seed {given.seed}", flush=True)
    if given.case:
        torture.try_case(given.case if given.case.startswith("random-kills") else faults.Case.of(given.case))
    elif given.full:
        full(torture)
    else:
        for_minutes(torture, given.minutes)
    for complaint in torture.complaints:
        print(f"\n{complaint}")
    print(f"{torture.tried - len(torture.complaints)} passed, {len(torture.complaints)} failed")
    return 1 if torture.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
