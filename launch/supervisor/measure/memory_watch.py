"""The peak memory of a run, sampled twice a second by a thread.

Host: private pages of all its processes plus the filled pages of their shared segments; without a run directory, the growth
of what the whole system uses. Device: the growth of the memory that the driver reports as used, if there is a driver. No
other process may begin to use that GPU meanwhile.
"""

import os
import re
import shutil
import subprocess
import threading

from ..lifecycle import processes, segments
from ..shared import machine
from ..shared.files import read_json

_EVERY = 0.5  # seconds


class MemoryWatch:
    """`with MemoryWatch(run_directory) as watch:` around a run, or `MemoryWatch()` around other work. Afterwards `watch.host`
    and `watch.device` are bytes or None."""

    def __init__(self, run_directory=None):
        self.host = self.device = None
        self._record = run_directory / "run.json" if run_directory else None
        self._host_before = _system_used()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._smi = shutil.which("nvidia-smi")
        self._before = self._device_used()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _watch(self):
        while not self._over.wait(_EVERY):
            self.look()

    def look(self):
        """One sample. A run none of whose processes lives, yet or any more, gives none."""
        if self._record is None:
            self.host = max(self.host or 0, _system_used() - self._host_before)
        elif (run_id := read_json(self._record).get("run_id")) and (held := _host_used(run_id)):
            self.host = max(self.host or 0, held)
        used = self._device_used()
        if used is not None and self._before is not None:
            self.device = max(self.device or 0, used - self._before)

    def _device_used(self):
        """Of the first GPU: a run uses that one."""
        if self._smi is None:
            return None
        command = [self._smi, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return None
        return int(text) << 20 if text.isdigit() else None


def _system_used():
    return machine.meminfo("MemTotal") - machine.meminfo("MemAvailable")


def _host_used(run_id):
    own = sum(_own_bytes(process.pid) for process in processes.running() if process.run_id == run_id)
    return own + sum(_filled(segments.FOLDER / name) for name in segments.names_of(run_id))


def _own_bytes(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return sum(int(number) << 10 for number in re.findall(r"^RssAnon:\s+(\d+) kB", file.read(), re.MULTILINE))
    except OSError:
        return 0


def _filled(path):
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0
