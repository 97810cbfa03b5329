"""A run's order log as `poise-planner inspect --json` prints it, in Python types."""

import json
import os
import struct
import subprocess
from dataclasses import dataclass, field

from ..shared.files import segments_of
from ..shared.paths import PLANNER, program
from ..shared.trouble import Refusal, shown

STREAMS = ("copy_in", "compute", "copy_out", "host")
CLASSES = ("weights", "kv", "act", "stores")


@dataclass
class Order:
    """A layer order: when it was sent and done, and what the executor reported about it. Times are seconds of the log."""

    name: str
    stage: int
    sent: float
    done: float
    busy: dict  # seconds by stream
    wait: dict
    rested: float  # how long the device was idle before it; of an iteration's first order only
    link: dict  # bytes by class
    spans: list  # of a traced run: dicts with kind, stream, mini_batch, begin_s, end_s


@dataclass
class Iteration:
    number: int
    sent: float
    done: float
    sequences: int
    rows: int
    context: int  # tokens already in blocks
    samples: int
    decode: bool  # every sequence generates, none is in its prompt (recomputed rows do not count)
    orders: list = field(default_factory=list)

    def total(self, what, name):
        return sum(getattr(order, what).get(name, 0) for order in self.orders)


@dataclass
class Record:
    header: dict
    configure: dict
    ready: dict
    iterations: list  # those that were finished

    @property
    def link_bytes_per_s(self):
        """The link's speed as measured by the device; 0 if it is unknown."""
        return self.ready.get("link_bytes_per_s", 0)

    @property
    def traced(self):
        return any(order.spans for iteration in self.iterations for order in iteration.orders)


def header_of(log):
    """The header of an order log (common/order_log.h)."""
    try:
        with open(log, "rb") as file:
            magic, _, size = struct.unpack("<8sII", file.read(16))
            header = json.loads(file.read(min(size, 1 << 20)))
    except OSError as problem:
        raise Refusal(f"{shown(log)} cannot be read: {problem.strerror}") from None
    except (struct.error, ValueError, RecursionError):
        magic, header = b"", None
    if magic != b"POISELOG" or not isinstance(header, dict):
        raise Refusal(f"{shown(log)} is not an order log of this version of poise")
    return header


def keeps_every_order(log):
    """Whether `log` has all orders of its run, and the reports on them (common/files/order_log_segments.h)."""
    headers = [header_of(file) for file in segments_of(log) if os.path.exists(file)]  # a run that goes on removes the oldest
    if not headers:
        return False
    return headers[0].get("segment", 1) == 1 and all(header.get("keeps", "full") == "full" for header in headers)


def read_record(log):
    """Reads `log`, an orders.log. Leaves out iterations that were not finished."""
    command = [str(program(PLANNER)), "inspect", str(log), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        record = read_lines(process.stdout)
        complaint = process.stderr.read().strip()
    if process.returncode:
        raise Refusal(f"{shown(log)} cannot be read: {complaint or process.returncode}")
    return record


def read_lines(lines):
    """From the JSON lines that inspect prints."""
    record = Record({}, {}, {}, [])
    for text in lines:
        line = json.loads(text)
        kind = line.get("type")
        if kind is None:
            record.header = line
        elif kind == "configure":
            record.configure = line
        elif kind == "ready":
            record.ready = line
        elif kind == "iteration":
            record.iterations.append(_iteration(line))
        elif kind == "layer" and "done_s" in line:
            record.iterations[-1].orders.append(_order(line))
    record.iterations = [one for one in record.iterations if one.done is not None]
    return record


def _iteration(line):
    batches = line["mini_batches"]
    sequences = [sequence for batch in batches for sequence in batch["sequences"]]
    return Iteration(
        number=line["iteration"],
        sent=line["sent_s"],
        done=line.get("done_s"),
        sequences=len(sequences),
        rows=sum(batch["rows"] for batch in batches),
        context=sum(sequence["context"] for sequence in sequences),
        samples=sum(batch["samples"] for batch in batches),
        decode=line["generates_only"],
    )


def _order(line):
    reports = {name: line.get(name) or {} for name in STREAMS}
    return Order(
        name=line["name"],
        stage=line["stage"],
        sent=line["sent_s"],
        done=line["done_s"],
        busy={name: report.get("busy_ms", 0) * 1e-3 for name, report in reports.items()},
        wait={name: report.get("wait_ms", 0) * 1e-3 for name, report in reports.items()},
        rested=line.get("rested_ms", 0) * 1e-3,
        link=line.get("link_bytes") or {},
        spans=line.get("spans", []),
    )
