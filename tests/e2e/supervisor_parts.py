#!/usr/bin/env python3
"""The supervisor's parts by themselves: sizes, options, locks, who is dead, who is to blame, what stands still."""

import argparse
import concurrent.futures
import contextlib
import errno
import fcntl
import gzip
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import harness
from harness import expect, expect_equal, test, wait_until
from server.planner_protocol import OpenRequest, PlannerProtocol
from supervisor.commands import profile, tail
from supervisor.lifecycle import children, cublas, grammars, live_changes, loaders, locks, notification, own_packages, processes, segments, short_folders, watchdog
from supervisor.lifecycle.delivery import Delivery
from supervisor.lifecycle.locks import Lock, is_held
from supervisor.lifecycle.run_directory import RunDirectory
from supervisor.lifecycle.sources import Sources
from supervisor.lifecycle.standing_run import StandingRun
from supervisor.lifecycle.supervision import Supervision
from supervisor.shared import options, paths, quantities
from supervisor.shared.decoder_shape import decoder_shape
from supervisor.shared.trouble import CANNOT_START, DONE, FOREIGN, INTERNAL, INTERRUPTED, OUTPUT, Refusal, brief, naming, of_system, shown


def refuses(function, *arguments, error=Refusal):
    try:
        value = function(*arguments)
    except error as refusal:
        return str(refusal)
    raise harness.Failed(f"{function.__name__}{arguments} gave {value!r}")


@test
def a_configs_matrices_are_those_of_its_family(_):
    """Beside the published sizes: 124 million parameters of GPT-2, 6.7 billion of OPT-6.7B, 8.03 billion of Llama-3-8B, 32.8 of Qwen3-32B."""
    for name, layer, words, all_of_it in (
        ("gpt2", 12 * 768 * 768, 1, 124e6),
        ("opt-6.7b", 12 * 4096 * 4096, 1, 6.66e9),
        ("llama-3-8b", 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 2, 8.03e9),
        ("qwen3-32b", 5120 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 25600), 2, 32.76e9),
    ):
        shape = decoder_shape(json.loads((harness.ROOT / "bench" / "models" / f"{name}.json").read_text()))
        expect_equal(shape.layer_entries(), layer, name)
        entries = shape.layers * layer + words * shape.head_entries() + shape.positions * shape.hidden
        expect(abs(entries / all_of_it - 1) < 0.005, f"{name}: {entries} entries in all")


@test
def a_config_without_a_model_type_is_of_its_classs_family_and_an_unknown_family_is_of_none(_):
    config = json.loads((harness.ROOT / "bench" / "models" / "llama-3-8b.json").read_text())
    known = decoder_shape(config)
    named = {name: value for name, value in config.items() if name != "model_type"}
    expect_equal(decoder_shape({**named, "architectures": ["LlamaForCausalLM"]}), known, "the shape by its class")
    for unknown in ({**config, "model_type": "gemma2"}, {**named, "architectures": ["Gemma2ForCausalLM"]}, {**named, "architectures": None}):
        expect("supported are llama" in refuses(decoder_shape, unknown), "the refusal does not say what is supported")


@test
def each_wish_for_a_policy_has_the_answer_that_is_its_own(_):
    granted = {"serial": 3, "policy": "kvpr", "since": 7, "refusal": ""}
    refused = {"serial": 5, "policy": "kvpr", "since": 7, "refusal": "it is too large"}
    later = {"serial": 9, "policy": "hybrid", "since": 8, "refusal": ""}
    status = {"policy": "hybrid", "policy_answers": [granted, refused, later]}
    stays, replaced = "it is too large; kvpr stays in force", "a later request replaced this one; hybrid is in force"
    for serial, wanted in {3: (granted, ""), 5: (None, stays), 7: (None, replaced), 9: (later, ""), 11: (None, "")}.items():
        expect_equal(live_changes.answer_to(serial, status), wanted, f"the answer to {serial}")
    expect_equal(live_changes.answer_to(1, {}), (None, ""), "the answer of a planner that has just begun")


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
def a_write_that_fails_is_told_with_its_file(_):
    def write():
        with naming("/dev/full"), open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    try:
        write()
    except OSError as problem:
        told = of_system(problem)
    expect_equal((str(told), told.code), ("/dev/full: No space left on device", OUTPUT), "a full device")
    copy = OSError(errno.ENOSPC, "No space left on device", "from", None, "to")
    expect_equal(str(of_system(copy)), "to: No space left on device", "a copy")


