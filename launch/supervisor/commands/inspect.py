"""`poise inspect`: the orders of a run. We find the log; poise-planner reads and prints it."""

from pathlib import Path

from ..lifecycle.ask_planner import become_planner
from ..lifecycle.run_directory import RunDirectory
from ..shared.options import normalised, parser
from ..shared.quantities import count
from ..shared.trouble import Refusal, shown


def _number(text):
    return count(text, least=0)


def inspect(words):
    made = parser("inspect", "Shows what was ordered, per iteration and layer, with bytes and times.")
    made.add_argument("what", metavar="RUN|orders.log", help="a run directory, or a log of orders")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument("--check", action="store_true", help="whether every order could be right; ends with 1 if one could not")
    made.add_argument("--iteration", type=_number, metavar="N", help="this one alone")
    made.add_argument("--layer", type=_number, metavar="N", help="this one alone, from 0")
    given = made.parse_args(normalised(words))
    path = Path(given.what)
    if path.is_dir():
        RunDirectory(path).require_a_run()
        path = path / "orders.log"
        if not path.exists():
            raise Refusal(f"{shown(path.parent)}: no orders.log: this run has sent no order yet")
    elif not path.is_file():
        raise Refusal(f"{shown(path)}: {'not a file of orders' if path.exists() else 'no such file or directory'}")
    arguments = ["inspect", str(path), *(["--json"] if given.json else []), *(["--check"] if given.check else [])]
    for name in ("iteration", "layer"):
        if getattr(given, name) is not None:
            arguments += [f"--{name}", str(getattr(given, name))]
    become_planner(*arguments)
