"""`poise report`: a run as one page that a browser shows without a network."""

from pathlib import Path

from ..lifecycle import own_packages
from ..lifecycle.run_directory import RunDirectory
from ..measure.plotly import library_in, read_library
from ..measure.report_page import page
from ..measure.run_facts import facts_of, require_something
from ..shared.files import replace_file
from ..shared.options import normalised, parser
from ..shared.paths import ROOT
from ..shared.quantities import bytes_text
from ..shared.trouble import DONE, OUTPUT, Refusal, brief, say, shown, tell

_NEEDS = ROOT / "launch" / "report" / "requirements.txt"


def report(words):
    made = parser(
        "report",
        "Writes one HTML page about a run: throughput, busy shares, bytes, memory, lengths, waits, the slowest requests. It opens "
        "in any browser and asks no network for anything. The first report installs plotly from PyPI.",
    )
    made.add_argument("run", metavar="RUN", help="a run directory")
    made.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: ./report.html")
    made.add_argument("--plotly", metavar="FILE", help="a plotly.min.js to use; nothing is installed")
    given = made.parse_args(normalised(words))
    directory = RunDirectory(Path(given.run))
    directory.require_a_run()
    output = Path(given.output)
    if not output.parent.is_dir() or output.is_dir():
        raise Refusal(f"-o {shown(output)}: {'is a directory' if output.is_dir() else 'its directory is not there'}; name a file", OUTPUT)
    facts, text = _made(directory, given.plotly)
    for note in facts["notes"]:
        say(note)
    try:
        _write(output, text)
    except OSError as problem:
        raise Refusal(f"-o {shown(output)} cannot be written: {problem.strerror}", OUTPUT) from None
    tell(f"{brief(output)} is written: {bytes_text(output.stat().st_size)}; open it in a browser")
    return DONE


def _made(directory, plotly):
    """(facts, page)."""
    library = None
    for is_sound in (True, False):
        try:
            facts = facts_of(directory, is_sound)
            require_something(facts)
            library = library or _library(plotly)
            return facts, page(facts, library)
        except (TypeError, ValueError, LookupError, AttributeError):  # of a status.json that holds other things than a planner writes
            if not is_sound:
                raise
    return None


def _write(output, text):
    if output.exists() and not output.is_file():  # a device or a pipe stays what it is
        output.write_text(text, encoding="utf-8")
    else:
        replace_file(output, text)


def _library(named):
    if named is not None:
        return read_library(Path(named), f"--plotly {shown(named)}")
    return library_in(own_packages.environment("report-venv", "POISE_REPORT_VENV", _NEEDS, "what draws a report", "plotly"))
