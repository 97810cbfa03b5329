#!/usr/bin/env python3
"""What the supervisor reports of memory: how much a run may take, and how much of it is reserved already."""

import os
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import expect, expect_equal, test  # noqa: E402
from supervisor.lifecycle import inputs, loaders, run_summary, segments  # noqa: E402
from supervisor.shared import machine, progress  # noqa: E402


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def groups_in(workspace):
    """The control groups of an invented machine."""
    return mock.patch.multiple(machine, _GROUPS=workspace / "groups", _MEMBERSHIP=workspace / "membership")


@test
def page_cache_of_files_is_free_and_shared_memory_is_not(workspace):
    with groups_in(workspace):
        expect_equal(machine.cgroup_headroom(), None, "without groups")
        write(workspace / "membership", "0::/outer/inner\n")
        write(workspace / "groups/outer/inner/memory.max", "max\n")
        write(workspace / "groups/outer/inner/memory.current", "8000\n")
        expect_equal(machine.cgroup_headroom(), None, "without a limit")
        write(workspace / "groups/outer/memory.max", "10000\n")
        write(workspace / "groups/outer/memory.current", "9000\n")
        expect_equal(machine.cgroup_headroom(), 1000, "without a look at the cache")
        write(workspace / "groups/outer/memory.stat", "anon 1500\nfile 7000\nshmem 3000\n")
        expect_equal(machine.cgroup_headroom(), 5000, "with it")
        expect_equal(machine.cgroup_limit(), 10000, "the limit")


@test
def version_one_of_control_groups_says_the_same_in_other_words(workspace):
    with groups_in(workspace):
        write(workspace / "membership", "5:memory:/docker/x\n")
        write(workspace / "groups/memory/memory.limit_in_bytes", "10000\n")
        write(workspace / "groups/memory/memory.usage_in_bytes", "9000\n")
        write(workspace / "groups/memory/memory.stat", "cache 1\nshmem 1\ntotal_cache 7000\ntotal_shmem 3000\n")
        expect_equal(machine.cgroup_headroom(), 5000, "room")
        write(workspace / "groups/memory/memory.limit_in_bytes", "9223372036854771712\n")  # its word for none
        expect_equal(machine.cgroup_headroom(), None, "without a limit")


@test
def shared_memory_without_a_name_is_what_files_do_not_show(workspace):
    (workspace / "inner").mkdir()
    with mock.patch.multiple(machine, _SHARED=workspace.folder, meminfo=lambda name: {"Shmem": 10 << 20}[name]):
        expect_equal(machine.unnamed_shared_memory(), 10 << 20, "no files")
        for name, there in (("one", 3 << 20), ("inner/two", 1 << 20)):
            with open(workspace / name, "wb") as file:
                os.ftruncate(file.fileno(), 8 << 20)  # the rest are holes
                os.posix_fallocate(file.fileno(), 0, there)
        told = machine.unnamed_shared_memory()  # a file system may need some more for itself
        expect((6 << 20) - (1 << 19) < told <= 6 << 20, f"{told} beside theirs")


@test
def what_the_kernel_takes_out_of_mappings_first_is_waited_for_longer(workspace):
    given = mock.Mock(host_memory=80 << 30, gpu_memory=None)
    began = time.monotonic()
    with mock.patch.multiple(
        machine,
        available_memory=lambda: (20 if time.monotonic() - began < 1.5 else 90) << 30,
        unnamed_shared_memory=lambda: 60 << 30,
    ):
        inputs.clip_memory(given, lambda: 1 << 30)
    expect_equal(given.host_memory, 80 << 30, "all that was wanted")


