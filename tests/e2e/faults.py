"""What torture.py does to runs: faults at failpoints, each followed by a resume and compared with an undisturbed run.

A case is one line of text, with which it can be repeated: the words of POISE_FAILPOINTS, then how the run goes on. Its last
entry is the fault. Not a test script.
"""

import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import harness
from harness import comparable, expect, expect_equal, request, wait_until
from supervisor.lifecycle import live_changes, processes
from supervisor.lifecycle.run_directory import RunDirectory
from supervisor.shared.failpoints import POINTS as SUPERVISOR_POINTS
from supervisor.shared.trouble import Refusal

MODEL = harness.ROOT / "tests" / "golden" / "models" / "pre_norm_head32"
# Weights and context lie on the host, so that all of both crosses the link. A halted process is found soon.
OPTIONS = ("--skip-tokenizer-init", "--threads", "1", "--resident-layers", "0", "--max-num-seqs", "3")
IMPATIENT = ("--stall-timeout", "1")
ON_HOST = ("--policy", "host-kv", "--host-threads", "2")  # to die while host cores are at work
SIGNALS = ("kill", "stop", "abort")
LONGEST = 60  # seconds that a disturbed run may take
_HEADER = harness.ROOT / "common" / "testing" / "failpoint.h"


def points():
    """{name: (kind, numbers)} of the programs' failpoints, as the header has them."""
    entries = re.findall(r'{"([\w.]+)", PointKind::(\w+), "([^"]*)"}', _HEADER.read_text(encoding="utf-8"))
    return {name: (kind, numbers.split()) for name, kind, numbers in entries}


def kill_points():
    """{number: name} of the 28 points at which every signal is tried."""
    named = {name: numbers for name, (_, numbers) in points().items()}
    named |= {name: re.split(r"[ :]", text) for name, text in SUPERVISOR_POINTS.items()}
    return {number: name for name, numbers in named.items() for number in numbers if re.fullmatch(r"[LPEWS]\d+", number)}


# ---- work


def small():
    """Some twenty iterations, answers that end at different times, lines that are errors."""
    lines = [request(f"g{i}", [5 + i, 6, 7, 11 * i + 3], max_tokens=(3, 20, 7)[i % 3], ignore_eos=True) for i in range(5)]
    lines += [request(f"s{i}", [9, 8, i], max_tokens=9, temperature=1.0, seed=i, logprobs=2) for i in range(2)]
    lines += [request("long", list(range(4, 40)), max_tokens=4), request("bad", [1], max_tokens=-1)]
    return lines


def tiny():
    """A few iterations: the work in which every single call fails once."""
    return [request("a", [5, 6, 7], max_tokens=3), request("b", list(range(4, 24)), max_tokens=2), request("bad", [1], top_p=7)]


WORK = {"small": small, "tiny": tiny}
_oracles = {}
_oracle_lock = threading.Lock()


def oracle(work, options=()):
    """What every run of this work gives."""
    with _oracle_lock:
        if work not in _oracles:
            workspace = harness.Workspace(0)
            try:
                requests = workspace.write_requests("in.jsonl", WORK[work]())
                workspace.run(requests, workspace / "out", *OPTIONS, *options, model=MODEL).expect(0)
                _oracles[work] = comparable(workspace / "out")
            finally:
                workspace.close()
        return _oracles[work]


# ---- one case


@dataclass(frozen=True)
class Case:
    words: str  # POISE_FAILPOINTS
    work: str = "small"
    restarts: int = 0  # deaths that the supervisor mends by itself
    policy: str = ""  # asked for while the planner, halted by the first entry, stands before an iteration
    wakes: bool = False  # a supervisor that was halted is woken; else it is killed

    def __str__(self):
        facts = [self.words, f"work={self.work}"]
        facts += [f"restarts={self.restarts}"] if self.restarts else []
        facts += [f"policy={self.policy}"] if self.policy else []
        return " ".join(facts + (["wakes"] if self.wakes else []))

    @staticmethod
    def of(text):
        words, *facts = text.split()
        given = dict(fact.partition("=")[::2] for fact in facts)
        return Case(words, given["work"], int(given.get("restarts", 0)), given.get("policy", ""), "wakes" in given)

    @property
    def fault(self):
        """(point, action) of the last entry."""
        entry = re.fullmatch(r"(?:\w+/)?([\w.]+):([^@+]*).*", self.words.split(",")[-1])
        return entry[1], entry[2]


def codes(case):
    """The exit codes that are right for the disturbed run."""
    point, action = case.fault
    if action in SIGNALS:
        return (0, 75) if not point.startswith("supervisor.") or case.wakes else (-signal.SIGKILL, -signal.SIGABRT)
    kind = point.split(".")[0]
    return {
        "results": (0, 73), "order_log": (0, 73), "replace_file": (0, 73), "directory": (0, 73), "supervisor": (0, 73),
        "segment": (0, 2, 75), "device": (0, 2, 75), "channel": (0, 75),
    }[kind]  # fmt: skip


