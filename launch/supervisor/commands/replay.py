"""`poise replay`: a run's orders once more, without its planner; every answer and time beside the recorded one.

The planner reads the log and gives its orders to an executor, as they are (planner/replay/replay.h); we start the processes in
a temporary directory and print what came of it. The run that is read is not written to.
"""

import json
import os
import shutil

from ..lifecycle import inputs, leftovers, loaders, scratch, segments
from ..lifecycle.interrupts import Interrupts
from ..lifecycle.process_arguments import ProcessArguments
from ..lifecycle.run_directory import RunDirectory, find_orders
from ..lifecycle.run_summary import progress_text
from ..lifecycle.supervision import Supervision
from ..measure.record import header_of
from ..shared.files import read_json, segments_of
from ..shared.options import DTYPES, add_device, add_loading, add_model, normalised, parser
from ..shared.paths import PROGRAMS, program
from ..shared.progress import ProgressLine
from ..shared.quantities import bytes_text, count, counted
from ..shared.trouble import DIFFERENT, DONE, Refusal, brief, naming, say, shown, tell

_COLUMNS = (("copy_in_s", "copy in"), ("compute_s", "compute"), ("waits_s", "waits"), ("copy_out_s", "copy out"))
_MILLI = 1e3


def replay(words):
    made = parser(
        "replay",
        "Gives a run's recorded orders to a gpu_executor once more, as they are, without a planner, and compares every token\n"
        "and log probability with the record: bit-equal on the device that made it. Ends with 1 if something differs.",
    )
    made.add_argument("what", metavar="RUN|orders.log", help="a run directory, or a log of orders (then with --model)")
    add_model(made, required=False)
    made.add_argument("--until", type=count, metavar="N", help="up to this iteration")
    made.add_argument("--repeat", type=count, default=1, metavar="N", help="replay N times; the fastest counts")
    made.add_argument("--json", action="store_true", help="the comparison as one JSON object")
    made.add_argument("-o", "--output-file", dest="output", metavar="FILE", help="keep an order log of the replay there")
    add_device(made)
    add_loading(made)
    made.set_defaults(dtype=None, load_format=None, quantization=None, pack_weights=None, seed=None)
    given = made.parse_args(normalised(words))
    given.keep_loader, given.stall_timeout = False, 30.0
    orders = _find(given)
    inputs.check_limits(given.model)
    inputs.check_model(given.model)
    if given.output is not None:
        inputs.check_written("-o", given.output, ("the log that is replayed", orders))
        if os.path.isfile(given.output):
            raise Refusal(f"-o {shown(given.output)} exists already: name another file")
    for name in PROGRAMS:
        program(name)
    with scratch.folder("replay") as folder:
        code = _replay(folder, given, orders)
        return _tell(folder, given, orders) if code == DONE else code


def _find(given):
    """The log; fills in how the run loaded its model, where the options do not say it."""
    path, directory = find_orders(given.what)
    record = directory.record() if directory else {}
    loaded = record.get("answers_hang_on") or {}
    if given.model is None:
        if "model" not in record:
            raise Refusal(f"{shown(path)} does not say where its model is: name it with --model")
        given.model = os.path.join(record.get("folder", ""), record["model"])
    header = header_of(segments_of(path)[-1])  # the oldest may be removed at any time
    recorded = header.get("dtype", "auto")
    if recorded not in DTYPES:
        raise Refusal(f"the header of {shown(path)} is damaged: there is no dtype {shown(str(recorded)[:80])}")
    for name, otherwise in (("dtype", recorded), ("load_format", "auto"), ("quantization", "auto"), ("pack_weights", "off"), ("seed", 0)):
        if getattr(given, name) is None:
            setattr(given, name, loaded.get(name, otherwise))
    return path


class _ReplayArguments(ProcessArguments):
    """A run whose planner takes its decisions from a log."""

    def __init__(self, directory, given, orders):
        super().__init__(directory, given)
        self._orders = orders

    def record(self):
        return {name: getattr(self.given, name) for name in ("model", "device", "dtype")} | {"replays": str(self._orders)}

    def progress_text(self, control):
        loaded = control.loader_state >= segments.SEALED
        return progress_text(self.directory.status_of(self.run_id)) if loaded else super().progress_text(control)

    def planner_arguments(self, **_):
        words = ["replay", *self.planner_links(), "--orders", os.path.abspath(self._orders)]
        words += ["-o", self.directory.path.parent / "report.json", "--repeat", self.given.repeat]
        if self.given.output is not None:
            words += ["--replayed", self.directory.path.parent / "replayed.log"]
        for name in ("until", "host_memory"):
            if getattr(self.given, name) is not None:
                words += ["--" + name.replace("_", "-"), getattr(self.given, name)]
        return words


def _replay(folder, given, orders):
    leftovers.sweep()
    inputs.clip_memory(given, loaders.Home.of(given).held_bytes)
    directory = RunDirectory(folder / "run")
    interrupts, line = Interrupts(), ProgressLine()
    directory.enter()
    arguments = _ReplayArguments(directory, given, orders)
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
        if "host memory" in outcome.sentence and (held := loaders.held_by_others(arguments.run_id)):
            say(held)
    return outcome.code


def _tell(folder, given, orders):
    report = read_json(folder / "report.json")
    tell(json.dumps(report) if given.json else _table(report, orders))
    if given.output is not None:
        with naming(given.output):
            shutil.copyfile(folder / "replayed.log", given.output)
        say(f"{brief(given.output)} is written")
    return DONE if report["equal"] else DIFFERENT


def _table(report, orders):
    rows = [["ms"] + [name for _, name in _COLUMNS] * 2]
    sums = [0.0] * (2 * len(_COLUMNS))
    for stage in report["stages"]:
        times = [stage[side][name] * _MILLI for side in ("recorded", "replayed") for name, _ in _COLUMNS]
        sums = [one + other for one, other in zip(sums, times)]
        rows.append([stage["name"], *(f"{time:.3f}" for time in times)])
    rows.append(["all", *(f"{time:.3f}" for time in sums)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    half = sum(widths[1 : 1 + len(_COLUMNS)]) + 2 * len(_COLUMNS)
    text = [" " * widths[0] + "  recorded".ljust(half) + "  replayed"]
    text += ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]) for row in rows]
    return "\n".join([*text, *_conclusions(report, orders)])


def _conclusions(report, orders):
    times = ", ".join(f"{seconds:.3f}" for seconds in report["replayed_s"])
    yield f"{counted(report['iterations'], 'iteration')} on {report['device']}: {times} s; recorded: {report['recorded_s']:.3f} s"
    if report["unfinished_iterations"]:
        yield f"{counted(report['unfinished_iterations'], 'iteration')} left out that the log does not finish"
    if report["torn_bytes"]:
        yield f"{bytes_text(report['torn_bytes'])} torn off at the end of {shown(orders)}"
    if report["missing"]:
        yield report["missing"]
    tokens, logprobs = report["tokens"], report["logprobs"]
    compared = f"{counted(tokens['compared'], 'token')} and {counted(logprobs['compared'], 'logprob')}"
    if report["equal"]:
        yield f"every answer is equal: {compared}"
        return
    first = report["first_difference"]
    yield (
        f"of {compared}, {tokens['differ']} and {logprobs['differ']} differ, and {counted(report['shapes_differ'], 'answer')} in form; "
        f"the first: iteration {first['iteration']}, request {first['request']}, {first['what']}: "
        f"{first['recorded']} was recorded, {first['replayed']} is replayed"
    )
