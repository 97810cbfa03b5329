#!/usr/bin/env python3
"""Whose memory, locks, folders and runs are: what the supervisor takes, leaves alone and gives back."""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import expect, expect_equal, refuses, test, wait_until  # noqa: E402
from supervisor.commands import tail  # noqa: E402
from supervisor.lifecycle import leftovers, live_changes, loaders, locks, processes, segments, short_folders  # noqa: E402
from supervisor.lifecycle.delivery import Delivery  # noqa: E402
from supervisor.lifecycle.locks import Lock, is_held  # noqa: E402
from supervisor.lifecycle.run_directory import RunDirectory  # noqa: E402
from supervisor.lifecycle.sources import Sources  # noqa: E402
from supervisor.lifecycle.standing_run import StandingRun  # noqa: E402
from supervisor.shared import paths  # noqa: E402
from supervisor.shared.trouble import CANNOT_START, DONE, FOREIGN, INTERNAL, INTERRUPTED, OUTPUT, Refusal  # noqa: E402


@test
def what_is_held_back_is_that_of_the_last_wish_that_was_granted(workspace):
    granted = {"serial": 3, "policy": "kvpr", "since": 7, "refusal": "", "held_back": "fewer blocks"}
    refused = {**granted, "serial": 5, "refusal": "it is too large", "held_back": ""}
    for answers, wanted in (([], ""), ([granted], "fewer blocks"), ([granted, refused], "fewer blocks"), ([granted, {**granted, "held_back": ""}], "")):
        expect_equal(live_changes.held_back_now({"policy_answers": answers}), wanted, f"held back by {answers}")
    expect_equal(live_changes.held_back_now({}), "", "of a planner that has just begun")
    run = mock.Mock(path=workspace / "a run")
    run.path.mkdir()
    with mock.patch.dict(os.environ, {"POISE_COMMAND": "poise"}):
        told = f"poise policy kvpr '{run.path}' --rebuild"
        expect_equal(live_changes.rebuild_command(run, "kvpr"), told, "as the command line said")
        (run.path / "policy.in_force.json").write_text('{"serial": 3, "policy": "kvpr", "act_share": 0.25, "rebuild": true}')
        expect_equal(live_changes.rebuild_command(run, "hybrid"), told.replace("kvpr", "hybrid"), "another's options")
        told = told.replace(" --rebuild", " --act-share 0.25 --rebuild")
        expect_equal(live_changes.rebuild_command(run, "kvpr"), told, "with its options")


@test
def a_wish_does_not_wait_without_end_for_whoever_holds_the_lock(workspace):
    run = mock.Mock(path=workspace)
    with mock.patch.object(live_changes, "WAIT", 0.1):
        with mock.patch.object(live_changes, "read_json", return_value={"serial": 2**62}):
            expect(live_changes.wish_for_policy(run, "kvpr", {}) > 2**62, "a serial not above those before")
        held = Lock.take(workspace / "policy.lock")
        message = refuses(live_changes.wish_for_policy, run, "kvpr", {})
        held.give_back()
    expect("policy.lock is held" in message, message)


@test
def a_lock_is_held_until_its_last_holder_is_gone(workspace):
    path = workspace / "lock"
    lock = Lock.take(path)
    expect(Lock.take(path) is None and is_held(path), "taken twice")
    os.set_inheritable(lock.descriptor, True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.descriptor])
    lock.give_back()
    expect(is_held(path), "lost while the child lives")
    child.kill()
    child.communicate()
    expect(not is_held(path), "held by the dead")
    os.symlink(workspace / "elsewhere", workspace / "link")
    refuses(Lock.take, workspace / "link")
    expect(not (workspace / "elsewhere").exists(), "a link was followed")


@test
def a_lock_names_its_old_or_its_new_owner_whenever_its_holder_is_killed(workspace):
    lock = Lock.take(workspace / "lock")
    lock.write('{"owner": "a long name"}')
    write, found = os.pwrite, []
    try:
        os.pwrite = lambda *given: found.append((workspace / "lock").read_text()) or write(*given)
        lock.write('{"owner": "b"}')
    finally:
        os.pwrite = write
    expect_equal(found, ['{"owner": "a long name"}'], "the file before its one write")
    expect_equal(json.loads((workspace / "lock").read_text()), {"owner": "b"}, "the file after it")
    lock.give_back()


