"""Texts to token ids and back, by the planner's own tokenizer: a process that reads lines and answers each."""

import asyncio
import contextlib
import json
import os
import signal

from .errors import Refused

_LONGEST = 1 << 28  # bytes of an answer


class TokenProcess:
    def __init__(self, program, model):
        self._words = [program, "encode", "--model", model]
        self._process = None
        self._lock = asyncio.Lock()

    async def encode(self, text, add_special_tokens=True):
        return await self._ask({"text": text, "add_special_tokens": add_special_tokens})

    async def decode(self, ids):
        return await self._ask({"ids": ids})

    async def _ask(self, question):
        async with self._lock:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL, start_new_session=True, limit=_LONGEST,
                )  # fmt: skip
            process, self._process = self._process, None
            try:
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
                answer = json.loads(line)
            except (ValueError, ConnectionError):
                self._kill(process)
                raise Refused(500, "the tokenizer's process has ended", code="server_error") from None
            except asyncio.CancelledError:
                self._kill(process)
                raise
            self._process = process
        if isinstance(answer, dict):
            raise Refused(400, answer["error"])
        return answer

    @staticmethod
    def _kill(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    def close(self):
        if self._process is not None:
            self._kill(self._process)
