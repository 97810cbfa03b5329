#!/usr/bin/env python3
"""Figures drawn from numbers: well-formed, in the axes, and the same each time. Pages of `poise report`: their figures are those of the
run's own records, and text from outside stays text.
"""

import fcntl
import importlib.util
import json
import re
import shutil
import xml.etree.ElementTree as xml
from collections import Counter
from html.parser import HTMLParser

from harness import ROOT, expect, expect_equal, main, request, test
from supervisor.measure.bins import Bins
from supervisor.measure.run_facts import _LogReading
from supervisor.measure.svg import Figure, page

SVG = "{http://www.w3.org/2000/svg}"


def circles(text):
    return [(float(c.get("cx")), float(c.get("cy"))) for c in xml.fromstring(text).iter(SVG + "circle")]


@test
def points_lie_in_proportion_to_their_numbers(_):
    (x0, y0), (x1, y1), (x2, y2) = circles(Figure("t").points("p", [(0, 0), (5, 1), (10, 4)]).svg())
    expect_equal(round((x2 - x0) / (x1 - x0), 2), 2.0, "across")
    expect_equal(round((y2 - y0) / (y1 - y0), 2), 4.0, "up")
    expect(y2 < y1 < y0, "more is higher up")


@test
def on_logarithmic_axes_equal_factors_are_equal_ways(_):
    (x0, y0), (x1, y1), (x2, y2) = circles(
        Figure("t", log_x=True, log_y=True).points("p", [(1, 0.001), (10, 0.1), (100, 10)]).svg()
    )
    expect_equal(round(x2 - x1, 1), round(x1 - x0, 1), "across")
    expect_equal(round(y2 - y1, 1), round(y1 - y0, 1), "up")


@test
def a_logarithmic_axis_refuses_zero(_):
    try:
        Figure("t", log_y=True).points("p", [(1, 0)])
    except ValueError as problem:
        expect("logarithmic" in str(problem), str(problem))
    else:
        expect(False, "0 was drawn on a logarithmic axis")


@test
def bars_are_as_high_as_their_numbers(_):
    text = Figure("t").bars("a", {"x": 2, "y": 4}).bars("b", {"x": 1}).svg()
    bars = [r for r in xml.fromstring(text).iter(SVG + "rect") if float(r.get("height").rstrip("%")) > 8 and r.get("x")]
    heights = [float(bar.get("height")) for bar in bars]
    expect_equal([round(height / heights[2], 2) for height in heights], [2.0, 4.0, 1.0], "heights")


@test
def any_words_make_a_well_formed_picture_and_always_the_same_one(_):
    def draw():
        figures = [Figure("a < b & \"c\"", "x", "y").line("<line>", [(1, 2), (3, -4)]) for _ in range(3)]
        return page([*figures, Figure("nothing to draw")], columns=2)

    xml.fromstring(draw())
    expect_equal(draw(), draw(), "a second drawing")


@test
def the_picture_in_the_readme_is_drawn_from_the_results_that_are_kept(_):
    spec = importlib.util.spec_from_file_location("draw_results", ROOT / "bench" / "draw_results.py")
    draw_results = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_results)
    kept = draw_results.RESULTS.with_suffix(".svg")
    expect(str(kept.relative_to(ROOT)) in (ROOT / "README.md").read_text(encoding="utf-8"), "the README does not show it")
    drawn = draw_results.drawing(json.loads(draw_results.RESULTS.read_text(encoding="utf-8")))
    expect_equal(drawn, kept.read_text(encoding="utf-8"), "run bench/draw_results.py")


# ---- reports

HOSTILE = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "--><!--", "&amp;\"'", "<b>" * 500, "\u202e\x1b[31m")


