#!/usr/bin/env python3
"""What HTTP costs: `poise serve` beside `poise run`, on the demo model unless --model names another. Needs no package.

    bench/serving.py [--model DIR] [--clients N] [--lines N] [--disturbed SECONDS] [--only PART] [--threads N] [--json]

It starts a server and measures, one after the other (--only: one of them):
  clients   N connections at once, each with one request: errors, seconds
  front     the front's share of a core at 2,000 requests a minute, for 30 s
  streams   100 streams open all the time: what the server adds to the first token of each, as it says itself (poise:first_token_added_seconds, without
            the planner's and the device's time), how many get less than 5 ms more, and the difference of what clients see and what the
            planner says, in which the clients of this process wait for each other, too
  disturbed with --disturbed: as many streams as clients, of which three in ten leave at some token, while planner and gpu_executor are killed
            by turns; every stream that ends must have the text of an undisturbed one
  batch     a file of N lines as a batch and as a run: tokens/s of both, and the most memory that the front had
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "launch"))
from supervisor.lifecycle import processes  # noqa: E402

POISE = ROOT / "launch" / "poise"
TICK = os.sysconf("SC_CLK_TCK")
NAMES = ("Jana", "Petr", "Eva", "Ivan", "Lena", "Olaf", "Mira", "Tomas")


class Server:
    def __init__(self, folder, model, *options):
        self.run = folder / "serve"
        words = [POISE, "serve", "--model", model, "--port", "0", "--run-dir", self.run, "--max-num-seqs", "256", *options]
        self.process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = self._until(lambda: json.loads((self.run / "run.json").read_text())["url"])
        self.host, self.port = re.fullmatch(r"http://([^:]+):(\d+)", self.url).groups()
        self._until(lambda: self.get("/health") is not None)
        self.front = self._until(self._find_front)

    def _until(self, what):
        until = time.monotonic() + 300
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError, KeyError):
                value = what()
                if value:
                    return value
            time.sleep(0.05)
        raise SystemExit("the server does not start")

    def _find_front(self):
        # The shell of `poise` becomes the supervisor, whose child the front is.
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if b"server/start.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        return None

    def get(self, path, body=None, headers=()):
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, dict(headers)), timeout=60) as answer:
            return answer.read() or b" "

    def cpu(self):
        fields = Path(f"/proc/{self.front}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def peak(self):
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.front}/status").read_text())[1]) * 1024

    def metric(self, name):
        page = self.get("/metrics").decode()
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    def histogram(self, name):
        """{bound: how many were at most so large}, with the sum and the count of all."""
        page = self.get("/metrics").decode()
        bounds = {}
        for bound, count in re.findall(rf'^{re.escape(name)}_bucket{{.*le="([^"]+)".*}} (\S+)$', page, re.MULTILINE):
            bounds[float(bound)] = bounds.get(float(bound), 0.0) + float(count)
        return {"sum": self.metric(f"{name}_sum"), "count": self.metric(f"{name}_count"), "bounds": bounds}

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


async def post(server, path, body):
    """(status, seconds until the first byte of the body, the whole body) of one request over a connection of its own."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        text = json.dumps(body).encode()
        began = time.monotonic()
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(text)) + text)
        head = await reader.readuntil(b"\r\n\r\n")
        first = await reader.read(1 << 16)
        seconds = time.monotonic() - began
        return int(head.split(b" ", 2)[1]), seconds, first + await reader.read()
    finally:
        writer.close()


