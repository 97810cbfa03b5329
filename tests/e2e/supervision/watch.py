#!/usr/bin/env python3
"""What the supervisor makes of its processes: who is to blame, what stands still, who is told of the end."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import expect, expect_equal, test, wait_until  # noqa: E402
from supervisor.lifecycle import children, notification, processes, watchdog  # noqa: E402
from supervisor.lifecycle.supervision import Supervision  # noqa: E402
from supervisor.shared import paths  # noqa: E402
from supervisor.shared.trouble import INTERRUPTED  # noqa: E402


class _Ended:
    """A child that has ended."""

    end_seen = False

    def __init__(self, name, code, said=""):
        self.name, self.plain_name, self._code, self._said = name, paths.PLAIN_NAMES[name], code, said

    def returncode(self):
        return self._code

    def said(self):
        return self._said


@test
def the_root_of_a_failure_is_told_not_what_followed(_):
    lost = _Ended(paths.PLANNER, 75, "poise-planner: the executor is gone\n")
    killed = _Ended(paths.EXECUTOR, -9)
    refused = _Ended(paths.LOADER, 2, "poise-loader: warning: odd\npoise-loader: model.safetensors: torn\n")
    crashed = _Ended(paths.EXECUTOR, -11)
    defect = _Ended(paths.PLANNER, 70, "poise-planner: broken invariant: x\n")

    def cause(*ended):
        supervision = Supervision.__new__(Supervision)
        supervision._oom_kills = 1 << 60
        return supervision._root_cause(list(ended))

    expect_equal(cause(lost, killed), (INTERRUPTED, "gpu_executor was killed"), "killed")
    expect_equal(cause(lost, refused), (2, "model.safetensors: torn"), "refused")
    expect_equal(cause(lost), (75, "the executor is gone"), "lost")
    expect("gpu_executor crashed" in cause(lost, crashed)[1], "crashed")
    expect("broken invariant" in cause(lost, defect)[1] and cause(defect)[0] == INTERRUPTED, "a defect")
    expect("signal" not in str(cause(lost, crashed)), "a signal's number")


@test
def a_run_whose_output_is_written_is_done_whoever_else_failed(_):
    """The executor is killed while the planner writes the output; the planner ends with 0 before it must."""
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    planner, executor = _Ended(paths.PLANNER, None), _Ended(paths.EXECUTOR, -9)
    for child, descriptor in zip((planner, executor), descriptors):
        child.pid, child.descriptor, child.asked_to_end = 1, descriptor, False
        child.new_lines = list
        child.close = mock.Mock()
    arguments = mock.Mock(stall_timeout=30, run_id="nobodys", restarts=0)
    arguments.packs.return_value = False
    line = mock.Mock()
    line.wait.return_value, line.due.return_value = 0.01, False

    def ended_as_asked(last):
        def asked(_):
            planner._code = last

        planner.signal = asked
        planner._code = None
        supervision = Supervision(arguments, mock.Mock(count=0, descriptor=descriptors[0]), line)
        with mock.patch.object(supervision, "_start"):
            supervision._kept = None
            supervision._children = [planner, executor]
            return supervision.run()

    expect_equal(ended_as_asked(0).code, 0, "exit code")
    outcome = ended_as_asked(75)
    expect_equal((outcome.code, outcome.sentence), (INTERRUPTED, "gpu_executor was killed"), "unfinished")
    for descriptor in descriptors:
        os.close(descriptor)


@test
def a_planner_does_not_wait_for_an_executor_that_has_ended_with_it(_):
    """Both are asked to end at once: what the executor leaves undone, the planner would else wait for."""
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    loader, planner, executor = (_Ended(name, None) for name in (paths.LOADER, paths.PLANNER, paths.EXECUTOR))
    asked = []
    for child, descriptor in zip((loader, planner, executor), descriptors):
        child.pid, child.descriptor, child.asked_to_end = 1, descriptor, False
        child.new_lines, child.close, child.signal = list, mock.Mock(), asked.append
    loader._code = -9
    arguments = mock.Mock(stall_timeout=30, run_id="nobodys", restarts=0)
    line = mock.Mock()
    line.wait.return_value, line.due.return_value = 0.01, False
    supervision = Supervision(arguments, mock.Mock(count=0, descriptor=descriptors[0]), line)
    looks = iter([None, None])  # it ends some time after the signal
    executor.returncode = lambda: next(looks, INTERRUPTED) if asked else None

    def planners_end():
        if asked and planner._code is None and select.select([supervision._death_pipe.read_end], [], [], 0)[0]:
            planner._code = INTERRUPTED
        return planner._code

    planner.returncode = planners_end
    with mock.patch.object(supervision, "_start"):
        supervision._children = [loader, planner, executor]
        began = time.monotonic()
        outcome = supervision.run()
    expect_equal((outcome.code, outcome.sentence), (INTERRUPTED, "loader was killed"), "why")
    expect(time.monotonic() - began < 4, "did not end in seconds")
    expect(signal.SIGKILL not in asked, "the planner was killed before it had put its answers away")
    for descriptor in descriptors:
        os.close(descriptor)


@test
def a_process_that_ends_between_two_looks_is_not_slept_over(_):
    read_end, write_end = os.pipe()
    arguments = mock.Mock(stall_timeout=30, run_id="nobodys", restarts=0)
    arguments.packs.return_value = False
    supervision = Supervision(arguments, mock.Mock(count=0, descriptor=read_end), mock.Mock())
    process = subprocess.Popen(["true"])
    child = SimpleNamespace(name=paths.PLANNER, descriptor=os.pidfd_open(process.pid), returncode=process.poll, end_seen=False)
    supervision._children = [child]
    expect_equal(process.wait(), 0, "exit code")

    def slept():
        began = time.monotonic()
        supervision._sleep(0.5)
        return time.monotonic() - began

    expect(slept() < 0.4, "it slept, though a process had ended")
    expect_equal(supervision._ended(), [child], "who has ended")
    expect(slept() >= 0.5, "an end that it knows woke it")
    supervision._death_pipe.close()
    for descriptor in (read_end, write_end, child.descriptor):
        os.close(descriptor)


@test
def processes_of_a_run_that_begins_anew_are_not_told_to_end(_):
    """They would inherit a pipe that has ended, if the executor's end were told as where a run is over."""
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    loader, planner, executor = (_Ended(name, -9) for name in (paths.LOADER, paths.PLANNER, paths.EXECUTOR))
    for child, descriptor in zip((loader, planner, executor), descriptors):
        child.descriptor, child.close, child.signal = descriptor, mock.Mock(), mock.Mock()
    looks = iter([None, None])  # the planner ends after the executor
    planner.returncode = lambda: next(looks, -9)
    arguments = mock.Mock(stall_timeout=30, run_id="nobodys", restarts=0)
    supervision = Supervision(arguments, mock.Mock(count=0, descriptor=descriptors[0]), mock.Mock())
    supervision._children = [loader, planner, executor]
    supervision._restarts._begin({"what": "gpu_executor"}, 7, supervision._children)
    supervision._begin_anew()
    expect_equal(supervision._children, [loader], "who is left")
    name, text = arguments.directory.write.call_args.args
    expect("begins anew" in json.loads(text)["answers"]["7"]["refused"], f"{name}: {text}")
    expect(not supervision._restarts.pending(), "the restart of a process that is gone is awaited")
    expect(not select.select([supervision._death_pipe.read_end], [], [], 0)[0], "the pipe has ended")
    supervision._death_pipe.close()
    for descriptor in descriptors:
        os.close(descriptor)


