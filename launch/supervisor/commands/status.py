"""`poise status`: how far a run is, or which runs and kept loaders this user has."""

import json
import time
from pathlib import Path

from ..lifecycle import loaders, moments, processes
from ..lifecycle.run_directory import FINISHED, UNFINISHED, RunDirectory
from ..lifecycle.run_summary import finished_lines, progress_text, resume_text, safe_text
from ..shared.options import normalised, parser
from ..shared.paths import PLANNER
from ..shared.quantities import bytes_text, counted
from ..shared.trouble import DONE, shown, tell


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
    facts |= {"run_dir": str(directory.path), "results": results, "output": directory.output()}
    if given.json:
        tell(json.dumps(facts))
        return DONE
    record = directory.record()
    tell(f"{shown(given.run)}: {facts['state']}")
    for name in ("model", "input", "output"):
        if record.get(name):
            tell(f"  {name:7} {shown((record.get('named') or {}).get(name) or record[name])}")
    if directory.lives():
        since = directory.owner().get("since")
        tell(f"  {progress_text(facts)}{f', since {since}' if since else ''}")
    elif facts["state"] == UNFINISHED:
        tell(f"  {safe_text(directory)}; go on with: {resume_text(record)}")
    elif facts["state"] == FINISHED:
        tell(f"  {counted(facts.get('done', 0), 'result')}, {facts.get('errors', 0)} of them errors")
    if (times := moments.words(directory)) and not directory.lives():
        tell(f"  {times}")
    _tell_balance(facts.get("balance") or {})
    return DONE


def _tell_balance(balance):
    """The balance of link and computation in words, then the last iterations: what each took, and what it waited for."""
    if balance.get("words"):
        tell(f"  {balance['words']}")
    on_host = any("t_host" in one for one in balance.get("last", ()))
    if balance.get("last"):
        host = "  T_host ms" if on_host else ""
        tell(f"  iteration  T_PCIe ms  T_compute ms{host}  wall ms  waits for weights, blocks, rows; buffers ms    F_b")
    for one in balance.get("last", ()):
        waits = one["compute_waits"]
        told = ", ".join(f"{waits[name] * 1e3:.2f}" for name in ("weights", "blocks", "rows"))
        told += f"; {one['link_waits']['buffers'] * 1e3:.2f}"
        host = f"{one.get('t_host', 0) * 1e3:11.2f}" if on_host else ""
        times = f"{one['t_pcie'] * 1e3:11.2f}{one['t_compute'] * 1e3:14.2f}{host}{one.get('seconds', 0) * 1e3:9.2f}"
        tell(f"  {one['iteration']:9}{times}  {told:>42}{one['f_b']:7.2f}")


def _of_user(given):
    planners = [process for process in processes.running() if process.program == PLANNER]
    folders = [process.option("--run-dir") for process in planners]
    runs = [shown(folder) for folder in folders if folder is not None]  # a planner without one only reads, as for `inspect`
    kept = [home.describe() for home in loaders.Home.all() if home.lives()]
    elsewhere = [home.describe() for home in loaders.Home.elsewhere()]
    if given.json:
        tell(json.dumps({"runs": runs, "kept_loaders": kept, "kept_elsewhere": elsewhere, "time": time.time()}))
        return DONE
    for run in runs:
        tell(f"run           {run}")
    for loader in kept + elsewhere:
        use = "in use" if loader["in_use"] else "idle"
        pool = f" and a pool of {bytes_text(loader['pool_bytes'])}" if loader["pool_bytes"] else ""
        tell(f"kept loader   {shown(loader['model'])} ({loader['dtype']}, {bytes_text(loader['weights_bytes'])}{pool}, {use})")
    if elsewhere:
        tell(f"{counted(len(elsewhere), 'loader')} of these kept under another XDG_RUNTIME_DIR: `poise stop --all` ends them, too")
    if not runs and not kept and not elsewhere:
        tell("nothing is running")
    return DONE
