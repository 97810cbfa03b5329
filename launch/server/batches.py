"""The Batch API: its paths, and all batches of the run directory."""

import asyncio
import re
import time
from pathlib import Path

from starlette.responses import JSONResponse

from supervisor.shared.files import read_json

from .batch import Batch
from .bodies import is_text, read_object
from .completions import CHAT, COMPLETIONS
from .errors import Refused
from .files import new_digits, page_of

_ID = re.compile(r"batch_[0-9a-f]{24}")
_LONGEST_ORDER = 1 << 20  # what creates a batch
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIMES = ("in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


class Batches:
    def __init__(self, settings, planner, chat, metrics, files):
        self.folder = Path(settings.run_dir) / "batches"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.planner, self.chat, self.metrics, self.files = planner, chat, metrics, files
        self.slots = asyncio.Semaphore(settings.batch_window)
        self.all = {}

    @property
    def closing(self):
        return self.planner.closing

    def resume(self):
        """Goes on with what an earlier server had begun."""
        for path in sorted(self.folder.glob("batch_*.json")):
            facts = read_json(path)
            if facts.get("id") == path.stem:
                if not is_text(facts):  # earlier servers took half of a surrogate pair, and could not send it back
                    facts["metadata"] = None
                self._begin(Batch(self, facts))

    def _begin(self, batch):
        self.all[batch.facts["id"]] = batch
        if batch.active:
            batch.task = asyncio.create_task(batch.run())
        else:
            batch.forget_results()

    def is_needed(self, file):
        return any(batch.active and batch.facts["input_file_id"] == file for batch in self.all.values())

    @staticmethod
    def output_names(name):
        """The ids of a batch's output and error file: they follow from its own."""
        digits = name.removeprefix("batch_")
        return f"file-{digits[:-1]}0", f"file-{digits[:-1]}1"

    def create(self, body):
        endpoint, source = body.get("endpoint"), body.get("input_file_id")
        if endpoint not in (COMPLETIONS, CHAT):
            raise Refused(400, f'"endpoint" must be "{COMPLETIONS}" or "{CHAT}"', "endpoint")
        if not isinstance(source, str):
            raise Refused(400, '"input_file_id" is missing', "input_file_id", "missing_required_parameter")
        if self.files.facts(source)["purpose"] != "batch":
            raise Refused(400, f'{source} has another purpose than "batch"', "input_file_id")
        window = body.get("completion_window")
        found = _WINDOW.fullmatch(window) if isinstance(window, str) else None
        if found is None:
            raise Refused(400, '"completion_window" must be a time such as "24h"', "completion_window")
        metadata = body.get("metadata")
        if metadata is not None and not (
            isinstance(metadata, dict) and len(metadata) <= 16 and all(isinstance(v, str) and len(k) <= 64 and len(v) <= 512 for k, v in metadata.items())
        ):
            raise Refused(400, '"metadata" must be an object of at most 16 short strings', "metadata")
        now = int(time.time())
        facts = {
            "id": f"batch_{new_digits()}", "object": "batch", "endpoint": endpoint, "errors": None, "input_file_id": source,
            "completion_window": window, "status": "validating", "output_file_id": None, "error_file_id": None, "created_at": now,
            **dict.fromkeys(_TIMES), "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": metadata,
        }  # fmt: skip
        facts["expires_at"] = now + int(found[1]) * _SECONDS[found[2]]
        batch = Batch(self, facts)
        try:
            batch.note()
        except OSError as problem:
            raise Refused(507, f"the batch cannot be kept: {problem.strerror}", code="insufficient_storage") from None
        self._begin(batch)
        return batch

    # ---- paths

    async def batches(self, request):
        if request.method == "POST":
            _, body = await read_object(request, _LONGEST_ORDER)
            return JSONResponse(self.create(body).facts)
        facts = sorted((batch.facts for batch in self.all.values()), key=lambda one: (one["created_at"], one["id"]), reverse=True)
        return page_of(request, facts, 100)

    async def batch(self, request):
        return JSONResponse(self.find(request.path_params["name"]).facts)

    async def cancel(self, request):
        batch = self.find(request.path_params["name"])
        batch.cancel()
        return JSONResponse(batch.facts)

    def find(self, name):
        batch = self.all.get(name) if _ID.fullmatch(name) else None
        if batch is None:
            raise Refused(404, f"there is no batch {name[:64]}", code="batch_not_found")
        return batch

    def stop(self):
        """Lines under way are dropped; the next server does them again."""
        for batch in self.all.values():
            batch.stop()

    async def close(self):
        for batch in self.all.values():
            if batch.task is not None:
                batch.task.cancel()
        await asyncio.gather(*(batch.task for batch in self.all.values() if batch.task), return_exceptions=True)
