#!/usr/bin/env python3
"""What clients do at length, with programs that no test run installs (apt-get install prometheus chromium): a batch of 5,000 lines whose
server is killed five times; a Prometheus that scrapes a server; a report and a server's page in a browser. By hand:

    tests/e2e/by_hand/doors_at_length.py [NAME …]
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "clients")]
import harness  # noqa: E402
from harness import expect, expect_equal, request, test, wait_until  # noqa: E402
from served import KEY, Server, children_of, ended, lines_of, order, serving, upload, wait_for, with_clients  # noqa: E402

LINES = 5000
KILLS = 5


@test
def a_batch_of_five_thousand_lines_is_a_run_after_five_kills(workspace):
    lines = [request(f"r{n}", f"where is Jana? {n}", temperature=1, max_tokens=8) for n in range(LINES)]
    options = ("--served-model-name", "m")
    workspace.run(workspace.write_requests("batch.jsonl", lines), workspace / "of_run.jsonl", *options).expect(0)
    wanted = harness.read_results(workspace / "of_run.jsonl")
    server = Server(workspace, *options)
    batch = order(server.client, upload(server.client, lines))
    for kill in range(KILLS):
        wait_for(server.client, batch, lambda now: now.request_counts.completed >= (kill + 1) * LINES // (KILLS + 2), 120)
        for pid in [server.process.pid, *children_of(server.process.pid)]:
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
        server = Server(workspace, *options)
        print(f"killed at {server.client.batches.retrieve(batch.id).request_counts.completed} lines", flush=True)
    batch = ended(server.client, batch, 300)
    expect_equal((batch.status, batch.request_counts.completed), ("completed", LINES), "the end")
    got = lines_of(server.client, batch.output_file_id)  # no line twice
    choices = {name: line["response"]["body"]["choices"] for name, line in got.items()}
    expect_equal(choices, {name: line["response"]["body"]["choices"] for name, line in wanted.items()}, "answers")
    server.end().expect(0)


def needed(*names):
    found = next((path for path in map(shutil.which, names) if path), None)
    expect(found, f"{names[0]} is missing: apt-get install {names[0]}")
    return found


@test
def a_prometheus_that_scrapes_a_server_counts_what_its_results_say(workspace):
    prometheus = needed("prometheus")
    with serving(workspace, "--served-model-name", "m") as server:
        where = urllib.parse.urlsplit(server.url)
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "poise", "authorization": {"credentials": KEY}, "static_configs": [{"targets": [where.netloc]}]}],
        }
        (workspace / "prometheus.yml").write_text(json.dumps(config))  # YAML, too
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        words = [prometheus, f"--config.file={workspace / 'prometheus.yml'}", f"--storage.tsdb.path={workspace / 'tsdb'}", f"--web.listen-address={address}"]
        scraper = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            def sum_of(name):
                query = urllib.parse.urlencode({"query": f"sum({{__name__='{name}'}})"})
                try:
                    answer = json.load(urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=10))
                except OSError:
                    return None
                return float(answer["data"]["result"][0]["value"][1]) if answer["data"]["result"] else None

            wait_until(lambda: sum_of("up") == 1, "Prometheus to see the server", 60)
            lines = [request(f"r{n}", f"where is Jana? {n}", max_tokens=5 + n % 30) for n in range(300)]
            batch = ended(server.client, order(server.client, upload(server.client, lines)), 120)
            usages = [line["response"]["body"]["usage"] for line in lines_of(server.client, batch.output_file_id).values()]
            totals = {
                "vllm:prompt_tokens_total": sum(usage["prompt_tokens"] for usage in usages),
                "vllm:generation_tokens_total": sum(usage["completion_tokens"] for usage in usages),
                "vllm:request_success_total": len(usages),
            }
            expect_equal(len(usages), 300, "answers")
            for name, total in totals.items():
                wait_until(lambda: sum_of(name) == total, f"{name} to be {total}, not {sum_of(name)}", 15)
        finally:
            scraper.terminate()
            scraper.wait()


def seen(workspace, url, width, log):
    """A screenshot, and what the browser said meanwhile: lines of its console, and addresses that it asked for."""
    chromium = needed("chromium")
    picture = workspace / f"{log}-{width}.png"
    frame = workspace / "frame.html"  # a window has a least width of its own; a frame has not
    frame.write_text(f'<body style="margin:0"><iframe src="{url}" style="border:0;width:{width}px;height:2400px"></iframe>')
    words = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-component-update", "--disable-background-networking",
             "--no-first-run", f"--user-data-dir={workspace / 'browser'}", f"--window-size={max(width, 800)},2400", "--enable-logging=stderr", "--v=0",
             f"--log-net-log={workspace / 'net.json'}", "--virtual-time-budget=8000", f"--screenshot={picture}", frame.as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    expect(picture.exists(), done.stderr)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    net = (workspace / "net.json").read_text(errors="replace")
    asked = {piece.split('"')[0] for piece in net.split('"url":"')[1:]}
    kept = os.environ.get("POISE_PICTURES")
    if kept:
        shutil.copy(picture, kept)
    own = ("google.com", "gvt1.com", "googleapis.com")  # whom the browser asks by itself, whatever the page
    hosts = {one: urllib.parse.urlsplit(one).hostname or "" for one in asked if one.startswith(("http", "ws"))}
    return console, {one for one, host in hosts.items() if not host.endswith(own)}


@test
def a_report_in_a_browser_says_nothing_wrong_and_asks_no_network(workspace):
    lines = workspace.write_requests("requests.jsonl", [request(f"r{n}", "Rosa lives in " * 12, max_tokens=3 + n % 20) for n in range(60)])
    workspace.run(lines, workspace / "out.jsonl", "--machine", "l4-pcie4").expect(0)
    workspace.poise("report", workspace / "out.jsonl.poise", "-o", workspace / "report.html").expect(0)
    for width in (1280, 390):
        console, asked = seen(workspace, (workspace / "report.html").as_uri(), width, "report")
        expect_equal((console, asked), ([], set()), f"the report at {width} pixels")


@test
def the_page_of_a_server_in_a_browser_asks_its_own_server_alone(workspace):
    with serving(workspace, "--served-model-name", "m", key=None) as server:
        began = time.monotonic()
        server.client.completions.create(model="m", prompt="where is Jana?", max_tokens=20)
        for width in (1280, 390):
            console, asked = seen(workspace, server.url + "/", width, "page")
            expect_equal(console, [], f"the page at {width} pixels")
            strangers = {one for one in asked if not one.startswith(server.url)}
            expect(not strangers, f"{strangers} were asked for, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    with_clients()
    raise SystemExit(harness.main())
