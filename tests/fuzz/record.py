#!/usr/bin/env python3
"""Records what the fuzz targets of binary inputs start from, into tests/fuzz/recorded: order logs and messages.

Runs `poise` on a tiny model (POISE_BIN says which programs), so it is needed only if one of the formats has grown.
"""

import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))
import harness  # noqa: E402

MODEL = harness.ROOT / "tests" / "golden" / "models" / "no_bias"
RECORDED = HERE / "recorded"
# What differs in orders: kinds of blocks, streamed weights, blocks on the device, blocks that are kept nowhere.
WAYS = {
    "kv": ("--policy", "kv-only", "--resident-layers", "1", "--gpu-blocks", "none"),
    "mixed": ("--policy", "hybrid", "--act-share", "0.5", "--resident-layers", "0", "--mini-batch-tokens", "48"),
    "recompute": ("--policy", "token-recompute", "--recompute-share", "0.5", "--resident-layers", "1"),
}
ITERATIONS = 2  # of a recorded log


def requests():
    for number, length in enumerate((5, 19, 33)):
        body = {"prompt": [7 + number] * length, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        if number == 1:
            body |= {"logprobs": 2, "echo": True}
        yield {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def records(log):
    """Where each record begins and ends, and its message; at last the end of the header."""
    at = 16 + struct.unpack_from("<I", log, 12)[0]
    while at < len(log):
        size = struct.unpack_from("<I", log, at)[0]
        end = at + (24 + size + 7) // 8 * 8
        yield at, end, log[at + 24 : at + 24 + size]
        at = end


def body_type(message):
    """The union's type: field 5 of the root table."""
    table = struct.unpack_from("<I", message, 0)[0]
    vtable = table - struct.unpack_from("<i", message, table)[0]
    offset = struct.unpack_from("<H", message, vtable + 4 + 2 * 4)[0]
    return message[table + offset]


ITERATION, LAYER_ORDER, ITERATION_DONE, CONFIGURE = 4, 5, 8, 2


def cut(log):
    """The log up to its last finished iteration of those, and the executor's messages of it."""
    sent, done = b"", 0
    for _, end, message in records(log):
        kind = body_type(message)
        if kind in (CONFIGURE, ITERATION, LAYER_ORDER):
            sent += struct.pack("<I", len(message)) + message
        done += kind == ITERATION_DONE
        if done == ITERATIONS:
            return log[:end], sent
    raise SystemExit("the log is too short")


def record(workspace, name, options):
    path = workspace.write_requests(f"{name}.jsonl", list(requests()))
    output = workspace / f"{name}.out"
    workspace.run(path, output, "--skip-tokenizer-init", "--threads", "1", "--max-num-seqs", "3", *options, model=MODEL).expect(0)
    log, sent = cut((workspace / f"{name}.out.poise" / "orders.log").read_bytes())
    (RECORDED / f"order_log_{name}").write_bytes(log)
    (RECORDED / f"message_{name}").write_bytes(sent)


def main():
    RECORDED.mkdir(exist_ok=True)
    workspace = harness.Workspace(1)
    try:
        for name, options in WAYS.items():
            record(workspace, name, options)
    finally:
        print(*workspace.leftovers(), sep="\n")
        workspace.close()


if __name__ == "__main__":
    main()
