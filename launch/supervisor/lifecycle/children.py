"""One process of a run: started, watched through a pidfd, ended, and asked why it ended."""

import os
import re
import signal
import subprocess

from ..shared.paths import EXECUTOR, PLAIN_NAMES, program
from ..shared.trouble import DEVICE_FAILED, DONE, HANDED_OVER, INTERRUPTED, RUN_ENDS, UNPACKABLE
from . import cublas, processes, segments

_MOST_STDERR = 1 << 20
# Which process the kernel kills first when memory runs out: one that can be started again, rather than the supervisor.
_OOM_SCORES = {"poise-gpu-executor": 500, "poise-planner": 300, "poise-loader": 200}


class Child:
    """A child process. Its output goes to a memory file, so that its last sentence survives a full disk. `end_seen`: its supervisor knows
    that it has ended, and need not be woken by it."""

    def __init__(self, name, arguments, death_descriptor=None, inherited=()):
        self.name = name
        self.plain_name = PLAIN_NAMES[name]
        words = [str(program(name)), *(str(word) for word in arguments)]
        inherited = list(inherited)
        if death_descriptor is not None:
            words += ["--death-fd", str(death_descriptor)]
            inherited.append(death_descriptor)
        self._said = os.memfd_create(name, os.MFD_CLOEXEC)
        self._told = os.memfd_create(name, os.MFD_CLOEXEC)
        self._taken = 0
        # A session of its own: Ctrl-C at the terminal is for the supervisor alone.
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._told,
            stderr=self._said,
            pass_fds=inherited,
            start_new_session=True,
            env={**os.environ, **(cublas.environment() if name == EXECUTOR else {})},
        )
        self.pid = self._process.pid
        self.descriptor = os.pidfd_open(self.pid)
        self.asked_to_end = self.end_seen = False
        self._prefer_for_oom()

    def _prefer_for_oom(self):
        try:
            with open(f"/proc/{self.pid}/oom_score_adj", "w") as file:
                file.write(str(_OOM_SCORES[self.name]))
        except OSError:
            pass

    def returncode(self):
        """None while it lives; negative where a signal ended it."""
        return self._process.poll()

    def signal(self, number):
        self.asked_to_end = True
        processes.send(self.descriptor, number)

    def may_stay(self, control):
        """Whether this process, started as a kept loader, outlives the run: it has loaded all weights once. It may be reading
        released weights again just now."""
        return self.returncode() is None and (control.loader_state == segments.SEALED or control.was_sealed)

    def said(self):
        """What it wrote to stderr."""
        return os.pread(self._said, _MOST_STDERR, 0).decode("utf-8", "backslashreplace")

    def new_lines(self):
        """The whole lines it wrote to stdout since the last call."""
        text = os.pread(self._told, _MOST_STDERR, self._taken)
        text = text[: text.rfind(b"\n") + 1]
        self._taken += len(text)
        return text.decode("utf-8", "backslashreplace").splitlines()

    def close(self):
        for descriptor in (self.descriptor, self._said, self._told):
            os.close(descriptor)


class LivingLoader:
    """A kept loader that an earlier command started: not our child, so its exit code is unknown."""

    name, plain_name, asked_to_end, end_seen = "poise-loader", "loader", False, False

    def __init__(self, pid, descriptor):
        self.pid = pid
        self.descriptor = descriptor

    def may_stay(self, control):
        """A loader that found its weights damaged is about to end."""
        return self.returncode() is None and control.loader_state != segments.DRAINING

    def signal(self, number):
        processes.send(self.descriptor, number)

    def returncode(self):
        return None if processes.wait_gone([self.descriptor], 0) else -signal.SIGKILL

    def said(self):
        return ""

    def new_lines(self):
        return []

    def close(self):
        os.close(self.descriptor)


def reason(child, text=None):
    """(exit code, sentence) for a child that ended by itself; `text` is its stderr."""
    code = child.returncode()
    text = child.said() if text is None else text
    if code < 0:
        return INTERRUPTED, _of_signal(child, -code)
    if code == HANDED_OVER:  # but the run ended before the next planner started
        return INTERRUPTED, f"{child.plain_name} was interrupted"
    sentence = own_sentence(child.name, text)
    if code in (DEVICE_FAILED, UNPACKABLE):
        why = "its device failed" if code == DEVICE_FAILED else "its weights cannot be packed"
        return INTERRUPTED, sentence or f"{child.plain_name}: {why}"
    if code not in RUN_ENDS:
        return INTERRUPTED, f"{child.plain_name} failed{f': {sentence}' if sentence else ''} (a defect of poise)"
    if not sentence:
        how = {DONE: "ended too early", INTERRUPTED: "was interrupted"}.get(code, "ended without a message")
        sentence = f"{child.plain_name} {how}"
        return code or INTERRUPTED, sentence
    return code, sentence


def _of_signal(child, number):
    if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        return f"{child.plain_name} was killed"
    return f"{child.plain_name} crashed (a defect of poise)"


def own_sentence(name, text):
    """The last line that begins with `name: `, without that prefix."""
    sentences = re.findall(rf"^{re.escape(name)}: (.*)$", text, re.MULTILINE)
    return sentences[-1] if sentences else ""