@test
def speeds_are_never_written_with_an_exponent(_):
    for number, wanted in {0.0123: "0.0123", 255.25: "255.2", 9999.4: "9999", 34620000.3: "34620000"}.items():
        expect_equal(quantities.rate_text(number), wanted, str(number))


@test
def a_user_without_a_home_has_a_place_for_profiles_all_the_same(workspace):
    private = workspace / "private"
    private.mkdir(mode=0o700)
    for home in ("~", "relative"):
        with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(private), "XDG_CACHE_HOME": ""}):
            with mock.patch("os.path.expanduser", return_value=home):
                expect_equal(paths.profile_folder(), private / "poise" / "profiles", f"home {home}")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(workspace / "cache")}):
        expect_equal(paths.profile_folder(), workspace / "cache" / "poise" / "profiles", "with XDG_CACHE_HOME")


@test
def what_is_measured_is_not_lost_for_want_of_a_folder(workspace):
    (workspace / "file").write_text("")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(workspace / "file")}):
        told = refuses(profile._make_folder, None)
        expect("name a file (-o)" in told and "XDG_CACHE_HOME" in told, told)
        expect_equal(profile._make_folder("measured.json"), False, "with -o")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(workspace / "cache")}):
        expect_equal(profile._make_folder(None), True, "with a folder")


@test
def sizes_read_as_people_write_them(_):
    table = {
        "8192": 8192,
        "1B": 1,
        "24GiB": 24 << 30,
        "100GB": 100 * 10**9,
        "1.5G": 3 << 29,
        "2g": 2 * 10**9,
        "64mib": 64 << 20,
        "7 KiB": 7 << 10,
        "0.5k": 500,
        "1TiB": 1 << 40,
    }
    for text, wanted in table.items():
        expect_equal(quantities.size(text), wanted, text)
    for text in ("", "GiB", "-1", "0", "0GiB", "1e9", "12potato", "nan", "1.2.3GiB", "9" * 30, "16777216TiB", "٣"):
        refuses(quantities.size, text, error=argparse.ArgumentTypeError)


@test
def counts_and_shares_are_strict(_):
    expect_equal(quantities.count("12"), 12, "12")
    for text in ("", "0", "-1", "1.0", "1_000", " 1", "٣", "2147483648"):
        refuses(quantities.count, text, error=argparse.ArgumentTypeError)
    for text in ("-0.1", "1.01", "nan", "inf", "half", ""):
        refuses(quantities.share, text, error=argparse.ArgumentTypeError)


@test
def cublas_is_found_among_python_packages_and_a_given_folder_stands(workspace):
    folder = workspace / "site-packages" / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    with mock.patch.object(sys, "path", [str(workspace / "site-packages")]):
        (folder / "libcublasLt.so.13").touch()
        expect_equal(cublas.environment({}), {"POISE_CUBLAS": str(folder)}, "found")
        expect_equal(cublas.environment({"POISE_CUBLAS": "/elsewhere"}), {}, "given")
    with mock.patch.object(sys, "path", ["", "site-packages"]):  # never from where somebody happens to stand
        before = os.getcwd()
        os.chdir(workspace.folder)
        try:
            expect(cublas._in_python_packages(()) is None, "found in the working directory")
        finally:
            os.chdir(before)


@test
def underscores_stand_for_hyphens_in_names_of_options_alone(_):
    given = options.normalised(["--host_memory=a_b", "--run_dir", "x_y", "-i", "in_put", "--", "--a_b"])
    expect_equal(given, ["--host-memory=a_b", "--run-dir", "x_y", "-i", "in_put", "--", "--a_b"], "normalised")