@test
def a_pid_that_was_used_again_is_not_signalled(_):
    child = subprocess.Popen(["sleep", "60"])
    try:
        started = processes.start_time(child.pid)
        expect(processes.open_verified(child.pid, started - 1) is None, "another process was taken for the one noted")
        descriptor = processes.open_verified(child.pid, started)
        processes.send(descriptor, signal.SIGKILL)
        expect(not processes.wait_gone([descriptor], 5), "it lives")
        processes.send(descriptor, signal.SIGKILL)  # nothing happens
        os.close(descriptor)
    finally:
        child.kill()
        child.wait()
    expect(processes.open_verified(child.pid, started) is None, "a dead process was found")


def in_a_folder_of_its_own(workspace):
    """Segments that no `poise` beside this test sees."""
    folder = workspace / "shm"
    folder.mkdir()
    return mock.patch.object(segments, "FOLDER", folder)


def make_control(run_id):
    path = segments.FOLDER / f"{segments.prefix()}{run_id}-control"
    path.write_bytes(bytes(768))
    return path


@test
def a_loader_built_from_other_sources_is_refused_with_the_remedy(workspace):
    with in_a_folder_of_its_own(workspace):
        path = make_control("abi")
        control = segments.ControlView("abi")
        control.check_layout()  # not made yet
        path.write_bytes(struct.pack("<QII", segments._MAGIC, segments._ABI_VERSION, segments._SIZE))
        control.check_layout()
        path.write_bytes(struct.pack("<QII", segments._MAGIC, segments._ABI_VERSION - 1, segments._SIZE))
        try:
            control.check_layout()
            expect(False, "another layout was accepted")
        except Refusal as refusal:
            expect("setup" in refusal.sentence, refusal.sentence)
        finally:
            control.close()


