"""`poise test`: sets up, builds, runs all tests, and prints how many passed and failed."""

import collections
import concurrent.futures
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time

from ..shared import machine, quantities
from ..shared.options import normalised, parser
from ..shared.paths import PROGRAMS, ROOT, is_bundle
from ..shared.quantities import duration
from ..shared.trouble import DONE, Refusal, say, tell
from . import setup

_E2E = ROOT / "tests" / "e2e"
_ENVIRONMENTS = {
    "clients/serving.py": ("serve-venv", "clients-venv"),
    "clients/batches.py": ("serve-venv", "clients-venv"),
    "clients/python_package.py": ("python-venv",),
    "clients/evaluation.py": ("python-venv", "serve-venv"),
    "clients/structured_outputs.py": ("serve-venv", "forms-venv"),
}
_VENV = ROOT / "build" / "venv"
_PARTS = ("unit", "e2e", "asan", "tsan")
_BEGUN = ("asan", "tsan", "unit", "e2e")  # of the parts whose programs are built, in this order
_PRESETS = {"unit": "release", "e2e": "release", "asan": "dev", "tsan": "tsan"}
# Every unit test runs under asan. Those of kernels and executor also run as users have them, because their bits must not
# depend on how they are compiled. Those of folders with threads run under tsan; the planner decides in one thread, and its other
# threads (requests, supervisor) run in e2e/sanitized.py.
_TARGETS = {
    "unit": (*PROGRAMS, "poise-tokenizer-tool", "poise_kernels_tests", "poise_gpu_executor_tests"),
    "e2e": (*PROGRAMS, "poise-tokenizer-tool"),
    "tsan": (*PROGRAMS, "poise_common_tests", "poise_kernels_tests", "poise_loader_tests", "poise_gpu_executor_tests"),
}
_FOLDERS = {"unit": "kernels|gpu_executor", "asan": ".*", "tsan": "common|kernels|loader|gpu_executor"}
# The end-to-end script that runs on the sanitizers' programs: a whole run, a kill and a resume.
_SANITIZED = "sanitized.py"
# Fuzz targets, for some seconds each; clang alone builds them.
_FUZZ = ROOT / "tests" / "fuzz" / "run.py"
_NOT_SCRIPTS = {"harness.py", "environment.py", "served.py", "ending.py", "mixed_requests.py", "faults.py", _SANITIZED}
_LONG_ONES = ["tokenizer_equality.py", "swaps.py", "kills.py", "torture.py", "sameness.py", "profiles.py", "hostile_requests.py", "clients/serving.py"]
_LONGEST_SCRIPT = 900  # seconds
_TORTURE = 10.0  # minutes, unless told otherwise
_STEPS_AT_A_TIME = 3
_SHOWN_STEPS = 12  # with their CPU time


def test(words):
    made = parser("test", "Sets up, builds, and runs the tests: unit tests, end to end, and both under sanitizers.")
    setup.add_install_option(made)
    made.add_argument("--only", action="append", choices=_PARTS, help="a part of them; may be given more than once")
    made.add_argument(
        "--torture", nargs="?", type=quantities.positive, const=_TORTURE, metavar="MINUTES",
        help=f"instead, random faults in random runs, for so long ({_TORTURE:g} minutes)",
    )  # fmt: skip
    made.add_argument("--seed", type=quantities.seed, metavar="N", help="of --torture: the same faults again")
    given = made.parse_args(normalised(words))
    if is_bundle():
        raise Refusal("this is a bundle: tests are for a checkout of the sources; bench/gpu_check.sh checks a bundle")
    if given.torture and given.only:
        made.error("--torture is no part of the tests: leave --only out")
    if given.seed is not None and not given.torture:
        made.error("--seed goes with --torture")
    if given.torture:
        return _torture(given)
    parts = [part for part in _PARTS if not given.only or part in given.only]
    count = _Count()
    began = time.monotonic()
    builds = _Builds(parts, count)
    try:
        with builds:
            _run_all([step for part in sorted(parts, key=_BEGUN.index) for step in _steps(part, count, given.no_install)], builds, count)
    finally:
        _interrupt(list(_scripts))  # after an interrupt: they are sessions of their own
    say(f"{', '.join(parts)}: {duration(time.monotonic() - began)}")
    count.say_spent()
    for name in count.names:
        say(f"failed: {name}")
    tell(f"{count.passed} passed, {count.failed} failed")
    return 1 if count.failed or not count.passed else DONE