def survives(case, workspace):
    """Runs, resumes and compares; returns whether the fault came to pass. Raises harness.Failed."""
    wanted = oracle(case.work)
    requests = workspace.write_requests("in.jsonl", WORK[case.work]())
    output, notes = workspace / "out", workspace / "fired"
    notes.mkdir()
    options = [*OPTIONS, *(ON_HOST if case.fault[0] == "executor.attending" else ())]
    # Where no end is right that a halted process brings, none is looked for: on a busy machine a process may get no core for a second.
    impatient = IMPATIENT if 75 in codes(case) or case.fault[1] in SIGNALS else ()
    words = workspace.run_words(requests, output, *options, *impatient, model=MODEL)
    words += ["--restarts", str(case.restarts)] if case.restarts else []
    environment = {"POISE_FAILPOINTS": case.words, "POISE_FAILPOINTS_FIRED": str(notes)}
    process = workspace.start(*words, env=environment)
    fault = notes / str(case.words.count(","))
    if case.policy:
        _ask_for_policy(case, workspace, process, Path(f"{output}.poise"), notes)
    if case.fault[0].startswith("supervisor.") and case.fault[1] == "stop":
        _see_to_halted_supervisor(case, process, fault)
    ended = workspace.finish(process, LONGEST)
    _check_end(case, ended)
    if ended.code != 0:
        if case.fault[1] == "nan":
            raise harness.Failed(f"a value that is not a number ended the run:\n{ended.err}")
        workspace.run(requests, output, *options, "--resume", model=MODEL, timeout=LONGEST).expect(0)
    if case.fault[1] == "nan" and fault.exists():
        _check_one_error(comparable(output), wanted)
    else:
        expect_equal(comparable(output), wanted, "the answers")
    return fault.exists()


def _ask_for_policy(case, workspace, process, run, notes):
    """Once the planner stands still before an iteration, so that the policy comes into force there."""
    wait_until(lambda: (notes / "0").exists() or process.poll() is not None, "the planner to halt")
    pid = workspace.children(run).get("planner")
    if process.poll() is None and pid:
        wait_until(lambda: processes.is_stopped(pid) or process.poll() is not None, "the planner to stand still")
        try:
            live_changes.wish_for_policy(RunDirectory(run), case.policy, {})
        except (Refusal, OSError):  # the run has ended
            pass
        os.kill(pid, signal.SIGCONT)


def _see_to_halted_supervisor(case, process, fault):
    wait_until(lambda: fault.exists() or process.poll() is not None, "the supervisor to come to that point")
    if process.poll() is None:
        wait_until(lambda: processes.is_stopped(process.pid), "the supervisor to halt")
        time.sleep(0.05)  # the others notice nothing yet
        os.kill(process.pid, signal.SIGCONT if case.wakes else signal.SIGKILL)


def _check_end(case, ended):
    told = f"ended with {ended.code} after {ended.seconds:.1f} s:\n{ended.err}"
    expect(ended.code in codes(case), f"{codes(case)} wanted; {told}")
    for trace in ("Traceback", "Assertion", "terminate called"):
        expect(trace not in ended.err, f"{trace!r} on stderr; {told}")
    if ended.code > 0:
        last = ended.err.splitlines()[-1:]
        expect(last and last[0].startswith("poise: ") and len(last[0]) > 30, f"no sentence at the end; {told}")
        expect(case.fault[1] in SIGNALS or "defect" not in ended.err, f"taken for a defect of poise; {told}")
    if ended.code == 75:
        expect("--resume" in ended.err, f"it does not say how to go on; {told}")


def _check_one_error(got, wanted):
    """One request's logits were no numbers: its line is an error, and all others are as they were."""
    changed = sorted(set(got) - set(wanted))
    expect(len(got) == len(wanted) and len(changed) == 1, f"{len(changed)} lines differ, of {len(got)}: {changed}")
    expect('"status_code": 200' not in changed[0] and "finite" in changed[0], f"no error line: {changed[0]}")


# ---- all cases

_OFTEN = {  # how often a run of the small work comes to a point, at least
    "loader.started": 1, "segment.unsized": 3, "segment.uninitialised": 3, "loader.weight_copy": 20, "loader.unsealed": 1,
    "loader.sealed": 1, "loader.granting": 1, "loader.border_moved": 1, "loader.draining": 1, "loader.unlinked": 1,
    "planner.validated": 1, "planner.order_made": 80, "planner.order_sent": 80, "planner.policy_swapped": 1,
    "planner.all_done": 1, "executor.attached": 1, "executor.registering": 1, "executor.loading": 40,
    "executor.computing": 40, "executor.attending": 20, "executor.storing": 40, "executor.result_ready": 80, "executor.result_sent": 80,
    "results.mid_line": 7, "results.written": 8, "results.before_rename": 1, "supervisor.half_started": 1,
    "supervisor.steady": 1,
}  # fmt: skip


