"""`poise simulate`: poise-planner plays a paper's experiment; we draw it."""

import json

from ..lifecycle import inputs
from ..lifecycle.ask_planner import ask, become_planner
from ..measure.paper_figures import DRAWN, NOT_DRAWN, draw
from ..shared.options import normalised, parser
from ..shared.trouble import DONE, Refusal, naming, of_system, tell


def simulate(words):
    made = parser(
        "simulate",
        "Plays a paper's experiment in virtual time with the planner's own decisions; needs no GPU and no weights.",
    )
    made.add_argument("name", metavar="NAME", help=f"one of {', '.join((*DRAWN, *NOT_DRAWN))}; the last two take up to a minute and have no picture")
    made.add_argument("--machine", metavar="NAME|FILE", help="play it on this machine instead of the paper's")
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--svg", metavar="FILE", help="draw it, too, as the paper does")
    given = made.parse_args(normalised(words))
    if not given.name:
        made.error("missing: NAME")
    words = ["--machine", given.machine] if given.machine is not None else []
    if given.svg is None:
        return become_planner("simulate", *words, *(["--json"] if given.json else []), "--", given.name)
    if given.name in NOT_DRAWN:
        raise Refusal(f"there is no picture of {given.name}; there are pictures of {', '.join(DRAWN)}")
    inputs.check_written("--svg", given.svg)
    table, _, played = ask("simulate", *words, "--json", "--table", "--", given.name).rstrip("\n").rpartition("\n")
    _write(given.svg, draw(given.name, json.loads(played)))
    tell(played if given.json else table)
    return DONE


def _write(path, text):
    try:
        with naming(path), open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise of_system(problem) from None
