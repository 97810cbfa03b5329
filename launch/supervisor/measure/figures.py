"""A run's speed from its record: tokens, bytes and busy time of its phases, each beside its limit.

Nothing here is predicted or scaled: every figure is counted or timed in the run. A phase's wall time is that of its
iterations, each from the end of the one before to its own end, so that the time between them counts. The roofline of
a phase is the time its bytes need on the link at its peak, in the direction that has more of them.
"""

from .link_gap import link_gap
from .record import CLASSES, STREAMS

_INTO = ("weights", "kv", "act")  # what crosses from host to device


def phases(record, link_peak, weights):
    """The figures of decode, of steady decode (of it, the iterations that sample the most tokens), of prefill and of all iterations.

    `link_peak` in bytes/s, or None; `weights`: entries of all layers' matrices, each of which every row meets once."""
    timed = _timed(record.iterations)
    decode = [one for one in timed if one[0].decode]
    most = max((iteration.samples for iteration, _, _ in decode), default=0)
    parts = {
        "steady": [one for one in decode if one[0].samples == most],
        "decode": decode,
        "prefill": [one for one in timed if not one[0].decode],
        "whole": timed,
    }
    return {name: _phase(part, record, link_peak, weights) for name, part in parts.items()}


def _timed(iterations):
    """(iteration, its wall seconds, of these the seconds before it was sent)."""
    before = None
    timed = []
    for iteration in iterations:
        begin = iteration.sent if before is None else before
        timed.append((iteration, iteration.done - begin, iteration.sent - begin))
        before = iteration.done
    return timed


def _phase(timed, record, link_peak, weights):
    """The figures of one phase; None if no iteration belongs to it."""
    if not timed:
        return None
    wall = sum(seconds for _, seconds, _ in timed)
    iterations = [iteration for iteration, _, _ in timed]
    link = {name: sum(one.total("link", name) for one in iterations) for name in CLASSES}
    busy = {name: sum(one.total("busy", name) for one in iterations) for name in STREAMS}
    into = sum(link[name] for name in _INTO)
    phase = {
        "iterations": len(iterations),
        "seconds": wall,
        "rows": sum(one.rows for one in iterations),
        "sampled_tokens": sum(one.samples for one in iterations),
        "rows_per_second": _ratio(sum(one.rows for one in iterations), wall),
        "sampled_tokens_per_second": _ratio(sum(one.samples for one in iterations), wall),
        "link_bytes": link,
        "link_bytes_in": into,
        "link_bytes_out": link["stores"],
        "link_bytes_in_per_second": _ratio(into, wall),
        "busy_share": {name: _ratio(busy[name], wall) for name in STREAMS},
        "compute_waits_share": _ratio(sum(one.total("wait", "compute") for one in iterations), wall),
        "between_iterations_share": _ratio(sum(gap for _, _, gap in timed), wall),
        "device_rests_share": _ratio(sum(order.rested for one in iterations for order in one.orders), wall),
        "compute_share_by_kind": _by_kind(iterations, wall),
    }
    roofline = max(into, link["stores"]) / link_peak if link_peak else None
    phase["roofline_seconds"] = roofline
    phase["efficiency"] = None if roofline is None else _ratio(roofline, wall)
    phase["link_gap"] = link_gap(timed, record, link_peak, into) if into >= link["stores"] else None
    # Multiplications and additions with the layers' weights, of new rows alone: the least that had to be computed.
    phase["weight_flops_per_second"] = _ratio(2 * weights * phase["rows"], wall)
    return phase


def _by_kind(iterations, wall):
    """The share of the compute stream's time for each kind of work; None if the run was not traced."""
    seconds = {}
    for iteration in iterations:
        for order in iteration.orders:
            for span in order.spans:
                if span["stream"] == "compute":
                    seconds[span["kind"]] = seconds.get(span["kind"], 0) + span["end_s"] - span["begin_s"]
    return {kind: _ratio(time, wall) for kind, time in sorted(seconds.items())} or None


def _ratio(part, whole):
    return part / whole if whole > 0 else None
