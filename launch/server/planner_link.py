"""The socket to the planner, and the requests over HTTP that are open (planner_protocol.py has the messages)."""

import asyncio
import time

import zmq
import zmq.asyncio

from .planner_protocol import OpenRequest, PlannerProtocol, any_line


class TooManyRequests(Exception):
    """As many requests are open as the front takes."""


class TimedRequest(OpenRequest):
    def __init__(self, line, chat_entry, line_number, streams=False):
        super().__init__(line, chat_entry, line_number, streams)
        self.began = time.monotonic()


class HttpRequest(TimedRequest):
    """Its events come out of `next`, the result line last."""

    def __init__(self, line, chat_entry, streams, choices):
        super().__init__(line, chat_entry, any_line(), streams)
        self.in_front = 0.0  # seconds from the request's last byte until the planner was sent it
        self.first_sent = None  # of a stream: when its client's connection had the first token
        self.first_counted = False  # what the server added to that is in the metrics
        self.counts = choices
        self._events = []
        self._wake = None

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
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to tell a planner that has gone
        self._socket.bind(f"ipc://{path}")
        self._protocol = PlannerProtocol(self._send)
        self._most_open = most_open
        self.closing = False
        self.ready = asyncio.Event()

    # ---- requests

    @property
    def front_id(self):
        return self._protocol.front

    @property
    def facts(self):
        """What the planner says of itself."""
        return self._protocol.facts

    def __len__(self):
        return len(self._protocol.open)

    @property
    def counted(self):
        """How many of the open requests count; one with several choices as often."""
        return self._protocol.counted

    def open_lines(self):
        """How many of the open requests are lines of batches."""
        return sum(not request.counts for request in self._protocol.open.values())

    def room(self):
        """How many requests may be opened."""
        return max(0, self._most_open - self.counted)

    def submit(self, lines, arrived, streams=False, choices=1):
        """Opens a request for each (batch line, rendered prompt or None), or for none of them. `arrived`: when their last byte came."""
        if len(lines) * choices > self.room():
            raise TooManyRequests
        opened = [HttpRequest(line, entry, streams, choices) for line, entry in lines]
        self._protocol.submit(opened)
        for one in opened:
            one.in_front = time.monotonic() - arrived
        return opened

    def open(self, request):
        self._protocol.submit([request])

    def cancel(self, requests):
        """Forgets those that are still open."""
        self._protocol.cancel(requests)

    # ---- messages

    async def run(self):
        watcher = asyncio.create_task(self._watch())
        try:
            while True:
                peer, *frames = await self._socket.recv_multipart()
                for _ in self._protocol.taken(peer, frames):
                    await asyncio.sleep(0)  # what was woken is written before the rest is looked at
                if self._protocol.peer is not None:
                    self.ready.set()
        finally:
            watcher.cancel()

    async def _watch(self):
        """A planner that is gone shows at once; the next one says who it is."""
        while True:
            await self._monitor.recv_multipart()
            self._lost()

    def _lost(self):
        self._protocol.lost()
        self.ready.clear()

    def _send(self, peer, frames):
        sent = self._socket.send_multipart([peer, *frames])  # a ROUTER never blocks here
        if sent.done() and sent.exception() is not None:
            self._lost()  # its last words were read after its end

    def close(self):
        self._context.destroy(linger=0)