@test
def stillness_is_noticed_and_later_where_a_disk_writes(_):
    clock = mock.Mock(return_value=1000.0)
    work = mock.Mock(return_value=0.0)
    child = mock.Mock(pid=1, plain_name="gpu_executor")
    with (
        mock.patch.object(watchdog.time, "monotonic", clock),
        mock.patch.object(processes, "cpu_seconds", work),
        mock.patch.object(processes, "is_stopped", mock.Mock(return_value=False)),
        mock.patch.object(processes, "waits_for_a_disk") as waits,
    ):

        def seconds_until_noticed(cores, disk=False):
            waits.return_value = disk
            dog = watchdog.Watchdog(30)
            dog.look((1,), [child])
            for second in range(1, 5000):
                clock.return_value += 1
                work.return_value += cores
                if dog.look((1,), [child]):
                    return second
            return None

        expect_equal(seconds_until_noticed(0.0), 30, "idle")
        expect_equal(seconds_until_noticed(1.0), 30, "busy")
        expect_equal(seconds_until_noticed(0.0, disk=True), 600, "while a disk writes")
        waits.return_value = False
        dog = watchdog.Watchdog(30)
        dog.look((1,), [child])
        clock.return_value += 3600  # we slept ourselves: a laptop's lid, a debugger
        expect(dog.look((1,), [child]) is None, "the watcher's own sleep was held against the run")
        for step in range(100):
            clock.return_value += 4
            expect(dog.look((step + 2,), [child]) is None, "a run that moves was ended")
        dog.begin_again()
        dog.look((200,), [child])
        for _ in range(5):  # another process takes 20 s to begin, which is no step
            clock.return_value += 4
            expect(dog.look((200,), [child]) is None, "a process that begins was ended")
        dog.look((201,), [child])
        for second in range(1, 100):
            clock.return_value += 1
            if dog.look((201,), [child]):
                break
        expect_equal(second, 40, "ten times the slowest step, which took 4 s")
        dog = watchdog.Watchdog(30)
        for words in ((0, 0), (1, 0), (1, 1)):  # the second one waits for the first to begin, which is no step of its own
            for _ in range(5):
                expect(dog.look(words, [child]) is None, "a run that begins was ended")
                clock.return_value += 4
        for second in range(20, 400):
            if dog.look(words, [child]):
                break
            clock.return_value += 1
        expect_equal(second, 30, "a process that has just begun, behind another")


