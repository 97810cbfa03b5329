"""`poise profile`: the planner has the executor measure what everything costs; we print the fitted lines, keep and draw them.

A profile holds for one device and one model (its fingerprint). Kept ones lie in $XDG_CACHE_HOME/poise/profiles, where runs
and `poise plan` find them.
"""

import errno
import os
import shutil
from pathlib import Path

from ..lifecycle import ask_planner, inputs, leftovers, loaders, scratch, segments
from ..lifecycle.interrupts import Interrupts
from ..lifecycle.process_arguments import ProcessArguments
from ..lifecycle.run_directory import RunDirectory
from ..lifecycle.run_summary import progress_text
from ..lifecycle.supervision import Supervision
from ..measure.svg import Figure, page
from ..shared import machine
from ..shared.files import read_json, replace_file
from ..shared.options import add_device, add_kv_cache, add_loading, add_model, normalised, parser
from ..shared.paths import PROGRAMS, profile_folder, program
from ..shared.progress import ProgressLine
from ..shared.trouble import DONE, OUTPUT, Refusal, brief, naming, of_system, say, shown, tell

_LEVEL = 1e-3  # a line that rises by a smaller share of its height counts as level
_MICRO = 1e6
_TITLES = {
    "load_w": "T_load_w",
    "load_kv": "T_load_kv",
    "load_act": "T_load_act",
    "load_here": "ACT blocks of the device",
    "kv_gen": "T_kv_gen",
    "attention": "attention, decoding",
    "prefill": "attention, prompts",
    "forward": "forward",
    "qkv": "forward, before attention",
    "embed": "embedding",
    "head": "head",
    "store_kv": "stores, KV",
    "store_act": "stores, ACT",
    "tables": "tables of an iteration",
    "results": "results of an iteration",
    "host_attention": "T_host, attention on host cores",
    "host_down": "rows to host cores",
    "host_up": "rows from host cores",
    "load_beside_host": "KV blocks while host cores attend",
    "load_act_beside_host": "ACT blocks while host cores attend",
    "absorb_rows": "T_absorb, rows of one ACT block",
    "absorb": "T_absorb, each block beyond",
}


def profile(words):
    made = parser(
        "profile",
        "Measures what loading, computing and storing cost on this machine with this model, and keeps lines through the\n"
        "times; policies decide and `poise plan` predicts by them. Takes seconds once the model is loaded.\n"
        "--export measures nothing: it writes the machine of the profile that is kept of this model, as a file for --machine.",
    )
    add_model(made)
    made.add_argument("-o", "--output-file", dest="output", metavar="FILE", help="keep it there, too")
    made.add_argument("--export", metavar="FILE", help="write the machine of the kept profile there")
    made.add_argument("--profile", metavar="FILE", help="with --export: the machine of this profile")
    add_device(made)
    add_kv_cache(made)
    add_loading(made)
    given = made.parse_args(normalised(words))
    given.keep_loader, given.stall_timeout = False, 30.0
    inputs.check_limits(given.model)
    inputs.check_model(given.model)
    if given.export is not None:
        return _export(given)
    if given.profile is not None:
        made.error("--profile goes with --export")
    if given.output is not None:
        inputs.check_written("-o", given.output)
    kept = _make_folder(given.output)
    for name in PROGRAMS:
        program(name)
    with scratch.folder("profile") as folder:
        code = _measure(folder, given)
        if code == DONE:
            _keep(folder / "profile.json", given.output, kept)
    return code


def _export(given):
    inputs.check_written("--export", given.export)
    if given.device == "auto" and machine.gpus():
        given.device = "cuda"
    words = ["--model", given.model, "--dtype", given.dtype, "--device", given.device, "--profile-dir", profile_folder()]
    words += ["--quantization", given.quantization, "--pack-weights", given.pack_weights, "--kv-cache-dtype", given.kv_cache_dtype]
    words += ["--profile", given.profile] if given.profile is not None else []
    ask_planner.ask("export", *words, "-o", given.export)
    say(f"{brief(given.export)} is written; --machine {brief(given.export)} takes it")
    return DONE


class _ProfileArguments(ProcessArguments):
    """A run that ends where its first iteration would begin: the planner profiles instead."""

    def record(self):
        return {name: getattr(self.given, name) for name in ("model", "device", "dtype")} | {"measures": True}

    def progress_text(self, control):
        loaded = control.loader_state >= segments.SEALED
        return progress_text(self.directory.status_of(self.run_id)) if loaded else super().progress_text(control)

    def planner_arguments(self, **_):
        words = ["profile", *self.planner_links(), "-o", self.directory.path.parent / "profile.json"]
        for name in ("gpu_memory", "host_memory", "kv_cache_dtype"):
            if getattr(self.given, name) is not None:
                words += ["--" + name.replace("_", "-"), getattr(self.given, name)]
        return words


