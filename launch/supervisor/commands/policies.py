"""`poise policies`: poise-planner prints the list."""

from ..lifecycle.ask_planner import become_planner
from ..shared.options import normalised, parser


def policies(words):
    made = parser("policies", "Lists the ways to keep context (--policy), each with its source.")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    given = made.parse_args(normalised(words))
    become_planner("policies", *(["--json"] if given.json else []))
