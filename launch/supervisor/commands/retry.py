"""`poise retry`: the lines of a finished run that failed, once more."""

import hashlib
import json
import os
import re
from pathlib import Path

from ..lifecycle.delivery import STDOUT, Delivery
from ..lifecycle.run_directory import FINISHED, UNFINISHED, RunDirectory
from ..lifecycle.standing_run import StandingRun
from ..shared.files import publish_file, read_json, remove, remove_tree
from ..shared.options import parser, run_parser
from ..shared.paths import command_line
from ..shared.quantities import counted
from ..shared.trouble import DONE, FOREIGN, Refusal, naming, say, shown, tell
from .run import run_given

_ID = re.compile(rb'\{"id":"poise-([1-9][0-9]*)"')
_LINES, _ANSWERS, _RUN = "retry.jsonl", "retried.jsonl", "retry.poise"


def retry(words):
    made = parser(
        "retry",
        "Runs the lines of a finished run that got an error line once more, with the run's model and options, and puts what comes of\n"
        "them into its output. All other lines stay. A line keeps its number, so it gets the tokens that it would have got.",
    )
    made.add_argument("run", metavar="RUN", help="the directory of a finished run")
    made.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = made.parse_args(words)
    directory = RunDirectory(Path(os.path.abspath(given.run)))
    directory.require_a_run()
    directory.enter()
    try:
        record = StandingRun(directory).record  # behind an attempt that was killed, too
        _check(directory, record, given.json)
        failed = _failed_lines(directory.published())
        code = _run_again(directory, record, failed) if failed else DONE
        if code != DONE:
            return code
        answered = _put_in(directory, record, failed) if failed else 0
        _forget(directory)
    finally:
        directory.leave()
    facts = {"run_dir": str(directory.path), "failed": len(failed), "answered": answered, "still_failed": len(failed) - answered}
    if given.json:
        tell(json.dumps(facts))
    elif failed:
        say(f"{answered} of {counted(len(failed), 'line')} that had failed {'has' if answered == 1 else 'have'} an answer now")
    else:
        say(f"no line of {shown(given.run)} failed")
    return DONE


def _check(directory, record, as_json):
    if directory.state() != FINISHED:
        how = record.get("resume") or "`run … --resume`"
        raise Refusal(f"{shown(directory.path)}: the run is not finished; go on with it first: {shown(how)}")
    if not isinstance(record.get("words"), list):
        raise Refusal(f"{shown(directory.path)}: another version of poise made this run, which did not note its options: run the lines anew")
    if as_json and _delivery(directory, record).output == STDOUT:
        raise Refusal("retry: the run's results go to standard output, and --json's facts would, too: leave --json out")
    if not os.path.isfile(directory.published()):
        raise Refusal(f"the output {shown(directory.published())} of the run is gone, so nothing says which lines failed")
    source = os.path.join(record["folder"], record["input"])
    try:
        with open(source, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        raise Refusal(f"the run's input {shown(source)} cannot be read: {problem.strerror}") from None
    if read_json(directory.path / "manifest.json").get("input") != digest:
        raise Refusal(f"the run's input {shown(source)} is another file by now: run its lines anew, into another output", FOREIGN)


def _failed_lines(output):
    """Numbers of the lines whose results are errors."""
    failed = set()
    with open(output, "rb") as file:
        for place, line in enumerate(file, 1):
            number = _number_of(line, place, output)
            if b'"status_code":200' not in line or _status_of(line, place, output) != 200:
                failed.add(number)
    return failed


def _number_of(line, place, output):
    found = _ID.match(line)
    if found is None:
        raise _edited(place, output)
    return int(found[1])


def _status_of(line, place, output):
    try:
        return json.loads(line)["response"]["status_code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _edited(place, output) from None


def _edited(place, output):
    return Refusal(f"{shown(output)}: line {place} is no result line of the run: undo what was changed there, or run the lines anew", FOREIGN)


def _delivery(directory, record):
    return Delivery(run_parser().parse_args(record["words"]).output, directory.path)


def _run_again(directory, record, failed):
    os.chdir(record["folder"])  # the options' paths may be relative to it
    given = run_parser().parse_args(record["words"])
    lines, folder = directory.path / _LINES, directory.path / _RUN
    goes_on = RunDirectory(folder).state() in (UNFINISHED, FINISHED) and _numbers_in(lines) == failed
    if not goes_on:
        remove_tree(folder)
        with naming(lines), open(record["input"], "rb") as source, open(lines, "wb") as target:
            os.fchmod(target.fileno(), 0o600)
            for number, line in enumerate(source, 1):  # a blank line counts, and is none
                target.write(line if number in failed else b"\n")
    given.words, given.input, given.output = record["words"], [str(lines)], str(directory.path / _ANSWERS)
    given.run_dir, given.resume, given.overwrite = str(folder), goes_on, True
    given.notify, given.json, given.trace, given.metrics_port = None, False, None, None
    again = command_line("retry", directory.path)
    return run_given(given, again, again)


def _numbers_in(lines):
    """Of the lines that an earlier `retry` ran, or began to."""
    try:
        with open(lines, "rb") as file:
            return {number for number, line in enumerate(file, 1) if line.strip()}
    except FileNotFoundError:
        return set()


def _put_in(directory, record, failed):
    """Results that came now take the places of the errors; returns how many of them are answers."""
    answers = directory.path / _ANSWERS
    with open(answers, "rb") as file:
        now = {_number_of(line, place, answers): line for place, line in enumerate(file, 1)}
    output = directory.published()
    fresh = f"{output}.new"
    delivery = _delivery(directory, record)
    try:
        with naming(fresh), open(output, "rb") as source, open(fresh, "wb") as target:
            for line in source:
                number = int(_ID.match(line)[1])  # (_failed_lines has read them all)
                target.write(now.get(number, line) if number in failed else line)
        if delivery.planners == output:  # first: while it fails, the errors that `retry` looks for stay in the planner's file
            delivery.deliver(command_line("retry", directory.path), fresh)
        publish_file(fresh, output)
    finally:
        remove(fresh)
    answered = len(failed - _failed_lines(answers))
    status = directory.status() | {"errors": len(failed) - answered}
    directory.write("status.json", json.dumps(status))
    return answered


def _forget(directory):
    """What a retry makes in the run directory."""
    for name in (_LINES, _ANSWERS):
        remove(directory.path / name)
    remove_tree(directory.path / _RUN)
