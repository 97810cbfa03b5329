"""Why the link carried less than its peak in a traced run: the parts of the wall time.

A phase's wall time is the time its bytes take at the link's peak, plus these:
  slow_copies         copying, but below the peak (tables and other small copies among it)
  waits_for_compute   nothing copied while the compute stream worked: it held the buffers
  between_iterations  nothing copied between one iteration's last report and the next one's first order
  other               nothing copied, and neither of these
"""

import bisect


def link_gap(timed, record, link_peak, into):
    """Shares of the wall time; together with the roofline's share they are 1. None if nothing was traced or no peak is known."""
    if not link_peak or not record.traced:
        return None
    wall = sum(seconds for _, seconds, _ in timed)
    windows = [(one.done - seconds, one.done) for one, seconds, _ in timed]
    between = [(one.sent - gap, one.sent) for one, _, gap in timed]
    spans = {"copy_in": [], "compute": []}
    for iteration in record.iterations:
        for order in iteration.orders:
            for span in order.spans:
                if span["stream"] in spans:
                    spans[span["stream"]].append((span["begin_s"], span["end_s"]))
    copying, computing = (union(spans[name]) for name in ("copy_in", "compute"))
    idle = without(union(windows), copying)
    idle_between, idle_inside = within(idle, union(between)), without(idle, union(between))
    waits = within(idle_inside, computing)
    seconds = {
        "slow_copies": length(within(union(windows), copying)) - into / link_peak,
        "waits_for_compute": length(waits),
        "between_iterations": length(idle_between),
        "other": length(idle_inside) - length(waits),
    }
    return {name: value / wall for name, value in seconds.items()} if wall > 0 else None


def union(intervals):
    """The same time as sorted intervals that do not overlap."""
    made = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        elif end > begin:
            made.append((begin, end))
    return made


def within(these, those):
    """The intersection of two results of `union`."""
    made, ends = [], [end for _, end in those]
    for begin, end in these:
        for index in range(bisect.bisect_right(ends, begin), len(those)):
            if those[index][0] >= end:
                break
            made.append((max(begin, those[index][0]), min(end, those[index][1])))
    return made


def without(these, those):
    """`these` without the other intervals; both are results of `union`."""
    made = []
    for begin, end in these:
        for cut_begin, cut_end in within([(begin, end)], those):
            if cut_begin > begin:
                made.append((begin, cut_begin))
            begin = cut_end
        if end > begin:
            made.append((begin, end))
    return made


def length(intervals):
    return sum(end - begin for begin, end in intervals)
