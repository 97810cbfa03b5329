"""A run directory: which run it belongs to, whether that run lives, how far it came.

The supervisor writes run.lock (held while it lives), children.lock (inherited by every process of the run, so held until
the last of them has ended), run.json (what was started), finished.json (of what the results are, once
they are whole), times.json (where the time of an attempt went), chat.jsonl (the prompts of chat lines, until the run is finished), input.jsonl and output.jsonl (of a run whose files are not plain
ones: sources.py, delivery.py), logs/ and loader/ (home of the run's own loader). The planner writes manifest.json, results.jsonl.partial, results.jsonl.published, orders.log (in segments, if it has a limit) and status.json.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from pathlib import Path

from ..shared.files import is_socket, parsed_json, read_json, remove, remove_tree, replace_file, segments_of
from ..shared.paths import command_line
from ..shared.trouble import LOCKED, OUTPUT, Refusal, of_system, shown
from . import chat_prompts, processes
from .locks import Lock, is_held

FRESH, UNFINISHED, FINISHED = "fresh", "unfinished", "finished"
_ORPHANS_END = 15  # seconds

# Of a run whose files are not plain ones.
INPUT_NAMES = ("input.jsonl", "input.jsonl.new")
OUTPUT_NAMES = ("output.jsonl",)
# Those of a finished run lie under other names while another attempt begins, and its facts in a file (standing_run.py).
KEPT_ASIDE, KEPT = (INPUT_NAMES[0], OUTPUT_NAMES[0]), ".kept"
STANDING = "standing.json"
STATUS = "status.json"
FACTS = ("run.json", STATUS, "times.json")
_LOCKS = {"run.lock", "children.lock"}
_FOLDERS = ("logs", "loader")
_OURS = _LOCKS | {"run.json", "run.json.new", "finished.json", "finished.json.new", "times.json", "times.json.new", *_FOLDERS, *chat_prompts.NAMES, *INPUT_NAMES, *OUTPUT_NAMES, *(name + KEPT for name in KEPT_ASIDE), STANDING, f"{STANDING}.new", "retry.jsonl", "retried.jsonl", "retry.poise"}
_PLANNERS = {"manifest.json", "results.jsonl.partial", "results.jsonl.published", "orders.log", STATUS}
# Requests to a living run, and their answers: live_changes.py, restarts.py.
_REQUESTS = ("policy.json", "policy.lock", "policy.in_force.json", "restart.*.json", "restarted.json")


def find_orders(what):
    """The order log of a run directory, or the log itself, and the directory (or None). A log has the name of its first segment, which
    may be gone by now."""
    path, directory = Path(what), None
    if path.is_dir():
        directory = RunDirectory(path)
        directory.require_a_run()
        path = path / "orders.log"
        if not segments_of(path):
            raise Refusal(f"{shown(path.parent)}: no orders.log: this run has sent no order yet")
    elif not path.is_file() and (path.exists() or not segments_of(path)):
        raise Refusal(f"{shown(path)}: {'not a file of orders' if path.exists() else 'no such file or directory'}")
    return path, directory


class RunDirectory:
    def __init__(self, path):
        self.path = path
        self.lock = None
        self.children_lock = None
        self.made_here = False

    # ---- looking, without entering

    def exists(self):
        return os.path.isdir(self.path)

    def holds_a_run(self):
        """Whether a supervisor wrote here which run it is. Files that only have names like ours do not make a directory ours."""
        return "run_id" in self.record() or "takes_requests" in self.owner()

    def keeps(self, name):
        return name in _OURS | _PLANNERS | {"profile.json", "journal"} or name.startswith("orders.log.")

    def require_a_run(self):
        if not self.exists():
            raise Refusal(f"{shown(self.path)}: no such directory, so no run")
        if not self.holds_a_run():
            raise Refusal(f"{shown(self.path)} holds no run: name the directory that `run` printed (OUTPUT.poise)")

    def state(self):
        """As planner/results/results_directory.h defines it."""
        if os.path.lexists(self.path / "results.jsonl.partial"):
            return UNFINISHED
        return FINISHED if self.published() else FRESH

    def published(self):
        """The path of the output that this run has written or was about to write; None before that."""
        try:
            text = (self.path / "results.jsonl.published").read_bytes()
        except OSError:
            return None
        path = os.fsdecode(text.partition(b"\n")[2])
        kept = f"{path}{KEPT}"
        aside = os.path.basename(path) in KEPT_ASIDE and not os.path.lexists(path) and os.path.lexists(kept)
        return (kept if aside and self._noted_outside() else path) or None

    def publication(self):
        """Changes with each run that is finished here; None before the first is, and while another one works."""
        try:
            status = os.lstat(self.path / "results.jsonl.published")
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def output(self):
        """The same as the user names it: a path, or - for standard output."""
        record, published = self.record(), self.published()
        named = record.get("named", {}).get("output")
        if not published or not named:
            return published
        return named if named == "-" else os.path.join(record.get("folder", ""), named)

    def lives(self):
        return is_held(self.path / "run.lock")

    def owner(self):
        """What the lock's holder wrote: pid, started, since, run_id."""
        return read_json(self.path / "run.lock")

    def status(self):
        return self.fact(STATUS)

    def status_of(self, run_id):
        """The status, if this run or attempt wrote it; {} if it is of an earlier one."""
        status = self.status()
        return status if status.get("run_id") == run_id else {}

    def record(self):
        return self.fact("run.json")

    def fact(self, name):
        """The JSON object in one of the files that say what the run here is like; {} as for read_json."""
        noted = self._noted_outside()
        return read_json(self.path / name) if noted is None else noted.get(name) or {}

    def noted(self):
        """What STANDING says, as long as the finished run of which it was noted stands here unchanged: the text of each fact, or None for
        one that was not there."""
        try:
            noted = json.loads((self.path / STANDING).read_bytes())
            same = self.state() == FINISHED and tuple(noted["publication"]) == self.publication()
            facts = {name: noted["facts"][name] for name in FACTS}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return facts if same and all(text is None or isinstance(text, str) for text in facts.values()) else None

    def _noted_outside(self):
        """The facts of a finished run over which an attempt began that was killed: its own lie in the files until the next one puts the
        run's back (standing_run.py)."""
        if not os.path.lexists(self.path / STANDING) or self.lock is not None or self.lives():
            return None
        noted = self.noted()
        return None if noted is None else {name: parsed_json(text) for name, text in noted.items()}

    # ---- entering

    def enter(self):
        """Makes the directory and takes its lock; refuses while another run lives in it."""
        self._make()
        try:
            self._take_lock()
        except BaseException:
            self._remove_what_holds_nothing()
            raise
        self._end_orphans()

    def _take_lock(self):
        self.lock = Lock.take(self.path / "run.lock")
        if self.lock is None:
            owner = self.owner()
            since = f" since {owner['since']}" if "since" in owner else ""
            raise Refusal(
                f"{shown(self.path)} is in use by another run (process {owner.get('pid', 'unknown')}{since}): wait for "
                f"it, end it ({command_line('stop', self.path)}), or name another directory with --run-dir",
                LOCKED,
            )
        owner = {"pid": os.getpid(), "started": processes.start_time(os.getpid()), "takes_requests": True}
        self.lock.write(json.dumps({**owner, "since": time.strftime("%Y-%m-%d %H:%M:%S")}))

    def _make(self):
        try:
            os.mkdir(self.path, 0o700)
            self.made_here = True
            return
        except FileExistsError:
            pass
        except FileNotFoundError:
            raise Refusal(f"{shown(self.path.parent)}: the run directory's parent is not there; make it first") from None
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EPERM):
                raise Refusal(
                    f"the run directory {shown(self.path)} cannot be made: {problem.strerror}; name one with --run-dir",
                    OUTPUT,
                ) from None
            raise of_system(problem) from None
        status = os.lstat(self.path)
        if not stat.S_ISDIR(status.st_mode):
            raise Refusal(f"{shown(self.path)} is not a directory: name another one with --run-dir")
        if status.st_uid != os.geteuid():
            raise Refusal(f"{shown(self.path)} belongs to user {status.st_uid}, not to you: name another with --run-dir")
        if not self.holds_a_run() and not set(os.listdir(self.path)) <= {*_LOCKS, *chat_prompts.NAMES, *INPUT_NAMES}:
            # (A supervisor may be killed before it writes run.json.)
            raise Refusal(
                f"{shown(self.path)} holds other files and no run: name an empty or new directory with --run-dir"
            )
        os.chmod(self.path, 0o700)

    def _end_orphans(self):
        """Ends processes of an earlier run whose supervisor was killed, before a new run writes here."""
        deadline = time.monotonic() + _ORPHANS_END
        while (lock := Lock.take(self.path / "children.lock")) is None:
            run_id = self.record().get("run_id")
            orphans = [p for p in processes.running() if p.run_id == run_id and p.orphaned]
            processes.end(orphans, patience=0)
            if time.monotonic() > deadline:
                raise Refusal(
                    f"processes of an earlier run in {shown(self.path)} do not end: see `ps`, or name another "
                    "directory with --run-dir",
                    LOCKED,
                )
            time.sleep(0.05)
        self.children_lock = lock

    def begin(self, record):
        """Writes run.json under a new run id and returns the id."""
        run_id = secrets.token_hex(8)
        for name in _FOLDERS:
            self.make_folder(name)
        self.remove_sockets()
        for pattern in _REQUESTS:  # requests to the previous attempt
            for path in self.path.glob(pattern):
                remove(path)
        self.note({"version": 1, "run_id": run_id, **record})
        return run_id

    def note(self, record):
        self.write("run.json", json.dumps(record, indent=2) + "\n")

    def make_folder(self, name):
        try:
            os.mkdir(self.path / name, 0o700)
        except FileExistsError:
            pass
        return self.path / name

    def write(self, name, text, durable=False):
        try:
            replace_file(self.path / name, text, durable=durable)
        except OSError as problem:
            raise Refusal(f"{shown(self.path / name)} cannot be written: {problem.strerror}", OUTPUT) from None

    # ---- leaving

    def remove_sockets(self):
        for folder in (self.path, self.path / "loader"):
            try:
                entries = [entry.path for entry in os.scandir(folder)]
            except OSError:
                continue
            for path in entries:
                if is_socket(path):
                    remove(path)

    def forget_what_did_not_start(self, run_id):
        """Removes results that were only opened, so that the corrected command does not need --resume."""
        status = self.status_of(run_id)
        before_work = status.get("state") in ("interrupted", "starting", "loading", "preparing", "measuring")
        if before_work and status.get("iteration") == 0:  # (a planner whose weights were lost is loading again)
            for name in ("results.jsonl.partial", "manifest.json", STATUS):
                remove(self.path / name)

    def leave(self, forget=False):
        """Releases the lock. `forget`: nothing started, so a directory made for the run is removed."""
        if self.children_lock:
            self.children_lock.give_back()
        if forget and self.lock and self.made_here and self.state() == FRESH:
            remove_tree(self.path)
        self._remove_what_holds_nothing()
        if self.lock:
            self.lock.give_back()

    def _remove_what_holds_nothing(self):
        """A directory that was made for the run, if no more came of it than locks and empty folders: a full disk, say."""
        if not self.made_here or (self.lock is None and os.path.lexists(self.path / "run.lock")):
            return  # (where we have no lock, another command may have taken it)
        with contextlib.suppress(OSError):
            names = set(os.listdir(self.path))
            if names <= {*_LOCKS, *_FOLDERS}:
                for name in names - _LOCKS:
                    os.rmdir(self.path / name)
                for name in names & _LOCKS:
                    remove(self.path / name)
                os.rmdir(self.path)