@test
def segments_of_the_dead_are_reaped_and_those_of_the_living_are_not(workspace):
    dead, held, starting = (f"{workspace.random.getrandbits(64):016x}" for _ in range(3))
    # A loader that is about to lock what it has just made is known by its command line.
    process = subprocess.Popen(
        ["poise-loader", "-c", "import time; time.sleep(60)", "--run-id", starting], executable=sys.executable
    )
    try:
        # The kernel lets the parent go on before the new command line can be read.
        wait_until(lambda: starting in [found.run_id for found in processes.running()], "a process that is seen")
        with in_a_folder_of_its_own(workspace):
            paths = {run_id: make_control(run_id) for run_id in (dead, held, starting)}
            blocks = segments.FOLDER / f"{segments.prefix()}{dead}-blocks-1"
            blocks.write_bytes(b"x" * 4096)
            with open(paths[held], "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                names, size = segments.reap()
                expect(paths[held].exists(), "a held segment was removed")
                expect(paths[starting].exists(), "a segment that is being made was removed")
                expect(not paths[dead].exists() and not blocks.exists(), "the dead run's segments are still there")
                expect_equal(names, [f"{segments.prefix()}{dead}-{what}" for what in ("blocks-1", "control")], "reported")
                expect(size >= 4096, f"{size} bytes")
            process.kill()
            process.wait()
            segments.reap()
            expect(not paths[held].exists() and not paths[starting].exists(), "not reaped after their end")
    finally:
        process.kill()
        process.wait()


@test
def a_run_that_begins_while_others_are_reaped_is_left_alone(workspace):
    with in_a_folder_of_its_own(workspace):
        dead = make_control("dead")
        begun = []

        def processes_of_a_moment_ago():
            begun.append(make_control("begun"))  # its loader started after this look
            return []

        with mock.patch.object(processes, "running", processes_of_a_moment_ago):
            names, _ = segments.reap()
        expect_equal(names, [dead.name], "reaped")
        expect(begun and begun[0].exists(), "the segment of a run that has just begun was removed")


@test
def segments_between_two_loaders_are_left_alone(workspace):
    with in_a_folder_of_its_own(workspace):
        control = make_control("between")
        with segments.held("between"):
            expect_equal(segments.reap()[0], [], "reaped")
        expect_equal(segments.reap()[0], [control.name], "reaped once no one takes over")


@test
def a_segment_loses_its_name_only_while_nobody_can_attach_to_it(workspace):
    with in_a_folder_of_its_own(workspace):
        make_control("dead")
        unlink, attached = os.unlink, []

        def attach_then_unlink(path):
            with open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    attached.append(path)
                except BlockingIOError:
                    pass
            unlink(path)

        with mock.patch.object(segments.os, "unlink", attach_then_unlink):
            names, _ = segments.reap()
        expect_equal(len(names), 1, "reaped")
        expect(not attached, "somebody attached to what was then removed")


@test
def shared_memory_that_was_cleaned_up_is_told(workspace):
    told = []
    only_segments = {"sweep": segments.reap, "say": told.append}  # the rest is this user's own
    with in_a_folder_of_its_own(workspace), mock.patch.multiple(leftovers, **only_segments):
        make_control("dead")
        with mock.patch.object(processes, "running", list):
            expect(leftovers.clean_up(), "there was something")
            expect(not leftovers.clean_up(), "there is nothing any more")
    expect_equal([line.partition(" (")[0] for line in told], ["removed 1 shared memory segment of dead runs"], "told")


@test
def a_private_folder_is_nobody_elses(workspace):
    expect_equal((paths.make_private(workspace / "new").stat().st_mode & 0o777), 0o700, "mode")
    (workspace / "open").mkdir()
    os.chmod(workspace / "open", 0o755)
    os.symlink(workspace / "new", workspace / "link")
    (workspace / "file").write_text("")
    for name in ("open", "link", "file"):
        refuses(paths.make_private, workspace / name)
    if os.geteuid() == 0:
        (workspace / "others").mkdir(mode=0o700)
        os.chown(workspace / "others", 65534, 65534)
        refuses(paths.make_private, workspace / "others")


def standing_facts(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_facts(folder, run_id, **status):
    for name, more in (("run.json", {}), ("status.json", status), ("times.json", {})):
        (folder / name).write_text(json.dumps({"run_id": run_id, **more}))


@test
def an_attempt_that_has_worked_keeps_its_own_facts_however_it_ends(workspace):
    for code in (CANNOT_START, INTERNAL, OUTPUT, INTERRUPTED, FOREIGN):
        for iteration in (0, 3):
            folder = workspace / f"{code}-{iteration}"
            folder.mkdir()
            (folder / "results.jsonl.partial").write_text("")
            write_facts(folder, "first", iteration=5, state="interrupted")
            before, standing = standing_facts(folder), StandingRun(RunDirectory(folder))
            write_facts(folder, "second", iteration=iteration, state="loading")
            after = standing_facts(folder)
            standing.end(code)
            expect_equal(standing_facts(folder), after if iteration else before, f"behind exit code {code}, iteration {iteration}")


@test
def a_finished_run_is_put_back_without_hard_links_and_behind_a_kill(workspace):
    for end in ("a refusal", "a kill", "a kill after its publication is gone", "a full disk"):
        folder, second = workspace / end, workspace / "second.gz"
        folder.mkdir()
        second.write_bytes(gzip.compress(b"{}\n"))
        for name in ("results.jsonl.published", "input.jsonl", "output.jsonl"):
            (folder / name).write_text(f"1\n/{name} of the first")
        write_facts(folder, "first", state="done")
        (folder / "times.json").unlink()
        before, standing = standing_facts(folder), StandingRun(RunDirectory(folder))
        expect_equal(standing_facts(folder), before, "before the attempt writes anything")
        with mock.patch("os.link", side_effect=OSError(errno.EPERM, "no hard links")):
            Sources([str(second)]).prepare(folder, set_aside=standing.set_aside)
            standing.note()
            Delivery("-", folder).begin(False, standing.set_aside)
        write_facts(folder, "second", state="loading", iteration=0)
        if end == "a kill after its publication is gone":
            (folder / "results.jsonl.published").unlink()
            again = StandingRun(RunDirectory(folder))
            expect_equal(again.record["run_id"], "second", "whose facts they are")
            expect_equal(set(standing_facts(folder)), {"input.jsonl", "run.json", "status.json", "times.json"}, "names")
            continue
        if end == "a full disk":
            with mock.patch("supervisor.lifecycle.run_directory.replace_file", side_effect=OSError(errno.ENOSPC, "full")):
                standing.end(INTERRUPTED)
            expect_equal((folder / "output.jsonl").read_bytes(), before["output.jsonl"], "the output")
        if end == "a refusal":
            standing.end(CANNOT_START)
        else:
            again = StandingRun(RunDirectory(folder))
            expect_equal(again.record["run_id"], "first", "whose facts they are")
            again.end(DONE)
        expect_equal(standing_facts(folder), before, f"the finished run behind {end}")


@test
def a_finished_run_is_looked_at_through_what_a_killed_attempt_left(workspace):
    for end in ("a kill", "a kill after its publication is gone", "a damaged note"):
        folder = workspace / end
        folder.mkdir()
        output = folder / "output.jsonl"
        output.write_text("{}\n")
        (folder / "results.jsonl.published").write_text(f"3\n{output}")
        write_facts(folder, "first", state="done", done=8)
        directory = RunDirectory(folder)
        directory.enter()
        standing = StandingRun(directory)
        standing.note()
        standing.set_aside("output.jsonl")
        write_facts(folder, "second", state="loading", done=0)
        outside = RunDirectory(folder)
        expect_equal([one.record()["run_id"] for one in (directory, outside)], ["second"] * 2, "while the attempt lives")
        if end == "a kill after its publication is gone":
            (folder / "results.jsonl.published").unlink()
        if end == "a damaged note":
            (folder / "standing.json").write_text('{"publication": [1, 2], "facts": {"run.json": 5}}')
        directory.leave()
        of = "first" if end == "a kill" else "second"
        expect_equal((outside.record()["run_id"], outside.fact("times.json")["run_id"]), (of, of), f"whose facts they are behind {end}")
        expect_equal(outside.status()["done"], 8 if of == "first" else 0, f"results behind {end}")
        if end == "a kill":
            expect_equal(outside.published(), f"{output}.kept", "where the output is")
            before = standing_facts(folder)
            (folder / "standing.json").write_bytes(before["standing.json"].replace(b"first", b"third"))
            expect_equal(outside.record()["run_id"], "third", "what the note says")
        (folder / "run.json").unlink()
        expect_equal("run_id" in outside.record(), end == "a kill", "a run that only the note has")


@test
def the_note_of_a_finished_run_is_durable_before_the_attempt_writes_and_what_it_says_before_it_goes(workspace):
    folder, events = workspace / "run", []
    folder.mkdir()
    (folder / "results.jsonl.published").write_text("1\n/out")
    write_facts(folder, "first", state="done")

    def noting(name, call, target):
        def noted(*arguments):
            events.append((name, target(*arguments)))
            return call(*arguments)

        return mock.patch(f"os.{name}", noted)

    def name_of(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    def base(path, *_):
        return os.path.basename(path)

    with noting("fsync", os.fsync, name_of), noting("replace", os.replace, base), noting("unlink", os.unlink, base):
        standing = StandingRun(RunDirectory(folder))
        standing.note()
        noted = [event for event in events if event[0] != "unlink"]
        expect_equal(noted, [("fsync", "standing.json.new"), ("replace", "standing.json.new"), ("fsync", "run")], "how it is noted")
        write_facts(folder, "second", state="loading")
        events.clear()
        standing.end(CANNOT_START)
    gone = events.index(("unlink", "standing.json"))
    for name in ("run.json", "status.json", "times.json"):
        place = events.index(("replace", f"{name}.new"))
        expect(events[place - 1] == ("fsync", f"{name}.new") and events[place + 1] == ("fsync", "run") and place < gone, f"{events}")


@test
def a_kept_loader_that_packs_nothing_has_the_home_that_it_had_before_weights_could_be_packed(workspace):
    """Otherwise an upgrade would leave it, and the memory that it holds, behind."""
    given = SimpleNamespace(model=str(workspace.folder), dtype="auto", load_format="auto", quantization="auto", pack_weights="off")
    known = {"model": os.path.realpath(given.model), "dtype": "auto", "load_format": "auto", "quantization": "auto"}
    expect_equal(loaders._identity(given), known, "what its home is named by")
    given.pack_weights = "auto"
    expect_equal(loaders._identity(given), known | {"pack_weights": "auto"}, "another home")


@test
def a_note_of_a_kept_loader_ends_no_other_process(workspace):
    """Whoever may write where the homes of kept loaders are could name any process of ours."""
    with contextlib.ExitStack() as held, mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(workspace.runtime)}):
        home = workspace.runtime / "poise" / "loaders" / "0123456789abcdef"
        home.mkdir(parents=True)
        for folder in (home, home.parent):
            folder.chmod(0o700)
        bystander = held.enter_context(subprocess.Popen(["sleep", "60"]))
        held.callback(bystander.kill)
        note = {"pid": bystander.pid, "started": processes.start_time(bystander.pid), "run_id": ""}
        (home / "kept.json").write_text(json.dumps(note))
        lock = Lock.take(home / "lock")
        held.callback(lock.give_back)
        os.chmod(workspace.runtime / "poise", 0o755)
        expect_equal((loaders.Home.all(), loaders.Home(home).lives(), loaders.Home(home).record), ([], False, {}), "what is believed")
        os.chmod(workspace.runtime / "poise", 0o700)
        (found,) = loaders.Home.all()
        expect(found.lives() and found.record == note, "our own folder is not believed")
        expect_equal(found.living(), None, "the loader")
        found.stop()
        expect_equal(bystander.poll(), None, "the end of the other process")


@test
def folders_for_sockets_of_dead_runs_are_removed(workspace):
    with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(workspace.runtime)}):
        dead, new, living = (short_folders.make(run_id) for run_id in ("dead", "new", "living"))
        (dead / "executor.sock").write_text("")
        for folder in (dead, living):
            os.utime(folder, (0, 0))
        process = processes.Found(1, "poise-loader", ["--run-id", "living"], 1)
        with mock.patch.object(processes, "running", lambda: [process]):
            short_folders.sweep()
        expect_equal((dead.exists(), new.exists(), living.exists()), (False, True, True), "what stays")


