"""The Batch API. A batch is a run of its own: its lines are checked and answered as a file's, by their numbers.

On disk, in RUN/batches: ID.json has the batch as clients see it, and ID.results every result line so far, in the order in which they came.
After any crash a batch goes on with the lines that have none there. At the end they become two files in the input's order,
the answers and the errors.
"""

import asyncio
import json
import os
import re
import time
from pathlib import Path

from starlette.responses import JSONResponse

from supervisor.shared.files import read_json, remove, replace_file

from .answers import Answer
from .bodies import read_object
from .completions import CHAT, COMPLETIONS
from .errors import Refused, error_type
from .files import new_digits, page_of
from .planner_link import OpenRequest

_ID = re.compile(r"batch_[0-9a-f]{24}")
_NUMBER = re.compile(rb'\{"id":"poise-(\d+)"')
_LONGEST_LINE = 64 << 20
_LONGEST_ORDER = 1 << 20  # what creates a batch
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SYNC = 1.0  # seconds until a result is safe on the disk, and until counts are
_ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
_TIMES = ("in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


class _Line(OpenRequest):
    """A line that the planner has; its result goes to its batch at once."""

    counts = False

    def __init__(self, number, batch, text, entry, line):
        super().__init__(number, text, entry, line, False)
        self.batch, self.line = batch, line

    def put(self, event):
        self.batch.take(self, event)


class Batch:
    """One batch: `facts` are what clients see."""

    def __init__(self, batches, facts):
        self.facts = facts
        self._batches = batches
        self._path = batches.folder / facts["id"]
        self._open = {}
        self._done = set()
        self._results = None
        self._idle = asyncio.Event()
        self._broken = None  # what the disk said
        self.task = None

    @property
    def active(self):
        return self.facts["status"] in _ACTIVE

    def note(self, status=None):
        if status is not None:
            self.facts["status"] = status
            if f"{status}_at" in self.facts:
                self.facts[f"{status}_at"] = int(time.time())
        replace_file(f"{self._path}.json", json.dumps(self.facts))

    def count(self, good):
        self.facts["request_counts"]["completed" if good else "failed"] += 1

    # ---- from its beginning to its end

    async def run(self):
        try:
            await self._run()
        except OSError as problem:
            self._fail([("storage", problem.strerror or str(problem), None)])
        finally:
            self._leave()

    async def _run(self):
        source = self._batches.files.path(self.facts["input_file_id"])
        if self.facts["status"] == "validating":
            total = await asyncio.to_thread(_count_lines, source)
            if total == 0:
                return self._fail([("empty_file", "the input file has no lines", None)])
            self.facts["request_counts"]["total"] = total
            self.note("in_progress")
        if self.facts["status"] != "finalizing":
            await asyncio.to_thread(self._resume)
            keeper = asyncio.create_task(self._keep_safe())
            try:
                await self._answer(source)
            finally:
                keeper.cancel()
            if self._batches.closing:
                return None
            if self._broken:
                raise self._broken
        await self._finish()

    def _fail(self, errors):
        data = [{"code": code, "message": message, "param": None, "line": line} for code, message, line in errors]
        self.facts["errors"] = {"object": "list", "data": data}
        try:
            self.note("failed")
        except OSError:
            pass  # clients see it as long as the server lives

    def _resume(self):
        """Reads which lines have results. The end of a line that a crash tore is cut off."""
        self._results = os.open(f"{self._path}.results", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        counts, end = self.facts["request_counts"], 0
        counts["completed"] = counts["failed"] = 0
        with open(self._results, "rb", closefd=False) as file:
            for line in file:
                found = _NUMBER.match(line)
                if not line.endswith(b"\n") or found is None:
                    break
                end += len(line)
                self._done.add(int(found[1]))
                self.count(_is_good(line))
        os.ftruncate(self._results, end)
        os.lseek(self._results, end, os.SEEK_SET)

    async def _answer(self, source):
        """Sends the lines that have no result, as the planner has room, and waits for all."""
        chat = self.facts["endpoint"] == CHAT
        with open(source, "rb") as file:
            for number, text in _lines(file):
                if number in self._done:
                    continue
                if self._overdue():
                    self._write(number, _expired(number, text))
                    continue
                await self._batches.slots.acquire()
                if self.facts["status"] == "cancelling" or self._batches.closing or self._broken:
                    self._batches.slots.release()
                    break
                try:
                    refusal, entry = await self._entry(number, text, chat)
                except BaseException:
                    self._batches.slots.release()
                    raise
                if refusal is not None:
                    self._batches.slots.release()
                    self._write(number, refusal)
                    continue
                line = _Line(self._batches.planner.number(), self, text, entry, number)
                self._open[number] = line
                self._batches.planner.open(line)
        while self._open and not self._broken and not self._batches.closing and self.facts["status"] != "cancelling":
            self._idle.clear()
            left = max(0.01, self.facts["expires_at"] - time.time())
            try:
                async with asyncio.timeout(left):
                    await self._idle.wait()
            except TimeoutError:
                self._expire_open()
        self._drop_open()

    def _overdue(self):
        return time.time() >= self.facts["expires_at"]

    def _expire_open(self):
        late = list(self._open.values())
        self._drop_open()
        for line in late:
            self._write(line.line, _expired(line.line, line.frames[0]))

    async def _entry(self, number, text, chat):
        """(an error line or None, the rendered prompt or None)."""
        if text is None:
            return _refused(number, None, f"the line is longer than {_LONGEST_LINE >> 20} MiB", None), None
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return None, None  # the planner says what is wrong with it
        url = document.get("url") if isinstance(document, dict) else None
        if url in (COMPLETIONS, CHAT) and url != self.facts["endpoint"]:
            message = f'"url" must be "{self.facts["endpoint"]}", the endpoint of the batch'
            return _refused(number, document.get("custom_id"), message, "url"), None
        if not (chat and url == CHAT):
            return None, None
        try:
            return None, await self._batches.chat.entry(text)
        except Refused as refused:
            if refused.status == 429:  # too many of these lines: the others have their turn
                return _refused(number, document.get("custom_id"), str(refused), "messages", 400), None
            return _refused(number, document.get("custom_id"), str(refused), "messages", refused.status), None

    def take(self, line, event):
        if not isinstance(event, bytes) or self._open.pop(line.line, None) is None:
            return
        self._batches.slots.release()
        answer = Answer(event)
        self._batches.metrics.finished(line, answer)
        self._write(line.line, answer.line_numbered(line.line))
        if not self._open:
            self._idle.set()

    def _write(self, number, line):
        data = line + b"\n"
        try:
            while data:
                data = data[os.write(self._results, data) :]
        except OSError as problem:
            self._broken = problem
            self._idle.set()
            return
        self._done.add(number)
        self.count(_is_good(line))

    async def _keep_safe(self):
        while True:
            await asyncio.sleep(_SYNC)
            await asyncio.to_thread(os.fdatasync, self._results)
            self.note()

    def _drop_open(self):
        lines = list(self._open.values())
        self._open.clear()
        self._batches.planner.cancel(lines)
        for _ in lines:
            self._batches.slots.release()

    async def _finish(self):
        """Makes the two files. It may be done again after a crash: their ids were chosen at the beginning."""
        cancelled = self.facts["status"] == "cancelling"
        if self.facts["status"] not in ("finalizing", "cancelling"):
            self.note("finalizing")
        files = self._batches.files
        names = self._batches.output_names(self.facts["id"])
        kept = await asyncio.to_thread(_split, f"{self._path}.results", *(files.part(name) for name in names))
        for name, count, what in zip(names, kept["counts"], ("output", "error")):
            if count:
                await asyncio.to_thread(files.publish, name, f"{self.facts['id']}_{what}.jsonl", "batch_output")
                self.facts[f"{what}_file_id"] = name
        self.note("cancelled" if cancelled else "expired" if kept["expired"] else "completed")
        self.forget_results()

    def forget_results(self):
        remove(f"{self._path}.results")

    def _leave(self):
        self._drop_open()
        if self._results is not None:
            os.close(self._results)
            self._results = None

    # ---- from outside

    def cancel(self):
        if self.facts["status"] in ("cancelled", "cancelling"):
            return
        if self.facts["status"] not in ("validating", "in_progress"):
            raise Refused(409, f"the batch is {self.facts['status']}: it cannot be cancelled", code="batch_not_cancellable")
        self.note("cancelling")
        self._idle.set()

    def stop(self):
        self._idle.set()


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


# ---- lines of files


def _lines(file):
    """(number, bytes) of each line that is not blank; None where it is too long. As planner/requests/request_lines.h reads them."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 2):
        number += 1
        whole = line.endswith(b"\n") or len(line) < _LONGEST_LINE + 2
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.rstrip(b"\r\n")
        if whole and line.strip():
            yield number, line
        elif not whole:
            yield number, None
        while not whole:
            rest = file.readline(1 << 20)
            whole = not rest or rest.endswith(b"\n")


def _count_lines(path):
    with open(path, "rb") as file:
        return sum(1 for _ in _lines(file))


def _is_good(line):
    """Whether a result line is an answer. Its status stands behind custom_id, which may hold anything."""
    try:
        return Answer(line.rstrip(b"\n")).status == 200
    except ValueError:
        return False


def _split(results, output, errors):
    """Writes answers and errors in the order of their lines to two files, each only if it has a line."""
    places = []
    if not os.path.exists(results):
        return {"counts": (0, 0), "expired": False}
    with open(results, "rb") as file:
        at = 0
        for line in file:
            places.append((int(_NUMBER.match(line)[1]), at, _is_good(line)))
            at += len(line)
        places.sort()
        expired, counts = False, [0, 0]
        for index, path in enumerate((output, errors)):
            remove(path)
            wanted = [place for _, place, good in places if good == (index == 0)]
            counts[index] = len(wanted)
            if wanted:
                with open(path, "xb") as to:
                    os.fchmod(to.fileno(), 0o600)
                    for place in wanted:
                        file.seek(place)
                        line = file.readline()
                        expired = expired or (index == 1 and b'"code":"batch_expired"' in line[-512:])
                        to.write(line)
    return {"counts": counts, "expired": expired}


def _refused(number, custom_id, message, param, status=400):
    """An error line as the planner writes it."""
    error = {"message": message, "type": error_type(status), "param": param, "code": "invalid_value"}
    custom_id = custom_id if isinstance(custom_id, str) else None
    response = {"status_code": status, "request_id": f"req-{number}", "body": {"error": error}}
    return _text({"id": f"poise-{number}", "custom_id": custom_id, "response": response, "error": None})


def _expired(number, text):
    try:
        custom_id = json.loads(text or b"{}").get("custom_id")
    except (ValueError, RecursionError, AttributeError):
        custom_id = None
    error = {"code": "batch_expired", "message": "the completion window was over before this line was answered"}
    custom_id = custom_id if isinstance(custom_id, str) else None
    return _text({"id": f"poise-{number}", "custom_id": custom_id, "response": None, "error": {"message": error["message"], "code": error["code"]}})


def _text(value):
    return json.dumps(value, separators=(",", ":")).encode()