@test
def how_long_a_replacement_takes_is_no_step(_):
    clock = mock.Mock(return_value=1000.0)
    with mock.patch.object(watchdog.time, "monotonic", clock), mock.patch.object(processes, "cpu_seconds", return_value=0.0):
        arguments = mock.Mock(stall_timeout=30, run_id="nobodys", restarts=1)
        arguments.directory.status_of.return_value = {}
        supervision = Supervision(arguments, mock.Mock(count=0), mock.Mock())
        killed, new = _Ended(paths.EXECUTOR, -9), _Ended(paths.EXECUTOR, None)
        killed.close = mock.Mock()
        supervision._children, dog = [killed], supervision._watchdog
        new.pid = killed.pid = 1

        def seconds_until_noticed(words):
            for second in range(1, 1000):
                clock.return_value += 1
                if dog.look(words, []):
                    return second
            return None

        for step in range(3):
            dog.look((step,), [])
            clock.return_value += 1
        with mock.patch.object(supervision, "_child", return_value=new), mock.patch("supervisor.lifecycle.supervision.say"):
            expect(supervision._replaced([killed]), "it was not replaced")
        for _ in range(5):
            clock.return_value += 4
            expect(dog.look((2,), []) is None, "a process that begins was ended")
        dog.look((3,), [])
        expect_equal(seconds_until_noticed((3,)), 30, "the patience after a replacement that took 20 s")
        supervision._death_pipe.close()


@test
def a_process_that_computes_without_getting_anywhere_is_named(_):
    busy, idle = (
        subprocess.Popen([sys.executable, "-c", f"import signal\nprint('up', flush=True)\n{code}"], start_new_session=True, stdout=subprocess.PIPE)
        for code in ("while True: pass", "signal.pause()")
    )
    for process in (busy, idle):
        process.stdout.readline()
    children = [mock.Mock(pid=busy.pid, plain_name="gpu_executor"), mock.Mock(pid=idle.pid, plain_name="planner")]
    try:
        dog = watchdog.Watchdog(2)
        dog.look((1,), children)
        began = time.monotonic()
        found = wait_until(lambda: dog.look((1,), children), "the process that hangs")
        expect(time.monotonic() - began < 15, "it took long")
        expect_equal([child.pid for child in found.hung], [busy.pid], found.sentence)
        expect("gpu_executor computed for 2 s without getting anywhere" in found.sentence, found.sentence)
    finally:
        for process in (busy, idle):
            process.kill()
            process.communicate()


