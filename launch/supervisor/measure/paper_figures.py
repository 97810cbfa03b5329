"""The results of `poise simulate`, drawn like the papers' figures."""

from ..shared.quantities import counted
from .svg import Figure, Timeline, page

_SYSTEMS = ("deepspeed", "flexgen", "act-only", "hybrid-static", "hybrid", "kvpr", "ours")


NOT_DRAWN = ("policy-grid", "host-grid", "whole-runs")


def draw(name, played):
    """SVG text; `played`: the JSON of the simulation `name`, one of DRAWN."""
    return _DRAWERS[name](played)


def _bars(title, label, y, rows, systems, log=False):
    """One group of bars for each row; `label` names it."""
    figure = Figure(title, y=y, log_y=log)
    for system in systems:
        values = {label(row): row[system] for row in rows if system in row}
        if values:
            figure.bars(system, values)
    return figure


def _grouped(played, key, y, title):
    return _bars(title, lambda row: row[key], y, played["rows"], _SYSTEMS).svg()


def _by(played, key, category, y, systems, log=False):
    """A figure for each value of `key`, in it a group for each value of `category`, or of two of them."""
    names = category if isinstance(category, tuple) else (category,)
    figures = []
    for value in dict.fromkeys(row[key] for row in played["rows"]):
        rows = [row for row in played["rows"] if row[key] == value]
        title = value if isinstance(value, str) else f"{value} {key}"
        figure = _bars(title, lambda row: "+".join(str(row[name]) for name in names), y, rows, systems, log)
        figure.x = " + ".join(names)
        figures.append(figure)
    return page(figures)


def _volumes(played):
    """Figure 9: for each prompt length, FlexGen's volume beside CAPTURE's, KV and ACT."""
    parts = {"flexgen KV": "flexgen_kv", "hybrid KV": "hybrid_kv", "hybrid ACT": "hybrid_act"}
    figures = []
    for requests in dict.fromkeys(row["requests"] for row in played["rows"]):
        figure = Figure(counted(requests, "request"), x="prompt", y="GB in an iteration")
        for title, name in parts.items():
            figure.bars(title, {str(row["prompt"]): row[name] for row in played["rows"] if row["requests"] == requests})
        figures.append(figure)
    return page(figures)


def _timelines(played):
    titles = {"kv": "(a) KV caching", "act": "(b) activation caching", "hybrid": "(c) hybrid caching"}
    figures = []
    for cache, spans in played["timelines"].items():
        # The link's track is above the GPU's, as in the paper.
        ordered = sorted(spans, key=lambda span: (span["stream"] != "PCIe", span["begin_ms"]))
        figures.append(
            Timeline(
                titles.get(cache, cache),
                [(span["stream"], span["kind"], span["begin_ms"], span["end_ms"]) for span in ordered],
            )
        )
    return page(figures, columns=1)


def _three_resources(played):
    """For each model, a group of bars for each pair of speeds: a bar for each policy."""
    policies = [name for name in played["rows"][0] if name not in ("model", "link_gbps", "host_gbps", "best")]
    figures = []
    for model in dict.fromkeys(row["model"] for row in played["rows"]):
        rows = [row for row in played["rows"] if row["model"] == model]
        figure = _bars(model, lambda row: f"{row['link_gbps']:g} × {row['host_gbps']:g}", "tokens/s", rows, policies)
        figure.x = "link GB/s × host GB/s"
        figures.append(figure)
    return page(figures, columns=1)


_DRAWERS = {
    "capture-table3": lambda played: _grouped(played, "model", "tokens/s", "CAPTURE, Table III"),
    "capture-figure1": _timelines,
    "capture-figure8": lambda played: _by(played, "model", "prompt", "tokens/s", _SYSTEMS, log=True),
    "capture-figure9": _volumes,
    "capture-figure10": lambda played: _by(played, "requests", "prompt", "GPU busy", ("flexgen", "hybrid")),
    "kvpr-gains": lambda played: _by(played, "model", ("prompt", "answer"), "tokens/s", ("flexgen", "kvpr", "ours")),
    "kvpr-figure8": lambda played: _by(
        played, "model", ("prompt", "answer"), "tokens/s", ("flexgen", "kvpr", "flexgen_int4", "kvpr_int4")
    ),
    "host-cores": _three_resources,
    "ours-beyond": lambda played: _by(played, "machine", "model", "tokens/s", ("flexgen", "hybrid", "ours")),
}
DRAWN = tuple(_DRAWERS)
