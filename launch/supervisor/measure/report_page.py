"""A report as one HTML page: tables made here, curves drawn by launch/report/page.js from the same facts."""

import base64
import gzip
import html
import json
import time
from pathlib import Path

from ..shared.build_facts import version
from ..shared.paths import ROOT
from ..shared.quantities import bytes_text, counted, duration, rate_text
from ..shared.trouble import shown
from .record import CLASSES

_PARTS = ROOT / "launch" / "report"
# No request of any kind; `img-src` is for Plotly's "download as a picture".
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
)
# The live page asks the server that it came from for new figures.
LIVE_POLICY = _POLICY + "; connect-src 'self'"
_CLASS_WORDS = {"weights": "weights, to the device", "kv": "KV blocks, to the device", "act": "ACT blocks, to the device", "stores": "new rows, to the host"}


def page(facts, library):
    """`library`: the text of plotly.min.js, as bytes."""
    title = f"poise report: {Path(facts['run']['path']).name}"
    return _document(title, _POLICY, _body(facts, title), facts, library)


def live_page(name, library):
    """The page of a run that goes on. It fills itself with `live_parts`, and with the facts that go with them."""
    title = f"poise: {Path(name).name}"
    body = [f"<h1>{_text(title)}</h1>", '<div id="live" data-from="report.json"></div>', *_curves({"events": [], "has_reports": True}, live=True)]
    body.append('<div id="live-tables"></div>')
    body.append(f"<footer>poise {_text(version())}; curves: Plotly.js (MIT licence)</footer>")
    return _document(title, LIVE_POLICY, body, None, library)


def live_parts(facts):
    """What changes in a live page, above and below its curves."""
    status = facts["status"]
    if not status:
        return '<p class="note">nothing is known yet: the model is being loaded</p>', ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["run"]["since"]))
    parts = [status.get("state", ""), f"on {status.get('device', '')}", f"policy {status.get('policy', '')}", f"curves since {since}"]
    numbers = (("running", "requests at work"), ("waiting", "requests that wait"), ("requests", "requests so far"), ("done", "done"))
    numbers += (("errors", "of them errors"), ("generated_tokens", "generated tokens"), ("iteration", "iterations"), ("preemptions", "times blocks were given back"))
    head = [f'<p class="dim">{_text(" · ".join(parts))}</p>', _tile_row((f"{status.get(name, 0):,}", words) for name, words in numbers)]
    words = (status.get("balance") or {}).get("words")
    head += [f"<p>{_text(words)}</p>"] if words else []
    tables = [*_bytes(facts), *_predicted(status), *_events(facts["log"], "Seconds since the curves begin.")]
    rows = [(f"{pool['kind'].upper()}, {pool['place']}", f"{pool['total']:,}", f"{pool['taken']:,}") for pool in status.get("pools", [])]
    if rows:
        tables.insert(0, "<section><h2>Blocks of context</h2>" + _table(("what", "blocks", "taken"), rows) + "</section>")
    return "\n".join(head), "\n".join(tables)


def _document(title, policy, body, facts, library):
    packed = base64.b64encode(gzip.compress(library, 9, mtime=0)).decode()
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{_text(title)}</title><link rel="icon" href="data:,">',
            f"<style>\n{(_PARTS / 'page.css').read_text()}</style></head><body>",
            *body,
            f'<script type="application/json" id="facts">{_embedded(facts)}</script>',
            f'<script type="text/plain" id="library">{packed}</script>',
            f"<script>\n{(_PARTS / 'page.js').read_text()}</script>",
            "</body></html>\n",
        ]
    )


