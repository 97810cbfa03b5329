"""The table that `poise bench` prints: each figure beside its limit, where one is known."""

from ..shared.quantities import bytes_text, duration
from ..shared.trouble import shown

_GAPS = {
    "slow_copies": "copies below the peak",
    "waits_for_compute": "the link waiting for compute",
    "between_iterations": "gaps between iterations",
    "other": "other pauses of the link",
}
_STREAMS = (("copy_in", "link in"), ("compute", "compute"), ("copy_out", "link out"), ("host", "host cores"))


def throughput_line(run):
    return (
        f"Throughput: {run['requests_per_second']:.2f} requests/s, {run['tokens_per_second']:.2f} total tokens/s, "
        f"{run['output_tokens_per_second']:.2f} output tokens/s"
    )


def table(result):
    work = result["work"]
    lengths = " + ".join(f"{work[name][1]:.0f}" for name in ("input_len", "output_len"))
    rows = [
        (f"{shown(work['model'])}, {work['num_prompts']} x ({lengths})", "measured", "limit", "share"),
        *_phase_rows("steady", result),
        *_phase_rows("decode", result)[:2],
        *_phase_rows("prefill", result),
        ("whole run", duration(result["elapsed_time"]), "", ""),
        ("  output tokens/s", f"{result['output_tokens_per_second']:.1f}", "", ""),
        *_prediction(result),
        *_lost(result),
        *_memory(result),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
    peak = result["link_peak_bytes_per_second"]
    told = f"{peak * 1e-9:.2f} GB/s, {result['link_peak_source']}" if peak else "unknown: --link-peak gives it"
    about = f"policy {result['policy']}, device {result['device']}; link peak {told}"
    return "\n".join([about, *(line.rstrip() for line in lines)])


def _phase_rows(name, result):
    phase = result["phases"][name]
    title = _title(name, phase)
    if phase is None:
        return [(title, "none", "", "")]
    tokens = "rows" if name == "prefill" else "sampled_tokens"
    told = "prompt rows/s" if name == "prefill" else "tokens/s"
    roofline = phase["roofline_seconds"]
    rate = phase[f"{tokens}_per_second"]
    rows = [
        (title, f"{phase['seconds']:.2f} s", f"{roofline:.2f} s" if roofline else "", ""),
        (
            f"  {told}",
            _number(rate),
            _number(phase[tokens] / roofline) if roofline else "",
            _percent(phase["efficiency"]),
        ),
    ]
    peak = result["link_peak_bytes_per_second"]
    speed = phase["link_bytes_in_per_second"]
    rows.append(
        ("  link in, GB/s", f"{speed * 1e-9:.2f}", f"{peak * 1e-9:.2f}" if peak else "", _percent(speed / peak if peak else None))
    )
    if name == "prefill":
        rows.append(_flops(phase["weight_flops_per_second"], result["compute_peak_flops_per_second"]))
    for part, share in (phase["link_gap"] or {}).items():
        rows.append((f"    lost to {_GAPS[part]}", _percent(share), "", ""))
    for kind, size in phase["link_bytes"].items():
        rows.append((f"  {kind} over the link", bytes_text(size), "", ""))
    for stream, told in _STREAMS:
        if stream != "host" or phase["busy_share"][stream] > 0:
            rows.append((f"  {told} busy", _percent(phase["busy_share"][stream]), "100 %", ""))
    for kind, share in (phase["compute_share_by_kind"] or {}).items():
        rows.append((f"    {kind}", _percent(share), "", ""))
    rows.append(("  between iterations", _percent(phase["between_iterations_share"]), "", ""))
    rows.append(("  device at rest there", _percent(phase["device_rests_share"]), "", ""))
    return rows


def _title(name, phase):
    if name == "steady":
        rows = f", {phase['sampled_tokens'] // phase['iterations']} at a time" if phase else ""
        return f"steady decode{rows}"
    return "all of decode" if name == "decode" else name


def _flops(speed, peak):
    share = speed / peak if speed and peak else None
    return ("  weights' TFLOP/s", f"{speed * 1e-12:.2f}", f"{peak * 1e-12:.1f}" if peak else "", _percent(share))


def _prediction(result):
    predicted, measured = result["predicted"], result["measured"]
    seconds = [both.get("decode_iteration_seconds") if both else None for both in (measured, predicted)]
    if not all(seconds):
        return []
    told = [f"{one * 1e3:.1f} ms" for one in seconds]
    return [("an iteration of decode; predicted", *told, f"{seconds[1] / seconds[0] - 1:+.1%}")]


def _lost(result):
    shares = result["planner_shares"]
    names = (("planning_share", "planner decides"), ("messages_share", "orders and messages"), ("answers_share", "answers"))
    return [(f"  {told}", _percent(shares.get(name)), "", "") for name, told in names]


def _memory(result):
    rows = []
    taken, cap = result["device_memory_bytes"], result["device_memory_cap_bytes"]
    if taken:
        rows.append(("device memory", bytes_text(taken), bytes_text(cap) if cap else "", _percent(taken / cap if cap else None)))
    if result["device_memory_peak_by_driver_bytes"]:
        rows.append(("  as the driver counts", bytes_text(result["device_memory_peak_by_driver_bytes"]), "", ""))
    if result["host_memory_peak_bytes"]:
        cap = result["work"]["host_memory"]
        peak = result["host_memory_peak_bytes"]
        rows.append(("host memory", bytes_text(peak), bytes_text(cap) if cap else "", _percent(peak / cap if cap else None)))
    return rows


def _number(value):
    return "" if value is None else f"{value:.1f}" if value < 1e4 else f"{value:.0f}"


def _percent(share):
    return "" if share is None else f"{share * 100:.1f} %"
