#!/usr/bin/env python3
"""Loaders that are kept: used instead of loading again, never when the files changed, gone at `poise stop`. Pools whose memory comes behind
the first orders, and goes behind the command."""

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import harness
from ending import SLOWLY, long_requests, wait_for_results
from harness import DEMO, DEMO_MODEL, comparable, expect, expect_equal, request, test, wait_until
from supervisor.commands import stop as stop_command
from supervisor.lifecycle import loaders, processes, segments


def kept(workspace):
    return json.loads(workspace.poise("status", "--json").expect(0).out)["kept_loaders"]


@test
def load_keeps_a_loader_that_later_runs_use(workspace):
    workspace.poise("load", "--model", DEMO_MODEL).expect(0, "kept until")
    living = kept(workspace)
    expect_equal(len(living), 1, "kept loaders")
    workspace.poise("load", "--model", DEMO_MODEL).expect(0, "loaded already")
    for name, kind in (("a", "auto"), ("codes", "int4"), ("b", "auto")):
        workspace.run(DEMO / "show.jsonl", workspace / name, "--kv-cache-dtype", kind).expect(0, "using the kept loader")
        expect_equal(kept(workspace)[0]["pid"], living[0]["pid"], "the loader's pid")
    workspace.run(DEMO / "show.jsonl", workspace / "c", "--dtype", "float32").expect(0)
    expect_equal(comparable(workspace / "a"), comparable(workspace / "b"), "second run")
    workspace.poise("stop").expect(0, "ended the loader")
    expect_equal(kept(workspace), [], "kept loaders")
    workspace.run(DEMO / "show.jsonl", workspace / "d").expect(0)
    expect_equal(comparable(workspace / "d"), comparable(workspace / "a"), "with a loader of its own")



@test
def what_is_no_home_among_the_kept_loaders_is_left_alone(workspace):
    stray = workspace.runtime / "poise" / "loaders" / "notes.txt"
    stray.parent.mkdir(parents=True)
    stray.parent.parent.chmod(0o700)
    stray.write_text("")
    workspace.poise("stop").expect(0, "no loader was kept")
    expect(stray.exists(), "a file that is not ours is removed")


@test
def loaders_kept_under_another_runtime_folder_are_seen_and_can_be_ended(workspace):
    workspace.poise("load", "--model", DEMO_MODEL).expect(0)
    (loader,) = kept(workspace)
    other = workspace / "other"
    other.mkdir(mode=0o700)
    environment = {"XDG_RUNTIME_DIR": str(other)}
    known = json.loads(workspace.poise("status", "--json", env=environment).expect(0).out)
    expect_equal(known["kept_loaders"], [], "kept loaders of this folder")
    expect(loader["pid"] in [one["pid"] for one in known["kept_elsewhere"]], known)
    said = workspace.poise("stop", env=environment).expect(0, "no loader was kept", "--all").err
    expect(str(workspace.runtime) in said and alive(loader["pid"]), said)
    # As `stop --all` ends it, which would end those of other tests, too.
    (home,) = [home for home in loaders.Home.elsewhere() if home.folder.is_relative_to(workspace.runtime)]
    expect(stop_command._stop_loader(home), "it was not ended")
    wait_until(lambda: not alive(loader["pid"]), "the loader to end")
    expect(not home.folder.exists(), "its home is left")


@test
def a_link_in_place_of_the_loaders_folder_is_not_followed(workspace):
    theirs = workspace / "theirs"
    for name in ("open", "closed"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "letter.txt").write_text("mine")
    (theirs / "closed").chmod(0o700)
    theirs.chmod(0o700)
    folder = workspace.runtime / "poise"
    folder.mkdir(mode=0o700)
    (folder / "loaders").symlink_to(theirs)
    before = sorted(map(str, theirs.rglob("*")))
    for words, code in (
        (("stop",), 0),
        (("doctor",), 0),
        (("status",), 0),
        (("load", "--model", DEMO_MODEL), 2),
        (workspace.run_words(DEMO / "show.jsonl", workspace / "out"), 0),
        (workspace.run_words(DEMO / "show.jsonl", workspace / "kept", "--keep-loader"), 2),
    ):
        workspace.poise(*words).expect(code)
        expect_equal(sorted(map(str, theirs.rglob("*"))), before, f"files of another folder after {words[0]}")


