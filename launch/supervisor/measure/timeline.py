"""A run's record as a trace for Chrome (chrome://tracing) or Perfetto (ui.perfetto.dev).

The device has a track for each stream. A slice for each layer order holds slices for its mini-batches, which hold those of
single operations; operations on the rows of several mini-batches lie directly in the layer's slice. The host has tracks for
the planner's work between iterations, for iterations, and for orders from when they were sent until they were reported
done. Times are those of the order log, in microseconds.
"""

import gzip
import itertools
import json

from ..shared.trouble import Refusal
from .record import STREAMS

_HOST, _DEVICE = 1, 2
_DECIDES, _ITERATIONS, _ORDERS = 1, 2, 3
_OF_A_MINI_BATCH = ("Load", "Embed", "KvGen", "Attention", "HostAttention")
_NAMES = {"KvGen": "KV Gen", "Qkv": "QKV", "Fc1": "FC1", "Fc2": "FC2", "HostAttention": "attention on host cores", "HostRows": "rows of host cores"}


def write_trace(record, path, device=""):
    """Writes `path`, compressed where it ends with .gz."""
    if not record.traced:
        raise Refusal("there is no trace: the run ended before any order was done, or it ran without --trace")
    text = json.dumps({"displayTimeUnit": "ms", "otherData": record.header, "traceEvents": events(record, device)})
    if str(path).endswith(".gz"):
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            file.write(text)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def events(record, device=""):
    made = list(_track_names(device))
    before = None
    ids = itertools.count(1)
    for iteration in record.iterations:
        name = f"iteration {iteration.number}"
        if before is not None:
            made.append(_slice(f"plan {name}", _HOST, _DECIDES, before, iteration.sent))
        before = iteration.done
        facts = {"sequences": iteration.sequences, "rows": iteration.rows, "tokens of context": iteration.context}
        facts["phase"] = "decode" if iteration.decode else "prefill"
        made.append(_slice(name, _HOST, _ITERATIONS, iteration.sent, iteration.done, facts))
        for order in iteration.orders:
            made += _order_on_host(order, iteration, next(ids))
            for number, stream in enumerate(STREAMS):
                spans = [span for span in order.spans if span["stream"] == stream]
                made += _order_on_stream(order, iteration, spans, number + 1)
    return made


def _track_names(device):
    tracks = [(_HOST, _DECIDES, "planner decides"), (_HOST, _ITERATIONS, "iterations"), (_HOST, _ORDERS, "orders")]
    names = ["host cores" if stream == "host" else stream.replace("_", " ") for stream in STREAMS]
    tracks += [(_DEVICE, number, name) for number, name in enumerate(names, 1)]
    for process, name in ((_HOST, "host"), (_DEVICE, f"device {device}".strip())):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for process, track, name in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": track, "args": {"sort_index": track}}


def _order_on_host(order, iteration, number):
    """Orders overlap one another, so they are asynchronous events."""
    common = {"name": order.name, "cat": "order", "id": number, "pid": _HOST, "tid": _ORDERS}
    yield {**common, "ph": "b", "ts": _us(order.sent), "args": {"iteration": iteration.number, "bytes": order.link}}
    yield {**common, "ph": "e", "ts": _us(order.done)}


def _order_on_stream(order, iteration, spans, track):
    if not spans:
        return
    facts = {"iteration": iteration.number}
    yield _slice(order.name, _DEVICE, track, spans[0]["begin_s"], spans[-1]["end_s"], facts)
    for batch, group in itertools.groupby(spans, key=lambda span: None if _own(span) else span["mini_batch"]):
        group = list(group)
        if batch is not None:
            name = f"mini-batch {batch}"
            yield _slice(name, _DEVICE, track, group[0]["begin_s"], group[-1]["end_s"], {"layer": order.name})
        for span in group:
            yield _piece(span, track)


def _own(span):
    """Whether an operation belongs to no single mini-batch: weights, tables, and work on the rows of several together."""
    return span["kind"] not in _OF_A_MINI_BATCH


def _piece(span, track):
    name = _NAMES.get(span["kind"], span["kind"])
    if span["kind"] == "Weights":
        name = f"W layer {span['layer']} piece {span['piece']}"
    facts = {}
    if span.get("bytes"):
        seconds = span["end_s"] - span["begin_s"]
        facts = {"bytes": span["bytes"], "GB/s": round(span["bytes"] / seconds * 1e-9, 2) if seconds > 0 else None}
    return _slice(name, _DEVICE, track, span["begin_s"], span["end_s"], facts)


def _slice(name, process, track, begin, end, facts=None):
    begin, end = _us(begin), _us(end)
    slice_ = {"ph": "X", "name": name, "pid": process, "tid": track, "ts": begin, "dur": round(end - begin, 3)}
    return {**slice_, "args": facts} if facts else slice_


def _us(seconds):
    return round(seconds * 1e6, 3)