@test
def a_lock_whose_file_was_removed_meanwhile_is_taken_anew(workspace):
    path = workspace / "lock"
    real, times = locks.fcntl.flock, []

    def flock(descriptor, operation):
        if not times:  # its last holder removes it, after we opened it
            os.unlink(path)
        times.append(descriptor)
        real(descriptor, operation)

    with mock.patch.object(locks.fcntl, "flock", flock):
        lock = locks.Lock.take(path)
    expect(os.path.samestat(os.fstat(lock.descriptor), os.stat(path)), "the lock is on a file without a name")
    expect(locks.Lock.take(path) is None, "two hold it")
    lock.give_back()


@test
def a_run_that_overwrites_a_finished_one_is_told_from_its_first_line(workspace):
    published = workspace / "output.jsonl"
    published.write_bytes(b"old 1\nold 2\n")
    results = tail._Results(SimpleNamespace(path=workspace.folder, published=lambda: published))
    expect_equal(list(results.further()), [b"old 1\n", b"old 2\n"], "the finished run's")
    partial = workspace / "results.jsonl.partial"
    partial.write_bytes(b"new 1\nnew 2\nnew 3\n")
    expect_equal(list(results.further()), [b"new 1\n", b"new 2\n", b"new 3\n"], "the run's that overwrites it")
    partial.rename(workspace / "before")
    partial.write_bytes(b"new 1\nnew 2\nnew 3\nnew 4\n")
    expect_equal(list(results.further()), [b"new 4\n"], "behind what the resumed run kept")


if __name__ == "__main__":
    raise SystemExit(harness.main())
