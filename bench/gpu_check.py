#!/usr/bin/env python3
"""All checks for a GPU machine, section by section, each with a time budget.

Results stand in DIR/gpu_check.json and, to be read, in DIR/gpu_check.txt; what programs said is in DIR/gpu_check.log. A second call
with the same DIR adds to them, so that sections may run one by one. Ends with 0 if nothing failed, 1 otherwise.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpu_restarts
import gpu_sections
import speed_table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "launch"))
from supervisor.lifecycle import cublas  # noqa: E402
from supervisor.shared import build_facts, paths  # noqa: E402

BUDGETS = {"tests": 300, "goldens": 180, "demo": 120, "sanitizer": 300, "restart": 240, "speed": 1500, "peers": 1500}


class Bench:
    """What the sections share: programs, time, a log, and their items."""

    def __init__(self, given):
        self.given = given
        self.root, self.bin = ROOT, paths.binary_folder()
        self.folder = Path(tempfile.mkdtemp(prefix="poise-gpu-check-"))
        self.results = Path(given.results).absolute()
        self.results.mkdir(parents=True, exist_ok=True)
        runtime = self.folder / "runtime"  # our own kept loaders: another user's `stop` does not end them
        runtime.mkdir(mode=0o700)
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "POISE_SOURCE_DIR": str(ROOT)}
        self.environment |= {"XDG_CACHE_HOME": str(self.folder / "cache")}  # profiles are of this day's machine
        self.environment |= {"POISE_DEVICE": given.device, **cublas.environment()}
        self.works = json.loads((ROOT / "bench" / "works.json").read_text())
        self.section, self.deadline = None, 0.0
        self.in_background = []  # runs, each with `end`
        self.told = self._earlier()
        self.told["machine"] = machine()

    def _earlier(self):
        try:
            return json.loads((self.results / "gpu_check.json").read_text())
        except (OSError, ValueError):
            return {"sections": {}}

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def poise(self, *words, **more):
        return self.run(["/bin/sh", ROOT / "launch" / "poise", *words], **more)

    def run(self, command, environment=None, most=None):
        """(exit code, or None if time ran out; output). At the time limit it is interrupted first, so that it can clean up."""
        command = [str(word) for word in command]
        left = min(self.seconds_left(), most or 1e9)
        if left <= 0:
            return None, "the section's time is over"
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                env={**self.environment, **(environment or {})},
            )
            code, in_time = None, True
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                in_time, code = False, _end(process)
            except BaseException:  # we are told to end, and it would not hear of that
                _end(process)
                raise
            said.seek(0)
            text = said.read().decode("utf-8", "replace")
        self.log(f"\n### {' '.join(command)}\n{text}### ended with {code}")
        return (code if in_time else None), text

    def log(self, text):
        with open(self.results / "gpu_check.log", "a") as log:
            log.write(text + "\n")

    def note(self, name, ok, told, **figures):
        """`ok`: True, False, or None if it could not run. An item of the same name is replaced."""
        items = self.told["sections"].setdefault(self.section, [])
        items[:] = [item for item in items if item["name"] != name]
        items.append({"name": name, "ok": ok, "told": told, **figures})
        print(f"{ {True: 'ok', False: 'FAILED', None: 'not run'}[ok]:8} {self.section}: {name}: {told}", flush=True)
        self.write()

    def write(self):
        (self.results / "gpu_check.json").write_text(json.dumps(self.told, indent=1) + "\n")
        (self.results / "gpu_check.txt").write_text(speed_table.report(self.told))


def _end(process):
    """Interrupts a process group, kills it if that does not help, and returns the exit code."""
    for number, patience in ((signal.SIGINT, 40), (signal.SIGKILL, 20)):
        until = time.monotonic() + patience
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                if process.poll() is not None and not _works(process.pid):
                    return process.returncode
                time.sleep(0.05)
        except ProcessLookupError:
            return process.wait()
    return process.poll()


def _works(group):
    """Whether a process of the group still runs: a tool may end before the program it watches, which still has the GPU."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # gone meanwhile
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def machine():
    facts = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": build_facts.commit(), "python": sys.version.split()[0]}
    smi = shutil.which("nvidia-smi")
    if smi:
        query = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
        command = [smi, f"--query-gpu={query}", "--format=csv,noheader"]
        facts["gpu"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    facts |= {"cores": os.cpu_count(), "host_memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB"}
    return facts


def options():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--results", required=True, metavar="DIR")
    made.add_argument("--only", metavar="A,B", help=f"of {', '.join(BUDGETS)}; default: all")
    made.add_argument("--budget", metavar="A=S,B=S", default="", help="seconds for sections, instead of the usual ones")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses the script")
    made.add_argument("--works", metavar="A,B", help="of works.json, for speed and peers; default: all")
    made.add_argument("--variants", metavar="A,B", help="of poise, by the beginning of their names: kv-only,act-only")
    made.add_argument("--works-file", help="instead of works.json")
    made.add_argument("--output-len", type=int, metavar="N", help="tokens of each answer, instead of the works'")
    made.add_argument("--link-peak", type=float, metavar="GB/s", help="instead of what torch reaches")
    made.add_argument("--runs", type=int, default=1, help="of each speed; the middle one counts")
    made.add_argument("--trace", action="store_true", help="timelines of the speed runs, in DIR")
    made.add_argument("--options", default="", help="more options for each speed run")
    made.add_argument("--peer-python", default=shutil.which("python3") or sys.executable)
    made.add_argument("--flexgen-wheel", metavar="PATH")
    made.add_argument("--peers", default="flexgen,transformers")
    return made.parse_args()


def main():
    given = options()
    sections = given.only.split(",") if given.only else list(BUDGETS)
    budgets = BUDGETS | {name: float(value) for name, _, value in (one.partition("=") for one in given.budget.split(",") if one)}
    for name in {*sections, *budgets} - set(BUDGETS):
        sys.exit(f"there is no section {name}; there are: {', '.join(BUDGETS)}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda told, _: sys.exit(128 + told))  # what is under way is ended then, too
    bench = Bench(given)
    if given.works_file:
        bench.works = json.loads(Path(given.works_file).read_text())
    try:
        for name in sections:
            bench.section, bench.deadline = name, time.monotonic() + budgets[name]
            (gpu_restarts.restart if name == "restart" else getattr(gpu_sections, name))(bench)
    finally:
        bench.deadline = time.monotonic() + 60
        for run in bench.in_background:
            run.end()
        bench.poise("stop")
        bench.write()
        shutil.rmtree(bench.folder, ignore_errors=True)
    print((bench.results / "gpu_check.txt").read_text())
    ran = [item for name in sections for item in bench.told["sections"].get(name, [])]
    sys.exit(1 if not ran or any(item["ok"] is False for item in ran) else 0)


if __name__ == "__main__":
    main()
