"""`poise retry`: the lines of a finished run that failed, once more."""

import hashlib
import json
import os
import re
from pathlib import Path

from ..lifecycle.delivery import Delivery
from ..lifecycle.run_directory import FINISHED, UNFINISHED, RunDirectory
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
        record = directory.record()
        _check(directory, record)
        failed = _failed_lines(directory.published())
        code = _run_again(directory, record, failed) if failed else DONE
        if code != DONE:
            return code
        answered = _put_in(directory, record, failed) if failed else 0
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


def _check(directory, record):
    if directory.state() != FINISHED:
        how = record.get("resume") or "`run … --resume`"
        raise Refusal(f"{shown(directory.path)}: the run is not finished; go on with it first: {shown(how)}")
    if not isinstance(record.get("words"), list):
        raise Refusal(f"{shown(directory.path)}: another version of poise made this run, which did not note its options: run the lines anew")
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
        for line in file:
            if b'"status_code":200' not in line or json.loads(line)["response"]["status_code"] != 200:
                failed.add(int(_ID.match(line)[1]))
    return failed


def _run_again(directory, record, failed):
    os.chdir(record["folder"])  # the options' paths may be relative to it
    given = run_parser().parse_args(record["words"])
    lines, folder = directory.path / _LINES, directory.path / _RUN
    unfinished = RunDirectory(folder).state() == UNFINISHED
    if not (unfinished and lines.exists()):
        remove_tree(folder)
        with naming(lines), open(record["input"], "rb") as source, open(lines, "wb") as target:
            os.fchmod(target.fileno(), 0o600)
            for number, line in enumerate(source, 1):  # a blank line counts, and is none
                target.write(line if number in failed else b"\n")
    given.words, given.input, given.output = record["words"], [str(lines)], str(directory.path / _ANSWERS)
    given.run_dir, given.resume, given.overwrite = str(folder), unfinished, True
    given.notify, given.json, given.trace, given.metrics_port = None, False, None, None
    return run_given(given, command_line("retry", directory.path))


def _put_in(directory, record, failed):
    """Results that came now take the places of the errors; returns how many of them are answers."""
    answers = directory.path / _ANSWERS
    with open(answers, "rb") as file:
        now = {int(_ID.match(line)[1]): line for line in file}
    output = directory.published()
    fresh = f"{output}.new"
    with naming(fresh), open(output, "rb") as source, open(fresh, "wb") as target:
        for line in source:
            number = int(_ID.match(line)[1])
            target.write(now.get(number, line) if number in failed else line)
    publish_file(fresh, output)
    answered = len(failed - _failed_lines(answers))
    status = directory.status() | {"errors": len(failed) - answered}
    directory.write("status.json", json.dumps(status))
    given = run_parser().parse_args(record["words"])
    delivery = Delivery(given.output, directory.path)
    if delivery.planners == output:
        delivery.deliver()
    for name in (_LINES, _ANSWERS):
        remove(directory.path / name)
    remove_tree(directory.path / _RUN)
    return answered
