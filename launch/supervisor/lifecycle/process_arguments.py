"""Which loader a run uses, where its sockets are, and the arguments of each of its programs."""

import contextlib
import hashlib
import json
import os
import time

from ..shared import machine
from ..shared.files import read_json, remove_tree
from ..shared.options import executor_arguments, loader_arguments, orders_log_arguments, planner_arguments
from ..shared.paths import fits_a_socket, profile_folder
from ..shared.progress import LoadingRate, reserving_text
from ..shared.trouble import Refusal, say
from . import grammars, loaders, segments, short_folders
from .run_summary import progress_text


def what_answers_hang_on(given):
    """Everything that could change a run's answers, as far as it can be known without reading the weights."""
    facts = {name: getattr(given, name) for name in ("dtype", "kv_cache_dtype", "load_format", "quantization", "pack_weights", "seed", "max_model_len")}
    facts |= {"served_model_name": given.served_model_name or given.model, "skip": given.skip_tokenizer_init}
    return facts | {"files": loaders.model_files(given.model, given.load_format, tokenizer=True)}


def note_finished(directory):
    """Notes what the answers of the run that has just finished hang on, bound to its manifest: a later run in this directory replaces
    the manifest before it replaces anything else. Without the note a loader compares the weights."""
    note = {"manifest": _digest(directory.path / "manifest.json"), "answers_hang_on": directory.record()["answers_hang_on"]}
    with contextlib.suppress(Refusal):
        directory.write("finished.json", json.dumps(note, indent=2) + "\n")


def finished_as_it_stands(directory, given):
    """Whether a finished run had exactly this model, input and options; then no loader has to compare the weights."""
    note = read_json(directory.path / "finished.json")
    if note.get("answers_hang_on") != json.loads(json.dumps(what_answers_hang_on(given))):
        return False
    manifest = directory.path / "manifest.json"
    return note.get("manifest") == _digest(manifest) and read_json(manifest).get("input") == _digest(given.input)