@test
def an_unknown_option_is_named_before_a_missing_one(_):
    sentence = refuses(options.run_parser().parse_args, ["--modle", "x"])
    expect("--modle" in sentence and "--model?" in sentence, sentence)


@test
def a_name_with_control_characters_stays_in_one_line(_):
    expect_equal(shown("a\nb\x1b[31mc\udcff"), "a\\nb\\x1b[31mc\\udcff", "shown")
    expect("\n" not in brief("x\ny"), "brief")


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
def the_beginning_of_a_stream_is_handed_out_before_the_rest_of_a_message(_):
    heard = []

    class Heard(OpenRequest):
        def put(self, event):
            heard.append((self.id, event if isinstance(event, bytes) else event["text"]))

    def text(number, at, more):
        return {"id": number, "at": at, "text": more, "tokens": at + 1}

    protocol = PlannerProtocol(lambda peer, frames: None)
    protocol.take(b"peer", [b'{"planner": "first"}'])
    requests = [Heard(b"{}", None, 1, streams=True) for _ in range(3)]
    protocol.submit(requests)
    protocol.take(b"peer", [json.dumps({"events": [text(1, 0, "a"), text(2, 0, "b")]}).encode()])
    expect_equal(heard, [(1, "a"), (2, "b")], "two that begin")
    heard.clear()
    ended = {"id": 3, "frame": 1, "waited": 0.1, "prefill": 0.2, "decode": 0.3, "token_at": 4.5, "event_at": 4.5}
    steps = protocol.taken(b"peer", [json.dumps({"events": [text(1, 1, "c"), text(3, 0, "d"), text(2, 1, "e"), ended]}).encode(), b"whole"])
    next(steps)
    expect_equal(heard, [(3, "d")], "the one that begins")
    expect_equal(list(steps), [], "steps behind it")
    expect_equal(heard, [(3, "d"), (1, "c"), (2, "e"), (3, b"whole")], "all of the message")
    expect_equal((requests[2].times, requests[2].token_at, set(protocol.open)), ((0.1, 0.2, 0.3), 4.5, {1, 2}), "what is known of the third")
    expect_equal(list(protocol.taken(b"another", [json.dumps({"events": [text(1, 2, "f")]}).encode()])), [], "of another planner")
    expect_equal(len(heard), 4, "events of another planner")


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


class _Ended:
    """A child that has ended."""

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
def an_environment_is_made_once_for_each_python_and_list_of_packages(workspace):
    made = []

    def install(words, *_):
        if "venv" in words:
            made.append(words[-1])
            time.sleep(0.2)
            os.makedirs(words[-1])
        return 0, ""

    needs = workspace / "requirements.txt"
    needs.write_text("one")

    def environment():
        return str(own_packages.environment("of-a-test", "POISE_TEST_VENV", needs, "what a test needs", "one"))

    home = {"XDG_CACHE_HOME": str(workspace.folder), "POISE_TEST_VENV": ""}
    with mock.patch.dict(os.environ, home), mock.patch.object(own_packages, "is_bundle", lambda: True), mock.patch.object(own_packages, "_installer", install):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            found = set(pool.map(lambda _: environment(), range(3)))
        expect_equal((len(found), made), (1, list(found)), "made at once")
        with mock.patch.object(sys, "version", "3.99"):
            expect(environment() not in found, "two Pythons share an environment")
        expect(environment() in found and len(made) == 2, f"made again: {made}")
        needs.write_text("two")
        expect(environment() not in found and len(made) == 3, f"another list: {made}")
        expect(not [name for name in os.listdir(workspace / "poise") if name.endswith(".lock")], "a lock is left")
        needs.write_text("three")
        with mock.patch.dict(sys.modules, {"ensurepip": None}):
            refused = refuses(environment)
        expect(f"python3.{sys.version_info.minor}-venv" in str(refused), str(refused))


