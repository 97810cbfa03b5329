"""`poise bench --stage`: one process's work alone, each figure beside its limit.

  loader        each file of a checkpoint read, and its bytes digested, beside the disk's and the memory's own speed
  planner       an iteration planned, part by part, beside the time that the iteration itself is predicted to take
  gpu_executor  a run's orders replayed, stage by stage, beside the recorded times, the link and the device's computation

Each function takes bench's options and returns its figures and their table.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from ..lifecycle import ask_planner, inputs
from ..lifecycle.children import own_sentence
from ..lifecycle.run_directory import RunDirectory
from ..shared import machine
from ..shared.decoder_shape import decoder_shape
from ..shared.files import read_json
from ..shared.options import executor_arguments
from ..shared.paths import LOADER, ROOT, profile_folder, program
from ..shared.quantities import bytes_text, counted
from ..shared.trouble import DIFFERENT, DONE, INTERNAL, Refusal, say, shown
from .bench_requests import make_requests, write_requests

STAGES = ("loader", "planner", "gpu_executor")
PLANNING_SHARE = 0.01  # of an iteration's time: what planning may take (bench/README.md)
_MOST_ITERATIONS = 256
_SMALL = 64 << 20  # a file that caches of cores hold, and that is read within the time in which threads start
_STREAMS = (
    ("copy_in_s", "copy in", "link_s"),
    ("compute_s", "compute", "compute_s"),
    ("waits_s", "  it waited", None),
    ("copy_out_s", "copy out", None),
    ("host_s", "host cores", None),
)
_PARTS = (
    ("schedule", "schedule: which requests run"),
    ("pack", "pack: mini-batches"),
    ("tables", "tables: blocks, slots, stores"),
    ("orders", "orders of layers"),
    ("serialise", "serialise: messages"),
    ("complete", "complete: results taken in"),
)


def take_run(given):
    """Fills in model and requests of the RUN that was named, where the options do not say them."""
    given.input, given.model_is_named = None, given.model is not None or given.config is not None
    if given.run is None:
        return
    path = Path(given.run)
    directory = RunDirectory(path if path.is_dir() else path.parent)
    if path.is_dir():
        directory.require_a_run()
    record = directory.record()
    folder, loaded = record.get("folder", ""), record.get("answers_hang_on") or {}
    if not given.model_is_named and "model" in record:
        given.model = os.path.join(folder, record["model"])
        for name in ("dtype", "load_format", "quantization", "pack_weights"):
            setattr(given, name, loaded.get(name, getattr(given, name)))
        given.skip_tokenizer_init = given.skip_tokenizer_init or loaded.get("skip", False)
        given.max_model_len = given.max_model_len or loaded.get("max_model_len")
    if "input" in record:
        given.input = os.path.join(folder, record["input"])


# ---- loader


def loader(given, _folder):
    if given.model is None or given.load_format == "dummy":
        raise Refusal("bench: --stage loader reads a checkpoint's files: name them with --model DIR")
    inputs.check_model(given.model)
    command = [str(program(LOADER)), "--measure", "--model", given.model]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:
        sentence = own_sentence(LOADER, ended.stderr) or f"the loader ended with {ended.returncode} and gave no reason"
        raise Refusal(sentence, ended.returncode if ended.returncode > 0 else INTERNAL)
    found = json.loads(ended.stdout)
    return found, loader_table(found)


def loader_table(found):
    rows = [(f"{counted(found['threads'], 'thread')}; GB/s", "measured", "limit", "share", "")]
    copied = found["memory_copied_bytes_per_s"]
    for file in found["files"]:
        cached, disk = file["cached_share"], file["disk_bytes_per_s"]
        # What was in the page cache is copied, the rest comes from the disk: their times add up, for one and the same thread.
        limit = copied if cached == 1 else disk
        if cached and cached < 1 and disk:
            limit = 1 / (cached / copied + (1 - cached) / disk)
        small = file["bytes"] < _SMALL
        state = "page cache: unknown" if cached is None else f"{cached * 100:.0f} % in the page cache"
        part = f", its first {bytes_text(file['measured_bytes'])}" if file["measured_bytes"] < file["bytes"] else ""
        about = f"{bytes_text(file['bytes'])}{part}; {state}{'; too small to judge by' if small else ''}"
        speed, told, share = _beside(file["read_bytes_per_s"], limit)
        rows.append((f"read {shown(file['name'])}", speed, told, "" if small else share, about))
        if disk is None:
            rows.append(("  the disk alone", "", "", "", "its file system has no direct reads, or the file is below 1 MiB"))
        else:
            rows.append(("  the disk alone", _gb(disk), "", "", "direct reads, past the page cache"))
    rows.append(("digest (SHA-256) alone", *_beside(found["digest_bytes_per_s"], found["memory_read_bytes_per_s"]), "limit: memory read"))
    rows.append(("memory copied", _gb(copied), "", "", ""))
    rows.append(("memory read", _gb(found["memory_read_bytes_per_s"]), "", "", ""))
    return _table(rows)


# ---- planner


def planner(given, folder, sizes_of):
    """`sizes_of(given)`: (tokens of the vocabulary, positions) of a model, for requests that are made."""
    if given.model is None:
        raise Refusal("bench: --stage planner needs a model: --model DIR, --config FILE, or a RUN that names one")
    if given.input is None:
        given.input = str(folder / "requests.jsonl")
        write_requests(Path(given.input), make_requests(given, *sizes_of(given)))
    inputs.check_input(given.input)
    if given.device == "auto" and machine.gpus():
        given.device = "cuda"
    words = [*ask_planner.plan_words(given), "--profile-dir", profile_folder(), "--time", _MOST_ITERATIONS]
    found = json.loads(ask_planner.ask(*words))
    return found, planner_table(found)


def planner_table(found):
    lines = [f"policy {found['policy']}, {counted(found['requests'], 'request')}, {counted(found['layers'], 'layer')}; times of one core"]
    for phase in ("prefill", "decode"):
        times = found[phase]
        count = times["iterations"]
        if not count:
            continue
        limit = PLANNING_SHARE * times["predicted_seconds"] / count
        rows = [(f"{phase}, {counted(count, 'iteration')}: ms an iteration", "measured", "limit", "share", "")]
        rows += [(f"  {told}", _ms(times["seconds"][part] / count), "", "", "") for part, told in _PARTS]
        whole = sum(times["seconds"].values()) / count
        rows.append(("  all", _ms(whole), _ms(limit), _percent(whole / limit if limit else None), "limit: 1 % of the iteration's time"))
        about = f"predicted for {found['machine']}; {times['rows'] / count:.0f} rows in {times['mini_batches'] / count:.1f} mini-batches"
        rows.append(("  the iteration itself", _ms(times["predicted_seconds"] / count), "", "", about))
        rows.append(("  messages", bytes_text(times["message_bytes"] // count), "", "", "tables and orders of an iteration"))
        lines.append(_table(rows))
    return "\n".join(lines)


# ---- gpu_executor


def gpu_executor(given, _folder):
    if given.run is None:
        raise Refusal("bench: --stage gpu_executor replays recorded orders: name a run directory, or a log of orders")
    command = [sys.executable, "-s", str(ROOT / "launch" / "start.py"), "replay", given.run, "--json", "--repeat", given.runs]
    command += executor_arguments(given)
    if given.model_is_named:  # else replay finds it, and how it was loaded
        command += ["--model", given.model, *(["--load-format", "dummy"] if given.load_format == "dummy" else [])]
    command += ["--host-memory", given.host_memory] if given.host_memory is not None else []
    ended = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode not in (DONE, DIFFERENT):
        raise Refusal("the orders were not replayed, for the reason above", ended.returncode)
    found = json.loads(ended.stdout)
    config = read_json(Path(given.model) / "config.json") if given.model is not None else {}
    found |= {"link_peak": _link_peak(given, found), "compute_peak": _compute_peak(given)}
    found["limits"] = stage_limits(found, config)
    if not found["equal"]:
        say("answers differ from the recorded ones: `poise replay` says where")
    return found, executor_table(found)


def _link_peak(given, found):
    return given.link_peak * 1e9 if given.link_peak is not None else found["link_bytes_per_s"] or None


def _compute_peak(given):
    return given.compute_peak * 1e12 if given.compute_peak is not None else given.compute_gflops and given.compute_gflops * 1e9


def stage_limits(found, config):
    """The least seconds of each group of stages: (group, for the link's bytes, for multiplications with weights); None: unknown."""
    link, compute = found["link_peak"], found["compute_peak"]
    flops = {}
    try:
        shape = decoder_shape(config)
        flops = {"layers": 2 * found["rows"] * shape.layer_entries() * shape.layers}
        flops["head"] = 2 * found["samples"] * shape.head_entries()
    except (KeyError, TypeError, Refusal):
        pass  # without the model, or with one of another build
    limits = {}
    for group, times in groups(found).items():
        into = max(times["replayed"]["bytes_in"], times["replayed"]["bytes_out"])
        limits[group] = {
            "link_s": into / link if link else None,
            "compute_s": flops[group] / compute if compute and group in flops else None,
        }
    return limits


def groups(found):
    """Times and bytes of embedding, all decoder layers, and head."""
    result = {}
    for stage in found["stages"]:
        group = result.setdefault(stage["name"] if stage["name"] in ("embedding", "head") else "layers", {})
        for side in ("recorded", "replayed"):
            sums = group.setdefault(side, dict.fromkeys(stage[side], 0))
            for name, value in stage[side].items():
                sums[name] += value
    return result


def executor_table(found):
    count = found["iterations"]
    rows = [("ms an iteration", "recorded", "replayed", "limit", "share", "")]
    layers = len(found["stages"]) - 2
    bounds = []
    for group, times in groups(found).items():
        limits = found["limits"][group]
        rows.append((counted(layers, "layer") if group == "layers" else group, "", "", "", "", ""))
        for name, told, limit in _STREAMS:
            if name == "host_s" and not times["replayed"][name]:
                continue
            recorded, replayed, limit = times["recorded"][name], times["replayed"][name], limit and limits[limit]
            about = f"{bytes_text(times['replayed']['bytes_in'] // count)} in" if name == "copy_in_s" else ""
            rows.append((f"  {told}", _ms(recorded / count), _ms(replayed / count), *_limit(limit, replayed, count), about))
        bounds.append(max(limits["link_s"] or 0, limits["compute_s"] or 0))
    fastest = min(found["replayed_s"])
    bound = sum(bounds) or None
    about = f"fastest of {len(found['replayed_s'])}"
    rows.append(("all, with gaps", _ms(found["recorded_s"] / count), _ms(fastest / count), *_limit(bound, fastest, count), about))
    told = [
        f"{counted(count, 'iteration')} of {shown(found['orders'])} on {found['device']}",
        f"link {_gb(found['link_peak'])} GB/s" if found["link_peak"] else "link unknown: --link-peak gives it",
        f"computation {found['compute_peak'] * 1e-12:.3g} TFLOP/s" if found["compute_peak"] else "computation unknown: --compute-peak gives it",
    ]
    return "; ".join(told) + "\n" + _table(rows)


def _limit(limit, seconds, count):
    return (_ms(limit / count), _percent(limit / seconds if seconds else None)) if limit else ("", "")


# ---- tables


def _table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])), row[-1]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _beside(speed, limit):
    return _gb(speed), _gb(limit) if limit else "unknown", _percent(speed / limit if limit else None)


def _gb(speed):
    return f"{speed * 1e-9:.2f}"


def _ms(seconds):
    return f"{seconds * 1e3:.3f}"


def _percent(share):
    return "" if share is None else f"{share * 100:.1f} %"
