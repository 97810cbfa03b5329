"""The page at `/`: a run or a server as it goes on, with curves since this process began. It samples RUN/status.json, which the planner
writes twice a second; its memory does not grow with time, because bins double (supervisor/measure/bins.py).
"""

import asyncio
import contextlib
import os
import time

from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from supervisor.measure.bins import Bins
from supervisor.measure.plotly import installed_library
from supervisor.measure.report_page import LIVE_POLICY, live_page, live_parts
from supervisor.shared.files import read_json

_EVERY = 1.0  # seconds
_OLD = 2.0
_MOST_EVENTS = 100
_HEADERS = {"Cache-Control": "no-store", "Content-Security-Policy": LIVE_POLICY, "X-Content-Type-Options": "nosniff"}


class LivePage:
    def __init__(self, run_dir, run_id, names):
        self._run_dir, self._run_id, self._names = run_dir, run_id, names
        self._began = self._sampled = time.monotonic()
        self._since = time.time()
        self._series = Bins(_EVERY)
        self._status, self._counts, self._events = {}, {}, []
        self._page = None

    def routes(self):
        return [Route("/", self._answer_page), Route("/report.json", self._answer_facts)]

    async def keep_sampling(self):
        before = read_json(f"{self._run_dir}/status.json")
        if before.get("run_id") == self._run_id:  # what was before this process is not of its curves
            self._counts, self._status = _counts(before), before
        while True:
            path = f"{self._run_dir}/status.json"
            with contextlib.suppress(OSError):
                age = time.time() - os.stat(path).st_mtime
                self._sample(read_json(path), age)
            await asyncio.sleep(_EVERY)

    def _sample(self, status, age):
        """`age`: of the file, in seconds; a planner that has nothing to do does not write it."""
        if status.get("run_id") != self._run_id:
            return
        begin, now = self._sampled, time.monotonic()
        if 0 <= age < _OLD:
            now = max(begin, now - age)
        self._sampled = now
        counts, known = _counts(status), self._counts
        # A planner that takes over counts from 0 again.
        grown = {name: count - known.get(name, 0) if count >= known.get(name, 0) else count for name, count in counts.items()}
        seconds = now - begin
        grown |= {"seconds": seconds, "sequence_seconds": status.get("running", 0) * seconds, "waiting_seconds": status.get("waiting", 0) * seconds}
        self._series.spread(begin - self._began, now - self._began, grown)
        self._notice(status)
        self._counts, self._status = counts, status

    def _notice(self, status):
        before, now = self._status, time.monotonic() - self._began
        if before.get("policy") and status.get("policy") != before["policy"]:
            self._events.append({"at": now, "kind": "policy", "words": f"{status.get('policy')} instead of {before['policy']}"})
        for name, pid in (status.get("pids") or {}).items():
            old = (before.get("pids") or {}).get(name)
            if old and pid and pid != old:
                self._events.append({"at": now, "kind": "restart", "words": f"another {name}"})
        del self._events[:-_MOST_EVENTS]

    def facts(self):
        series = {"width": self._series.width, "end": self._series.end, **self._series.rows()}
        log = {"series": series, "events": self._events, "has_reports": True} if "seconds" in series else None
        return {"run": {"name": self._names[0], "since": self._since}, "status": self._status, "log": log, "results": None, "memory": None, "notes": []}

    async def _answer_facts(self, request):
        facts = self.facts()
        head, tables = live_parts(facts)
        return JSONResponse({"facts": facts, "head": head, "tables": tables}, headers=_HEADERS)

    async def _answer_page(self, request):
        if self._page is None:  # the library is packed once
            self._page = await asyncio.to_thread(lambda: live_page(self._names[0], installed_library()))
        return HTMLResponse(self._page, headers=_HEADERS)


def _counts(status):
    """What only grows, of one planner."""
    whole = (status.get("balance") or {}).get("whole") or {}
    counts = {"tokens": status.get("generated_tokens", 0), "rows": (status.get("iteration_tokens") or {}).get("sum", 0)}
    counts |= {name: whole.get(source, 0) for name, source in (("link", "t_pcie"), ("compute", "t_compute"), ("back", "t_stores"), ("host", "t_host"))}
    counts |= {f"waits_{name}": (whole.get("compute_waits") or {}).get(name, 0) for name in ("weights", "blocks", "rows", "host")}
    return counts | {f"bytes_{name}": (status.get("link_bytes") or {}).get(name, 0) for name in ("weights", "kv", "act", "stores")}
