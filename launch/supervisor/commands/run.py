"""`poise run`: checks the options, supervises the processes, reports the result."""

import os
from pathlib import Path

from ..lifecycle import chat_prompts, inputs, leftovers, loaders, metrics_port
from ..lifecycle.ask_planner import check_decisions
from ..lifecycle.interrupts import Interrupts
from ..lifecycle.locks import is_held
from ..lifecycle.process_arguments import ProcessArguments, finished_as_it_stands, note_finished
from ..lifecycle.run_directory import FINISHED, UNFINISHED, RunDirectory
from ..lifecycle.run_summary import beside_predicted, safe_text, summary
from ..measure.record import read_record
from ..measure.timeline import write_trace
from ..shared.options import normalised, run_parser
from ..shared.paths import PROGRAMS, program
from ..shared.progress import ProgressLine
from ..shared.trouble import CANNOT_START, DONE, FOREIGN, INTERRUPTED, OUTPUT, Refusal, brief, naming, of_system, say, shown


def run(words):
    words = normalised(words)
    given = run_parser().parse_args(words)
    inputs.check_limits(given.model)
    inputs.check_model(given.model)
    inputs.check_input(given.input)
    for name in PROGRAMS:
        program(name)
    port = metrics_port.MetricsPort.of(given)
    try:
        return _run(given, words, port)
    finally:
        port.close()


def _run(given, words, port):
    directory = RunDirectory(Path(os.path.abspath(given.run_dir or f"{given.output}.poise")))
    if given.trace:
        _check_trace(given, directory)
    check_decisions(given)
    if not directory.exists() or not is_held(directory.path / "run.lock"):
        inputs.check_output(given, directory)
    interrupts = Interrupts()
    try:
        directory.enter()
    except OSError as problem:
        raise of_system(problem) from None
    code = INTERRUPTED
    try:
        code = _run_in(directory, given, words, interrupts, port)
    except Refusal as refusal:
        code = refusal.code
        raise
    finally:
        directory.leave(forget=code in (CANNOT_START, FOREIGN))
    return code


def _check_trace(given, directory):
    """Before the run. The trace may go into the run directory, which need not exist yet."""
    path = Path(os.path.abspath(given.trace))
    if path.parent != directory.path:
        inputs.check_written("--trace", given.trace, ("the input", given.input), ("the output", given.output))
    elif directory.keeps(path.name):
        raise Refusal(f"--trace {shown(given.trace)}: the run keeps a file of that name there; name another")


def _run_in(directory, given, words, interrupts, port):
    inputs.check_output(given, directory)
    inputs.check_run_directory(given, directory)
    leftovers.sweep()
    if given.resume and directory.state() == FINISHED and finished_as_it_stands(directory, given):
        say(f"the run is finished already; its output is {brief(given.output)}")
        return DONE
    inputs.clip_memory(given, loaders.Home.of(given).held_bytes, lambda: interrupts.count > 0)
    line = ProgressLine()
    try:
        given.chat_prompts = chat_prompts.prepare(given, directory.path, interrupts, line, given.resume and directory.state() == UNFINISHED)
    finally:
        line.clear()
    arguments = ProcessArguments(directory, given, inputs.resume_command(words))
    before, record = directory.state(), directory.record()
    try:
        kept = arguments.choose_loader()
        arguments.begin()
        say(f"run directory {brief(directory.path)}")
        outcome = port.supervision(arguments, interrupts, line, kept).run()
    finally:
        line.clear()
        arguments.end()
    if given.trace is not None and outcome.code in (DONE, INTERRUPTED):
        _write_trace(directory, given.trace or directory.path / "trace.json")
    if outcome.code == DONE:
        note_finished(directory)
        chat_prompts.forget(directory.path)
        say(summary(directory, given.output))
        compared = beside_predicted(directory.status())
        if compared:
            say(compared)
        words = (directory.status().get("balance") or {}).get("words")
        if words:
            say(words)
    elif outcome.code in (INTERRUPTED, OUTPUT):
        safe = safe_text(directory) if directory.state() == UNFINISHED else "nothing was finished yet"
        say(f"{outcome.sentence}; {safe}; go on with: {inputs.resume_command(words)}")
    else:
        say(outcome.sentence)
        if "host memory" in outcome.sentence and (held := loaders.held_by_others(arguments.run_id)):
            say(held)
        if before == UNFINISHED:
            directory.note(record)  # the directory is unchanged: `status` reports that run, not this attempt
        elif outcome.code == CANNOT_START:
            directory.forget_what_did_not_start(arguments.run_id)
    return outcome.code


def _write_trace(directory, path):
    """Writes the timeline of a traced run. If that fails, the results are still valid."""
    try:
        with naming(path):
            write_trace(read_record(directory.path / "orders.log"), path, directory.status().get("device", ""))
        say(f"the trace is {brief(path)}: open it in ui.perfetto.dev or chrome://tracing")
    except Refusal as refusal:
        say(f"no trace: {refusal.sentence}")
    except OSError as problem:
        say(f"no trace: {of_system(problem).sentence}")