@test
def a_lock_that_no_loader_holds_is_no_loader(workspace):
    workspace.poise("load", "--model", DEMO_MODEL).expect(0)
    (loader,) = kept(workspace)
    (home,) = (workspace.runtime / "poise" / "loaders").iterdir()
    os.kill(loader["pid"], signal.SIGKILL)
    wait_until(lambda: not alive(loader["pid"]), "the loader to end")
    with open(home / "lock") as lock:  # its number may be another process's by now
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = workspace.poise("load", "--model", DEMO_MODEL).expect(2)
        expect("loaded already" not in ended.err, ended.err)
    workspace.poise("load", "--model", DEMO_MODEL).expect(0, "kept until")
    workspace.poise("stop").expect(0)


@test
def a_bench_of_a_config_uses_the_loader_that_another_kept(workspace):
    words = ["bench", "--config", DEMO_MODEL / "config.json", "--num-prompts", "2", "--input-len", "4", "--output-len", "2"]
    words += ["--device", "cpu", "--keep-loader"]
    workspace.poise(*words).expect(0)
    living = kept(workspace)
    expect_equal(len(living), 1, "kept loaders")
    workspace.poise(*words).expect(0, "using the kept loader")
    workspace.poise(*words, "--dtype", "bfloat16").expect(0)
    expect_equal(len(kept(workspace)), 2, "kept loaders of two data types")
    workspace.poise("stop").expect(0)
    expect_equal(kept(workspace), [], "kept loaders")
    expect_equal(os.listdir(workspace.runtime / "poise" / "configs"), [], "configs")


@test
def who_refuses_for_memory_names_the_loaders_that_hold_some(workspace):
    workspace.poise("load", "--model", DEMO_MODEL).expect(0)
    ended = workspace.run(DEMO / "show.jsonl", workspace / "a", "--dtype", "float32", "--host-memory", "3MiB").expect(2, "host memory")
    expect("kept loaders hold memory" in ended.err and str(DEMO_MODEL) in ended.err and "stop --all" in ended.err, ended.err)
    workspace.poise("stop").expect(0, "ended the loader")


@test
def a_run_may_leave_its_loader_behind(workspace):
    workspace.run(DEMO / "show.jsonl", workspace / "a", "--keep-loader").expect(0)
    expect_equal(len(kept(workspace)), 1, "kept loaders")
    workspace.run(DEMO / "show.jsonl", workspace / "b").expect(0, "using the kept loader")
    workspace.poise("stop").expect(0, "ended the loader")
    expect_equal(comparable(workspace / "a"), comparable(workspace / "b"), "second run")


@test
def the_next_run_of_a_kept_loader_has_its_pools_memory(workspace):
    questions = (DEMO / "show.jsonl").read_text().splitlines()
    some = workspace.write_requests("some.jsonl", questions[:2])
    pools = []
    for name, requests, kind in (("a", DEMO / "show.jsonl", "auto"), ("b", some, "int8"), ("c", DEMO / "show.jsonl", "auto")):
        workspace.run(requests, workspace / name, "--keep-loader", "--kv-cache-dtype", kind).expect(0)
        (loader,) = kept(workspace)
        (pool,) = [path for path in harness.SHM.iterdir() if "-blocks-" in path.name and path.name.startswith(_prefix(loader))]
        expect_equal(pool.stat().st_size, loader["pool_bytes"], "bytes of the pool")
        pools.append((pool.stat().st_ino, loader["pool_bytes"]))
    expect_equal(len({inode for inode, _ in pools}), 1, f"files of pools: {pools}")
    expect(pools[1][1] < pools[0][1] == pools[2][1], f"bytes of pools: {pools}")
    expect_equal(comparable(workspace / "a"), comparable(workspace / "c"), "third run")
    workspace.run(DEMO / "show.jsonl", workspace / "d").expect(0, "using the kept loader")
    workspace.poise("stop").expect(0, "ended the loader")


def _prefix(loader):
    return f"{segments.prefix()}{loader['run_id']}-"


