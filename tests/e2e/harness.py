"""What the end-to-end tests share: a workspace for each test, `poise` as a user types it, and a check for leftovers.

A test is a function decorated with `test`, its name a sentence; it takes a Workspace. A script of tests ends with
`harness.main()`: one line a test, then `N passed, N failed`. Random tests take `workspace.random`. Its seed is 1 unless
--seed gives another, so that each run tests the same; a failed test prints it. POISE_BIN chooses the programs (a
sanitizer's build, say), POISE_DEVICE the device of runs.
"""

import argparse
import atexit
import contextlib
import fcntl
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POISE = ROOT / "launch" / "poise"
DEMO = ROOT / "launch" / "demo"
DEMO_MODEL = DEMO / "model"
PROGRAMS = ("poise-loader", "poise-planner", "poise-gpu-executor")
SHM = Path("/dev/shm")

sys.path.insert(0, str(ROOT / "launch"))
from supervisor.lifecycle import processes, segments  # noqa: E402
from supervisor.shared import paths  # noqa: E402
from supervisor.shared.trouble import Refusal  # noqa: E402

_tests = []


def bin_folder():
    """Where the programs under test lie."""
    return paths.binary_folder()


@functools.cache
def policies():
    """The names of all policies, as the planner lists them."""
    listed = subprocess.run([bin_folder() / "poise-planner", "policies", "--json"], check=True, capture_output=True, text=True)
    return tuple(json.loads(line)["name"] for line in listed.stdout.splitlines())


def test(function):
    _tests.append(function)
    return function


class Failed(AssertionError):
    """A test's complaint, with what poise said."""


def expect(condition, complaint):
    if not condition:
        raise Failed(complaint)


def expect_equal(got, wanted, what):
    if got != wanted:
        raise Failed(f"{what}: {got!r} instead of {wanted!r}")


def refuses(function, *arguments, error=Refusal):
    """What `function` says when it refuses; it must."""
    try:
        value = function(*arguments)
    except error as refusal:
        return str(refusal)
    raise Failed(f"{function.__name__}{arguments} gave {value!r}")


class Ended:
    """A finished `poise`."""

    def __init__(self, words, code, out, err, seconds, cpu_seconds):
        self.words, self.code, self.out, self.err, self.seconds = words, code, out, err, seconds
        self.cpu_seconds = cpu_seconds  # of all its processes: what else the machine does is not in it

    def expect(self, code, *fragments):
        """This exit code, these words on stderr, and no trace of a program's insides."""
        told = f"`poise {' '.join(map(str, self.words))}` ended with {self.code} after {self.seconds:.1f} s:\n{self.err}"
        expect(self.code == code, f"exit code {code} wanted; {told}")
        for fragment in fragments:
            expect(fragment in self.err, f"{fragment!r} wanted on stderr; {told}")
        for trace in ("Traceback", "Aborted", "terminate called", "Assertion", "SIGKILL", "signal 9"):
            expect(trace not in self.err, f"{trace!r} on stderr; {told}")
        return self

    def lines(self):
        """stderr without progress."""
        return [line for line in self.err.splitlines() if "] " not in line or "requests" not in line]


IDLE_COMMAND = 0.25  # seconds that `poise policies` takes on an idle machine


_with_orphans = 0  # how often this script is within


@contextlib.contextmanager
def alone_with_orphans():
    """`stop` and `doctor` end all processes of this user whose supervisor is gone. Within it no other script's do, so that those
    which a test left are there for the command that it tests."""
    global _with_orphans
    descriptor = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _with_orphans:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _with_orphans += 1
        try:
            yield
        finally:
            _with_orphans -= 1
    finally:
        os.close(descriptor)


