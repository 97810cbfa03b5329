"""`poise setup`: configures and builds. The shell part has already installed the Debian packages."""

import collections
import json
import os
import re
import subprocess
import time

from ..shared import machine
from ..shared.build_facts import version
from ..shared.options import add_json, normalised, parser
from ..shared.paths import PROGRAMS, ROOT, binary_folder, command_line, is_bundle
from ..shared.progress import ProgressLine
from ..shared.quantities import duration
from ..shared.trouble import DONE, Refusal, say, shown, tell

_MEMORY_PER_JOB = 3 << 29  # 1.5 GiB: the largest sources of this project under a sanitizer
_TAIL = 30
_CHECKED, _FOR_USE = "POISE_CUDA:STRING=CHECKED", "POISE_CUDA:STRING=AUTO"  # how GPU code is compiled


def add_install_option(to):
    # The shell part, which ran before, obeys it.
    to.add_argument("--no-install", action="store_true", help="install nothing; say what is missing")


def setup(words):
    made = parser("setup", "Installs what is missing (Debian packages), configures and builds.")
    add_install_option(made)
    add_json(made)
    given = made.parse_args(normalised(words))
    began = time.monotonic()
    build_programs()
    if given.json:
        built = [str(binary_folder() / name) for name in PROGRAMS]
        tell(json.dumps({"programs": built, "version": version(), "seconds": round(time.monotonic() - began, 2)}))
    else:
        say(f"built: try {command_line('demo')}")
    return DONE


def jobs():
    return max(1, min(machine.cores(), machine.available_memory() // _MEMORY_PER_JOB))


def build_programs():
    """Builds the programs; `poise test` builds the tests."""
    build("release", PROGRAMS)


def build(preset, targets=(), checked=False, wait=subprocess.Popen.wait):
    """Configures `preset` if that was not done before, and builds it. If that fails, prints the compiler's last lines and refuses.

    `checked`: a new build compiles GPU code in a third of the time, and for no GPU. The next build without that compiles it for use.
    `wait` is called for the end of each tool's process."""
    if is_bundle():
        raise Refusal("this is a bundle: its programs are built already; `setup` and `test` are for a checkout of the sources")
    folder = ROOT / "build" / preset
    os.makedirs(folder, exist_ok=True)
    began = time.monotonic()
    log = folder / "setup.log"
    with open(log, "w") as file:
        *configure, ninja = build_commands(preset, targets, checked)
        for command in configure:
            if _execute(command, file, preset, wait) and _execute([*command, "--fresh"], file, preset, wait):
                raise Refusal(f"configuring failed: the lines above say why (all of it: {shown(log)})")
        if _execute(ninja, file, preset, wait):
            raise Refusal(f"building failed: the lines above say why (all of it: {shown(log)})")
    seconds = time.monotonic() - began
    if seconds > 5:
        say(f"built {preset} in {duration(seconds)}")


def build_commands(preset, targets=(), checked=False):
    """What `build` executes, one after the other."""
    folder = ROOT / "build" / preset
    configure = ["cmake", "--preset", preset]
    ninja = ["ninja", "-C", str(folder), f"-j{jobs()}", *targets]
    if not (folder / "build.ninja").exists():
        return [[*configure, *([f"-D{_CHECKED}"] if checked else [])], ninja]
    if not checked and _CHECKED in (folder / "CMakeCache.txt").read_text().splitlines():
        return [[*configure, f"-D{_FOR_USE}"], ninja]
    return [ninja]


def _execute(command, log, preset, wait):
    """Runs a tool and shows ninja's [done/all] as the progress line. If the tool fails, prints its last lines."""
    line, tail = ProgressLine(), collections.deque(maxlen=_TAIL)
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise Refusal(f"{command[0]} is missing: run {command_line('setup')} without --no-install") from None
    with process:
        for text in process.stdout:
            log.write(text)
            step = re.match(r"\[(\d+)/(\d+)\]", text)
            if not step or "FAILED" in text:
                tail.append(text)
            elif line.due():
                line.show(f"building {preset}: {step.group(1)} of {step.group(2)}")
        wait(process)
    line.clear()
    if process.returncode and ("--preset" not in command or "--fresh" in command):
        for text in filter(str.strip, tail):
            say(text.rstrip())
    return process.returncode