@test
def changed_files_are_loaded_again(workspace):
    model = workspace / "model"
    shutil.copytree(DEMO_MODEL, model)
    workspace.poise("load", "--model", model).expect(0)
    before = kept(workspace)[0]["pid"]
    os.utime(model / "model.safetensors")
    ended = workspace.run(DEMO / "show.jsonl", workspace / "a", "--keep-loader", model=model)
    ended.expect(0, "changed")
    after = kept(workspace)
    expect_equal(len(after), 1, "kept loaders")
    expect(after[0]["pid"] != before, "the old loader is still used")
    workspace.poise("stop").expect(0)


@test
def a_kept_loader_serves_one_run_at_a_time_and_survives_its_death(workspace):
    workspace.poise("load", "--model", DEMO_MODEL).expect(0)
    pid = kept(workspace)[0]["pid"]
    requests = long_requests(workspace)
    for number, victim in enumerate(("planner", "gpu_executor", "supervisor")):
        output = workspace / f"{victim}.jsonl"
        run = workspace / f"{victim}.jsonl.poise"
        process = workspace.start(*workspace.run_words(requests, output, *SLOWLY))
        wait_for_results(run, 1)
        if number == 0:
            workspace.run(DEMO / "show.jsonl", workspace / "beside").expect(0, "in use by another run")
            ended = workspace.poise("stop").expect(74, "in use")
            expect("no loader was kept" not in ended.err and alive(pid), ended.err)
        children = workspace.children(run)
        os.kill(process.pid if victim == "supervisor" else children[victim], signal.SIGKILL)
        ended = workspace.finish(process)
        if victim != "supervisor":
            ended.expect(75, victim)
        wait_until(lambda c=children: not any(alive(c[n]) for n in ("planner", "gpu_executor")), "both to end", 15)
        expect(alive(pid), f"the kept loader died with the {victim}")
        workspace.run(DEMO / "show.jsonl", workspace / f"after-{victim}").expect(0, "using the kept loader")
    workspace.poise("stop").expect(0, "ended the loader")
    wait_until(lambda: not alive(pid), "the loader to end")


@test
def a_kept_loader_that_dies_ends_its_run_and_leaves_nothing(workspace):
    workspace.poise("load", "--model", DEMO_MODEL).expect(0)
    pid = kept(workspace)[0]["pid"]
    requests = long_requests(workspace)  # more than is done while who else ends is awaited
    process = workspace.start(*workspace.run_words(requests, workspace / "out", *SLOWLY))
    wait_for_results(workspace / "out.poise", 1)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    workspace.finish(process).expect(75, "loader", "--resume")
    expect(time.monotonic() - began < 10, "did not end in seconds")
    workspace.run(requests, workspace / "out", "--resume").expect(0)


@test
def a_loader_without_a_record_is_ended_and_replaced(workspace):
    homes = workspace.runtime / "poise" / "loaders"
    for end in (["stop"], workspace.run_words(DEMO / "show.jsonl", workspace / "out", "--keep-loader")):
        workspace.poise("load", "--model", DEMO_MODEL).expect(0)
        pid = kept(workspace)[0]["pid"]
        next(homes.iterdir()).joinpath("kept.json").unlink()  # as if who started it was killed before it was written
        workspace.poise(*end).expect(0)
        wait_until(lambda p=pid: not alive(p), "the loader to end")
    expect_equal(len(kept(workspace)), 1, "kept loaders")
    workspace.poise("stop").expect(0, "ended the loader")


@test
def a_loader_that_cannot_be_recorded_is_not_kept(workspace):
    home = loaders.Home(workspace / "home")
    home.folder.mkdir(mode=0o700)
    (home.folder / "kept.json").symlink_to("/dev/full")
    given = SimpleNamespace(model=str(DEMO_MODEL), dtype="auto", load_format="auto", quantization="auto", pack_weights="off", seed=0, host_memory=None)
    try:
        home.start(given)
        raise harness.Failed("it is kept")
    except OSError as problem:
        expect_equal(problem.errno, errno.ENOSPC, "the problem")
    expect(not home.lives() and not home.folder.exists(), "its home is left")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# ---- pools that are made behind the work, and given back behind the command: 312 MiB

