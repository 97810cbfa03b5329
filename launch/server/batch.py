"""One batch, from its order to its files. It is a run of its own: its lines are checked and answered as a file's, by their numbers.

On disk, in RUN/batches: ID.json has the batch as clients see it, and ID.results every result line so far, in the order in which they came.
After any crash a batch goes on with the lines that have none there. At the end they become two files in the input's order,
the answers and the errors. A disk that takes nothing more costs no answer: the batch says so in `errors` and waits until it does.
"""

import asyncio
import contextlib
import json
import os
import re
import time
from collections import deque

from supervisor.shared.files import remove, replace_file

from .answers import Answer
from .batch_lines import LONGEST_LINE, Unreadable, count_lines, field_of, late_line, refused_line, results_in, slices, split
from .completions import CHAT, COMPLETIONS
from .errors import Refused
from .planner_link import TimedRequest

_SYNC = 1.0  # seconds until a result is safe on the disk, and until counts are; and until a disk that was full is tried again
_ESCAPED = re.compile(rb"\\(?:/|u00)")  # how a url may be written in another way
_ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")


class _Line(TimedRequest):
    """A line that the planner has; its result goes to its batch at once."""

    counts = 0

    def __init__(self, batch, text, entry, number):
        super().__init__(text, entry, number)
        self.batch, self.number = batch, number

    def put(self, event):
        self.batch.take(self, event)


