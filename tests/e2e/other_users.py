#!/usr/bin/env python3
"""Another user of the machine reaches no socket, segment, file or process of ours, whatever our umask is.

Our own user reaches each with the same probes: one that is refused for another reason would be found.
"""

import ctypes
import json
import os
import signal
import socket
from pathlib import Path

import harness
from harness import DEMO_MODEL, comparable, expect, expect_equal, test, wait_until
from kept_loaders import kept
from supervisor.lifecycle import processes, segments

OTHER = 65534
_PTRACE_SEIZE, _PTRACE_DETACH = 0x4206, 17


# ---- probes: each returns "" where it succeeds, else the error's name


def connecting(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def reading(path):
    with open(path, "rb") as file:
        file.read(1)


def writing(path):
    os.close(os.open(path, os.O_WRONLY))


def listing(path):
    os.listdir(path)


def making(path):
    name = os.path.join(path, "poise-probe")
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
    os.unlink(name)


def signalling(pid):
    os.kill(pid, 0)


def reading_memory(pid):
    with open(f"/proc/{pid}/mem", "rb"):
        pass


def listing_descriptors(pid):
    os.listdir(f"/proc/{pid}/fd")


def tracing(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.kill(pid, signal.SIGSTOP)  # one must stand still to be let go
    os.waitpid(pid, 0x40000000)
    libc.ptrace(_PTRACE_DETACH, pid, None, None)
    os.kill(pid, signal.SIGCONT)


def as_user(uid, probes):
    """{name of a probe: "" or the error}, tried by a process of that user."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            told = {}
            for name, (probe, of) in probes.items():
                try:
                    probe(of)
                    told[name] = ""
                except OSError as problem:
                    told[name] = type(problem).__name__
            os.write(write_end, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        told = json.loads(file.read())
    os.waitpid(child, 0)
    return told


def probes_of(folders, pids):
    """Everything of ours that these folders and processes have, with the ways to reach it."""
    found, kinds = {}, set()

    def add(kind, probe, of):
        kinds.add(kind)
        found[f"{probe.__name__} {of}"] = (probe, of)

    for folder in folders:
        for path in [folder, *(folder.rglob("*") if folder.name != f"poise-{os.geteuid()}" else ())]:  # which others' runs share
            if path.is_socket():
                add("socket", connecting, path)
            elif path.is_dir():
                add("folder", listing, path)
                add("folder", making, path)
            else:
                add("file", reading, path)
                add("file", writing, path)
    # Those of these processes alone: a run of another test may end meanwhile.
    for run_id in {process.run_id for process in processes.running() if process.pid in pids and process.run_id}:
        for name in segments.names_of(run_id):
            add("segment", reading, harness.SHM / name)
    for pid in pids:
        for probe in (signalling, reading_memory, listing_descriptors):
            add("process", probe, pid)
    expect_equal(kinds, {"socket", "folder", "file", "segment", "process"}, "what there is to reach")
    return found


def expect_out_of_reach(folders, pids):
    probes = probes_of(folders, pids)
    own = as_user(os.geteuid(), probes)
    reached = [name for name, error in own.items() if not error]
    expect(len(reached) > 0.9 * len(own), f"our own user reaches too little: {own}")
    others = as_user(OTHER, probes)
    complaints = [f"{name}: {error or 'reached'}" for name, error in others.items() if error != "PermissionError"]
    expect(not complaints, "\n".join(complaints))
    traced = as_user(OTHER, {str(pid): (tracing, pid) for pid in pids})
    expect_equal(set(traced.values()), {"PermissionError"}, "to trace our processes")


def probed(workspace, output, environment, folders, loaders=()):
    """A run, and what is kept beside it, probed by another user while they live; `folders` are the run's, beside its directory."""
    expect(os.geteuid() == 0, "to become another user, this test must be root's")
    os.chmod(workspace.folder, 0o755)  # what keeps others out must be ours
    requests = workspace.write_requests("in.jsonl", [harness.request(i, "Rosa lives in", max_tokens=60, ignore_eos=True) for i in range(9)])
    words = workspace.run_words(requests, output, "--dtype", "float32", *workspace.paced(0.5))
    process = workspace.start(*words, env=environment, umask=0)
    run = Path(f"{output}.poise")
    wait_until(lambda: harness._json(run / "status.json").get("iteration", 0) > 0, "the first iteration")
    pids = [process.pid, *workspace.children(run).values(), *loaders]
    expect_equal(len(pids), 4 + len(loaders), "processes")
    expect_out_of_reach([run, *folders(harness._json(run / "run.json")["run_id"])], pids)
    process.send_signal(signal.SIGTERM)
    workspace.finish(process).expect(75)
    workspace.run(requests, output, "--dtype", "float32", "--resume").expect(0)
    expect_equal(len(comparable(output)), 9, "answers")


@test
def another_user_reaches_nothing_of_a_run_or_a_kept_loader(workspace):
    workspace.poise("load", "--model", DEMO_MODEL, umask=0).expect(0)
    (loader,) = kept(workspace)
    probed(workspace, workspace / "out.jsonl", {}, lambda _: [workspace.runtime / "poise"], [loader["pid"]])
    workspace.poise("stop").expect(0, "ended the loader")


@test
def another_user_reaches_nothing_where_there_is_no_runtime_folder(workspace):
    """The run's directory is too deep for sockets: these lie in the private folder in /tmp."""
    deep = workspace / ("d" * 100)
    deep.mkdir(mode=0o755)
    environment = {"XDG_RUNTIME_DIR": "/nowhere"}
    private = Path("/tmp") / f"poise-{os.geteuid()}"
    probed(workspace, deep / "out.jsonl", environment, lambda run_id: [private, *private.glob(f"*{run_id}*")])


if __name__ == "__main__":
    raise SystemExit(harness.main())