LAYERS = 2
FIRST_ROUND = 2 + 2 * LAYERS  # calls: for the control segment, for the weights, for both ends of each layer's region
CONFIG = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu", "do_layer_norm_before": True,
    "hidden_size": 1024, "word_embed_proj_dim": 1024, "ffn_dim": 64, "num_attention_heads": 16, "num_hidden_layers": LAYERS,
    "vocab_size": 64, "max_position_embeddings": 2048, "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
WORDS = ("--load-format", "dummy", "--skip-tokenizer-init", "--policy", "kv-only")


class Work:
    """Ten requests that could fill the pool. Nine of them end at once, the other has 40 tokens."""

    def __init__(self, workspace):
        self.workspace = workspace
        self.model = workspace / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        lines = [request(f"r{number}", [5 + number, 6, 7], max_tokens=2000, logit_bias={"2": 100}) for number in range(9)]
        lines.append(request("longer", [20, 21], max_tokens=40, ignore_eos=True))
        self.requests = workspace.write_requests("requests.jsonl", lines)

    def run(self, name, *options, failpoints=""):
        environment = {"POISE_FAILPOINTS": failpoints, "POISE_FAILPOINTS_FIRED": str(self.workspace / "fired")}
        return self.workspace.run(self.requests, self.workspace / name, *WORDS, *options, model=self.model, env=environment if failpoints else None)

    def expect_equal(self, *names):
        for name in names[1:]:
            expect_equal(comparable(self.workspace / name), comparable(self.workspace / names[0]), name)

    def times(self, name):
        return json.loads((self.workspace / f"{name}.poise" / "times.json").read_text())

    def pool_stood(self, name):
        return "all of its memory stands" in (self.workspace / f"{name}.poise" / "logs" / "loader.log").read_text()


@test
def a_run_begins_and_ends_while_its_pool_is_being_made(workspace):
    work = Work(workspace)
    (workspace / "fired").mkdir()
    work.run("plain").expect(0)
    work.run("slow", failpoints=f"loader/segment.reserve:delay=1500@{FIRST_ROUND + 1}+").expect(0)
    expect(work.pool_stood("slow") is False, "the whole pool was waited for")
    work.expect_equal("plain", "slow")
    expect("first order" in workspace.poise("status", workspace / "slow.poise").expect(0).out, "where the time went")


@test
def processes_die_while_the_pool_grows(workspace):
    work = Work(workspace)
    (workspace / "fired").mkdir()
    deaths = f"gpu_executor/executor.registering:kill@2,loader/segment.reserve:kill@{FIRST_ROUND + 2}"  # of the first blocks; in the second round
    work.run("killed", "--restarts", "4", failpoints=f"{deaths},loader/segment.reserve:delay=40+").expect(0, "another one goes on")
    expect({"0", "1"} <= {path.name for path in (workspace / "fired").iterdir()}, "not both died")
    work.run("plain").expect(0)
    work.expect_equal("plain", "killed")


@test
def a_pool_whose_memory_cannot_be_had_any_more_ends_its_run_which_can_go_on(workspace):
    work = Work(workspace)
    (workspace / "fired").mkdir()
    ended = work.run("out", failpoints=f"loader/segment.reserve:errno=ENOSPC@{FIRST_ROUND}")
    ended.expect(75, "the memory of the block pool cannot be had any more", "--resume")
    work.run("out", "--resume").expect(0)
    work.run("plain").expect(0)
    work.expect_equal("plain", "out")


@test
def a_command_whose_output_is_written_does_not_wait_for_memory(workspace):
    """The loader halts where nothing but its memory is left: a pool of many GiB takes the kernel as long."""
    work = Work(workspace)
    (workspace / "fired").mkdir()
    with harness.alone_with_orphans():
        work.run("out", failpoints="loader/loader.unlinked:stop").expect(0)
        times = work.times("out")
        expect(times["ended"] - times["planner_ended"] < 3, f"the end took {times}")
        (left,) = [process for process in processes.running() if str(workspace.folder) in " ".join(process.arguments)]
        expect_equal(segments.names_of(left.run_id), [], "names in /dev/shm")
        workspace.poise("stop").expect(0, "whose supervisor was gone")  # and other scripts' orphans, if there are any
    expect_equal([process for process in processes.running() if process.pid == left.pid], [], "what was left")


if __name__ == "__main__":
    raise SystemExit(harness.main())
