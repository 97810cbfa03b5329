"""Texts to token ids and back, by the planner's own tokenizer: a process, which a thread waits for."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from .errors import Refused
from .workers import Tokens, WorkerEnded


class TokenProcess:
    def __init__(self, program, model):
        self._tokens = Tokens(program, model)
        self._thread = ThreadPoolExecutor(1)

    async def encode(self, text, add_special_tokens=True):
        return await self._of_thread(self._tokens.encode, text, add_special_tokens)

    async def decode(self, ids):
        return await self._of_thread(self._tokens.decode, ids)

    async def _of_thread(self, function, *arguments):
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except WorkerEnded:
            raise Refused(500, "the tokenizer's process has ended", code="server_error") from None
        except ValueError as problem:
            raise Refused(400, str(problem)) from None

    def close(self):
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._tokens.close()
