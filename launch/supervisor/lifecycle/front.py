"""The front of a server (launch/server/): its environment, its process, and the socket it listens on.

The supervisor listens, and the front inherits the socket: a port that is taken is refused before a model is loaded, and a front that is
replaced goes on with the connections that wait.
"""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

from ..shared.paths import PLANNER, ROOT, program
from ..shared.trouble import Refusal, shown
from . import own_packages, processes

SERVER = ROOT / "launch" / "server"
_NEEDS = SERVER / "requirements.txt"
_MOST_STDERR = 1 << 20
# Lines of batches that the planner has at a time: twice as many as may run, so that none is missing while others are sent.
_MOST_AT_A_TIME, _LEAST_WINDOW = 256, 64


def python():
    """The interpreter that has what the front needs."""
    folder = own_packages.environment("serve-venv", "POISE_SERVE_VENV", _NEEDS, "what a server needs", "starlette, uvicorn and others")
    return folder / "bin" / "python"


def listening(host, port, option="--port"):
    """A socket that listens there. `option`: which one named the port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as problem:
        raise Refusal(f"--host {shown(host)}: {problem.strerror or problem}") from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as problem:
        made.close()
        raise Refusal(f"{option} {port} at {shown(host)}: {problem.strerror}; name another") from None
    return made


class Front:
    """One front's process, as supervision.py looks at children."""

    name, plain_name = "poise-front", "front"

    def __init__(self, interpreter, settings, inherited):
        """`settings`: what launch/server/main.py reads. `inherited`: descriptors."""
        self._said = os.memfd_create(self.name, os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            [str(interpreter), "-s", str(SERVER / "start.py")],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, pass_fds=inherited, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self.descriptor = os.pidfd_open(self.pid)
        self.asked_to_end = False
        try:
            self._process.stdin.write(json.dumps(settings).encode())
            self._process.stdin.close()
        except OSError:
            pass  # it has ended: its return code says so

    def returncode(self):
        return self._process.poll()

    def signal(self, number):
        self.asked_to_end = self.asked_to_end or number in (signal.SIGTERM, signal.SIGKILL)
        processes.send(self.descriptor, number)

    def said(self):
        return os.pread(self._said, _MOST_STDERR, 0).decode("utf-8", "backslashreplace")

    def close(self):
        os.close(self.descriptor)
        os.close(self._said)


def settings_of(given, arguments, listener, death_fd, version, fronts_before):
    """`fronts_before`: how many have died."""
    names = [given.served_model_name or given.model]
    if not given.served_model_name:
        names.append(getattr(given.model, "hub_name", Path(given.model).resolve().name))
    return {
        "kind": "server",
        "model": os.path.abspath(given.model),
        "names": names,
        "api_key": given.api_key,
        "front_socket": str(arguments.front_socket),
        "planner_program": str(program(PLANNER)),
        "run_dir": str(arguments.directory.path),
        "run_id": arguments.run_id,
        "listen_fd": listener.fileno(),
        "death_fd": death_fd,
        "max_open_requests": given.max_open_requests,
        "max_body": given.max_body,
        "max_file": given.max_file,
        "client_timeout": given.client_timeout,
        "batch_window": max(2 * (given.max_num_seqs or _MOST_AT_A_TIME), _LEAST_WINDOW),
        "drain_seconds": int(given.drain_timeout),
        "version": version,
        "fronts_before": fronts_before,
    }
