#!/usr/bin/env python3
"""kill -9 of every process at random moments: the run ends in seconds with a sentence, nothing is left behind, and
`--resume` gives the file an undisturbed run gives."""

import os
import signal
import tempfile
import time

import harness
from harness import comparable, expect, expect_equal, first_layers, request, segments, test, wait_until
from mixed_requests import BAD_LINES, good_request

SLOWLY = ("--max-num-seqs", "3")  # a few results at a time
LAYERS = 3  # of the demo model's: what is tested is who dies, not how much is computed


def work(workspace, count=100):
    random = workspace.random
    lines = [good_request(random, i) for i in range(count)]
    lines += [request(f"long{i}", "Rosa lives in", max_tokens=100, ignore_eos=True) for i in range(40)]
    lines += [make(random, f"bad{i}") for i, (make, _) in enumerate(BAD_LINES)]
    random.shuffle(lines)
    first_layers(LAYERS, workspace / "model")
    return workspace.write_requests("requests.jsonl", lines)


def run_to_its_end(workspace, requests, output, *options, **more):
    return workspace.run(requests, output, *options, model=workspace / "model", **more)


def start(workspace, requests, output, *options):
    return workspace.start(*workspace.run_words(requests, output, *options, model=workspace / "model"))


def undisturbed(workspace, requests):
    """What every run of these requests must give."""
    run_to_its_end(workspace, requests, workspace / "oracle.jsonl").expect(0)
    return comparable(workspace / "oracle.jsonl")


def pid_of(workspace, process, run, what):
    """Of the supervisor, or of one of the run's living processes; None before it is there."""
    expect(process.poll() is None, "the run ended by itself")
    return process.pid if what == "supervisor" else workspace.children(run).get(what)


def everybody_gone(workspace, run, run_id):
    def gone():
        left = [name for name in os.listdir("/dev/shm") if run_id in name]
        return not workspace.children(run) and not left

    wait_until(gone, "the run's processes and shared memory to be gone", seconds=15)


