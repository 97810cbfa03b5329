"""`poise report`: a run as one page that a browser shows without a network."""

import os
from pathlib import Path

from ..lifecycle import own_packages
from ..lifecycle.run_directory import RunDirectory
from ..measure.report_page import page
from ..measure.run_facts import facts_of, require_something
from ..shared.files import replace_file
from ..shared.options import normalised, parser
from ..shared.paths import ROOT
from ..shared.quantities import bytes_text
from ..shared.trouble import DONE, OUTPUT, Refusal, brief, say, shown, tell

_NEEDS = ROOT / "launch" / "report" / "requirements.txt"
_LIBRARY = "lib/python3*/site-packages/plotly/package_data/plotly.min.js"
_LARGEST_LIBRARY = 64 << 20


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
    facts = facts_of(directory)
    require_something(facts)
    library = _library(given.plotly)
    for note in facts["notes"]:
        say(note)
    try:
        replace_file(output, page(facts, library))
    except OSError as problem:
        raise Refusal(f"-o {shown(output)} cannot be written: {problem.strerror}", OUTPUT) from None
    tell(f"{brief(output)} is written: {bytes_text(output.stat().st_size)}; open it in a browser")
    return DONE


def _library(named):
    if named is not None:
        return _read(Path(named), f"--plotly {shown(named)}")
    folder = Path(os.environ.get("POISE_REPORT_VENV") or ROOT / "build" / "report-venv")
    own_packages.interpreter(folder, _NEEDS, "what draws a report", "plotly")
    found = sorted(folder.glob(_LIBRARY))
    if not found:
        raise Refusal(f"{shown(folder)} has no plotly.min.js: remove the folder, then it is made again")
    return _read(found[0], shown(found[0]))


def _read(path, what):
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST_LIBRARY + 1)
    except OSError as problem:
        raise Refusal(f"{what}: {problem.strerror}") from None
    if not text or len(text) > _LARGEST_LIBRARY:
        raise Refusal(f"{what}: a file of at most {bytes_text(_LARGEST_LIBRARY)} is wanted, and not an empty one")
    return text
