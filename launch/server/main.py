"""The front's process: one event loop, which serves HTTP, talks to the planner, and ends in order on SIGTERM."""

import asyncio
import os
import resource
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import uvicorn
import uvloop

from .application import application
from .batches import Batches
from .bodies import Patience
from .chat import ChatRenderer
from .files import FileStore
from .live import LivePage
from .metrics import Metrics
from .planner_link import PlannerLink
from .protocol import BoundedProtocol
from .tokens import TokenProcess
from .unsignalled import UnsignalledServer
from .watch import watch

_FILES = 1 << 14  # connections, and a few more


def main(settings):
    settings = SimpleNamespace(**settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # prompts do not get into core files
    uvloop.install()
    return asyncio.run(_serve(settings) if settings.kind == "server" else watch(settings))


async def _serve(settings):
    Patience.seconds = BoundedProtocol.head_seconds = settings.client_timeout
    planner = PlannerLink(settings.front_socket, settings.max_open_requests)
    chat = ChatRenderer(settings.model)
    tokens = TokenProcess(settings.planner_program, settings.model)
    metrics = Metrics(settings, planner)
    files = FileStore(Path(settings.run_dir) / "files")
    batches = Batches(settings, planner, chat, metrics, files)
    live = LivePage(settings.run_dir, settings.run_id, settings.names)
    app = application(settings, planner, chat, tokens, metrics, files, batches, live)
    server = UnsignalledServer(
        uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=30, backlog=2048, timeout_graceful_shutdown=settings.drain_seconds,
        )
    )  # fmt: skip
    loop = asyncio.get_running_loop()

    def end():
        planner.closing = True
        batches.stop()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_reader(settings.death_fd, lambda: os._exit(75))  # the supervisor has ended
    reader = asyncio.create_task(planner.run())
    reader.add_done_callback(lambda task: None if task.cancelled() else end())
    batches.resume()
    sampling = asyncio.create_task(live.keep_sampling())
    try:
        await server.serve(sockets=[socket.socket(fileno=settings.listen_fd)])
    finally:
        await batches.close()
        reader.cancel()
        sampling.cancel()
        await asyncio.gather(reader, sampling, return_exceptions=True)
        chat.close()
        tokens.close()
        planner.close()
    return 1 if not reader.cancelled() and reader.exception() else 0