class Page(HTMLParser):
    """What a browser makes of a report: its elements, the cells of its tables, and its facts."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.rows, self.notes, self.scripts, self._open = Counter(), [], [], [], []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.facts = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attributes):
        self.elements[tag] += 1
        self._open.append((tag, dict(attributes).get("class")))
        for name, value in attributes:
            expect(not name.startswith("on") and name not in ("src", "action"), f"<{tag} {name}={value!r}>")
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1][0] == "script":
            self.scripts[-1] += data
        elif ("p", "note") in self._open:
            self.notes.append(data)
        elif self.rows and any(tag == "td" for tag, _ in self._open):
            self.rows[-1][-1] += data

    def row(self, first):
        return next(row for row in self.rows if row and row[0] == first)


def small_run(workspace, *options):
    """Costs are those of a machine: measuring them would take longer than the run."""
    asked = [request(name + str(i), "Rosa lives in " * 12, max_tokens=3 + i) for i, name in enumerate(HOSTILE)]
    asked.append(request("none", "Rosa", max_tokens=-1))
    prompts = workspace.write_requests("requests.jsonl", asked)
    workspace.run(prompts, workspace / "out.jsonl", "--max-num-seqs", "2", "--machine", "l4-pcie4", *options).expect(0)
    (workspace / "plotly.min.js").write_text("// in place of the library\n")
    return workspace / "out.jsonl.poise"


def report(workspace, run):
    """The page, and what was said on stderr."""
    ended = workspace.poise("report", run, "-o", workspace / "report.html", "--plotly", workspace / "plotly.min.js").expect(0)
    expect("report.html is written" in ended.out, ended.out)
    return Page(workspace / "report.html"), ended.lines()


@test
def a_report_says_what_the_runs_own_records_say(workspace):
    run = small_run(workspace, "--gpu-memory", "3MiB", "--gpu-blocks", "none", "--policy", "hybrid", "--act-share", "0.5")
    page, said = report(workspace, run)
    expect_equal((said, page.notes), ([], []), "complaints about a run that is whole")
    lines = [json.loads(line) for line in (workspace / "out.jsonl").read_text().splitlines()]
    answers = {int(line["id"][6:]): line for line in lines if line["response"]["status_code"] == 200}
    usage = Counter()
    for line in answers.values():
        usage.update({name: line["response"]["body"]["usage"][name] for name in ("prompt_tokens", "completion_tokens")})
    got, log, status = page.facts["results"], page.facts["log"], json.loads((run / "status.json").read_text())
    expect_equal((got["answers"], got["errors"]), (len(answers), len(lines) - len(answers)), "answers and errors")
    expect_equal((got["prompt_tokens"], got["completion_tokens"]), (usage["prompt_tokens"], usage["completion_tokens"]), "usage")
    expect_equal(sum(got["prompts"]["requests"]), len(answers), "lengths of prompts")
    expect_equal(log["totals"]["tokens"], usage["completion_tokens"], "tokens in the log")
    expect(abs(sum(log["series"]["tokens"]) - usage["completion_tokens"]) < 1e-3, "tokens of the curve")
    expect_equal(log["totals"]["iterations"], status["iteration"], "iterations")
    for name, words in (("weights", "weights, to the device"), ("kv", "KV blocks, to the device"), ("act", "ACT blocks, to the device"), ("stores", "new rows, to the host")):
        wanted = status["link_bytes"][name]
        expect_equal(page.row(words)[2], f"{wanted:,}", words)
        expect(abs(sum(log["series"][f"bytes_{name}"]) - wanted) <= 1e-5 * wanted, f"the curve of {name}")
        expect(wanted > 0, f"this run says nothing about {name}")
    whole = status["balance"]["whole"]
    for curve, time in (("link", "t_pcie"), ("compute", "t_compute"), ("back", "t_stores")):
        expect(abs(sum(log["series"][curve]) - whole[time]) <= 1e-3 * whole[time] + 1e-5, f"busy: {curve}")
    memory = page.facts["memory"]
    expect_equal(sum(memory["device"].values()), status["device_bytes"], "device memory")
    told = re.findall(r"^(?:ACT|KV) buffers +([0-9.]+) KiB", (run / "logs/planner.log").read_text(), re.MULTILINE)
    expect(abs(memory["device"]["load buffers"] / 1024 - sum(map(float, told))) < 0.2, f"load buffers: {memory['device']}, {told} KiB")
    expect_equal(sum(memory["host"].values()), status["host_weights_bytes"] + status["host_pool_bytes"], "host memory")
    expect_equal(status["host_weights_bytes"] >= (ROOT / "launch/demo/model/model.safetensors").stat().st_size // 2, True, "weights on the host")
    decode = page.row("a decoding iteration")
    off = status["predicted"]["decode_iteration_seconds"] / status["measured"]["decode_iteration_seconds"] - 1
    expect_equal(decode[3], f"{off:+.1%}", "predicted beside measured")
    expect_equal(len(log["slowest"]), len(answers), "requests")
    for line in log["slowest"]:
        body = answers[line["request"]]["response"]["body"]
        expect_equal((line["prompt_tokens"], line["tokens"]), tuple(body["usage"][n] for n in ("prompt_tokens", "completion_tokens")), "a request")
        expect(0 <= line["waited_s"] < line["waited_s"] + line["worked_s"] <= log["series"]["end"] + 1e-6, line)
    # Text from outside is text: no element is made of it, whatever it says, and it can be read in the tables.
    expect_equal((page.elements["script"], page.elements["img"], page.elements["b"]), (3, 0, page.text.count("<div class=\"tile\">")), "elements")
    cells = {cell for row in page.rows for cell in row}
    expect("<" not in page.scripts[0] and page.scripts[0].endswith("}"), "facts that could end their element")
    for i, name in enumerate(HOSTILE[:4]):
        expect(name + str(i) in cells, f"{name}{i} is not in the tables")
    expect("\\u202e\\x1b[31m5" in cells, "control characters are not escaped")
    expect(all(len(cell) < 200 for cell in cells), "a long custom_id is not shortened")
    expect("default-src 'none'" in page.text and "http:" not in page.text and "https:" not in page.text, "something to ask a network for")


@test
def what_a_report_lacks_is_said_in_a_line(workspace):
    run = small_run(workspace)
    log = (run / "orders.log").read_bytes()

    def with_(change):
        copy = workspace / "copy"
        shutil.copytree(run, copy)
        change(copy)
        page, said = report(workspace, copy)
        shutil.rmtree(copy)
        expect_equal([line.removeprefix("poise: ") for line in said], page.notes, "stderr and page say the same")
        return page, said

    def damaged(copy):
        (copy / "orders.log").write_bytes(log[: len(log) // 2] + bytes([log[len(log) // 2] ^ 1]) + log[len(log) // 2 + 1 :])

    page, said = with_(damaged)
    expect(len(said) == 1 and "cannot be read further" in said[0] and "orders.log" in said[0], said)
    expect(0 < page.facts["log"]["totals"]["iterations"], "what lies before the damage is shown")
    page, said = with_(lambda copy: (copy / "orders.log").unlink())
    expect(len(said) == 1 and "--orders-log off" in said[0] and page.facts["log"] is None, said)
    _, said = with_(lambda copy: (copy / "orders.log").write_bytes(b"no log"))
    expect(len(said) == 1 and "orders.log" in said[0], said)
    _, said = with_(lambda copy: (copy / "status.json").write_text("{"))
    expect(len(said) == 1 and "status.json" in said[0], said)
    for text in ('{"blocks": 3, "host_pool_bytes": "x"}', '{"predicted": [1], "balance": {"words": 5}}', '{"policy_answers": 7, "iteration": {}, "device": []}'):
        page, said = with_(lambda copy: (copy / "status.json").write_text(text))
        expect(len(said) == 1 and "status.json" in said[0] or page.facts["status"], f"{text}: {said}")
    # A run that goes on: its lock is held, its results are not published, the last line of each file is being written.
    def going_on(copy):
        (copy / "results.jsonl.partial").write_bytes((workspace / "out.jsonl").read_bytes()[:-40])
        (copy / "orders.log").write_bytes(log[:-100])
        held.append(open(copy / "run.lock"))
        fcntl.flock(held[0], fcntl.LOCK_EX)

    held = []
    page, said = with_(going_on)
    held[0].close()
    expect(len(said) == 1 and "goes on" in said[0], said)
    expect_equal((page.facts["run"]["state"], page.facts["results"]["answers"]), ("running", len(HOSTILE) - 1), "so far")
    # A results file that somebody has edited since.
    text = (workspace / "out.jsonl").read_text()
    wrong = ["[]", "{", "\xff", '{"id": "poise-1"}'] + [re.sub(r'"prompt_tokens":\d+', f'"prompt_tokens":{n}', text.splitlines()[-1]) for n in ("1e999", "-1", '"x"')]
    (workspace / "out.jsonl").write_text(text + "\n".join(wrong) + "\n")
    page, said = report(workspace, run)
    expect(len(said) == 1 and f"{len(wrong)} lines are no results" in said[0], said)
    expect_equal(page.facts["results"]["answers"], len(HOSTILE), "answers beside lines that are none")
    (workspace / "out.jsonl").unlink()
    page, said = report(workspace, run)
    expect(len(said) == 1 and "out.jsonl" in said[0] and page.facts["results"] is None, said)
    workspace.poise("report", workspace / "none").expect(2, "no such directory, so no run")
    workspace.poise("report", workspace.folder).expect(2, "holds no run")
    workspace.poise("report", run, "-o", workspace / "none" / "r.html").expect(73, "name a file")
    node = workspace / "full"
    node.symlink_to("/dev/full")
    workspace.poise("report", run, "-o", node, "--plotly", workspace / "plotly.min.js").expect(73, "No space left")
    expect(node.is_char_device(), "a report took the place of a device")
    workspace.poise("report", run, "--plotly", workspace / "none.js").expect(2, "--plotly")


@test
def amounts_in_bins_are_kept_while_the_bins_grow(workspace):
    bins, whole = Bins(0.01, most=8), Counter()
    end = 0.0
    for _ in range(200):
        begin, end = end, end + workspace.random.expovariate(5)
        amounts = {name: workspace.random.random() for name in workspace.random.sample("abc", 2)}
        bins.spread(begin, end, amounts)
        whole.update(amounts)
    rows = bins.rows()
    expect_equal({len(sums) for sums in rows.values()}, {int(end / bins.width) + 1}, "bins")
    expect(4 <= len(rows["a"]) <= 8, f"{len(rows['a'])} bins")
    for name, sums in rows.items():
        expect(abs(sum(sums) - whole[name]) < 1e-4 * whole[name], f"{name}: {sum(sums)} instead of {whole[name]}")


@test
def policies_and_restarts_are_events_at_their_times(_):
    reading = _LogReading()
    policy = {"type": "policy", "from_iteration": 4, "act_blocks": 0, "kv_blocks": 1}
    for line in (
        {**policy, "policy": "kv-only", "sent_s": 1.0}, {"type": "successor", "of": "gpu_executor", "time_s": 2.0},
        {**policy, "policy": "kv-only", "sent_s": 2.5}, {**policy, "policy": "act-only", "sent_s": 3.0},
        {"type": "successor", "of": "attempt", "time_s": 4.0},
    ):  # fmt: skip
        reading.take(line)
    got = [(event["at"], event["kind"], event["words"]) for event in reading.events]
    wanted = [(1.0, "start", "with kv-only"), (2.0, "restart", "another gpu_executor")]
    wanted += [(3.0, "policy", "act-only instead of kv-only, from iteration 4 on"), (4.0, "restart", "another attempt (--resume)")]
    expect_equal(got, wanted, "events")


if __name__ == "__main__":
    raise SystemExit(main())
