"""`poise run`: checks the options, supervises the processes, reports the result."""

import json
import os
from pathlib import Path

from ..lifecycle import chat_prompts, grammars, inputs, leftovers, loaders, metrics_port
from ..lifecycle.ask_planner import check_decisions
from ..lifecycle.delivery import STDOUT, Delivery, run_folder
from ..lifecycle.interrupts import Interrupts
from ..lifecycle.locks import is_held
from ..lifecycle.notification import how_it_ended, notify
from ..lifecycle.process_arguments import ProcessArguments, finished_as_it_stands, note_finished
from ..lifecycle.run_directory import FINISHED, FRESH, UNFINISHED, RunDirectory
from ..lifecycle.run_summary import beside_predicted, resume_text, safe_text, summary
from ..lifecycle.sources import STDIN, Sources
from ..lifecycle.standing_run import StandingRun
from ..shared.options import normalised, run_parser
from ..shared.paths import PROGRAMS, program
from ..shared.progress import ProgressLine
from ..shared.trouble import CANNOT_START, DONE, FOREIGN, INTERNAL, INTERRUPTED, OUTPUT, Refusal, brief, naming, of_system, say, shown, tell


def run(words):
    words = normalised(words)
    given = run_parser().parse_args(words)
    given.words = words
    return run_given(given, inputs.resume_command(words), inputs.command_again(words))


def run_given(given, resume, again):
    """`resume`: the command that goes on with this run; `again`: the one that begins it, as long as a finished run stands there."""
    inputs.check_limits(given.model)
    inputs.check_model(given.model)
    sources = Sources(given.input)
    for name in PROGRAMS:
        program(name)
    port = metrics_port.MetricsPort.of(given)
    try:
        return _run(given, resume, again, sources, port)
    finally:
        port.close()


def _run(given, resume, again, sources, port):
    directory = RunDirectory(run_folder(given))
    delivery = Delivery(given.output, directory.path)
    if given.json and given.output == STDOUT:
        raise Refusal("run: -o - and --json both want standard output: leave one of them out")
    given.output = delivery.planners
    given.named = {"input": sources.shown(), "output": delivery.output} if delivery.later or not sources.plain() else {}
    if given.trace is not None:
        _tracing()  # loads it now: a run may take long, and the package be replaced meanwhile
    if given.trace:
        _check_trace(given, directory, sources, delivery)
    if sources.plain():
        given.input = sources.plain()
        check_decisions(given)
    if not directory.exists() or not is_held(directory.path / "run.lock"):
        delivery.check(given, directory, sources)
    interrupts = Interrupts()
    try:
        directory.enter()
    except OSError as problem:
        raise of_system(problem) from None
    code, sentence = INTERRUPTED, ""
    standing = StandingRun(directory)
    try:
        delivery.check(given, directory, sources)
        code, sentence = _run_in(directory, standing, given, interrupts, resume, again, sources, delivery, port)
    except Refusal as refusal:
        code, sentence = refusal.code, refusal.sentence
        raise
    except OSError as problem:
        code, sentence = of_system(problem).code, of_system(problem).sentence
        raise
    except Exception as problem:
        code, sentence = INTERNAL, f"a defect of poise: {type(problem).__name__}"
        raise
    finally:
        facts = how_it_ended(directory, delivery, code, sentence)
        standing.end(code)
        directory.leave(forget=code in (CANNOT_START, FOREIGN))
        if given.notify:
            notify(given.notify, facts, interrupts)
        if given.json:
            tell(json.dumps(facts))
    return code


def _check_trace(given, directory, sources, delivery):
    """Before the run. The trace may go into the run directory, which need not exist yet."""
    path = Path(os.path.abspath(given.trace))
    if path.parent != directory.path:
        read = [("the input", path) for path in sources.paths if path != STDIN]
        written = [] if delivery.output == STDOUT else [("the output", delivery.output)]
        inputs.check_written("--trace", given.trace, *read, *written)
    elif directory.keeps(path.name):
        raise Refusal(f"--trace {shown(given.trace)}: the run keeps a file of that name there; name another")


