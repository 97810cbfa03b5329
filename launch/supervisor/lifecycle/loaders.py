"""Kept loaders: loaders that outlive runs, so that the next run of the same model finds its weights in memory.

Each has a home in this user's private folder, named by what it was started with. The loader inherits the home's `lock`,
which is therefore held as long as the loader lives, whichever other processes end. The run that uses the loader holds
`attached.lock`.
"""

import contextlib
import hashlib
import json
import os
import secrets
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from ..shared.files import read_json, remove_tree
from ..shared.options import loader_arguments
from ..shared.paths import (
    LOADER, command_line, fits_a_socket, is_private, make_private, private_folder, private_folder_is_ours, private_folder_path, program,
)  # fmt: skip
from ..shared.quantities import bytes_text
from ..shared.trouble import Refusal, shown
from . import processes, segments
from .children import Child, LivingLoader, own_sentence
from .locks import Lock, is_held

OTHER_BUILD = "the kept loader is of another build"
_END = 15  # seconds
_LEAVE = 5  # seconds for a loader to leave its segments to a successor, and for that one to adopt them


def model_files(model, load_format, tokenizer=False):
    """Names, sizes, times of change and inodes: if these are equal, the model's files are the same."""
    files = []
    for entry in sorted(os.listdir(model)):
        weights = entry.endswith((".safetensors", ".safetensors.index.json"))
        texts = tokenizer and entry.endswith((".json", ".txt", ".model", ".jinja")) and not weights
        if entry == "config.json" or texts or (weights and load_format != "dummy"):
            try:
                status = os.stat(os.path.join(model, entry))
            except OSError:
                continue
            files.append([entry, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    return files


def _configs():
    return private_folder_path() / "configs"


def folder_of_config(path):
    """A folder for a copy of this config.json, the same for the same contents; it goes with the last loader of such a model."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return make_private(make_private(private_folder() / "configs") / digest)


def _identity(given):
    identity = {"model": os.path.realpath(given.model), "dtype": given.dtype, "load_format": given.load_format}
    identity["quantization"] = given.quantization
    if given.pack_weights != "off":
        identity["pack_weights"] = given.pack_weights
    if given.load_format == "dummy":
        identity["seed"] = given.seed
    return identity


def plain(given):
    """The options of a loader that follows one whose weights could not be packed."""
    return SimpleNamespace(**vars(given) | {"pack_weights": "off"})


def starts_over(loader):
    """What the user is told of a loader whose weights cannot be packed."""
    return f"{own_sentence(loader.name, loader.said())}; the model is loaded without packing (--pack-weights off saves the attempt)"


def _program_facts():
    """Tells one build of the loader from another: all programs of a run must come from the same build."""
    status = os.stat(program(LOADER))
    return [status.st_size, status.st_mtime_ns]


class Home:
    def __init__(self, folder):
        self.folder = folder
        self.socket = folder / "loader.sock"

    @classmethod
    def of(cls, given, make=False):
        digest = hashlib.sha256(json.dumps(_identity(given), sort_keys=True).encode()).hexdigest()[:16]
        if make:
            return cls(make_private(make_private(private_folder() / "loaders") / digest))
        return cls(private_folder_path() / "loaders" / digest)

    @classmethod
    def all(cls):
        folder = private_folder_path() / "loaders"
        try:
            homes = [cls(folder / name) for name in sorted(os.listdir(folder))]
        except OSError:
            return []
        return [home for home in homes if home._is_ours()]

    @classmethod
    def elsewhere(cls):
        """Of living loaders that were kept while the private folder was another one: XDG_RUNTIME_DIR has changed since."""
        here = {home.folder for home in cls.all()}
        kept = (p for p in processes.running() if p.program == LOADER and p.option("--death-fd") is None)
        folders = {Path(process.option("--home")) for process in kept if process.option("--home")}
        return [cls(folder) for folder in sorted(folders - here)]

    def _is_ours(self):
        """Looked at each time: where there is no XDG_RUNTIME_DIR, anybody may make a folder of the name that ours would have."""
        here = self.folder.is_relative_to(private_folder_path())
        above = private_folder_is_ours() and is_private(self.folder.parent) if here else True
        return above and is_private(self.folder)

    @property
    def record(self):
        return read_json(self.folder / "kept.json") if self._is_ours() else {}

    @property
    def run_id(self):
        return self.record.get("run_id", "")

    def lives(self):
        return self._is_ours() and is_held(self.folder / "lock")

    def in_use(self):
        return is_held(self.folder / "attached.lock")

    def take(self):
        """The right to use this loader, or None while a run has it."""
        return Lock.take(self.folder / "attached.lock")

    def start(self, given, run_id=None, adopts=False):
        """Starts a loader to be kept: it has no death pipe, and holds its home's lock itself. `adopts`: it takes over what an ended
        loader of that run id left. `given` may be `plain` in a home that is not."""
        if not fits_a_socket(self.socket):
            raise Refusal(f"{shown(self.folder)} is too long a path for sockets: set XDG_RUNTIME_DIR to a shorter one")
        lock = Lock.take(self.folder / "lock")
        if lock is None:
            raise Refusal(f"a loader of {shown(given.model)} is being started or ended just now: try again")
        os.set_inheritable(lock.descriptor, True)
        run_id = run_id or secrets.token_hex(8)
        words = loader_arguments(given) + ["--home", self.folder, "--run-id", run_id, *(["--adopt"] if adopts else [])]
        words += ["--log", self.folder / "loader.log"]
        # What is adopted was read from the files as they were then; they may have changed since, or be gone.
        files = self.record.get("files") if adopts else model_files(given.model, given.load_format)
        record = {**_identity(given), "files": files, "run_id": run_id}
        record["program"] = _program_facts()
        child = Child(LOADER, words, inherited=[lock.descriptor])
        lock.give_back()  # the loader's own copy stays
        record |= {"pid": child.pid, "started": processes.start_time(child.pid)}
        try:
            (self.folder / "kept.json").write_text(json.dumps(record))
        except OSError:  # a full disk: without the record no later command could find it
            self._end(child)
            self._remove(run_id)
            raise
        return child

    def living(self):
        """The loader that lives here, or None."""
        record = self.record
        if not self.lives() or "pid" not in record:
            return None
        descriptor = processes.open_verified(
            record["pid"], record.get("started"), lambda pid: processes.is_kept_loader(pid, self.folder)
        )
        return LivingLoader(record["pid"], descriptor) if descriptor is not None else None

    def _unrecorded(self):
        """(loader, run id) of this home's living loader if its record is missing, because it could not be written."""
        found = (p for p in processes.running() if p.program == LOADER and p.option("--home") == str(self.folder))
        for process in found:
            descriptor = processes.open_verified(process.pid, processes.start_time(process.pid))
            if descriptor is not None:
                return LivingLoader(process.pid, descriptor), process.run_id
        return None, ""

    def why_stale(self, given):
        """Why a new loader would differ from this one; None if it would not."""
        if self.record.get("files") != model_files(given.model, given.load_format):
            return "the model's files changed since the kept loader read them"
        return OTHER_BUILD if self.record.get("program") != _program_facts() else None

    def upgrade(self, given):
        """A loader of our build, which has adopted what the living one held; None if one of the two cannot do that."""
        old, run_id = self.living(), self.run_id
        if old is None:
            return None
        with segments.held(run_id):  # nobody else does, once the old one has left
            old.signal(signal.SIGUSR1)
            remains = processes.wait_gone([old.descriptor], _LEAVE)
            old.close()
            if remains:
                return None
            control = segments.ControlView(run_id)
            epoch, until = control.loader_epoch, time.monotonic() + _LEAVE
            new = self.start(given, run_id, adopts=True)
            while control.loader_epoch == epoch and new.returncode() is None and time.monotonic() < until:
                time.sleep(0.01)
            done = control.loader_epoch > epoch
            control.close()
        if not done:
            new.close()
        return new if done else None

    def stop(self):
        """Ends the loader, if it lives, and removes all it left. True if there was one."""
        loader, run_id = self.living(), self.run_id
        if loader is None and self.lives():
            loader, run_id = self._unrecorded()
        if loader:
            self._end(loader)
        self._remove(run_id)
        return loader is not None

    @staticmethod
    def _end(loader):
        loader.signal(signal.SIGTERM)
        if processes.wait_gone([loader.descriptor], _END):
            loader.signal(signal.SIGKILL)
            processes.wait_gone([loader.descriptor], _END)
        loader.close()

    def _remove(self, run_id):
        """Removes what an ended loader left; holds its lock meanwhile, so that none is started there."""
        deadline = time.monotonic() + 1
        while self._is_ours() and time.monotonic() < deadline:
            try:
                lock = Lock.take(self.folder / "lock")
            except FileNotFoundError:
                return
            if lock:
                if run_id:
                    segments.unlink_all(run_id)
                model = self.record.get("model", "")
                remove_tree(self.folder)
                if Path(model).parent == _configs() and all(home.record.get("model") != model for home in Home.all()):
                    remove_tree(model)
                lock.give_back()
                return
            time.sleep(0.02)

    def held_bytes(self):
        """Host memory held: the weights loaded so far, and the last run's pool, which the next run takes over."""
        kinds = ("weights", "blocks") if self.run_id else ()
        return sum(segments.reserved(self.run_id, kind)[0] for kind in kinds)

    def weights_bytes(self):
        return segments.weights_bytes(self.run_id) if self.run_id else 0

    def describe(self):
        record = self.record
        return {
            "model": record.get("model", ""),
            "dtype": record.get("dtype", ""),
            "load_format": record.get("load_format", ""),
            "pid": record.get("pid"),
            "run_id": self.run_id,
            "weights_bytes": self.weights_bytes(),
            "pool_bytes": segments.reserved(self.run_id, "blocks")[0] if self.run_id else 0,
            "in_use": self.in_use(),
        }


def sweep():
    """Removes homes whose loader is gone."""
    for home in Home.all():
        if home.lives():
            continue
        with contextlib.suppress(FileNotFoundError):
            if attached := home.take():
                home.stop()
                attached.give_back()


def held_by_others(run_id):
    """What kept loaders hold in memory, without that of `run_id`, as a clause; "" if there are none."""
    homes = [home for home in [*Home.all(), *Home.elsewhere()] if home.lives() and home.run_id != run_id]
    held = [f"{shown(home.record.get('model', home.folder))}: {bytes_text(home.held_bytes())}" for home in homes]
    return f"kept loaders hold memory ({', '.join(held)}); they end with: {command_line('stop', '--all')}" if held else ""

