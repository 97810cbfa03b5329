"""The metrics of a run with a file, and its page, for as long as it goes on: `run --metrics-port`. A process of its own, which only reads."""

import asyncio
import os
import signal
import socket

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from .live import LivePage
from .protocol import BoundedProtocol
from .run_metrics import RunCollector
from .unsignalled import UnsignalledServer


async def watch(settings):
    registry = CollectorRegistry()
    registry.register(RunCollector(settings.run_dir, settings.run_id, settings.names[0]))
    ending = asyncio.Event()

    async def metrics(request):
        page = generate_latest(registry)
        if ending.is_set():  # the last counts were read
            server.should_exit = True
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    live = LivePage(settings.run_dir, settings.run_id, settings.names)
    app = Starlette(routes=[Route("/metrics", metrics), *live.routes()])
    server = UnsignalledServer(
        uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=30, timeout_graceful_shutdown=2,
        )
    )  # fmt: skip
    loop = asyncio.get_running_loop()

    def end():
        ending.set()
        loop.call_later(settings.linger, lambda: setattr(server, "should_exit", True))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # it may have come already (metrics_port.py)
    loop.add_reader(settings.death_fd, lambda: os._exit(75))
    sampling = asyncio.create_task(live.keep_sampling())
    await server.serve(sockets=[socket.socket(fileno=settings.listen_fd)])
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    return 0
