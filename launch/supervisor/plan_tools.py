"""What the planner can be asked without a model, a machine or a run; it answers itself."""

import os

from .options import normalised, parser
from .places import PLANNER, program


def policies(words):
    made = parser("policies", "Lists the ways to keep context (--policy), each with its source.")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    given = made.parse_args(normalised(words))
    _ask("policies", *(["--json"] if given.json else []))


def simulate(words):
    made = parser(
        "simulate",
        "Plays the planner's own decisions in virtual time, with no GPU and no weights: the papers' experiments by name.",
    )
    made.add_argument("name", metavar="NAME", help="capture-table3: CAPTURE's Table III, and so on; a wrong one lists all")
    made.add_argument("--json", action="store_true", help="one JSON object")
    given = made.parse_args(normalised(words))
    _ask("simulate", *(["--json"] if given.json else []), "--", given.name)


def _ask(*words):
    tool = str(program(PLANNER))
    os.execv(tool, [tool, *words])