def asked(number, tokens=16, **more):
    return {"prompt": f"where is {NAMES[number % len(NAMES)]}?", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def clients(server, count):
    began = time.monotonic()
    ended = await asyncio.gather(*(post(server, "/v1/completions", asked(n)) for n in range(count)), return_exceptions=True)
    errors = [one for one in ended if isinstance(one, BaseException) or one[0] != 200]
    return {"clients": count, "errors": len(errors), "seconds": time.monotonic() - began, "first_error": repr(errors[0])[:200] if errors else None}


async def front(server, a_minute=2000, seconds=30.0):
    before, began, tasks = server.cpu(), time.monotonic(), []
    for n in range(int(a_minute / 60 * seconds)):
        await asyncio.sleep(max(0.0, began + n * 60 / a_minute - time.monotonic()))
        tasks.append(asyncio.create_task(post(server, "/v1/completions", asked(n))))
    statuses = [one[0] for one in await asyncio.gather(*tasks)]
    took = time.monotonic() - began
    return {"requests_a_minute": len(tasks) / took * 60, "errors": sum(one != 200 for one in statuses), "share_of_a_core": (server.cpu() - before) / took}


async def streams(server, at_a_time=100, seconds=10.0):
    planners, added = "vllm:time_to_first_token_seconds", "poise:first_token_added_seconds"
    before, used, began = {name: server.histogram(name) for name in (planners, added)}, server.cpu(), time.monotonic()
    seen = []

    async def one(place):
        await asyncio.sleep(0.01 * (place % 50))  # they do not begin together
        while time.monotonic() < began + seconds:
            seen.append((await post(server, "/v1/completions", asked(place + len(seen), 32 + (place + len(seen)) % 64, stream=True)))[1])

    await asyncio.gather(*(one(place) for place in range(at_a_time)))
    took, used = time.monotonic() - began, server.cpu() - used
    grown = {name: _grown(before[name], server.histogram(name)) for name in before}
    mean = {name: one["sum"] / one["count"] for name, one in grown.items()}
    bounds = grown[added]["bounds"]
    client = sum(seen) / len(seen)
    return {
        "streams": at_a_time, "first_tokens": int(grown[added]["count"]), "added_seconds": mean[added],
        **{f"added_seconds_{share:.0%}": _within(bounds, share) for share in (0.5, 0.9, 0.99)},
        "share_below_5_ms": bounds[0.005] / grown[added]["count"], "client_first_token_seconds": client, "of_the_planner": mean[planners],
        "clients_see_added": client - mean[planners], "share_of_a_core": used / took,
    }  # fmt: skip


def _grown(before, after):
    bounds = {bound: count - before["bounds"].get(bound, 0.0) for bound, count in after["bounds"].items()}
    return {"sum": after["sum"] - before["sum"], "count": after["count"] - before["count"], "bounds": bounds}


def _within(bounds, share):
    """The smallest bound of the histogram below which so many are; None where only infinity is."""
    return next((bound for bound, count in sorted(bounds.items()) if count >= share * bounds[math.inf] and bound < math.inf), None)


class Disturbed:
    """Streams whose clients vanish, in a server whose processes die."""

    KINDS, KILL_EVERY, VANISH = 40, 30.0, 0.3

    def __init__(self, server, count, seconds):
        self._server, self._count, self._until = server, count, time.monotonic() + seconds
        self._random = random.Random(1)
        self.found = {"streams": count, "right": 0, "left": 0, "wrong": 0, "broken": 0, "kills": 0, "memory": []}

    async def run(self):
        texts = {kind: await self._text(kind) for kind in range(self.KINDS)}
        self._note_memory()
        await asyncio.gather(self._kill(), *(self._streams(texts) for _ in range(self._count)))
        self._note_memory()
        return self.found

    async def _streams(self, texts):
        while time.monotonic() < self._until:
            kind = self._random.randrange(self.KINDS)
            leaves = self._random.randrange(1, 40) if self._random.random() < self.VANISH else None
            try:
                text = await self._text(kind, leaves)
            except (OSError, asyncio.IncompleteReadError):
                self.found["broken"] += 1
                continue
            self.found["left" if text is None else "right" if text == texts[kind] else "wrong"] += 1

    async def _text(self, kind, leaves=None):
        """The text of a stream; None if its client has left before the end."""
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            body = json.dumps(asked(kind, 60 + kind, stream=True, temperature=0.9, seed=kind)).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"\r\n\r\n")
            text, events = "", 0
            while not (line := await reader.readline()).startswith(b"data: [DONE]"):
                if not line:
                    raise asyncio.IncompleteReadError(b"", None)
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    events += 1
                    if events == leaves:
                        return None
            return text
        finally:
            writer.close()

    async def _kill(self):
        names = itertools.cycle(("poise-planner", "poise-gpu-executor"))
        while self._until - time.monotonic() > self.KILL_EVERY / 2:
            await asyncio.sleep(min(self.KILL_EVERY, (self._until - time.monotonic()) / 3))
            name = next(names)
            for process in self._processes():
                if process.program == name:
                    os.kill(process.pid, signal.SIGKILL)
                    self.found["kills"] += 1

    def _processes(self):
        run_id = json.loads((self._server.run / "run.json").read_text())["run_id"]
        return [process for process in processes.running() if process.run_id == run_id]

    def _note_memory(self):
        pids = {process.program: process.pid for process in self._processes()} | {"front": self._server.front}
        sizes = {name: re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for name, pid in pids.items()}
        self.found["memory"].append({name: f"{int(size[1]) >> 10} MiB" for name, size in sizes.items() if size})