def _torture(given):
    """Its output is the script's own: each case, then those that failed with the command that repeats them."""
    setup.build("release", PROGRAMS, _checked("release"))
    command = [sys.executable, str(_E2E / "torture.py"), "--minutes", f"{given.torture:g}"]
    command += [] if given.seed is None else ["--seed", str(given.seed)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        _scripts.add(process)
        try:
            return process.wait()
        finally:
            _interrupt([process])
            _scripts.discard(process)


class _Count:
    def __init__(self):
        self.passed = self.failed = 0
        self.names = []
        self._spent = {}  # step: CPU seconds
        self._lock = threading.Lock()

    def wait(self, process, name):
        """Waits for the end of a process of step `name`. Its CPU seconds, and those of all it waited for, count for the step."""
        try:
            _, status, used = os.wait4(process.pid, 0)
        except ChildProcessError:  # an interrupt has waited for it
            process.wait()
            return
        process.returncode = os.waitstatus_to_exitcode(status)
        with self._lock:
            self._spent[name] = self._spent.get(name, 0) + used.ru_utime + used.ru_stime

    def say_spent(self):
        """Says which steps took the most CPU time: they decide how long two cores need."""
        most = sorted(self._spent.items(), key=lambda item: -item[1])[:_SHOWN_STEPS]
        say(f"CPU time: {sum(self._spent.values()):.0f} s; most of it: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in most))

    def add(self, passed, failed, name):
        with self._lock:
            self.passed += passed
            self.failed += failed
            if failed:
                self.names.append(f"{name} ({failed})")

    def broke(self, name):
        say(name)
        with self._lock:
            self.failed += 1
            self.names.append(name)


def _checked(preset):
    """Whether GPU code is compiled only to see that it compiles."""
    return preset == "release" and not machine.gpus()


class _Builds:
    """Builds what `parts` need, one preset after the other: the first at once, the others at the lowest priority while tests
    of those before them run, and wait."""

    def __init__(self, parts, count):
        self._count = count
        targets = {}
        for part in parts:
            targets.setdefault(_PRESETS[part], []).extend(_TARGETS.get(part, ()))
        self._targets = targets
        self._ended = {preset: concurrent.futures.Future() for preset in targets}
        self._process = None
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_):
        with self._lock:
            self._stopped = True
            if self._process:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGINT)
        self._thread.join()

    def order(self, part):
        """When the programs of `part` are there: 0 now, or the number of their build."""
        preset = _PRESETS[part]
        return 0 if self._ended[preset].done() else 1 + list(self._ended).index(preset)

    def wait_for(self, part):
        """Returns when the programs of `part` are built. Raises the Refusal of a build that failed."""
        self._ended[_PRESETS[part]].result()

    def _run(self):
        for number, (preset, targets) in enumerate(self._targets.items()):
            try:
                if number:
                    self._build_quietly(preset, targets)
                if self._stopped:
                    raise Refusal("interrupted")
                # what was built is built; what failed fails again, and is shown
                setup.build(preset, targets, _checked(preset), lambda process, name=preset: self._count.wait(process, f"build {name}"))
                self._ended[preset].set_result(None)
            except Exception as problem:  # pylint: disable=broad-except
                self._ended[preset].set_exception(problem)  # whoever waits for this build raises it

    def _build_quietly(self, preset, targets):
        for command in setup.build_commands(preset, targets, _checked(preset)):
            with self._lock:
                if self._stopped:
                    return
                self._process = subprocess.Popen(
                    ["nice", "-n", "19", *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            self._count.wait(self._process, f"build {preset}")


def _steps(part, count, no_install):
    """[(part, function)]: what `part` consists of, the longest first."""
    preset = _PRESETS[part]
    folder = ROOT / "build" / preset / "bin"
    if part == "e2e":
        return [(part, functools.partial(_end_to_end, script, count, no_install)) for script in _scripts_of_e2e()]
    steps = [(part, functools.partial(_ctest, preset, _FOLDERS[part], count))]
    if part == "asan":
        steps.append((part, functools.partial(_fuzz, folder, count)))
    if part != "unit":
        command = [sys.executable, str(_E2E / _SANITIZED)]
        environment = {"POISE_BIN": str(folder), **sanitizer_options()}
        steps.append((part, functools.partial(_script, command, f"{part} e2e/{_SANITIZED}", count, environment)))
    return steps


def _run_all(steps, builds, count):
    """All steps, some at a time: they wait about as long as they compute. The next is the first one whose programs are built: so the
    long ones of the sanitizers do not remain for the end. A part whose build fails counts as one failed test."""
    unbuilt, lock = set(), threading.Lock()
    remaining = list(steps)

    def run(_):
        with lock:
            part, function = remaining.pop(min(range(len(remaining)), key=lambda i: builds.order(remaining[i][0])))
        try:
            builds.wait_for(part)
        except Refusal as refusal:
            with lock:
                if part not in unbuilt:
                    unbuilt.add(part)
                    count.broke(f"{part}: {refusal.sentence}")
            return
        function()

    pool = concurrent.futures.ThreadPoolExecutor(_STEPS_AT_A_TIME)
    try:
        list(pool.map(run, steps))
    finally:  # after an interrupt no other step begins; the caller ends those that are running
        pool.shutdown(wait=False, cancel_futures=True)


def _scripts_of_e2e():
    found = [path for folder in (".", "clients", "ends", "supervision") for path in (_E2E / folder).glob("*.py")]
    scripts = [str(path.relative_to(_E2E)) for path in found if path.name not in _NOT_SCRIPTS]
    return sorted(scripts, key=lambda name: (_LONG_ONES.index(name) if name in _LONG_ONES else len(_LONG_ONES), name))


def _end_to_end(script, count, no_install):
    if script == "tokenizer_equality.py":
        _tokenizer_equality(count, no_install)
    elif no_install and (lacking := [name for name in _ENVIRONMENTS.get(script, ()) if not (ROOT / "build" / name / "installed").exists()]):
        count.broke(f"e2e/{script}: build/{lacking[0]} is not there, and --no-install forbids making it")
    else:
        _script([sys.executable, str(_E2E / script)], f"e2e/{script}", count)


def _fuzz(folder, count):
    if (folder / "poise_fuzz_files").exists():
        _script([sys.executable, str(_FUZZ), "--bin", str(folder), "--jobs", "1"], f"asan fuzz/{_FUZZ.name}", count)


def sanitizer_options():
    suppressions = ROOT / "tests" / "support" / "tsan.supp"
    # TSan waits at the end of a process for races of other threads: by default for a second, and three scripts start many processes.
    return {
        "TSAN_OPTIONS": f"suppressions={suppressions}:halt_on_error=1:exitcode=66:atexit_sleep_ms=50",
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=66:malloc_context_size=4",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _ctest(preset, folders, count):
    """Runs the unit tests of `folders` (a regular expression), and prints the output of the processes in which one failed.

    A process runs many tests and says at its end how many passed. One that ends without that counts as one failed test.
    """
    # The digit begins the number of a process: folders below one of `folders` (kernels/cuda) are not meant.
    command = ["ctest", "--preset", preset, f"-j{setup.jobs()}", "--no-tests=error", "--verbose", "-R", f"^({folders})/[0-9]"]
    environment = {**os.environ, **sanitizer_options()}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    _scripts.add(process)
    passed = failed = 0
    ended, outputs = False, collections.defaultdict(list)
    with process:
        for line in process.stdout:
            said = re.match(r"(\d+): (.*\n)", line)
            end = re.match(r"\s*(\d+)/(\d+) Test +#(\d+): (\S+) \.+ *(.*\S)", line)
            if said:
                outputs[said.group(1)].append(said.group(2))
            elif end:
                step, steps, number, name, verdict = end.groups()
                output = "".join(outputs.pop(number, []))
                good, bad = _totals(output)
                if not verdict.startswith("Passed"):
                    bad = max(bad, 1)
                    tell(f"{output}{preset} {name}: {verdict}")
                elif "[  PASSED  ]" not in output:
                    good = 1  # no program of GoogleTest's
                passed, failed = passed + good, failed + bad
                tell(f"{preset}: {step} of {steps} processes of tests")
            ended = ended or "tests passed" in line
        count.wait(process, f"{preset} unit tests")
    _scripts.discard(process)
    if not ended:
        tell("".join(line for lines in outputs.values() for line in lines[-30:]).rstrip())
        count.broke(f"{preset} unit tests: ctest did not finish")
        return
    tell(f"{preset}: {passed} unit tests passed, {failed} failed")
    count.add(passed, failed, f"{preset} unit tests")


def _totals(output):
    """How many tests passed and how many failed, as GoogleTest says at the end of its output."""
    return tuple(
        sum(int(number) for number in re.findall(rf"^\[  {word}  \] (\d+) tests?[.,]", output, re.MULTILINE))
        for word in ("PASSED", "FAILED")
    )


_scripts = set()  # that run now, and ctest


def _end(process):
    """Kills a script and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _interrupt(scripts, patience=20):
    """Interrupts scripts, so that they end what they started; kills those that are still running after `patience` seconds."""
    for process in scripts:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    until = time.monotonic() + patience
    while time.monotonic() < until and any(process.poll() is None for process in scripts):
        time.sleep(0.05)
    for process in scripts:
        _end(process)


def _script(command, name, count, extra=None):
    """Runs a script of tests. Its last line is `N passed, N failed`; a script without that line counts as one test."""
    tell(f"{name}")
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **(extra or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )
    totals = None
    _scripts.add(process)
    alarm = threading.Timer(_LONGEST_SCRIPT, _end, (process,))
    alarm.daemon = True
    alarm.start()
    with process:
        for line in process.stdout:
            tell("  " + line.rstrip())
            totals = re.fullmatch(r"(\d+) passed, (\d+) failed\s*", line) or totals
        count.wait(process, name)
    alarm.cancel()
    _scripts.discard(process)
    if totals is None:
        count.add(int(process.returncode == 0), int(process.returncode != 0), name)
    else:
        passed, failed = int(totals.group(1)), int(totals.group(2))
        count.add(passed, max(failed, int(process.returncode != 0)), name)


def _tokenizer_equality(count, no_install):
    tool = ROOT / "build" / "release" / "bin" / "poise-tokenizer-tool"
    python = _VENV / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import tokenizers"], capture_output=True).returncode:
        if no_install:
            count.broke("e2e/tokenizer_equality.py: build/venv lacks the package tokenizers, and --no-install forbids it")
            return
        say("installing HuggingFace's tokenizers into build/venv, to compare with")
        for command in (
            [sys.executable, "-m", "venv", str(_VENV)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "tokenizers"],
        ):
            made = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if made.returncode:
                tell((made.stdout + made.stderr).rstrip())
                count.broke(f"e2e/tokenizer_equality.py: `{' '.join(command)}` failed")
                return
    _script([str(python), str(_E2E / "tokenizer_equality.py"), str(tool)], "e2e/tokenizer_equality.py", count)
