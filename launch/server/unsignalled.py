"""uvicorn's server, with signals left to us: it would raise them again after it has ended."""

import contextlib

import uvicorn


class UnsignalledServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield
