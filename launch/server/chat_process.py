"""Renders chat lines one after the other: each comes on stdin behind its length (4 bytes, little-endian), and its entry goes to stdout in
the same form. Bounds and rendering are those of a run's chat lines (supervisor/lifecycle/chat_worker.py).

    chat_process.py MODEL
"""

import json
import os
import resource
import signal
import struct
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.dont_write_bytecode, _as_it_was = True, sys.dont_write_bytecode
import bytecode_cache  # noqa: E402, F401

sys.dont_write_bytecode = _as_it_was

from supervisor.lifecycle.chat_worker import MEMORY, BadModel, Renderer, entry_of  # noqa: E402


def main(model):
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, to = sys.stdin.buffer, sys.stdout.buffer
    try:
        renderer = Renderer(model)
    except BadModel as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    while head := source.read(4):
        line = source.read(struct.unpack("<I", head)[0])
        entry = json.dumps(entry_of(renderer, line, True), ensure_ascii=False).encode(errors="replace")
        to.write(struct.pack("<I", len(entry)) + entry)
        to.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