def _run_in(directory, standing, given, interrupts, resume, again, sources, delivery, port):
    """(exit code, how it ended)"""
    inputs.check_run_directory(given, directory)
    leftovers.sweep()
    goes_on = given.resume and directory.state() != FRESH
    if not sources.plain():
        given.input = sources.prepare(directory.path, lambda: interrupts.count > 0, goes_on, standing.set_aside)
        check_decisions(given)
    if given.resume and directory.state() == FINISHED and finished_as_it_stands(directory, given):
        return _finished_already(delivery, resume)
    standing.note()
    inputs.clip_memory(given, loaders.Home.of(given).held_bytes, lambda: interrupts.count > 0)
    line = ProgressLine()
    try:
        given.chat_prompts = chat_prompts.prepare(given, directory.path, interrupts, line, given.resume and directory.state() == UNFINISHED)
    finally:
        line.clear()
    given.grammar_python = grammars.python_for(given.input, interrupts)
    delivery.begin(goes_on, standing.set_aside)
    arguments = ProcessArguments(directory, given, resume)
    try:
        kept = arguments.choose_loader()
        arguments.begin()
        say(f"run directory {brief(directory.path)}")
        supervision = port.supervision(arguments, interrupts, line, kept)
        outcome = supervision.run()
        supervision.moments.keep(directory, arguments.run_id)
    finally:
        line.clear()
        arguments.end()
    if given.trace is not None and outcome.code in (DONE, INTERRUPTED):
        _write_trace(directory, given.trace or directory.path / "trace.json")
    if outcome.code == DONE:
        note_finished(directory)
        chat_prompts.forget(directory.path)
        if standing.stands(DONE):
            standing.was_done()
            return _finished_already(delivery, resume)
        delivery.deliver(resume)
        sentence = summary(directory, given.output, delivery.called())
        say(sentence)
        compared = beside_predicted(directory.status())
        if compared:
            say(compared)
        balance = (directory.status().get("balance") or {}).get("words")
        if balance:
            say(balance)
        return DONE, sentence
    elif outcome.code in (INTERRUPTED, OUTPUT):
        say(f"{outcome.sentence}; {_how_to_go_on(directory, standing, outcome.code, resume, again)}")
    else:
        say(outcome.sentence)
        if "host memory" in outcome.sentence and (held := loaders.held_by_others(arguments.run_id)):
            say(held)
        if "memory" in outcome.sentence and (held := leftovers.still_ending()):
            say(f"{held} is not free yet: try again")
        if outcome.code == CANNOT_START and standing.state != UNFINISHED and not standing.stands(outcome.code):
            directory.forget_what_did_not_start(arguments.run_id)
    return outcome.code, outcome.sentence


def _finished_already(delivery, resume):
    delivery.deliver(resume)
    sentence = f"the run is finished already; its output is {delivery.called()}"
    say(sentence)
    return DONE, sentence


def _how_to_go_on(directory, standing, code, resume, again):
    if not standing.stands(code):
        safe = safe_text(directory) if directory.state() == UNFINISHED else "nothing was finished yet"
        return f"{safe}; go on with: {resume}"
    if standing.state == FINISHED:
        return f"nothing was finished yet, and the finished run there is as it was; start again with: {again}"
    return f"{safe_text(directory, standing.status)}; go on with: {resume_text(standing.record)}"


def _tracing():
    """The modules that write a timeline. Runs without --trace start faster without them."""
    from ..measure import record, timeline  # pylint: disable=import-outside-toplevel

    return record, timeline


def _write_trace(directory, path):
    """Writes the timeline of a traced run. If that fails, the results are still valid."""
    record, timeline = _tracing()
    try:
        with naming(path):
            timeline.write_trace(record.read_record(directory.path / "orders.log"), path, directory.status().get("device", ""))
        say(f"the trace is {brief(path)}: open it in ui.perfetto.dev or chrome://tracing")
    except Refusal as refusal:
        say(f"no trace: {refusal.sentence}")
    except OSError as problem:
        say(f"no trace: {of_system(problem).sentence}")