class Batch:
    """`facts` are what clients see."""

    def __init__(self, batches, facts):
        self.facts = facts
        self._batches = batches
        self._path = batches.folder / facts["id"]
        self._open = {}
        self._done = set()  # numbers of lines that have a result
        self._results, self._size = None, 0  # the file of results, and the bytes of whole lines in it
        self._unwritten = deque()  # results that the disk has not taken
        self._moved = asyncio.Event()  # a line was answered, or the disk took what waited
        self._stopped = asyncio.Event()
        self.task = None

    @property
    def active(self):
        return self.facts["status"] in _ACTIVE

    def note(self, status=None):
        """In the file first: what clients see survives a crash."""
        facts = dict(self.facts)
        if status is not None:
            facts["status"] = status
            if f"{status}_at" in facts:
                facts[f"{status}_at"] = int(time.time())
        replace_file(f"{self._path}.json", json.dumps(facts))
        self.facts = facts

    def _tell(self, *errors):
        """What is wrong with it: (code, message) of each; none of them: nothing is."""
        data = [{"code": code, "message": message, "param": None, "line": None} for code, message in errors]
        self.facts["errors"] = {"object": "list", "data": data} if data else None

    def _tell_disk(self, problem):
        self._tell(("storage", f"{problem.strerror or problem}: the batch waits until its results can be written"))

    # ---- from its beginning to its end

    async def run(self):
        try:
            while not self._batches.closing:
                try:
                    return await self._run()
                except OSError as problem:
                    self._tell_disk(problem)
                    await asyncio.sleep(_SYNC)
        finally:
            self._leave()

    async def _run(self):
        source = self._batches.files.path(self.facts["input_file_id"])
        try:
            if self.facts["status"] == "validating":
                await self._validate(source)
            if self.facts["status"] in ("in_progress", "cancelling"):
                await self._go_on(source)
                if self._batches.closing:
                    return
        except Unreadable as problem:
            self._tell(("storage", f"the input file cannot be read: {problem}"))
            return await self._finish("failed")
        if self.facts["status"] == "failed":
            return
        self._tell()
        cancelled = self.facts["status"] == "cancelling"
        if self.facts["status"] == "in_progress":
            self.note("finalizing")
        await self._finish("cancelled" if cancelled else None)

    async def _validate(self, source):
        total = await asyncio.to_thread(count_lines, source)
        self.facts["request_counts"]["total"] = total
        if self.facts["status"] == "cancelling":  # meanwhile
            return
        if total == 0:
            self._tell(("empty_file", "the input file has no lines"))
        self.note("in_progress" if total else "failed")

    async def _go_on(self, source):
        await asyncio.to_thread(self._resume)
        self._flush()
        if self.facts["status"] == "cancelling":
            return
        keeper = asyncio.create_task(self._keep_safe())
        try:
            await self._answer(source)
        finally:
            keeper.cancel()
        self._flush()

    def _resume(self):
        """Reads which lines have results. The end of a line that a crash tore is cut off."""
        if self._results is None:
            self._results = os.open(f"{self._path}.results", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        counts, self._size = self.facts["request_counts"], 0
        counts["completed"] = counts["failed"] = 0
        with open(f"{self._path}.results", "rb") as file:
            for number, good, size in results_in(file):
                self._size += size
                self._done.add(number)
                self._count(good)
        os.ftruncate(self._results, self._size)

    async def _answer(self, source):
        """Until every line has its result, or the batch is to stop."""
        try:
            ended = await self._until_stopped(self._send(source), max(0.0, self.facts["expires_at"] - time.time()))
        finally:
            self._drop_open()
        if not ended:  # the window is over
            await self._until_stopped(self._expire(source))

    async def _until_stopped(self, work, seconds=None):
        """Whether `work` came to its end before `seconds` were over and before the batch is to stop."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({task, stop}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _send(self, source):
        """Sends the lines that have no result, as the planner has room, and waits for all."""
        slots, planner = self._batches.slots, self._batches.planner
        async with contextlib.aclosing(slices(source, self._look)) as parts:
            async for part in parts:
                for number, text, refusal in part:
                    while self._unwritten:
                        await self._move()
                    if refusal is None:
                        await slots.acquire()
                        try:
                            refusal, entry = await self._entry(number, text)
                        except BaseException:
                            slots.release()
                            raise
                        if refusal is None:
                            line = self._open[number] = _Line(self, text, entry, number)
                            planner.open(line)
                            continue
                        slots.release()
                    self._write(number, refusal, False)
        while self._open or self._unwritten:
            await self._move()

    async def _move(self):
        self._moved.clear()
        await self._moved.wait()

    async def _expire(self, source):
        """Lines that have no result when the window is over."""
        async with contextlib.aclosing(slices(source, self._late)) as parts:
            async for part in parts:
                for number, line in part:
                    self._write(number, line, False)
                while self._unwritten:
                    await self._move()

    def _late(self, number, text):
        return None if number in self._done else (number, late_line(number, text))

    def _look(self, number, text):
        """(number, text, an error line or None); None if it has a result. What else may be wrong with it, the planner says: a line may be
        long, and is read as JSON only where it may be of the other endpoint."""
        if number in self._done:
            return None
        if text is None:
            return number, text, refused_line(number, None, f"the line is longer than {LONGEST_LINE >> 20} MiB", None)
        endpoint = self.facts["endpoint"]
        other = COMPLETIONS if endpoint == CHAT else CHAT
        if (other.encode() in text or _ESCAPED.search(text)) and field_of(text, "url") == other:
            message = f'"url" must be "{endpoint}", the endpoint of the batch'
            return number, text, refused_line(number, field_of(text, "custom_id"), message, "url")
        return number, text, None

    async def _entry(self, number, text):
        """(an error line or None, the rendered prompt, if this is a chat line)."""
        if self.facts["endpoint"] != CHAT:
            return None, None
        try:
            entry = await self._batches.chat.entry(text)
            return None, None if entry == b"null" else entry
        except Refused as refused:
            status = 400 if refused.status == 429 else refused.status  # too many of these lines: the others have their turn
            return refused_line(number, field_of(text, "custom_id"), str(refused), "messages", status), None

    def take(self, line, event):
        if self._open.pop(line.number, None) is None:
            return
        self._batches.slots.release()
        answer = Answer(event)
        self._batches.metrics.finished(line, answer)
        self._write(line.number, answer.line_numbered(line.number), answer.status == 200)
        self._moved.set()

    # ---- its results

    def _write(self, number, line, good):
        self._done.add(number)
        self._unwritten.append((line + b"\n", good))
        try:
            self._flush()
        except OSError as problem:  # _keep_safe tries again
            self._tell_disk(problem)

    def _flush(self):
        while self._unwritten:
            data, good = self._unwritten[0]
            written = 0
            while written < len(data):
                written += os.pwrite(self._results, data[written:], self._size + written)
            self._size += written
            self._unwritten.popleft()
            self._count(good)

    def _count(self, good):
        self.facts["request_counts"]["completed" if good else "failed"] += 1

    async def _keep_safe(self):
        while True:
            await asyncio.sleep(_SYNC)
            try:
                self._flush()
                await asyncio.to_thread(os.fdatasync, self._results)
                self._tell()
                self.note()
            except OSError as problem:
                self._tell_disk(problem)
            self._moved.set()

    def _drop_open(self):
        lines = list(self._open.values())
        self._open.clear()
        self._batches.planner.cancel(lines)
        for _ in lines:
            self._batches.slots.release()

    async def _finish(self, status):
        """Makes the two files. It may be done again after a crash: their ids were chosen at the beginning. `status`: None for completed
        or expired, as the lines say."""
        self._flush()
        files = self._batches.files
        names = self._batches.output_names(self.facts["id"])
        kept = await asyncio.to_thread(split, f"{self._path}.results", *(files.part(name) for name in names))
        for name, count, what in zip(names, kept["counts"], ("output", "error")):
            if count:
                await asyncio.to_thread(files.publish, name, f"{self.facts['id']}_{what}.jsonl", "batch_output")
                self.facts[f"{what}_file_id"] = name
        self.note(status or ("expired" if kept["expired"] else "completed"))
        self.forget_results()

    def forget_results(self):
        remove(f"{self._path}.results")

    def _leave(self):
        self._drop_open()
        self._done.clear()
        if self._results is not None:
            with contextlib.suppress(OSError):
                self._flush()
            os.close(self._results)
            self._results = None

    # ---- from outside

    def cancel(self):
        if self.facts["status"] in ("cancelled", "cancelling"):
            return
        if self.facts["status"] not in ("validating", "in_progress"):
            raise Refused(409, f"the batch is {self.facts['status']}: it cannot be cancelled", code="batch_not_cancellable")
        try:
            self.note("cancelling")
        except OSError:
            self.facts |= {"status": "cancelling", "cancelling_at": int(time.time())}  # of a full disk: `run` keeps trying
        self._stopped.set()

    def stop(self):
        """Lines under way are dropped; the next server does them again."""
        self._stopped.set()
