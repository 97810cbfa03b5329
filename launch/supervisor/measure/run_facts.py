"""What a report says about a run: read from its status, its log of orders and its results, in memory that does not grow with them
(but for two numbers a request). What is missing or damaged is said in `notes`; the rest is reported.
"""

import heapq
import json
import subprocess
import tempfile
from collections import Counter

from ..lifecycle.children import own_sentence
from ..shared.files import segments_of
from ..shared.paths import PLANNER, program
from ..shared.quantities import counted
from ..shared.trouble import Refusal, shown
from .bins import Bins
from .record import CLASSES

_BLOCK_TOKENS = 16
_SLOWEST = 15
_MOST_EVENTS = 200
_LONGEST_ID = 80
_MOST_TOKENS = 1 << 31
_LONGEST_LINE = 1 << 30  # as the planner's reader of results has it
WAITS = ("weights", "blocks", "rows", "host")  # host: for host cores that attend, where some do


def facts_of(directory, is_sound=True):
    """{"run", "status", "log", "results", "memory", "notes"} of a RunDirectory; parts that are not there are None. `is_sound`: whether
    status.json can be what a planner wrote."""
    notes = []
    lives = directory.lives()
    state = "running" if lives else directory.state()
    if lives:
        notes.append("the run goes on: this is how far it was when the report was made")
    status = directory.status() if is_sound else {}
    if not status:
        notes.append("status.json is missing or damaged: the report lacks what only it says, such as memory and predictions")
    log = _log(directory, notes)
    record = directory.record()
    results = None if "url" in record else _results(directory, state, log, notes)
    if "url" in record:
        state = "server" if lives else "server that has ended"
        notes.append("the answers of a server went to its clients: no lengths of prompts and answers")
    return {
        "run": {**_named({**record, **(record.get("named") or {})}, ("model", "input", "output", "device", "began", "url")), "state": state, "path": str(directory.path)},
        "status": status or None,
        "log": log,
        "results": results,
        "memory": _memory(status, log),
        "notes": notes,
    }


def _named(record, names):
    return {name: record[name] for name in names if record.get(name) is not None}


# ---- the log of orders


class _LogReading:
    """Takes the lines of `inspect --json --brief`, one after the other."""

    def __init__(self):
        self.header, self.configure, self.ready, self.balance = {}, {}, {}, {}
        self.series = Bins(1e-3)
        self.waited, self.worked = Bins(1e-3, 60), Bins(1e-3, 60)
        self.totals = Counter()
        self.events = []
        self.left_out = self.without_reports = 0
        self.slowest = []  # a heap of (seconds at work, request, its line)
        self.began = None
        self._policy = None

    def take(self, line):
        kind = line.get("type")
        if kind is None:
            self.header = line
        elif kind in ("configure", "ready", "balance"):
            setattr(self, kind, line)
        elif kind == "iteration":
            self._take_iteration(line)
        elif kind == "request":
            self._take_request(line)
        elif kind == "successor":
            words = {"attempt": "another attempt (--resume)", "planner": "another planner", "gpu_executor": "another gpu_executor"}
            self._event(line["time_s"], "restart", words.get(line["of"], line["of"]))
        elif kind == "policy" and line["policy"] != self._policy:
            if self._policy is None:
                self._event(line["sent_s"], "start", f"with {line['policy']}")
            else:
                self._event(line["sent_s"], "policy", f"{line['policy']} instead of {self._policy}, from iteration {line['from_iteration']} on")
            self._policy = line["policy"]

    def _event(self, at, kind, words):
        if len(self.events) < _MOST_EVENTS:
            self.events.append({"at": at, "kind": kind, "words": words})
        else:
            self.left_out += 1

    def _take_iteration(self, line):
        begin, end, balance = line["sent_s"], line["done_s"], line.get("balance")
        if self.began is None:
            self.began = begin
        self.totals.update(iterations=1, tokens=line["tokens"], rows=line["rows"], mini_batches=line["mini_batches"])
        amounts = {"tokens": line["tokens"], "rows": line["rows"], "sequence_seconds": line["sequences"] * (end - begin), "seconds": end - begin}
        if balance:  # the log has reports on it
            self._take_balance(balance, amounts)
        else:
            self.without_reports += 1
        self.series.spread(begin - self.began, end - self.began, amounts)

    def _take_balance(self, balance, amounts):
        self.totals.update(balance["bytes"])
        self.totals.update({f"host_{name}": count for name, count in balance.get("host_bytes", {}).items()})
        amounts |= {"link": balance["t_pcie"], "compute": balance["t_compute"], "back": balance["t_stores"], "host": balance.get("t_host", 0)}
        amounts |= {f"waits_{name}": balance["compute_waits"].get(name, 0) for name in WAITS}
        amounts |= {f"bytes_{name}": balance["bytes"][name] for name in CLASSES}

    def _take_request(self, line):
        worked = line["done_s"] - line["first_s"]
        self.waited.add(line["first_s"] - self.began, {"requests": 1})
        self.worked.add(worked, {"requests": 1})
        self.totals["requests"] += 1
        entry = (worked, line["request"], {**line, "waited_s": line["first_s"] - self.began, "worked_s": worked})
        if len(self.slowest) < _SLOWEST:
            heapq.heappush(self.slowest, entry)
        else:
            heapq.heappushpop(self.slowest, entry)


