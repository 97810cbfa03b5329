"""Starts the front. Its settings come as one JSON object on stdin, so that the key stands in no list of processes."""

import json
import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.dont_write_bytecode, _as_it_was = True, sys.dont_write_bytecode
import bytecode_cache  # noqa: E402, F401

sys.dont_write_bytecode = _as_it_was

from server.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(json.load(sys.stdin)))
