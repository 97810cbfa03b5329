"""The prompts of chat requests, rendered by a process of its own (chat_process.py): a template is a program of strangers."""

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from pathlib import Path

from supervisor.lifecycle.chat_worker import MOST_ENDED, SECONDS

from .errors import Refused

_PROGRAM = str(Path(__file__).with_name("chat_process.py"))
_ENDED_WITHIN = 60.0  # seconds in which at most MOST_ENDED lines may end the process


class ChatRenderer:
    """One process, one line at a time."""

    def __init__(self, model):
        self._model = model
        self._process = None
        self._lock = asyncio.Lock()
        self._ended = []  # when lines ended the process

    async def entry(self, line):
        """What planner/requests/chat_prompts.h has of a batch line: JSON bytes, a prompt or an error."""
        async with self._lock:
            if self._process is None:
                await self._start()
            process = self._process
            try:
                process.stdin.write(struct.pack("<I", len(line)) + line)
                await process.stdin.drain()
                (size,) = struct.unpack("<I", await process.stdout.readexactly(4))
                return await process.stdout.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                self._process = None
                return await self._of_ended(process)
            except asyncio.CancelledError:  # the client left; its answer must not become the next one's
                self._process = None
                self._kill(process)
                raise

    async def _start(self):
        now = asyncio.get_running_loop().time()
        self._ended = [then for then in self._ended if now - then < _ENDED_WITHIN]
        if len(self._ended) >= MOST_ENDED:
            raise Refused(
                429, "the chat template was ended on too many requests just now: try again later", code="chat_template_error",
                headers={"Retry-After": "60"},
            )  # fmt: skip
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-s", _PROGRAM, self._model,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    async def _of_ended(self, process):
        said = (await process.stderr.read(1 << 16)).decode(errors="replace").strip()
        code = await process.wait()
        if code == 2 and said:  # the template itself is of no use
            raise Refused(400, said.splitlines()[-1], "messages", "chat_template_error")
        self._ended.append(asyncio.get_running_loop().time())
        how = f"took more than {SECONDS} s of computing" if code == -signal.SIGPROF else "ended the process that renders it"
        entry = {"error": f"the chat template {how} on this line", "param": "messages", "code": "chat_template_error"}
        return json.dumps(entry).encode()

    @staticmethod
    def _kill(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    def close(self):
        if self._process is not None:
            self._kill(self._process)