def _log(directory, notes):
    path = directory.path / "orders.log"
    if not segments_of(path):
        notes.append("there is no orders.log (--orders-log off, or no order yet): no curves over time, no times of requests")
        return None
    reading = _LogReading()
    complaint = _read_lines(path, reading)
    if complaint:
        notes.append(f"the log of orders cannot be read further: {complaint}")
    if reading.began is None:
        if not complaint:
            notes.append("the log of orders has no finished iteration")
        return None
    first = reading.header
    if first.get("segment", 1) != 1:
        why = "it was damaged and set aside" if first.get("after_damage") else "--orders-log-size, or --orders-log off before"
        notes.append(f"the log of orders lacks its beginning ({why}): curves and times of requests begin where it does")
    has_reports = reading.without_reports < reading.totals["iterations"]
    if not has_reports:
        notes.append("the log of orders has tables alone (--orders-log tables): no busy shares, no bytes")
    elif reading.without_reports:
        without = counted(reading.without_reports, "iteration")
        notes.append(f"of {without} the log has tables alone (--orders-log tables): busy shares and bytes lack them")
    if reading.left_out:
        notes.append(f"{reading.left_out} more policies and restarts are not listed")
    slowest = [line for _, _, line in sorted(reading.slowest, key=lambda entry: entry[:2], reverse=True)]
    return {
        "header": _named(first, ("build", "dtype", "kv_cache_dtype", "layers", "kv_row_bytes", "act_row_bytes", "piece_bytes")),
        "configure": reading.configure,
        "ready": reading.ready,
        "balance": reading.balance,
        "totals": dict(reading.totals),
        "series": {"width": reading.series.width, "end": reading.series.end, **reading.series.rows()},
        "waited": {"width": reading.waited.width, **reading.waited.rows()},
        "worked": {"width": reading.worked.width, **reading.worked.rows()},
        "events": [{**event, "at": max(0.0, event["at"] - reading.began)} for event in reading.events],
        "slowest": slowest,
        "has_reports": has_reports,
    }


def _read_lines(path, reading):
    """Why the log could not be read to its end; '' if it could."""
    command = [str(program(PLANNER)), "inspect", str(path), "--json", "--brief"]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process:
            for text in process.stdout:
                reading.take(json.loads(text))
        said.seek(0)
        text = said.read(1 << 16)
    if not process.returncode:
        return ""
    return own_sentence(PLANNER, text) or f"poise-planner ended with {process.returncode}"


# ---- results