class Workspace:
    """A folder of its own for one test, with a private runtime folder for kept loaders."""

    def __init__(self, seed):
        self.folder = Path(tempfile.mkdtemp(prefix="poise-test-"))
        self.runtime = self.folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.seed = seed
        self.random = random.Random(seed)
        self._shm_before = set(_segments())
        self._started = []

    def __truediv__(self, name):
        return self.folder / name

    def environment(self, extra=None):
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), "POISE_COMMAND": "poise"}
        environment |= {"XDG_CACHE_HOME": str(self.folder / "cache"), **(extra or {})}
        environment.pop("PYTHONUNBUFFERED", None)  # as users have it: what stdout holds back is ours to lose
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # likewise: a third of the time of a short command compiles its sources
        return environment

    def poise(self, *words, timeout=120, env=None, cwd=None, **popen):
        """Runs `poise WORDS` to its end."""
        with alone_with_orphans() if words[:1] in (("stop",), ("doctor",)) else contextlib.nullcontext():
            process = self.start(*words, env=env, cwd=cwd, **popen)
            return self.finish(process, timeout)

    def slowness(self):
        """How many times longer a short command takes now than on an idle machine; 1 at least."""
        began = time.monotonic()
        self.poise("policies").expect(0)
        return max(1, (time.monotonic() - began) / IDLE_COMMAND)

    def paced(self, gflops):
        """Options for a CPU device of that speed. Where the machine is busy the device is slower still, so that a run always outlasts
        what the test does to it."""
        return ("--compute-gflops", f"{gflops / self.slowness():.3g}")

    def start(self, *words, env=None, cwd=None, **popen):
        log = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, "-s", str(ROOT / "launch" / "start.py"), *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self.environment(env),
            cwd=cwd or self.folder,
            start_new_session=True,
            **popen,
        )
        process.words, process.log, process.began = words, log, time.monotonic()
        self._started.append(process)
        return process

    def finish(self, process, timeout=120):
        before = cpu_of_children()
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Failed(f"`poise {' '.join(map(str, process.words))}` did not end in {timeout} s:\n{said(process)}") from None
        seconds = time.monotonic() - process.began
        cpu = cpu_of_children() - before
        return Ended(process.words, process.returncode, out.decode("utf-8", "replace"), said(process), seconds, cpu)

    def run(self, requests, output, *options, model=DEMO_MODEL, **more):
        """`poise run` on the CPU device, or on the one that POISE_DEVICE names."""
        return self.poise(*self.run_words(requests, output, *options, model=model), **more)

    def run_words(self, requests, output, *options, model=DEMO_MODEL):
        device = os.environ.get("POISE_DEVICE") or "cpu"
        return ["run", "--model", model, "-i", requests, "-o", output, "--device", device, *options]

    def replay(self, run, *options):
        """Replays a run's orders, expects its answers bit by bit, and returns the report."""
        ended = self.poise("replay", run, "--json", "--device", "cpu", "--threads", "1", *options).expect(0)
        report = json.loads(ended.out)
        expect(report["equal"] and report["iterations"] and report["tokens"]["compared"], ended.out)
        return report

    def children(self, directory):
        """The living processes of the run in `directory`, by plain name."""
        found = {}
        run_id = _json(Path(directory) / "run.json").get("run_id")
        for process in processes.running():
            if run_id and process.run_id == run_id:
                found[process.program.removeprefix("poise-").replace("-", "_")] = process.pid
        return found

    def write_requests(self, name, requests):
        """A request file: dicts become lines, strings and bytes stand as they are."""
        path = self / name
        with open(path, "wb") as file:
            for request in requests:
                if isinstance(request, dict):
                    request = json.dumps(request)
                file.write(request.encode() + b"\n" if isinstance(request, str) else request + b"\n")
        return path

    # ---- afterwards

    def leftovers(self):
        """What must be gone after every `poise` of the test has ended."""
        found = []
        for process in processes.running():
            if any(str(self.folder) in argument for argument in process.arguments):
                found.append(f"process {process.pid} ({process.program})")
        new = {name for name in _segments() if name not in self._shm_before and not _held(name)}
        if new:
            elsewhere = tuple(segments.prefix() + run_id for run_id in self._runs_of_other_tests())
            found += [f"shared memory {name}" for name in sorted(new) if not name.startswith(elsewhere)]
        bound = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
        return found + [f"socket {path}" for path in bound if path.startswith(str(self.folder))]

    def _runs_of_other_tests(self):
        """Ids of runs in the workspaces of other scripts that run at the same time: those scripts check their own leftovers."""
        for folder in self.folder.parent.glob("poise-test-*"):
            if folder != self.folder:
                with contextlib.suppress(FileNotFoundError):  # the other script may be removing it
                    for path in [path for name in ("run.json", "kept.json") for path in folder.rglob(name)]:
                        run_id = _json(path).get("run_id")
                        if run_id:
                            yield run_id

    def sanitizer_reports(self):
        for log in self.folder.rglob("*.stderr"):
            text = log.read_text(errors="replace")
            if "Sanitizer" in text or "runtime error:" in text:
                yield f"{log.name}:\n{text[:4000]}"

    def close(self):
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.log.close()
            if process.stdout:
                process.stdout.close()
        patience = time.monotonic() + 15
        while (left := self.leftovers()) and time.monotonic() < patience:
            time.sleep(0.1)
        reports = list(self.sanitizer_reports())
        for process in processes.running():
            if any(str(self.folder) in argument for argument in process.arguments):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        expect(not left, f"left behind: {', '.join(left)}")
        expect(not reports, "\n".join(reports))


def cpu_of_children():
    """Seconds on a core of all processes that have ended and were waited for, and of those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def said(process):
    """What it has told so far. The process writes where its own offset is, which is also this one's: so that one is left alone."""
    log = process.log.fileno()
    return os.pread(log, os.fstat(log).st_size, 0).decode("utf-8", "replace")


def _segments():
    return [name for name in os.listdir(SHM) if name.startswith(segments.prefix())]


def segments_of(run_id):
    return [name for name in _segments() if run_id in name]