def killed_and_resumed(workspace, victim):
    """Killed as soon as it is there, then twice after a random number of further results; then resumed."""
    requests = work(workspace)
    oracle = undisturbed(workspace, requests)
    output = workspace / "out.jsonl"
    run = workspace / "out.jsonl.poise"
    for first in (True, False, False):
        process = start(workspace, requests, output, "--resume", *SLOWLY, *workspace.paced(4))
        there = results(run)
        wanted = 0 if first else workspace.random.randrange(there + 1, (there + len(oracle)) // 2)
        wait_until(lambda: results(run) >= wanted and pid_of(workspace, process, run, victim), f"{wanted} results", 120)
        os.kill(pid_of(workspace, process, run, victim), signal.SIGKILL)
        began = time.monotonic()
        ended = workspace.finish(process, timeout=60)
        if victim == "supervisor":
            run_id = harness._json(run / "run.json").get("run_id", "never started")
            everybody_gone(workspace, run, run_id)
        else:
            expect(time.monotonic() - began < 10, "did not end in seconds")
            ended.expect(75, victim, "killed", "--resume")
    run_to_its_end(workspace, requests, output, "--resume").expect(0)
    expect_equal(comparable(output), oracle, "the resumed file")


def results(run):
    """How many result lines stand in the run's directory."""
    try:
        return (run / "results.jsonl.partial").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


@test
def a_killed_loader_ends_the_run_and_resume_completes_it(workspace):
    killed_and_resumed(workspace, "loader")


@test
def a_killed_planner_ends_the_run_and_resume_completes_it(workspace):
    killed_and_resumed(workspace, "planner")


@test
def a_killed_executor_ends_the_run_and_resume_completes_it(workspace):
    killed_and_resumed(workspace, "gpu_executor")


@test
def a_killed_supervisor_takes_everybody_with_it_and_resume_completes_the_run(workspace):
    killed_and_resumed(workspace, "supervisor")


@test
def all_killed_together_are_cleaned_up_by_the_next_run(workspace):
    requests = work(workspace)
    oracle = undisturbed(workspace, requests)
    output, run = workspace / "out.jsonl", workspace / "out.jsonl.poise"
    process = start(workspace, requests, output, *SLOWLY, *workspace.paced(4))
    wait_until(lambda: len(workspace.children(run)) == 3, "three processes")
    wanted = workspace.random.randrange(len(oracle) // 3)
    wait_until(lambda: results(run) >= wanted, f"{wanted} results", 120)
    children = workspace.children(run)
    run_id = harness._json(run / "run.json")["run_id"]
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot tidy up between the kills
    with segments.held(run_id):  # other scripts' runs tidy up, too
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
        workspace.finish(process)
        expect([name for name in os.listdir("/dev/shm") if run_id in name], "nothing to clean up: the test tests nothing")
    run_to_its_end(workspace, requests, output, "--resume").expect(0)
    expect(not [name for name in os.listdir("/dev/shm") if run_id in name], "the dead run's shared memory is still there")
    expect_equal(comparable(output), oracle, "the resumed file")


@test
def doctor_and_stop_clean_up_after_the_dead(workspace):
    requests = work(workspace)
    for command in (["doctor"], ["stop"]):
        output = workspace / f"{command[0]}.jsonl"
        run = workspace / f"{command[0]}.jsonl.poise"
        process = start(workspace, requests, output, *SLOWLY)
        wait_until(lambda run=run: len(workspace.children(run)) == 3, "three processes")
        children = workspace.children(run)
        with harness.alone_with_orphans():
            os.kill(process.pid, signal.SIGSTOP)
            # One is halted, so that it does not see that its supervisor is gone.
            os.kill(children["gpu_executor"], signal.SIGSTOP)
            for name in ("loader", "planner"):
                os.kill(children[name], signal.SIGKILL)
            os.kill(process.pid, signal.SIGKILL)
            workspace.finish(process)
            # Once the halted one is gone, a run that starts meanwhile may be the one that removes the shared memory.
            workspace.poise(*command).expect(0, "supervisor was gone")
        everybody_gone(workspace, run, harness._json(run / "run.json")["run_id"])


@test
def a_halted_process_is_noticed_and_the_run_ends_resumable(workspace):
    requests = work(workspace, 20)
    for victim in ("gpu_executor", "planner"):
        output = workspace / f"{victim}.jsonl"
        run = workspace / f"{victim}.jsonl.poise"
        process = start(workspace, requests, output, "--stall-timeout", "3", *SLOWLY)
        pid = wait_until(lambda run=run, v=victim: workspace.children(run).get(v), f"{victim} to start")
        os.kill(pid, signal.SIGSTOP)
        ended = workspace.finish(process, timeout=60)
        ended.expect(75, victim, "stood still", "--resume")
        expect(ended.seconds < 30, f"took {ended.seconds:.0f} s")
        run_to_its_end(workspace, requests, output, "--resume").expect(0)


@test
def a_disk_that_stands_still_is_waited_for(workspace):
    """Both where results become durable and where they are copied to another file system."""
    requests = work(workspace, 4)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-disk-") as folder:
        expect(os.stat(folder).st_dev != os.stat(workspace.folder).st_dev, "they are one file system: the test tests nothing")
        output = os.path.join(folder, "out.jsonl")
        slow = {"POISE_FAILPOINTS": "results.sync:delay=6000,results.copying:delay=6000"}
        words = ("--run-dir", workspace / "run", "--stall-timeout", "1")
        run_to_its_end(workspace, requests, output, *words, env=slow).expect(0)
        expect(len(comparable(output)) > 40, "results are missing")


@test
def an_order_log_whose_end_was_never_written_goes_on_or_is_set_aside_if_it_is_damaged(workspace):
    requests = work(workspace, 60)
    oracle = undisturbed(workspace, requests)
    output, run = workspace / "out.jsonl", workspace / "out.jsonl.poise"
    partial, log = run / "results.jsonl.partial", run / "orders.log"

    def interrupted_behind(results, *options):
        process = start(workspace, requests, output, *SLOWLY, *options)
        wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") > results, f"{results} results")
        process.send_signal(signal.SIGTERM)
        return workspace.finish(process).expect(75)

    interrupted_behind(40)  # 27 of them are lines that are no requests
    with open(log, "r+b") as file:  # as a file system may leave it that lost power
        file.truncate(log.stat().st_size - 100)
        file.seek(0, os.SEEK_END)
        file.write(bytes(4096))
    said = interrupted_behind(partial.read_bytes().count(b"\n") + 5, "--resume")
    expect("damaged" not in said.err, said.err)
    workspace.poise("inspect", run, "--check").expect(0)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0x10
    log.write_bytes(content)
    run_to_its_end(workspace, requests, output, "--resume").expect(0, "damaged", "a new one begins")
    expect_equal(comparable(output), oracle, "the resumed file")
    workspace.poise("inspect", run).expect(0)
    refused = workspace.poise("replay", run, "--device", "cpu").expect(2, "damaged and set aside", "another run directory")
    expect("--orders-log-size" not in refused.err, refused.err)


@test
def a_torn_last_line_is_computed_again(workspace):
    requests = work(workspace, 60)
    oracle = undisturbed(workspace, requests)
    output, run = workspace / "out.jsonl", workspace / "out.jsonl.poise"
    partial = run / "results.jsonl.partial"
    process = start(workspace, requests, output, *SLOWLY)
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 5, "five results")
    process.send_signal(signal.SIGTERM)
    workspace.finish(process).expect(75)
    content = partial.read_bytes()
    partial.write_bytes(content[: len(content) - workspace.random.randrange(1, 100)])
    run_to_its_end(workspace, requests, output, "--resume").expect(0)
    expect_equal(comparable(output), oracle, "the resumed file")


if __name__ == "__main__":
    raise SystemExit(harness.main())
