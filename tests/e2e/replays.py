#!/usr/bin/env python3
"""`poise replay` gives a run's orders to an executor again: bit-equal answers where nothing changed, and never silence where
something did. (Replays of disturbed runs: swaps.py, order_logs.py, sameness.py, released_weights.py.)"""

import json
import shutil
import signal
import struct
from pathlib import Path

import harness
from harness import DEMO_MODEL, expect, expect_equal, request, test, wait_until
from mixed_requests import good_request

MAGIC, RECORD = struct.Struct("<8sII"), struct.Struct("<IIQII")
_CRC_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = (_byte >> 1) ^ (0x82F63B78 if _byte & 1 else 0)
    _CRC_TABLE.append(_byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def recorded(workspace, *options, count=12):
    """A finished run's directory."""
    lines = [good_request(workspace.random, number, longest=40) for number in range(count)]
    output = workspace / "out.jsonl"
    workspace.run(workspace.write_requests("requests.jsonl", lines), output, *options).expect(0)
    return Path(f"{output}.poise")


def records(log):
    """(offset of the payload, its bytes) of each record."""
    at = MAGIC.size + MAGIC.unpack_from(log)[2]
    while at < len(log):
        size = RECORD.unpack_from(log, at)[0]
        yield at + RECORD.size, log[at + RECORD.size : at + RECORD.size + size]
        at += (RECORD.size + size + 7) // 8 * 8


def with_payload(log, at, payload):
    """The log with another payload of the same size at `at`, and its checksums: as a writer with a defect would have written it."""
    size, _, time, _, unused = RECORD.unpack_from(log, at - RECORD.size)
    head = struct.pack("<IIQ", size, crc32c(payload), time)
    return log[: at - RECORD.size] + head + struct.pack("<II", crc32c(head), unused) + payload + log[at + len(payload) :]


def with_header(log, **changes):
    """The log with another header."""
    magic, version, size = MAGIC.unpack_from(log)
    text = json.dumps(json.loads(log[MAGIC.size : MAGIC.size + size]) | changes).encode()
    return MAGIC.pack(magic, version, len(text)) + text + log[MAGIC.size + size :]


def refused(workspace, log, *fragments):
    return workspace.poise("replay", log, "--model", DEMO_MODEL, "--device", "cpu").expect(2, *fragments)


@test
def a_replay_says_what_it_compared_and_how_long_each_stage_took(workspace):
    run = recorded(workspace)
    before = {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}
    told = workspace.poise("replay", run, "--device", "cpu").expect(0).out
    expect("every answer is equal" in told and "layer 5" in told and "recorded" in told, told)
    expect_equal({path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}, before, "the run that was read")
    report = workspace.replay(run, "--repeat", "3")
    expect_equal(len(report["replayed_s"]), 3, "replays")
    expect(all(stage["recorded"]["compute_s"] > 0 and stage["replayed"]["compute_s"] > 0 for stage in report["stages"]), report)
    log = (run / "orders.log").read_bytes()
    at = len(log) * 9 // 10
    damaged = workspace / "damaged.log"
    damaged.write_bytes(log[:at] + bytes([log[at] ^ 1]) + log[at + 1 :])
    up_to_there = workspace.replay(damaged, "--until", "3", "--model", DEMO_MODEL)
    expect_equal(up_to_there["iterations"], 3, "iterations")
    copy = workspace / "replayed.log"
    workspace.poise("replay", run, "-o", damaged).expect(2, "exists already")
    expect_equal(workspace.replay(run, "-o", copy)["iterations"], report["iterations"], "iterations")
    workspace.poise("inspect", "--check", copy).expect(0, "")
    workspace.replay(copy, "--model", DEMO_MODEL)  # a replay's log replays
    workspace.poise("inspect", "--diff", run, copy).expect(0)


@test
def every_flipped_byte_is_refused(workspace):
    run = recorded(workspace, count=3)
    log = (run / "orders.log").read_bytes()
    path = workspace / "orders.log"
    at, payload = workspace.random.choice(list(records(log))[:-1])
    header = MAGIC.size + log[MAGIC.size :].index(b"layers")
    unused = at - 4
    in_payload = at + workspace.random.randrange(len(payload))
    anywhere = workspace.random.randrange(MAGIC.size + MAGIC.unpack_from(log)[2], len(log) * 9 // 10)
    for at in (3, header, unused, in_payload, anywhere):
        path.write_bytes(log[:at] + bytes([log[at] ^ 0x40]) + log[at + 1 :])
        refused(workspace, path)


@test
def a_wrong_answer_in_the_record_is_found_and_named(workspace):
    run = recorded(workspace, count=3)
    log = (run / "orders.log").read_bytes()
    lines = workspace.poise("inspect", run, "--json").expect(0).out.splitlines()
    last = max(line["iteration"] for line in map(json.loads, lines) if line.get("type") == "iteration")
    at, payload = list(records(log))[-1]  # the answers of the last iteration
    results = json.loads((workspace / "out.jsonl").read_text().splitlines()[0])
    expect(results["response"]["status_code"] == 200, results)
    wrong = None
    for offset in range(0, len(payload) - 3, 4):  # a token is a number of four bytes below the size of the vocabulary
        token = struct.unpack_from("<i", payload, offset)[0]
        if 3 < token < 1000:
            changed = payload[:offset] + struct.pack("<i", token ^ 1) + payload[offset + 4 :]
            (workspace / "orders.log").write_bytes(with_payload(log, at, changed))
            ended = workspace.poise("replay", workspace / "orders.log", "--model", DEMO_MODEL, "--device", "cpu", "--json")
            if ended.code == 1:
                wrong = json.loads(ended.out)["first_difference"]
                break
    expect(wrong and wrong["iteration"] == last and wrong["recorded"] != wrong["replayed"], f"{wrong}")


@test
def a_flipped_byte_in_an_orders_tables_is_found(workspace):
    prompt = [501, 502, 503, 504, 505, 506]
    lines = [request("a", prompt, max_tokens=8, ignore_eos=True, logprobs=1)]
    output = workspace / "out.jsonl"
    workspace.run(workspace.write_requests("requests.jsonl", lines), output).expect(0)
    log = (Path(f"{output}.poise") / "orders.log").read_bytes()
    tokens = struct.pack("<6i", *prompt)
    at, payload = next((at, payload) for at, payload in records(log) if tokens in payload)
    offset = payload.index(tokens) + 8
    changed = payload[:offset] + bytes([payload[offset] ^ 2]) + payload[offset + 1 :]
    path = workspace / "orders.log"
    path.write_bytes(log[: at + offset] + changed[offset : offset + 1] + log[at + offset + 1 :])
    refused(workspace, path)  # its checksum is wrong
    path.write_bytes(with_payload(log, at, changed))  # as by a planner that ordered something else
    ended = workspace.poise("replay", path, "--model", DEMO_MODEL, "--device", "cpu", "--json").expect(1)
    expect_equal(json.loads(ended.out)["first_difference"]["iteration"], 1, "the iteration with the first difference")


@test
def what_cannot_be_replayed_is_refused_in_a_sentence(workspace):
    run = recorded(workspace, count=3)
    log = (run / "orders.log").read_bytes()
    path = workspace / "orders.log"
    path.write_bytes(log)
    workspace.poise("replay", path, "--device", "cpu").expect(2, "--model")
    workspace.poise("replay", run, "--device", "cpu", "--dtype", "float32").expect(2, "was recorded with --dtype")
    workspace.poise("replay", run, "--device", "cpu", "--quantization", "int8").expect(2, "with the --model, --quantization, ")
    workspace.poise("replay", run, "--device", "cpu", "-o", run / "orders.log").expect(2, "the log that is replayed")
    other = workspace / "model"
    shutil.copytree(DEMO_MODEL, other)
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    workspace.poise("replay", run, "--device", "cpu", "--model", other).expect(2, "another model")
    for changes, why in (
        ({"layers": 1 << 30}, '"layers" must be an integer from 1 to 1024'),
        ({"layers": 3}, "is damaged"),
        ({"kv_row_bytes": 8}, "is damaged"),
        ({"dtype": "float16\0"}, "is damaged"),
    ):
        path.write_bytes(with_header(log, **changes))
        refused(workspace, path, "the header of", why)
    path.write_bytes(MAGIC.pack(b"POISELOG", 1, 50_000) + b"[" * 50_000)
    refused(workspace, path, "not an order log")
    at, grant = next(records(log))
    path.write_bytes(with_payload(log, at, grant.replace(struct.pack("<Q", 1), struct.pack("<Q", 2), 1)))
    refused(workspace, path, "iteration 1 is for pool 1, pool 2 was granted")
    path.write_bytes(log.replace(b"contracts ", b"contracts_", 1))
    refused(workspace, path, "another build")
    path.write_bytes(log[: MAGIC.size + MAGIC.unpack_from(log)[2]])
    refused(workspace, path, "no finished iteration")
    path.write_bytes(log[:-5])
    told = workspace.poise("replay", path, "--model", DEMO_MODEL, "--device", "cpu").expect(0).out
    expect("torn off at the end" in told and "left out" in told, told)
    workspace.poise("replay", workspace / "nothing").expect(2, "no such file")


@test
def a_replay_is_not_changed_while_it_goes_on_and_leaves_nothing_when_interrupted(workspace):
    run = recorded(workspace)
    folder = workspace / "tmp"
    folder.mkdir()
    there = {"env": {"TMPDIR": str(folder)}}

    def replaying():
        process = workspace.start("replay", run, "--device", "cpu", "--repeat", "100000", **there)
        wait_until(lambda: any(harness._json(path).get("state") == "replaying" for path in folder.glob("*/run/status.json")), "it")
        return process

    process = replaying()
    (replay,) = folder.glob("*/run")
    for words in (("restart", "planner"), ("restart", "loader"), ("policy", "kv-only")):
        workspace.poise(*words, replay).expect(2, "is of a replay")
    process.send_signal(signal.SIGINT)
    workspace.finish(process).expect(75, "interrupted")
    expect_equal(list(folder.iterdir()), [], "what is left")
    process = replaying()
    (folder / "poise-replay-notours").mkdir()  # open to others: whoever made it, it is no scratch folder
    workspace.poise("stop", **there)
    expect_equal(len(list(folder.glob("*/run"))), 1, "the living replay's folder")
    process.kill()
    workspace.finish(process)
    workspace.poise("stop", **there)
    expect_equal([path.name for path in folder.iterdir()], ["poise-replay-notours"], "what is left of one that was killed")


if __name__ == "__main__":
    raise SystemExit(harness.main())