def _held(name):
    """Whether a living process is attached: other people's tests run beside ours."""
    try:
        with open(SHM / name, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return True
    except OSError:
        return True


def _json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def wait_until(condition, what, seconds=30):
    """Waits until `condition` returns something true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise Failed(f"waited {seconds} s in vain: {what}")


def kill_together(supervisor, *pids):
    """Processes of a run, so that its supervisor finds all of them at one look."""
    os.kill(supervisor.pid, signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(supervisor.pid), "the supervisor to halt")
    kill(*pids)
    os.kill(supervisor.pid, signal.SIGCONT)


def kill(*pids):
    """Returns when they have ended."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    for descriptor in descriptors:
        processes.send(descriptor, signal.SIGKILL)
    expect(not processes.wait_gone(descriptors, 30), "killed, and they live")
    for descriptor in descriptors:
        os.close(descriptor)


# ---- models


def rewrite_tensors(file, change):
    """Alters a safetensors file's tensors: `change` takes and returns {name: (dtype, shape, bytes)}."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    found = {}
    for name, told in header.items():
        if name != "__metadata__":
            begin, end = told["data_offsets"]
            found[name] = (told["dtype"], told["shape"], body[begin:end])
    header, parts, at = {}, [], 0
    for name, (dtype, shape, content) in change(found).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        parts.append(content)
        at += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(b"".join((struct.pack("<Q", len(text)), text, *parts)))


def first_layers(count, folder):
    """A copy in `folder` of the demo model with its first `count` layers alone. It speaks nonsense in the same vocabulary and computes
    less: for tests of how work is done, not of what is said."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    expect(count < config["num_hidden_layers"], f"the demo model has {config['num_hidden_layers']} layers")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))

    def kept(name):
        layer = re.search(r"layers\.(\d+)\.", name)
        return not layer or int(layer[1]) < count

    rewrite_tensors(folder / "model.safetensors", lambda tensors: {n: t for n, t in tensors.items() if kept(n)})
    return folder


@functools.cache
def short_model():
    """The first three layers of the demo model, once for all tests of a script."""
    folder = Path(tempfile.mkdtemp(prefix="poise-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return first_layers(3, folder / "model")


# ---- requests and results


def request(custom_id, prompt, **body):
    return {
        "custom_id": str(custom_id),
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, **{"temperature": 0, "max_tokens": 8, **body}},
    }


def read_results(path):
    """Result lines by custom_id."""
    results = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        expect(result["custom_id"] not in results, f"two results for {result['custom_id']!r}")
        results[result["custom_id"]] = result
    return results


def comparable(path):
    """The parts of a results file that must be equal each time: without result ids and times, in any order."""
    lines = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        result.pop("id", None)
        result["response"].pop("request_id", None)
        for name in ("id", "created"):
            result["response"]["body"].pop(name, None)
        lines.append(json.dumps(result, sort_keys=True))
    return sorted(lines)


def choice(result):
    return result["response"]["body"]["choices"][0]


# ---- the runner


def seed_of(text):
    """What --seed says: a number, or `random` for one that nobody chose."""
    return int.from_bytes(os.urandom(4), "big") if text == "random" else int(text)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="*", help="run only the tests of these names, or whose names hold one of these")
    options.add_argument("--seed", type=seed_of, default=1, metavar="N", help="a number, or `random`; 1 unless given")
    options.add_argument("--list", action="store_true")
    given = options.parse_args()
    script = Path(sys.argv[0]).stem
    own = [t for t in _tests if t.__module__ == "__main__"]  # a script may borrow from another
    chosen = [t for t in own if not given.names or any(_is_meant(t.__name__, name, own) for name in given.names)]
    if given.list:
        print("\n".join(t.__name__ for t in chosen))
        return 0
    failed = 0
    for number, function in enumerate(chosen):
        seed = given.seed + number if len(chosen) > 1 else given.seed
        failed += not _passes(function, script, seed)
    print(f"{len(chosen) - failed} passed, {failed} failed", flush=True)
    return 1 if failed or not chosen else 0


def _is_meant(test_name, given, tests):
    """A whole name means that test alone, though it may be a part of another one's name."""
    whole = any(given == t.__name__ for t in tests)
    return test_name == given if whole else given in test_name


def _passes(function, script, seed):
    name = f"{script}: {function.__name__}"
    began, cpu_before = time.monotonic(), time.process_time() + cpu_of_children()
    workspace = Workspace(seed)
    complaint = None
    try:
        function(workspace)
    except Failed as problem:
        complaint = str(problem)
    except KeyboardInterrupt:  # nothing that was started stays
        with contextlib.suppress(Failed):
            workspace.close()
        raise SystemExit(75) from None
    except Exception:  # pylint: disable=broad-except
        complaint = traceback.format_exc()
    try:
        workspace.close()
    except Failed as problem:
        complaint = f"{complaint}\n{problem}" if complaint else str(problem)
    cpu = time.process_time() + cpu_of_children() - cpu_before
    took = f"{time.monotonic() - began:.1f} s, {cpu:.1f} CPU s"
    if complaint is None:
        print(f"ok     {name} ({took})", flush=True)
        return True
    print(f"FAILED {name} ({took}, --seed {seed})\n{complaint}", flush=True)
    return False
