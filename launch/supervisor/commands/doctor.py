"""`poise doctor`: checks the machine, removes leftovers of dead runs, tells what a model needs."""

import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from ..lifecycle import inputs, leftovers
from ..shared import machine
from ..shared.options import add_json, add_kv_cache, add_loading, add_model, loader_arguments, normalised, parser
from ..shared.paths import LOADER, PROGRAMS, binary_folder, command_line, is_bundle, program
from ..shared.quantities import bytes_text, counted
from ..shared.trouble import CANNOT_START, DONE, tell


class _Findings:
    def __init__(self, as_json):
        self.bad = 0
        self._found = [] if as_json else None

    def note(self, name, text, mark=" "):
        if self._found is None:
            tell(f"{mark} {name:14} {text}")
        else:
            self._found.append({"what": name, "found": text, "wrong": mark == "!"})

    def wrong(self, name, text):
        self.bad += 1
        self.note(name, text, "!")

    def end(self):
        if self._found is not None:
            tell(json.dumps({"findings": self._found, "wrong": self.bad}))
        else:
            tell("all well" if not self.bad else f"{self.bad} found wrong: see the lines marked !")


def doctor(words):
    made = parser("doctor", "Checks the machine, removes what dead runs left; with --model: what the model needs.")
    add_model(made, required=False)
    add_loading(made)
    add_kv_cache(made)
    add_json(made)
    given = made.parse_args(normalised(words))
    findings = _Findings(given.json)
    _memory(findings)
    _limits(findings)
    _devices(findings)
    _programs(findings)
    if not leftovers.clean_up():
        findings.note("leftovers", "none")
    _session(findings)
    if given.model is not None:
        inputs.check_model(given.model)
        _model(findings, given)
    findings.end()
    return CANNOT_START if findings.bad else DONE


def _memory(findings):
    total, available = machine.meminfo("MemTotal"), machine.meminfo("MemAvailable")
    findings.note("memory", f"{bytes_text(total)}, {bytes_text(available)} available")
    limit = machine.cgroup_limit()
    if limit and limit < total:
        findings.note("control group", f"allows {bytes_text(limit)}")
    size, free = machine.shared_memory()
    if not size:
        findings.wrong("/dev/shm", "is not there: poise keeps weights and context in it; mount a tmpfs on it")
    elif size < 1 << 30:
        findings.wrong(
            "/dev/shm", f"has {bytes_text(size)}: model and context must fit (docker: --shm-size; else: remount larger)"
        )
    else:
        findings.note("/dev/shm", f"{bytes_text(size)}, {bytes_text(free)} free")
    if held := leftovers.still_ending():
        findings.note("ending", f"{held} is not free yet; the next run waits for it")
    findings.note("for a run", f"{bytes_text(machine.available_memory())} of host memory, {counted(machine.cores(), 'core')}")


def _limits(findings):
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < inputs.FEWEST_FILES:
        findings.wrong("open files", f"{files} allowed, {inputs.FEWEST_FILES} wanted: ulimit -n {inputs.FEWEST_FILES}")
    else:
        findings.note("open files", f"{files} allowed")
    written = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if written != resource.RLIM_INFINITY:
        findings.note("file size", f"limited to {bytes_text(written)} (ulimit -f)")


def _devices(findings):
    gpus = machine.gpus()
    findings.note("GPU", ", ".join(gpus) if gpus else "none seen; runs use the CPU device")


def _programs(findings):
    if is_bundle():
        findings.note("programs", f"{binary_folder()}, in a bundle")
        return
    missing = [tool for tool in ("g++", "cmake", "ninja", "flatc") if not shutil.which(tool)]
    findings.note("build tools", f"missing: {', '.join(missing)}" if missing else "all there")
    built = [name for name in PROGRAMS if os.access(binary_folder() / name, os.X_OK)]
    if len(built) < len(PROGRAMS):
        findings.wrong("programs", f"not built: run {command_line('setup')}")
    else:
        findings.note("programs", str(binary_folder()))


def _session(findings):
    """systemd-logind removes a user's shared memory at logout, unless it is configured not to."""
    user = os.geteuid()
    try:
        text = Path("/etc/systemd/logind.conf").read_text()
    except OSError:
        return
    kept = re.search(r"^\s*RemoveIPC\s*=\s*(no|false|0)", text, re.MULTILINE)
    lingers = Path("/var/lib/systemd/linger", os.environ.get("USER", "")).is_file()
    if user >= 1000 and not kept and not lingers:
        findings.note("logout", "may remove shared memory of runs left behind (logind's RemoveIPC): loginctl enable-linger")


def _model(findings, given):
    command = [program(LOADER), *loader_arguments(given), "--home", "/nonexistent", "--run-id", "0", "--needs"]
    command += ["--kv-cache-dtype", given.kv_cache_dtype]
    looked = subprocess.run([str(word) for word in command], capture_output=True, text=True, errors="replace")
    for line in looked.stderr.splitlines():
        line = line.removeprefix(f"{LOADER}: ")
        (findings.wrong if looked.returncode else findings.note)("model", line)
    if looked.returncode == 0:
        _needs(findings, given, json.loads(looked.stdout))


def _needs(findings, given, needs):
    weights, kv, act = needs["weights"], needs["kv"], needs["act"]
    room = min(machine.available_memory(), given.host_memory or 1 << 62)
    packed = f", matrices of the layers as {needs['codes']}" if needs["codes"] else ""
    kept = "" if given.kv_cache_dtype == "auto" else f" of {given.kv_cache_dtype}"
    findings.note("model", f"{bytes_text(weights)} of weights as {needs['dtype']}{packed}")
    findings.note("context", f"{bytes_text(kv)} a token as KV{kept}, {bytes_text(act)} as ACT")
    if weights > room:
        findings.wrong("room", f"{bytes_text(room)}: not enough for the weights")
    else:
        left = room - weights
        findings.note("room", f"{bytes_text(room)}: beside the weights, {counted(left // kv, 'token')} as KV or {left // act} as ACT")
