"""uvicorn's HTTP/1.1 with bounds on what a client may make it keep: the bytes of a request's head, and how long it may take."""

import asyncio
import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ARRIVED = "poise.arrived"  # in a request's scope: when its last byte came
_HEAD_BYTES = 64 << 10
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)
_WORDS = b'{"error":{"message":"the head of the request is too large","type":"invalid_request_error","param":null,"code":"head_too_large"}}'


class BoundedProtocol(HttpToolsProtocol):
    """Between the end of one request's message and the end of the next one's head, bytes and seconds are counted."""

    head_seconds = 20.0  # set once, when the front starts

    def connection_made(self, transport):
        super().connection_made(transport)
        self._head = 0  # bytes of the head that is being read; -1: a body is
        self._late = None
        self._await_head()

    def connection_lost(self, exc):
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data):
        if self._head >= 0:
            if self._head == 0 and self._late is None:
                self._await_head()
            # Also a body's first bytes, where they come with the head; so the bound is only asked while the head goes on.
            self._head += min(len(data), _HEAD_BYTES)
        super().data_received(data)
        if self._head > _HEAD_BYTES and self.transport is not None and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE % (len(_WORDS), _WORDS))
            self.transport.close()

    def on_headers_complete(self):
        self._head = -1
        self._forget()
        super().on_headers_complete()

    def on_message_complete(self):
        self.scope[ARRIVED] = time.monotonic()
        super().on_message_complete()
        self._head = 0

    def _await_head(self):
        self._late = asyncio.get_running_loop().call_later(self.head_seconds, self._close)

    def _forget(self):
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self):
        self._late = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