def _digest(path):
    """SHA-256 of a file, in hex; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


class ProcessArguments:
    """The arguments of one run's programs. Call `begin` once the loader is chosen, and `end` in any case."""

    def __init__(self, directory, given, resume=""):
        """`resume`: the command that resumes the run, noted for a later `status`."""
        self.directory = directory
        self.given = given
        self._resume = resume
        self.stall_timeout = given.stall_timeout
        self.restarts = getattr(given, "restarts", 0)
        self.run_id = ""
        self._stood = directory.publication()  # of a finished run
        self._rate = LoadingRate()
        self._attached = None
        self._short_folder = None
        self._home = None
        self._loads = given  # as the loader is told

    # ---- before

    def choose_loader(self):
        """A free kept loader of these files, or a new one to be kept; None if the run starts its own."""
        home = loaders.Home.of(self.given)
        loader = None
        if home.lives():
            self._attached = home.take()
            if self._attached is None:
                say("the kept loader of this model is in use by another run; loading again for this one")
                return None
            loader = self._living_in(home)
        if loader is None and self.given.keep_loader:
            home = loaders.Home.of(self.given, make=True)
            self._attached = home.take()
            if self._attached is None:
                raise Refusal("another run is starting a kept loader of this model: try again")
            loader = home.start(self.given)
        if loader:
            self._home = home.folder
            self.run_id = home.run_id
        return loader

    def _living_in(self, home):
        """The loader that lives in `home`. If its model or build has changed: removes the home and returns None."""
        stale = home.why_stale(self.given)
        loader = home.living() if stale is None else None
        if loader:
            say("using the kept loader of this model")
            return loader
        if stale == loaders.OTHER_BUILD and (loader := home.upgrade(self.given)):
            say(f"{stale}: its successor has its memory, and nothing is read again")
            return loader
        say(f"{stale or 'the kept loader has just ended'}; loading again")
        self._attached.give_back()
        self._attached = None
        home.stop()
        return None

    def record(self):
        """What `status` and a later --resume read."""
        record = {name: getattr(self.given, name) for name in ("model", "input", "output", "device", "policy", "dtype")}
        record["named"] = getattr(self.given, "named", {})  # input and output as the user names them, where the planner has others
        record["words"] = getattr(self.given, "words", None)  # with which `retry` begins
        return record | {"answers_hang_on": what_answers_hang_on(self.given)}

    def begin(self):
        record = self.record() | {"folder": os.getcwd(), "resume": self._resume, "began": time.time()}
        if self.run_id:
            record["run_id"] = self.run_id
        run_id = self.directory.begin(record)
        self.run_id = self.run_id or run_id
        self._home = self._home or self.directory.path / "loader"
        if not (fits_a_socket(self._home / "loader.sock") and fits_a_socket(self.directory.path / "executor.sock")):
            self._short_folder = short_folders.make(self.run_id)
            if self._attached is None:
                self._home = self._short_folder

    def inherited_locks(self):
        return [self.directory.children_lock.descriptor]

    # ---- what the supervision starts

    def _logs(self, name):
        return ["--log", self.directory.path / "logs" / f"{name}.log"]

    @property
    def loader_socket(self):
        return self._home / "loader.sock"

    @property
    def executor_socket(self):
        return (self._short_folder or self.directory.path) / "executor.sock"

    def loader_arguments(self, adopts=False):
        """`adopts`: it takes over what this run's loader left."""
        words = [*loader_arguments(self._loads), "--home", self._home, "--run-id", self.run_id, *self._logs("loader")]
        return words + (["--adopt"] if adopts else [])

    def another_kept_loader(self, adopts):
        return loaders.Home(self._home).start(self._loads, self.run_id, adopts)

    def packs(self):
        """Whether the loader is to pack weights without loss."""
        return self._loads.pack_weights == "auto"

    def load_plain(self):
        """From now on loaders do not pack."""
        self._loads = loaders.plain(self.given)
        self._rate = LoadingRate()

    def planner_links(self):
        """The run's directory, and the sockets of loader and executor."""
        words = ["--run-dir", self.directory.path, "--run-id", self.run_id]
        words += ["--loader-socket", self.loader_socket, "--executor-socket", self.executor_socket]
        return words + self._logs("planner")

    def planner_arguments(self, takes_over=False):
        """`takes_over`: this planner continues for one of this run that has ended."""
        given = self.given
        words = self.planner_links()
        words += ["--model", given.model, "-i", given.input, "-o", given.output, *planner_arguments(given)]
        words += ["--profile-dir", profile_folder()]
        words += ["--resume"] if given.resume or (takes_over and not self._still_stands()) else []
        words += ["--overwrite"] if given.overwrite else []
        words += ["--verify"] if given.verify else []
        words += ["--takes-over"] if takes_over else []
        words += [*orders_log_arguments(given), *self._grammar_arguments()]
        return words + (["--trace"] if given.trace is not None else [])

    def _still_stands(self):
        """Whether a finished run is here that no planner of this attempt has replaced yet."""
        return self._stood is not None and self.directory.publication() == self._stood

    def _grammar_arguments(self):
        python = getattr(self.given, "grammar_python", None)  # grammars.py
        return ["--grammar-python", python, "--grammar-script", grammars.WORKER] if python else []

    def executor_arguments(self, after_death=False):
        """`after_death`: this executor replaces one that died without having been asked to end."""
        words = ["--run-id", self.run_id, "--planner-socket", self.executor_socket]
        words += ["--after-death"] if after_death else []
        return words + executor_arguments(self.given) + self._logs("gpu_executor")

    def for_a_gpu(self):
        return self.given.device != "cpu" and bool(machine.gpus())

    def loader_answers(self):
        return os.path.exists(self.loader_socket)

    def progress_text(self, control):
        status = self.directory.status_of(self.run_id)
        if control.loader_state < segments.SEALED:
            return self._rate.text(control.loaded_bytes, *segments.reserved(self.run_id, "weights"))
        reserved, wanted = segments.reserved(self.run_id, "blocks")
        if reserved < wanted and status.get("state") != "running":  # work begins before all of it is there
            return reserving_text(reserved, wanted)
        return progress_text(status)

    def keep_words(self, child):
        """Saves a process's whole stderr (a sanitizer's report, for example) in the logs."""
        text = child.said()
        if text:
            try:
                with open(self.directory.path / "logs" / f"{child.plain_name}.stderr", "w") as file:
                    file.write(text)
            except OSError:
                pass

    # ---- after

    def end(self):
        self.directory.remove_sockets()
        if self._short_folder:
            remove_tree(self._short_folder)
        if self._attached:
            self._attached.give_back()
