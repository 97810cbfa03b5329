"""The prompts of chat requests, rendered by a process of its own (chat_process.py): a template is a program of strangers."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from supervisor.lifecycle.chat_worker import MOST_ENDED

from .errors import Refused
from .workers import BadTemplate, ChatTemplate

_ENDED_WITHIN = 60.0  # seconds in which at most MOST_ENDED lines may end the process


class ChatRenderer:
    """One process, one line at a time, which a thread waits for."""

    def __init__(self, model):
        self._template = ChatTemplate(model)
        self._thread = ThreadPoolExecutor(1)
        self._ended = []  # when lines ended the process

    async def entry(self, line):
        """What planner/requests/chat_prompts.h has of a batch line: JSON bytes, a prompt or an error."""
        loop = asyncio.get_running_loop()
        self._ended = [then for then in self._ended if loop.time() - then < _ENDED_WITHIN]
        if len(self._ended) >= MOST_ENDED:
            raise Refused(
                429, "the chat template was ended on too many requests just now: try again later", code="chat_template_error",
                headers={"Retry-After": "60"},
            )  # fmt: skip
        try:
            entry, ended = await loop.run_in_executor(self._thread, self._template.entry, line)
        except BadTemplate as problem:
            raise Refused(400, str(problem), "messages", "chat_template_error") from None
        if ended:
            self._ended.append(loop.time())
        return entry

    def close(self):
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._template.close()