def kill_case(random, point, action, seed):
    """Seed 0 is the first time at that point; the others are random times, and odd ones allow two restarts."""
    nth = 1 if seed == 0 else random.randint(1, _OFTEN[point])
    words, policy = f"{point}:{action}@{nth}", ""
    if point in ("loader.border_moved", "planner.policy_swapped"):
        words = f"planner/planner.between_iterations:stop@{random.randint(2, 8)},{words}"
        policy = "act-only"
    elif point == "results.mid_line":
        words = f"results.write:short={random.randint(1, 90)}@{nth},{point}:{action}"
    theirs = point.startswith("supervisor.")
    return Case(words, restarts=0 if theirs else 2 * (seed % 2), policy=policy, wakes=theirs and action == "stop" and seed % 2 == 0)


def kill_matrix(random, seeds=range(4)):
    return [kill_case(random, point, action, seed) for point in kill_points().values() for action in SIGNALS for seed in seeds]


def failing_calls():
    """(program, point, action): each is to fail the first, second … time, until there is no such time."""
    found = []
    for name, (kind, _) in points().items():
        programs = _programs_at(name)
        if kind in ("call", "write"):
            actions = ["errno=ENOSPC"] if name.split(".")[1] in ("write", "reserve", "size") else ["errno=EIO"]
            actions += ["short=1"] if kind == "write" else []
        elif kind == "memory":
            actions = ["fail"]
        else:
            actions = {"message": ["errno=EAGAIN"]}.get(kind, [])
        found += [(program, name, action) for program in programs for action in actions]
    return found + [("supervisor", "supervisor.write", "errno=ENOSPC"), ("supervisor", "supervisor.write", "errno=EIO")]


def failing_messages():
    found = [(p, "channel.send", a) for p in ("loader", "planner", "gpu_executor") for a in ("drop", "duplicate", "reorder")]
    return found + [(p, "channel.receive", "drop") for p in ("loader", "planner", "gpu_executor")]


def _programs_at(name):
    if name.startswith(("segment.", "channel.")):
        return ("loader", "planner", "gpu_executor") if name in ("segment.open", "segment.map", "channel.send") else ("loader",)
    if name.startswith("replace_file."):
        return ("loader", "planner")
    if name.startswith("device."):
        return ("gpu_executor",)
    return ("planner",)


def nth_case(program, point, action, nth):
    return Case(f"{program}/{point}:{action}@{nth}", work="tiny")


def nan_case(random):
    return Case(f"device.logits:nan@{random.randint(1, 18)}")


# ---- kills at random times

_SLOWLY = ("--compute-gflops", "0.03")


def killed_at_random(random, workspace, kills):
    """Processes of runs are killed, one or some at a time, `kills` times in all; each run is resumed until it is done."""
    wanted = oracle("small")
    requests = workspace.write_requests("in.jsonl", small())
    number, done = 0, 0
    while done < kills:
        number += 1
        output, finished = workspace / f"out{number}", False
        while not finished and done < kills:
            words = workspace.run_words(requests, output, *OPTIONS, *_SLOWLY, "--resume", model=MODEL)
            words += random.choice(([], ["--restarts", "1"], ["--restarts", "2"]))
            process = workspace.start(*words)
            finished, killed = _kill_some(random, workspace, process, Path(f"{output}.poise"))
            done += killed
        if not finished:
            workspace.run(requests, output, *OPTIONS, "--resume", model=MODEL, timeout=LONGEST).expect(0)
        expect_equal(comparable(output), wanted, f"the answers of {output.name}")


def _kill_some(random, workspace, process, run):
    """Whether the run was done, and how many of its processes were killed."""
    time.sleep(random.uniform(0, 0.7))
    there = {"supervisor": process.pid, **workspace.children(run)} if process.poll() is None else {}
    victims = random.sample(sorted(there), min(len(there), random.choice((1, 1, 1, 1, 2, 4))))
    for name in victims:
        try:
            os.kill(there[name], signal.SIGKILL)
        except ProcessLookupError:
            pass
    ended = workspace.finish(process, LONGEST)
    if "supervisor" in victims:
        expect(ended.code in (0, 75, -signal.SIGKILL), f"ended with {ended.code}:\n{ended.err}")
    else:
        expect(ended.code in (0, 75), f"ended with {ended.code} after the end of {victims}:\n{ended.err}")
        expect(ended.code == 0 or "--resume" in ended.err, f"it does not say how to go on:\n{ended.err}")
    return ended.code == 0, len(victims)