@test
def a_process_that_no_signal_interrupts_waits_for_a_disk(_):
    """As fdatasync on a disk that stands still; here its own vfork, whose child sleeps."""
    code = "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.vfork() == 0:\n    libc.sleep(20)\n    libc._exit(0)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: processes.waits_for_a_disk(process.pid), "a process that cannot be interrupted")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    expect(not processes.waits_for_a_disk(os.getpid()), "this process waits for no disk")


@test
def a_command_that_is_told_of_the_end_is_ended_with_all_that_it_started(workspace):
    pid = workspace / "pid"
    command = f"sleep 100 & echo $! > {pid}; wait"
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    waiting = SimpleNamespace(count=0, descriptor=read_end, drain=lambda: os.read(read_end, 10))
    os.write(write_end, b"x")
    with open(workspace / "said", "w+") as said, mock.patch("sys.stderr", said):
        notification.notify(command, {}, waiting, patience=2)
        said.seek(0)
        expect("took more than 2 s" in said.read(), "not told")
        wait_until(lambda: _is_over(int(pid.read_text())), "what the command had started to end")
        os.write(write_end, b"x")  # of a run that was interrupted: it is told all the same
        notification.notify(f"echo told > {pid}", {}, waiting)
        expect_equal(pid.read_text(), "told\n", "told")


def _is_over(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@test
def what_a_program_says_for_itself_is_found_among_other_words(_):
    text = "libfoo: noise\npoise-loader: first\nnoise\npoise-loader: last: with colon\nmore noise"
    expect_equal(children.own_sentence("poise-loader", text), "last: with colon", "sentence")
    expect_equal(children.own_sentence("poise-planner", text), "", "of another program")


@test
def processes_are_known_by_one_path_however_the_command_is_called(workspace):
    folder = workspace / "python=3"
    folder.mkdir()
    python = folder / "python3"
    python.write_text('#!/bin/sh\n[ "$1" = -s ] || exec /usr/bin/env python3 "$@"\nshift\necho "$1"\n')
    python.chmod(0o755)
    link = workspace / "another-name"
    link.symlink_to(harness.ROOT / "launch")
    done = subprocess.run([link / "poise", "policies"], capture_output=True, text=True, env={**os.environ, "POISE_PYTHON": str(python)})
    expect_equal((done.returncode, done.stdout.strip()), (0, str(harness.ROOT / "launch" / "start.py")), done.stderr)


@test
def an_executor_for_a_gpu_starts_as_soon_as_there_is_a_control_segment(_):
    for gpu, there, answers, wanted in (
        (False, True, False, []), (False, True, True, ["planner", "executor"]), (True, False, False, []),
        (True, True, False, ["executor"]), (True, True, True, ["executor", "planner"]),
    ):  # fmt: skip
        run = object.__new__(Supervision)
        run._children, run.moments, run._planner_goes_on = [], SimpleNamespace(note=lambda moment: None), False
        run._control = SimpleNamespace(ready=lambda there=there: there)
        run._loader_is_ready = lambda answers=answers: answers
        run._arguments = SimpleNamespace(for_a_gpu=lambda gpu=gpu: gpu, planner_arguments=lambda takes_over: [], executor_arguments=lambda: [])
        run._start = lambda name, arguments, run=run: run._children.append(SimpleNamespace(name=name))
        run._start_others()
        expect_equal(["planner" if child.name == paths.PLANNER else "executor" for child in run._children], wanted, f"started: {gpu, there, answers}")


if __name__ == "__main__":
    raise SystemExit(harness.main())
