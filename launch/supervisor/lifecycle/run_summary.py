"""How far a run is and what came of it, each in one line of text."""

import itertools
import json
import os

from ..shared.progress import bar
from ..shared.quantities import counted, duration, rate_text
from ..shared.trouble import brief, shown

_LOOKED_AT = 1000  # result lines read to find the first error


def finished_lines(directory):
    """How many complete result lines a resume goes on with: of a run that verifies its weights, those that were verified."""
    count, left = 0, _verified_bytes(directory)
    try:
        with open(directory.path / "results.jsonl.partial", "rb") as file:
            while piece := file.read(min(1 << 20, left)):
                count += piece.count(b"\n")
                left -= len(piece)
    except OSError:
        pass
    return count


def _verified_bytes(directory):
    """planner/results/results_directory.h"""
    try:
        return int((directory.path / "results.jsonl.verified").read_bytes())
    except FileNotFoundError:
        return 1 << 62
    except (OSError, ValueError):
        return 0


def resume_text(record):
    """The command that resumes the run, and the directory it was typed in if that is another one: its paths may be relative."""
    command, folder = record.get("resume") or "`run … --resume`", record.get("folder")
    elsewhere = folder and os.path.realpath(folder) != os.getcwd()
    return f"{f'(in {shown(folder)}) ' if elsewhere else ''}{shown(command)}"


def safe_text(directory, status=None):
    """`status`: of the run, where another attempt has written its own."""
    total = (directory.status() if status is None else status).get("requests")
    done = finished_lines(directory)
    known = isinstance(total, int) and total >= done
    all_of_them = total if known else done
    of = f"{done} of " if known else ""
    return f"{of}{counted(all_of_them, 'result')} {'is' if all_of_them == 1 else 'are'} safe in {brief(directory.path)}"


def progress_text(status):
    """`status`: what the planner last wrote to status.json."""
    if status.get("state") == "measuring":
        share = status.get("measured", 0.0)
        return f"measuring what everything costs {bar(share)} {share:.0%}"
    if status.get("state") == "replaying":
        share = status.get("measured", 0.0)
        return f"replaying {bar(share)} {share:.0%}"
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


def summary(directory, output, called=None):
    """`called`: what the user calls the output, if it was made from this file."""
    status = directory.status()
    done, errors = status.get("done", 0), status.get("errors", 0)
    example = first_error(output) if errors else ""
    return f"{called or brief(output)} is written: {counted(done - errors, 'answer')}, {counted(errors, 'error')}{example}"


def first_error(output):
    """The first error of a results file: '; the first: "id": message'. Lines that cannot be answered come before all others."""
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
    """Predicted and measured time of a run whose costs were known; None if there is nothing to compare."""
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