def _measure(folder, given):
    leftovers.sweep()
    inputs.clip_memory(given, loaders.Home.of(given).held_bytes)
    directory = RunDirectory(folder / "run")
    interrupts, line = Interrupts(), ProgressLine()
    directory.enter()
    arguments = _ProfileArguments(directory, given)
    try:
        kept = arguments.choose_loader()
        arguments.begin()
        outcome = Supervision(arguments, interrupts, line, kept).run()
    finally:
        line.clear()
        arguments.end()
        directory.leave()
    if outcome.code != DONE:
        say(outcome.sentence)
    return outcome.code


def _make_folder(output):
    """Makes the profile folder before minutes of loading and measuring. If that fails, refuses, or with -o returns false."""
    try:
        os.makedirs(profile_folder(), mode=0o700, exist_ok=True)
        if not os.access(profile_folder(), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(profile_folder()))
    except OSError as problem:
        refusal = of_system(problem)
        if output is None:
            raise Refusal(
                f"the profile cannot be kept: {refusal.sentence}: name a file (-o), or another folder (XDG_CACHE_HOME)", OUTPUT
            ) from None
        say(f"{refusal.sentence}: the profile is not kept, only written to {shown(output)}")
        return False
    return True


def _keep(path, output, folder):
    measured = read_json(path)
    tell(table(measured))
    if output:
        with naming(output):
            shutil.copyfile(path, output)
        say(f"{brief(output)} is written")
    if folder:
        kept = kept_path(measured["fingerprint"])
        with naming(kept):
            replace_file(kept, Path(path).read_text(encoding="utf-8"), f".{os.getpid()}.new")
            kept.with_suffix(".svg").write_text(picture(measured), encoding="utf-8")
        say(f"kept as {brief(kept)}, drawn in {brief(kept.with_suffix('.svg'))}")


def kept_path(fingerprint):
    """The same name as in planner/profile/profile_run.h."""
    return profile_folder() / f"{fingerprint[:16]}.json"


def lines_of(measured):
    return [(name, measured[name]) for name in _TITLES if isinstance(measured.get(name), dict) and "points" in measured[name]]


def _fits(line):
    """R²; "level" for a line that does not rise, where R² means nothing."""
    rise = line["b"] * max(n for n, *_ in line["points"])
    return f"{line['r2']:.4f}" if rise > _LEVEL * line["a"] else "level"


def table(measured):
    """T(n) = a + b n for each line, how well it fits, and the point that is furthest off."""
    rows = [("line", "a, µs", "b, µs", "R²", "worst", "points", "alone: a", "b, µs", "n counts")]
    for name, line in lines_of(measured):
        worst = max((abs(beside) / seconds for _, seconds, beside in line["points"] if seconds > 0), default=0.0)
        alone = line["alone"] if len(line["alone"]["points"]) > 1 else None
        again = f" ({line['remeasured']} measured again)" if line.get("remeasured") else ""
        rows.append((
            name, f"{line['a'] * _MICRO:.2f}", f"{line['b'] * _MICRO:.4g}", _fits(line), f"{worst:.1%}",
            str(len(line["points"])), f"{alone['a'] * _MICRO:.2f}" if alone else "-",
            f"{alone['b'] * _MICRO:.4g}" if alone else "-", line["unit"] + again,
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [measured["name"]]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])), row[-1]]
        text.append("  ".join(cells))
    text.append(
        f"between iterations {measured['between'] * _MICRO:.0f} µs; work that waits for another stream begins "
        f"{measured.get('event_latency', 0) * _MICRO:.1f} µs later"
    )
    return "\n".join(text)


def picture(measured):
    """A figure for each line: its points, the line, and the points measured while the other streams were idle."""
    figures = []
    for name, line in lines_of(measured):
        figure = Figure(_TITLES[name], x=line["unit"], y="ms", width=420, height=280)
        most = max(n for n, _, _ in line["points"])
        figure.points("measured", [(n, seconds * 1e3) for n, seconds, _ in line["points"]])
        figure.line(f"R² {_fits(line)}", [(0, line["a"] * 1e3), (most, (line["a"] + line["b"] * most) * 1e3)])
        alone = line["alone"]
        if alone["points"]:
            figure.points("alone", [(n, seconds * 1e3) for n, seconds, _ in alone["points"]])
        if len(alone["points"]) > 1:
            figure.line("", [(0, alone["a"] * 1e3), (most, (alone["a"] + alone["b"] * most) * 1e3)], dashed=True)
        figures.append(figure)
    if not figures:
        raise Refusal(f"the profile of {measured.get('name')} holds no points: it was made of a machine's constants")
    return page(figures, columns=3)
