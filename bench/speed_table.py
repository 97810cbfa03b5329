"""The results of gpu_check.py as text: a line for each item, then one table of all systems on each work."""

_MARKS = {True: "ok", False: "FAILED", None: "not run"}


def report(told):
    lines = ["; ".join(f"{name} {value}" for name, value in told.get("machine", {}).items()), ""]
    for section, items in told["sections"].items():
        lines += [f"{_MARKS[item['ok']]:8} {section}: {item['name']}: {item['told']}" for item in items]
    rows = speed_rows(told)
    if rows:
        lines += ["", *table([_HEAD, *rows])]
    return "\n".join(lines) + "\n"


_HEAD = (
    *("work", "system", "requests", "decode tok/s", "x FlexGen", "of the roof", "prefill rows/s", "of GEMM", "output tok/s"),
    *("GPU GiB", "host GiB", "predicted"),
)


def speed_rows(told):
    items = [item for section in ("speed", "peers") for item in told["sections"].get(section, []) if item["ok"] and "work" in item]
    works = list(dict.fromkeys(item["work"] for item in items))
    rows = []
    for work in works:
        mine = [_figures(item) for item in items if item["work"] == work]
        best = max((one["decode"] for one in mine if one["system"].startswith("FlexGen") and one["decode"]), default=None)
        rows += [_row(work, one, best) for one in mine]
    return rows


def _figures(item):
    """The same names for poise and its peers; None if a system does not report it."""
    if "peer" in item:
        peer = item["peer"]
        return {
            "system": item["system"], "requests": peer["num_requests"], "decode": peer["decode_tokens_per_second"],
            "efficiency": None, "gemm": None, "prefill": peer["prefill_per_second"], "output": peer["output_tokens_per_second"],
            "gpu": peer["gpu_peak_by_driver_bytes"] or peer["gpu_reserved_bytes"], "host": peer["host_peak_bytes"],
            "predicted": None,
        }  # fmt: skip
    figures = item["figures"]
    decode, prefill = figures["phases"]["steady"] or {}, figures["phases"]["prefill"]
    return {
        "system": item["system"], "requests": figures["num_requests"], "decode": decode.get("sampled_tokens_per_second"),
        "efficiency": decode.get("efficiency"), "gemm": _gemm_share(figures, prefill), "prefill": prefill and prefill["rows_per_second"],
        "output": figures["output_tokens_per_second"],
        "gpu": figures["device_memory_peak_by_driver_bytes"] or figures["device_memory_bytes"],
        "host": figures["host_memory_peak_bytes"], "predicted": _predicted(figures),
    }  # fmt: skip


def _predicted(figures):
    """The relative error of the prediction of a decoding iteration."""
    both = [(figures.get(name) or {}).get("decode_iteration_seconds") for name in ("predicted", "measured")]
    return both[0] / both[1] - 1 if all(both) else None


def _gemm_share(figures, prefill):
    """Prefill's rate in products with the layers' weights, as a share of the library's best on a large product."""
    peak = figures["compute_peak_flops_per_second"]
    return prefill["weight_flops_per_second"] / peak if peak and prefill else None


def _row(work, one, best):
    def number(value, digits=1, scale=1):
        return "" if value is None else f"{value * scale:.{digits}f}"

    def percent(value):
        return "" if value is None else f"{value * 100:.1f} %"

    return (
        work, one["system"], str(one["requests"]), number(one["decode"]), number(one["decode"] / best if best and one["decode"] else None, 2),
        percent(one["efficiency"]), number(one["prefill"], 0), percent(one["gemm"]), number(one["output"]), number(one["gpu"], 1, 2**-30), number(one["host"], 1, 2**-30),
        "" if one["predicted"] is None else f"{one['predicted']:+.1%}",
    )  # fmt: skip


def table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
