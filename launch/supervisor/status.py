"""`poise status` and `poise inspect`, and how a run's progress reads in a line."""

import itertools
import json
import os
import time
from pathlib import Path

from . import loaders, processes
from .options import normalised, parser
from .places import PLANNER, program
from .progress import bar
from .quantities import bytes_text, count, counted, duration, rate_text
from .run_directory import FINISHED, UNFINISHED, RunDirectory
from .trouble import DONE, Refusal, brief, shown, tell


_LOOKED_AT = 1000  # result lines, for an error to tell of


def finished_lines(directory):
    """Result lines in the run directory: whole ones."""
    count = 0
    try:
        with open(directory.path / "results.jsonl.partial", "rb") as file:
            while piece := file.read(1 << 20):
                count += piece.count(b"\n")
    except OSError:
        pass
    return count


def safe_text(directory):
    total = directory.status().get("requests")
    done = finished_lines(directory)
    known = isinstance(total, int) and total >= done
    all_of_them = total if known else done
    of = f"{done} of " if known else ""
    return f"{of}{counted(all_of_them, 'result')} {'is' if all_of_them == 1 else 'are'} safe in {brief(directory.path)}"


def progress_text(status):
    """From what the planner last wrote to status.json."""
    if status.get("state") == "measuring":
        share = status.get("measured", 0.0)
        return f"measuring what everything costs {bar(share)} {share:.0%}"
    total, done = status.get("requests"), status.get("done", 0)
    if not isinstance(total, int) or status.get("state") in ("starting", "loading", "preparing"):
        return status.get("state", "starting")
    rate = status.get("tokens_per_second", 0.0)
    text = f"{bar(done / total if total else 1)} {done}/{total} requests, {rate:.0f} tokens/s"
    left = status.get("seconds_left")
    if isinstance(left, (int, float)):
        text += f", {duration(left)} left"
    if status.get("errors"):
        text += f", {counted(status['errors'], 'error')}"
    return text


def summary(directory, output):
    status = directory.status()
    done, errors = status.get("done", 0), status.get("errors", 0)
    example = first_error(output) if errors else ""
    return f"{brief(output)} is written: {counted(done - errors, 'answer')}, {counted(errors, 'error')}{example}"


def first_error(output):
    """Of a results file: '; the first: "id": message'. Lines that cannot be answered come before all others."""
    try:
        with open(output, "rb") as file:
            for line in itertools.islice(file, _LOOKED_AT):
                result = json.loads(line)
                response, custom_id = result["response"], result["custom_id"]
                if response["status_code"] != 200:
                    whose = f'"{shown(custom_id)[:40]}": ' if custom_id is not None else ""
                    return f"; the first: {whose}{shown(response['body']['error']['message'])[:200]}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return ""


def beside_predicted(status):
    """Predicted beside measured, of a run whose costs were known; None where there is nothing to compare."""
    predicted, measured = status.get("predicted"), status.get("measured")
    if not isinstance(predicted, dict) or not isinstance(measured, dict) or not status.get("decode_iterations"):
        return None
    name = "decode_iteration_seconds"
    if not measured.get(name):
        return None
    return (
        f"a decoding iteration took {measured[name] * 1e3:.3g} ms, {predicted[name] * 1e3:.3g} ms were predicted "
        f"({predicted[name] / measured[name] - 1:+.1%}); {rate_text(measured['tokens_per_second'])} tokens/s, "
        f"{rate_text(predicted['tokens_per_second'])} predicted"
    )


def status(words):
    made = parser("status", "How far the run in RUN is; without RUN, which runs and kept loaders live.")
    made.add_argument("run", nargs="?", metavar="RUN", help="a run directory")
    made.add_argument("--json", action="store_true", help="as one JSON object")
    given = made.parse_args(normalised(words))
    return _of_run(given) if given.run is not None else _of_user(given)