def upload(server, data):
    edge = b"edge-of-a-part"
    parts = [b'--%b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' % edge]
    parts.append(b'--%b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n%b\r\n--%b--\r\n' % (edge, data, edge))
    return json.loads(server.get("/v1/files", b"".join(parts), {"content-type": f"multipart/form-data; boundary={edge.decode()}"}))["id"]


def batch(server, folder, model, count):
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": asked(n, 16 + n % 32)} for n in range(count)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    tokens = sum(line["body"]["max_tokens"] for line in lines)
    file = upload(server, data)
    began, before = time.monotonic(), server.cpu()
    order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = json.loads(server.get("/v1/batches", json.dumps(order).encode()))
    while (now := json.loads(server.get(f"/v1/batches/{made['id']}")))["status"] not in ("completed", "failed"):
        time.sleep(0.2)
    as_batch, used = time.monotonic() - began, server.cpu() - before
    assert now["request_counts"]["completed"] == count, now
    peak = server.peak()
    server.end()
    (folder / "in.jsonl").write_bytes(data)
    words = [POISE, "run", "--model", model, "-i", folder / "in.jsonl", "-o", folder / "out.jsonl", "--max-num-seqs", "256", "--orders-log", "off"]
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = json.loads((folder / "out.jsonl.poise" / "status.json").read_text())
    return {
        "lines": count, "batch_tokens_per_second": tokens / as_batch, "run_tokens_per_second": tokens / status["elapsed_seconds"],
        "front_peak_bytes": peak, "front_share_of_a_core": used / as_batch,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "launch" / "demo" / "model"))
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--disturbed", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--only", choices=("clients", "front", "streams", "batch"), metavar="PART", help="one of: clients, front, streams, batch")
    parser.add_argument("--threads", metavar="N", help="cores of the CPU device; fewer than there are leave one to the server")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="poise-serving-") as name:
        server = Server(Path(name), given.model, *(("--threads", given.threads) if given.threads else ()))
        try:
            parts = {"clients": lambda: clients(server, given.clients), "front": lambda: front(server), "streams": lambda: streams(server)}
            if given.disturbed:
                parts["disturbed"] = lambda: Disturbed(server, given.clients, given.disturbed).run()
            for part, measured in parts.items():
                if given.only not in (None, part) and part != "disturbed":
                    continue
                found[part] = asyncio.run(measured())
                if not given.json:
                    print(part, json.dumps(found[part]), flush=True)
            if given.only in (None, "batch"):
                found["batch"] = batch(server, Path(name), given.model, given.lines)
                if not given.json:
                    print("batch", json.dumps(found["batch"]), flush=True)
        finally:
            server.end()
    if given.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