def _embedded(facts):
    """JSON that is at home in a script element: nothing in it looks like an end tag or a comment."""
    text = json.dumps(facts, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(words):
    return html.escape(shown(words))


def _body(facts, title):
    run, log = facts["run"], facts["log"]
    yield f"<h1>{_text(title)}</h1>"
    yield f'<p class="dim">{_text(_subtitle(run, facts["status"] or {}, log))}</p>'
    for note in facts["notes"]:
        yield f'<p class="note">{_text(note)}</p>'
    yield _tiles(facts)
    words = (log or {}).get("has_reports") and log["balance"].get("words") or ((facts["status"] or {}).get("balance") or {}).get("words")
    if words:
        yield f"<p>{_text(words)}</p>"
    yield "<noscript><p>The curves need scripts; the tables do not.</p></noscript>"
    if log:
        yield from _curves(log)
    yield from _bytes(facts)
    yield from _memory(facts["memory"])
    yield from _predicted(facts["status"] or {})
    yield from _requests(facts)
    yield from _events(log)
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    yield f"<footer>{_text(run['path'])}<br>made {made} by poise {_text(version())}; curves: Plotly.js (MIT licence)</footer>"


def _subtitle(run, status, log):
    header = (log or {}).get("header", {})
    parts = [run["state"]]
    parts += [f"{name} {run[name]}" for name in ("model", "input", "output", "url") if name in run]
    parts += [f"on {status['device']}"] if status.get("device") else []
    parts += [f"policy {status['policy']}"] if status.get("policy") else []
    parts += [f"{header['dtype']}, context {header.get('kv_cache_dtype', 'auto')}"] if header.get("dtype") else []
    if isinstance(run.get("began"), (int, float)):
        parts.append(f"began {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(run['began']))}")
    return " · ".join(parts)


def _tiles(facts):
    results, status, log = facts["results"] or {}, facts["status"] or {}, facts["log"]
    tiles = []
    if results:
        tiles += [(f"{results['answers']:,}", "answers"), (f"{results['errors']:,}", "errors")]
        tiles += [(f"{results['prompt_tokens']:,}", "prompt tokens"), (f"{results['completion_tokens']:,}", "generated tokens")]
    if status.get("elapsed_seconds"):
        tiles += [(duration(status["elapsed_seconds"]), "of the last attempt"), (rate_text(status.get("tokens_per_second", 0)), "tokens/s of it")]
        tiles.append((f"{status.get('preemptions', 0):,}", "times blocks were given back"))
    if log:
        tiles.append((f"{log['totals'].get('iterations', 0):,}", "iterations in the log"))
        tiles.append((f"{sum(event['kind'] == 'restart' for event in log['events']):,}", "restarts"))
    return _tile_row(tiles)


def _tile_row(tiles):
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{_text(b)}</b><span>{_text(words)}</span></div>' for b, words in tiles) + "</div>"


def _chart(name, title, about, low=False):
    return (
        f'<section><h2>{_text(title)}</h2><p class="about">{_text(about)}</p><div class="chart{" low" if low else ""}" id="{name}"></div></section>'
    )


def _curves(log, live=False):
    marks = " Dotted lines: another policy, or another process." if any(event["kind"] != "start" for event in log["events"]) else ""
    yield _chart("throughput", "Throughput", f"Tokens that were generated, and rows that were computed, a second.{marks}")
    yield '<div class="pair">'
    if log["has_reports"]:
        yield _chart("busy", "Who was busy", "Shares of the time in which the link and the device worked.")
        yield _chart("stalls", "What computation waited for", "Computing, and waiting for weights, for blocks, for room for new rows. The rest is time without an order.")
        yield _chart("bytes", "What crossed the link", "Weights, KV and ACT go to the device, new rows to the host.")
    about = "Requests that are at work, and those that wait for their turn." if live else "Requests with rows in an iteration."
    yield _chart("requests", "Requests at a time", about)
    yield "</div>"


def _table(head, rows, words=()):
    """`words`: the columns that hold text."""
    cells = lambda row: "".join(f'<td{" class=words" if i in words else ""}>{_cell(value)}</td>' for i, value in enumerate(row))  # noqa: E731
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{_text(name)}</th>" for name in head)}</tr>{body}</table></div>'


def _cell(value):
    return f"<bdi>{_text(value)}</bdi>"


def _bytes(facts):
    log = facts["log"]
    crossed = {name: log["totals"].get(name, 0) for name in CLASSES} if log and log["has_reports"] and "totals" in log else (facts["status"] or {}).get("link_bytes")
    if not crossed:
        return
    whole = sum(crossed.get(name, 0) for name in CLASSES)
    tokens = (log or {}).get("totals", {}).get("tokens") or (facts["status"] or {}).get("generated_tokens")
    rows = []
    for name in CLASSES:
        amount = crossed.get(name, 0)
        rows.append((_CLASS_WORDS[name], bytes_text(amount), f"{amount:,}", f"{amount / whole:.1%}" if whole else "", f"{amount / tokens:,.0f}" if tokens else ""))
    for name, words in (("host_read", "KV rows that host cores read where they lie"), ("host_rows", "their output, to the device")):
        amount = (log or {}).get("totals", {}).get(name, 0)
        if amount:
            rows.append((words, bytes_text(amount), f"{amount:,}", "", f"{amount / tokens:,.0f}" if tokens else ""))
    yield "<section><h2>Where each byte went</h2>"
    yield _table(("what", "size", "bytes", "share", "bytes a generated token"), rows) + "</section>"


def _memory(memory):
    if not memory:
        return
    yield '<div class="pair">'
    for place, words in (("host", "Host memory"), ("device", "Device memory")):
        parts = memory[place]
        cap = f" The cap is {bytes_text(memory['device_cap'])}." if place == "device" else ""
        yield f'<section><h2>{words}</h2><p class="about">As it stands at the end: {bytes_text(sum(parts.values()))} in all.{cap}</p>'
        yield f'<div class="chart low" id="memory-{place}"></div>'
        yield _table(("what", "size", "bytes"), [(name, bytes_text(amount), f"{amount:,}") for name, amount in parts.items()]) + "</section>"
    yield "</div>"


def _predicted(status):
    predicted, measured = status.get("predicted"), status.get("measured")
    yield "<section><h2>Predicted beside measured</h2>"
    if not isinstance(predicted, dict) or not isinstance(measured, dict) or not status.get("decode_iterations"):
        yield '<p class="about">This run had no costs to predict by: a profile (poise profile) or --machine gives it some.</p></section>'
        return
    rows = []
    for name, words, shown_as in (
        ("decode_iteration_seconds", "a decoding iteration", duration),
        ("tokens_per_second", "tokens a second", rate_text),
    ):
        off = f"{predicted[name] / measured[name] - 1:+.1%}" if measured.get(name) else ""
        rows.append((words, shown_as(predicted[name]), shown_as(measured[name]), off))
    yield _table(("what", "predicted", "measured", "off by"), rows)
    yield f'<p class="about">Of {counted(status["decode_iterations"], "decoding iteration")}.</p></section>'


def _requests(facts):
    results, log = facts["results"], facts["log"]
    yield '<div class="pair">'
    if results and results["prompts"].get("requests"):
        yield _chart("prompts", "Lengths of prompts", "Tokens of each prompt that was answered.", low=True)
        yield _chart("completions", "Lengths of answers", "Tokens that were generated for each request.", low=True)
    if log and log["waited"].get("requests"):
        yield _chart("waited", "Waits", "Seconds from the first iteration until a request's first rows were ordered.", low=True)
        yield _chart("worked", "Times at work", "Seconds from a request's first rows to its last token.", low=True)
    yield "</div>"
    if results and (results["ends"] or results["codes"]):
        rows = [(f"ended by {name}", f"{count:,}") for name, count in sorted(results["ends"].items())]
        rows += [(f"error {name}", f"{count:,}") for name, count in sorted(results["codes"].items())]
        yield "<section><h2>How requests ended</h2>" + _table(("end", "answers"), rows) + "</section>"
    if log and log["slowest"]:
        head = ("custom_id", "line", "waited", "at work", "prompt tokens", "generated", "rows", "ended by")
        rows = [
            (line.get("custom_id") or "", line["request"], duration(line["waited_s"]), duration(line["worked_s"]), line["prompt_tokens"])
            + (line["tokens"], line["rows"], line.get("ended") or "not yet")
            for line in log["slowest"]
        ]
        about = "Those with the longest times at work. More rows than tokens of prompt and answer: blocks were given back and computed again."
        yield f'<section><h2>The slowest requests</h2><p class="about">{about}</p>{_table(head, rows)}</section>'


def _events(log, about="Seconds since the first iteration in the log; time between two attempts does not count."):
    if log and log["events"]:
        rows = [(event["kind"], f"{event['at']:.2f} s", event["words"]) for event in log["events"]]
        yield f'<section><h2>Policies and restarts</h2><p class="about">{about}</p>{_table(("what", "at", ""), rows, words=(0, 2))}</section>'