def _of_run(given):
    directory = RunDirectory(Path(given.run))
    directory.require_a_run()
    facts = {**directory.status(), "state": "running" if directory.lives() else directory.state()}
    results = facts.get("done", 0) if facts["state"] == FINISHED else finished_lines(directory)
    facts |= {"run_dir": str(directory.path), "results": results, "output": directory.published()}
    if given.json:
        tell(json.dumps(facts))
        return DONE
    record = directory.record()
    tell(f"{shown(given.run)}: {facts['state']}")
    for name in ("model", "input", "output"):
        if record.get(name):
            tell(f"  {name:7} {shown(record[name])}")
    if directory.lives():
        since = directory.owner().get("since")
        tell(f"  {progress_text(facts)}{f', since {since}' if since else ''}")
    elif facts["state"] == UNFINISHED:
        tell(f"  {safe_text(directory)}; go on with: {_resume_text(record)}")
    elif facts["state"] == FINISHED:
        tell(f"  {counted(facts.get('done', 0), 'result')}, {facts.get('errors', 0)} of them errors")
    _tell_balance(facts.get("balance") or {})
    return DONE


def _resume_text(record):
    """The command, and where it was typed if that is elsewhere: its paths may be relative."""
    command, folder = record.get("resume") or "`run … --resume`", record.get("folder")
    elsewhere = folder and os.path.realpath(folder) != os.getcwd()
    return f"{f'(in {shown(folder)}) ' if elsewhere else ''}{shown(command)}"


def _tell_balance(balance):
    """In words, then the last iterations: what either side took, and what it stood still for."""
    if balance.get("words"):
        tell(f"  {balance['words']}")
    if balance.get("last"):
        tell("  iteration  T_PCIe ms  T_compute ms  wall ms  waits for weights, blocks, rows; buffers ms    F_b")
    for one in balance.get("last", ()):
        waits = one["compute_waits"]
        told = ", ".join(f"{waits[name] * 1e3:.2f}" for name in ("weights", "blocks", "rows"))
        told += f"; {one['link_waits']['buffers'] * 1e3:.2f}"
        times = f"{one['t_pcie'] * 1e3:11.2f}{one['t_compute'] * 1e3:14.2f}{one.get('seconds', 0) * 1e3:9.2f}"
        tell(f"  {one['iteration']:9}{times}  {told:>42}{one['f_b']:7.2f}")


def _of_user(given):
    planners = [process for process in processes.running() if process.program == PLANNER]
    runs = [shown(process.option("--run-dir")) for process in planners]
    kept = [home.describe() for home in loaders.Home.all() if home.lives()]
    if given.json:
        tell(json.dumps({"runs": runs, "kept_loaders": kept, "time": time.time()}))
        return DONE
    for run in runs:
        tell(f"run           {run}")
    for loader in kept:
        use = "in use" if loader["in_use"] else "idle"
        tell(f"kept loader   {shown(loader['model'])} ({loader['dtype']}, {bytes_text(loader['weights_bytes'])}, {use})")
    if not runs and not kept:
        tell("nothing is running")
    return DONE


def _number(text):
    return count(text, least=0)


def inspect(words):
    made = parser("inspect", "Shows what was ordered, per iteration and layer, with bytes and times.")
    made.add_argument("what", metavar="RUN|orders.log", help="a run directory, or a log of orders")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument("--check", action="store_true", help="whether every order could be right; ends with 1 if one could not")
    made.add_argument("--iteration", type=_number, metavar="N", help="this one alone")
    made.add_argument("--layer", type=_number, metavar="N", help="this one alone, from 0")
    given = made.parse_args(normalised(words))
    path = Path(given.what)
    if path.is_dir():
        RunDirectory(path).require_a_run()
        path = path / "orders.log"
        if not path.exists():
            raise Refusal(f"{shown(path.parent)}: no orders.log: this run has sent no order yet")
    elif not path.is_file():
        raise Refusal(f"{shown(path)}: {'not a file of orders' if path.exists() else 'no such file or directory'}")
    # The planner refuses under the name it is called by.
    arguments = ["poise", "inspect", str(path), *(["--json"] if given.json else []), *(["--check"] if given.check else [])]
    for name in ("iteration", "layer"):
        if getattr(given, name) is not None:
            arguments += [f"--{name}", str(getattr(given, name))]
    os.execv(program(PLANNER), arguments)