@test
@mock.patch.object(inputs.leftovers, "await_memory", lambda *_: None)  # it looks at all runs of this user
def memory_on_its_way_back_from_the_run_before_is_waited_for(workspace):
    given = mock.Mock(host_memory=80 << 30, gpu_memory=None)
    rooms = iter([20 << 30, 30 << 30, 50 << 30, 75 << 30, 90 << 30])
    with mock.patch.object(machine, "available_memory", lambda: next(rooms)):
        inputs.clip_memory(given, lambda: 1 << 30)
    expect_equal(given.host_memory, 80 << 30, "all that was wanted")
    room = mock.Mock(return_value=20 << 30)
    with mock.patch.multiple(machine, available_memory=room, unnamed_shared_memory=lambda: 0):
        inputs.clip_memory(given, lambda: 1 << 30)
    expect_equal(given.host_memory, 21 << 30, "what does not come is not waited for long")
    expect(room.call_count > 3, "the room was not looked at again")
    given.host_memory = 80 << 30
    rooms = iter([20 << 30, 20 << 30, 30 << 30, 25 << 30, *range(24 << 30, 0, -1 << 30)])
    signals = iter([False, False, True])
    with mock.patch.object(machine, "available_memory", lambda: next(rooms)):
        inputs.clip_memory(given, lambda: 1 << 30, lambda: next(signals))
    expect_equal(given.host_memory, 26 << 30, "an interrupted wait: what there is now, not what there was")
    given.host_memory = 80 << 30
    room.reset_mock()
    with mock.patch.object(machine, "available_memory", room):
        inputs.clip_memory(given)
    expect_equal((given.host_memory, room.call_count), (20 << 30, 1), "without a kept loader")


@test
def a_reservation_is_seen_to_grow(workspace):
    folder = workspace / "shm"
    folder.mkdir()
    with mock.patch.object(segments, "FOLDER", folder):
        expect_equal(segments.reserved("ab", "blocks"), (0, 0), "before there is one")
        for epoch, there in ((9, 2 << 20), (10, 1 << 20)):
            with open(folder / f"{segments.prefix()}ab-blocks-{epoch}", "wb") as file:
                os.ftruncate(file.fileno(), 4 << 20)
                os.posix_fallocate(file.fileno(), 0, there)
        expect_equal(segments.reserved("ab", "blocks"), (1 << 20, 4 << 20), "the newest")
        expect_equal(segments.reserved("ab", "weights"), (0, 0), "of another kind")


@test
def a_kept_loader_holds_what_is_there_of_weights_and_pool(workspace):
    folder = workspace / "shm"
    folder.mkdir()
    home = loaders.Home(workspace.folder)
    (workspace.runtime / "poise").mkdir(mode=0o700)
    ours = mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(workspace.runtime)})
    with ours, mock.patch.object(segments, "FOLDER", folder):
        expect_equal(home.held_bytes(), 0, "without a loader")
        (workspace / "kept.json").write_text('{"run_id": "ab"}')
        for what, there in (("weights", 3 << 20), ("blocks-2", 1 << 20)):
            with open(folder / f"{segments.prefix()}ab-{what}", "wb") as file:
                os.ftruncate(file.fileno(), 4 << 20)  # the rest are holes: released weights
                os.posix_fallocate(file.fileno(), 0, there)
        expect_equal(home.held_bytes(), 4 << 20, "held")


@test
def the_progress_line_tells_reserving_from_loading(_):
    rate = progress.LoadingRate()
    expect("reading" in rate.text(0, 0, 0), "before the segment")
    text = rate.text(0, 1 << 30, 4 << 30)
    expect("reserving memory" in text and "1.0 GiB of 4.0 GiB" in text, text)
    text = rate.text(2 << 30, 4 << 30, 4 << 30)
    expect(text.startswith("loading") and "2.0 GiB of 4.0 GiB" in text, text)


@test
def the_progress_line_tells_how_much_is_measured(_):
    text = run_summary.progress_text({"state": "measuring", "measured": 0.25, "requests": 8})
    expect("measuring" in text and "[=====  " in text and "25%" in text, text)
    expect_equal(run_summary.progress_text({"state": "preparing", "measured": 1.0}), "preparing", "behind that")


if __name__ == "__main__":
    raise SystemExit(harness.main())