@test
def an_installation_ends_with_the_command_that_wants_it(workspace):
    needs = workspace / "requirements.txt"
    needs.write_text("nothing-that-is-anywhere\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it never answers
        pip = {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple", "PIP_CONFIG_FILE": os.devnull}
        own = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(harness.ROOT / "launch")!r})
from supervisor.lifecycle import own_packages
from supervisor.lifecycle.interrupts import Interrupts
from supervisor.shared.trouble import Refusal
try:
    own_packages.environment("of-a-test", "POISE_TEST_VENV", Path({str(needs)!r}), "what a test needs", "one", Interrupts())
except Refusal as refusal:
    print(refusal.sentence)
    sys.exit(refusal.code)
"""
        for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
            folder = workspace / f"venv-{number}"
            environment = os.environ | pip | {"POISE_TEST_VENV": str(folder), "TMPDIR": str(workspace.folder)}
            command = subprocess.Popen([sys.executable, "-s", "-c", own], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            wait_until(lambda: _with_word(f"{folder}/bin/python"), "pip", 60)
            time.sleep(1)
            began = time.monotonic()
            command.send_signal(number)
            said = command.communicate(timeout=20)[0]
            wait_until(lambda: not _with_word(f"{folder}/bin/python"), "pip to end", 12)
            expect(time.monotonic() - began < 12, "it took its time")
            expect_equal(command.returncode, code, said)
            expect(code < 0 or "interrupted before what a test needs was installed" in said, said)
            lock = locks.Lock.take(folder.with_name(f"{folder.name}.lock"))
            expect(lock is not None, "the lock is held")
            lock.give_back()


def _with_word(word):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and word in processes.command_line_of(pid)]


@test
def only_a_line_that_wants_a_form_asks_for_what_forms_need(workspace):
    path = workspace / "in.jsonl"
    for text, wants in (
        ('{"response_format": {"type": "json_object"}}', True),
        ('{"response_format":{"type":"text"}}', False),
        ('{"response_format": { "type" : "text" }, "structured_outputs": null}', False),
        ('{"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}', True),
        ('{"response_format": {"type": "text"}}\n{"response_format": {"type": "json_object"}}', True),
        ('{"prompt": "x"}', False),
    ):
        for before in (0, *range((1 << 20) - 130, (1 << 20) + 3, 9)):
            path.write_text(" " * before + text)
            expect_equal(grammars._wants_one(path), wants, f"{text} behind {before}")


@test
def a_command_that_is_told_of_the_end_is_ended_with_all_that_it_started(workspace):
    pid = workspace / "pid"
    command = f"sleep 100 & echo $! > {pid}; wait"
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    waiting = SimpleNamespace(count=0, descriptor=read_end, drain=lambda: os.read(read_end, 10))
    os.write(write_end, b"x")
    with open(workspace / "said", "w+") as said, mock.patch("sys.stderr", said):
        notification.notify(command, {}, waiting, patience=0.5)
        said.seek(0)
        expect("took more than 0.5 s" in said.read(), "not told")
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
def the_shell_part_says_what_is_missing_and_installs_nothing_unasked(workspace):
    """With a PATH and include folders of a bare system: no compiler, no apt-get to be called by mistake."""
    bare = workspace / "bin"
    bare.mkdir()
    for tool in ("readlink", "dirname", "cat", "mktemp", "tail", "rm", "id", "env"):
        os.symlink(f"/usr/bin/{tool}", bare / tool)
    calls = workspace / "calls"
    (bare / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexit 1\n')
    (bare / "apt-get").chmod(0o755)
    environment = {"PATH": str(bare), "HOME": "/nonexistent"}
    command = ["/bin/sh", str(harness.POISE), "setup", "--no-install"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expect_equal(ended.returncode, 2, f"exit code ({ended.stderr})")
    for word in ("cmake", "ninja-build", "flatbuffers-compiler", "--no-install", "apt-get install"):
        expect(word in ended.stderr, f"{word!r} is not in {ended.stderr!r}")
    expect(not calls.exists(), "apt-get was called in spite of --no-install")
    expect_equal(ended.stderr.count("\n"), 1, "lines")


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
