"""The front's end of the planner's socket (planner/links/front_link.h has the messages).

A planner that starts, because the one before it died, asks for everything: all open requests are sent again. It computes the
same tokens, so what a client has already is left out here, and the client notices a pause and nothing else.
"""

import asyncio
import json
import secrets
import time

import zmq
import zmq.asyncio

_FIRST_ID, _LAST_ID = 1, (1 << 32) - 1


class TooManyRequests(Exception):
    """As many requests are open as the front takes."""


class OpenRequest:
    """A request that the planner has or will get. Its events come out of `next`, the result line last."""

    counts = True  # among the requests that may be open

    def __init__(self, number, line, chat_entry, line_number, streams):
        self.id = number
        self.header = {"id": number, "line": line_number, "stream": streams, "chat": chat_entry is not None}
        self.frames = [line] if chat_entry is None else [line, chat_entry]
        self._events = []
        self._wake = None
        self.received = 0  # bytes of its text
        self.tokens = 0  # whose ids or logprobs came
        self.began = time.monotonic()
        self.times = None  # seconds: waited, prompt, answer; once it is finished

    def put(self, event):
        self._events.append(event)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def next(self):
        """All events that came since the last call; waits for one."""
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        events, self._events = self._events, []
        return events


class PlannerLink:
    def __init__(self, path, most_open):
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the requests that may be open
        self._socket.setsockopt(zmq.RCVHWM, 0)  # the planner stops when its own queue is full
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(f"ipc://{path}")
        self._front = secrets.token_hex(8)
        self._planner = None  # who it is, and the address to answer to
        self._peer = None
        self._most_open = most_open
        self._open = {}
        self._counted = 0
        self._next_id = _FIRST_ID
        self.facts = {}  # what the planner says of itself
        self.closing = False
        self.ready = asyncio.Event()
        self.planners = 0  # that there were so far

    # ---- requests

    @property
    def front_id(self):
        return self._front

    def __len__(self):
        return len(self._open)

    @property
    def counted(self):
        """How many of the open requests count."""
        return self._counted

    def room(self):
        """How many requests may be opened."""
        return max(0, self._most_open - self._counted)

    def submit(self, lines, streams=False):
        """Opens a request for each (batch line, rendered prompt or None), or for none of them."""
        if len(lines) > self.room():
            raise TooManyRequests
        opened = []
        for line, entry in lines:
            number = self.number()
            # The seed of a request that names none follows from its line's number: here any, so that two that are equal differ.
            opened.append(OpenRequest(number, line, entry, secrets.randbelow(_LAST_ID) + 1, streams))
            self._open[number] = opened[-1]
        self._counted += len(opened)
        if self._peer is not None:
            self._send_requests(opened)
        return opened

    def open(self, request):
        """Opens a request that does not count."""
        self._open[request.id] = request
        if self._peer is not None:
            self._send_requests([request])

    def number(self):
        """One that no open request has."""
        while True:
            number = self._next_id
            self._next_id = number + 1 if number < _LAST_ID else _FIRST_ID
            if number not in self._open:
                return number

    def cancel(self, requests):
        """Forgets those that are still open."""
        gone = [request.id for request in requests if self._forget(request.id) is not None]
        if gone and self._peer is not None:
            self._send({"cancel": gone})

    def _forget(self, number):
        request = self._open.pop(number, None)
        self._counted -= request is not None and request.counts
        return request

    # ---- messages

    async def run(self):
        watcher = asyncio.create_task(self._watch())
        try:
            while True:
                peer, first, *frames = await self._socket.recv_multipart()
                self._take(peer, json.loads(first), frames)
        finally:
            watcher.cancel()

    async def _watch(self):
        """A planner that is gone shows at once; the next one says who it is."""
        while True:
            await self._monitor.recv_multipart()
            self._peer = None
            self.ready.clear()

    def _take(self, peer, message, frames):
        if "planner" in message:
            self.facts = message
            if (message["planner"], peer) != (self._planner, self._peer):
                self._greet(message["planner"], peer)
        elif peer == self._peer:
            for event in message.get("events", ()):
                self._hand_out(event, frames)

    def _greet(self, planner, peer):
        self.planners += planner != self._planner
        anew = planner != self._planner
        self._planner, self._peer = planner, peer
        self._send({"front": self._front})
        if anew:
            self._send_requests(list(self._open.values()))
        self.ready.set()

    def _send_requests(self, requests):
        for begin in range(0, len(requests), 256):
            part = requests[begin : begin + 256]
            self._send({"submit": [request.header for request in part]}, [frame for request in part for frame in request.frames])

    def _send(self, message, frames=()):
        # A ROUTER never blocks here: what is for a planner that has gone is dropped, and the next one gets it again.
        self._socket.send_multipart([self._peer, json.dumps(message).encode(), *frames])

    def _hand_out(self, event, frames):
        request = self._open.get(event["id"])
        if request is None:
            return
        if "frame" in event:
            self._forget(event["id"])
            if "waited" in event:
                request.times = event["waited"], event["prefill"], event["decode"]
            request.put(frames[event["frame"] - 1])
            return
        text = event["text"]
        if event["at"] < request.received:  # a planner that began it again: the client has that part
            text = text.encode()[request.received - event["at"] :].decode()
        first = event.get("first")
        if first is not None and event["tokens"] <= request.tokens:
            return
        request.received = max(request.received, event["at"] + len(event["text"].encode()))
        if first is not None:
            request.tokens = event["tokens"]
        if text or first is not None:
            event["text"] = text
            request.put(event)

    def close(self):
        self._context.destroy(linger=0)