def _results(directory, state, log, notes):
    path = directory.published() if state == "finished" else directory.path / "results.jsonl.partial"
    try:
        opened = open(path, "rb")
    except OSError as problem:
        notes.append(f"{shown(path)}: {problem.strerror}: no results, no lengths")
        return None
    found = Counter()
    ends, codes = Counter(), Counter()
    prompts, answers = Bins(1, 60), Bins(1, 60)
    slow = {line["request"]: line for line in log["slowest"]} if log else {}
    with opened as file:
        while text := file.readline(_LONGEST_LINE):
            _take_result(text, found, (ends, codes), (prompts, answers), slow)
    if found["others"]:
        notes.append(f"{shown(path)}: {found['others']} lines are no results of this run")
    return {
        "path": str(path),
        **{name: found[name] for name in ("answers", "errors", "prompt_tokens", "completion_tokens")},
        "ends": dict(ends),
        "codes": dict(codes),
        "prompts": {"width": prompts.width, **prompts.rows()},
        "completions": {"width": answers.width, **answers.rows()},
    }


def _take_result(text, found, counters, lengths, slow):
    try:
        line = json.loads(text)
        number = int(line["id"].removeprefix("poise-"))
        status, body = line["response"]["status_code"], line["response"]["body"]
        if status != 200:
            found["errors"] += 1
            counters[1][str(body["error"]["code"])[:40]] += 1
        else:
            usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
            if any(not isinstance(tokens, int) or not 0 <= tokens < _MOST_TOKENS for tokens in usage.values()):
                raise ValueError("no planner counts so")
            for which, (name, tokens) in zip(lengths, usage.items()):
                which.add(tokens, {"requests": 1})
                found[name] += tokens
            found["answers"] += 1
            counters[0].update(str(choice["finish_reason"])[:40] for choice in body["choices"])
        if number in slow:
            slow[number]["custom_id"] = _short(line["custom_id"])
            slow[number]["ended"] = "error" if status != 200 else body["choices"][0]["finish_reason"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        found["others"] += text.endswith(b"\n")  # (a torn last line is one that is being written)


def _short(custom_id):
    return custom_id if custom_id is None or len(custom_id) <= _LONGEST_ID else custom_id[:_LONGEST_ID] + "…"


# ---- memory


def _memory(status, log):
    """What lies where, in bytes: {"host": {name: bytes}, "device": {name: bytes}, "device_cap"}; parts that are known."""
    if not status or not log or not log["configure"]:
        return None
    configure, header = log["configure"], log["header"]
    layers = header["layers"]
    block = {kind: header[f"{kind}_row_bytes"] * _BLOCK_TOKENS for kind in ("act", "kv")}
    host = {"weights": status.get("host_weights_bytes", 0)}
    blocks = status.get("blocks") or {}
    host |= {f"{kind.upper()} blocks": blocks.get(kind, 0) * block[kind] * layers for kind in block}
    host["pool, not in use by either kind"] = status.get("host_pool_bytes", 0) - host["ACT blocks"] - host["KV blocks"]
    device = {"resident weights": configure["resident_layers"] * sum(header.get("piece_bytes", []))}
    device |= {f"{kind.upper()} blocks": configure[f"gpu_{kind}_blocks"] * block[kind] * layers for kind in block}
    device["load buffers"] = 2 * sum(configure[f"{kind}_slots"] * block[kind] for kind in block)
    whole = log["ready"].get("device_bytes", 0)
    device["embeddings, rows, streamed weights, tables"] = whole - sum(device.values())
    return {
        "host": {name: amount for name, amount in host.items() if amount > 0},
        "device": {name: amount for name, amount in device.items() if amount > 0},
        "device_cap": configure["gpu_memory"],
        "free_blocks": blocks.get("free"),
    }


def require_something(facts):
    """Refuses a run of which there is nothing to report yet."""
    if facts["status"] is None and facts["log"] is None and facts["results"] is None:
        raise Refusal(f"{shown(facts['run']['path'])}: nothing to report: no status, no orders and no results can be read")
