"""`poise inspect`: the orders of a run. We find the log; poise-planner reads and prints it."""

from ..lifecycle.ask_planner import become_planner
from ..lifecycle.run_directory import find_orders
from ..shared.options import normalised, parser
from ..shared.quantities import count
from ..shared.trouble import Refusal


def _number(text):
    return count(text, least=0)


def inspect(words):
    made = parser(
        "inspect",
        "Shows what was ordered, per iteration and layer, with bytes and times; with --diff, in what two runs differ first.\n\n"
        "Exit codes: 0; 1 an order could not be right (--check), or the logs differ (--diff); 2 a log cannot be read.",
    )
    made.add_argument("what", metavar="RUN|orders.log", help="a run directory, or a log of orders")
    made.add_argument("other", metavar="RUN|orders.log", nargs="?", help="the second one, for --diff")
    made.add_argument("--json", action="store_true", help="one JSON object a line")
    made.add_argument("--brief", action="store_true", help="with --json: sums of iterations and times of requests, without orders")
    made.add_argument("--check", action="store_true", help="whether every order could be right; ends with 1 if one could not")
    made.add_argument("--diff", action="store_true", help="the first order, table or result in which two logs differ")
    made.add_argument("--times", action="store_true", help="with --diff: clocks, names of processes and measured times, too")
    made.add_argument("--iteration", type=_number, metavar="N", help="this one alone")
    made.add_argument("--layer", type=_number, metavar="N", help="this one alone, from 0")
    given = made.parse_args(normalised(words))
    if given.diff:
        _diff(given)
    if given.other is not None or given.times:
        raise Refusal("inspect: two logs, and --times, are for --diff (options: help inspect)")
    path, _ = find_orders(given.what)
    arguments = ["inspect", str(path), *(f"--{name}" for name in ("json", "brief", "check") if getattr(given, name))]
    for name in ("iteration", "layer"):
        if getattr(given, name) is not None:
            arguments += [f"--{name}", str(getattr(given, name))]
    become_planner(*arguments)


def _diff(given):
    if given.other is None:
        raise Refusal("inspect: --diff compares two logs: name another run directory, or log of orders")
    if given.check or given.brief or given.iteration is not None or given.layer is not None:
        raise Refusal("inspect: --diff finds the first difference by itself: leave --check, --brief, --iteration and --layer out")
    paths = [str(find_orders(what)[0]) for what in (given.what, given.other)]
    become_planner("inspect", "--diff", *paths, *(["--json"] if given.json else []), *(["--times"] if given.times else []))
