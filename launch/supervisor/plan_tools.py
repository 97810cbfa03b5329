"""What the planner can be asked without a model, a machine or a run; it answers itself."""

import os

from .options import normalised, parser
from .places import PLANNER, program


def policies(words):
    made = parser("policies", "Lists the ways to keep context (--policy), each with its source.")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    given = made.parse_args(normalised(words))
    _ask("policies", *(["--json"] if given.json else []))


def _ask(*words):
    tool = str(program(PLANNER))
    os.execv(tool, [tool, *words])
