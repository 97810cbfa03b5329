#!/usr/bin/env python3
"""The Batch API of `poise serve`: batches equal to runs, whatever dies meanwhile."""

import json
import os
import resource
import signal
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import ROOT, expect, expect_equal, request, test, wait_until  # noqa: E402
from served import (  # noqa: E402
    Server,
    children_of,
    ended,
    endpoint,
    lines_of,
    metrics_of,
    order,
    refused,
    said_alone,
    summed,
    upload,
    wait_for,
    with_clients,
)

def lines_of_run(workspace, lines, *options):
    workspace.run(workspace.write_requests("batch.jsonl", lines), workspace / "of_run.jsonl", *options).expect(0)
    found = harness.read_results(workspace / "of_run.jsonl")
    for line in found.values():
        line["response"]["body"].pop("created", None)
    return found


@test
def a_batch_is_a_run_also_after_everything_was_killed(workspace):
    lines = [request(f"r{n}", f"where is Jana? {n}", temperature=1, max_tokens=60) for n in range(200)]
    for bad in (3, 150):
        lines[bad]["body"]["max_tokens"] = -1
    lines[40]["body"]["n"] = 3
    wanted = lines_of_run(workspace, lines, "--served-model-name", "m")
    options = (*workspace.paced(2), "--served-model-name", "m", "--max-num-seqs", "16")
    server = Server(workspace, *options)
    batch = order(server.client, upload(server.client, lines), metadata={"for": "a test"})
    counted, lost = 0, None
    for _ in range(2):
        least = counted + 5
        counted = wait_for(server.client, batch, lambda now: now.request_counts.completed > least).request_counts.completed
        if lost is not None:
            wait_for(server.client, lost, lambda now: now.request_counts.completed > 2)
        children = [server.process.pid, *children_of(server.process.pid)]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
        if lost is not None:
            (server.run / "files" / lost.input_file_id).unlink()
        left = [server.run / "files" / name for name in (f"file-{'0' * 24}", f"file-{'1' * 24}.part", f"file-{'2' * 24}.json.new")]
        for path in left:  # of uploads that the end interrupted
            path.write_text("half")
        _leave_a_batch_that_cannot_be_sent(server.run / "batches", batch.id)
        server = Server(workspace, *options)
        expect(not any(path.exists() for path in left), f"{os.listdir(server.run / 'files')}: parts of files stay")
        expect(server.client.batches.retrieve(batch.id).request_counts.completed >= counted - 1, "answers were lost")
        lost = lost or order(server.client, upload(server.client, lines[:100]))
    lost = ended(server.client, lost)
    expect_equal((lost.status, lost.errors.data[0].code), ("failed", "storage"), "a batch whose input is gone")
    kept = lines_of(server.client, lost.output_file_id)
    expect(len(kept) > 2 and all(line == wanted[name] for name, line in kept.items()), f"{list(kept)} were kept of it")
    batch = ended(server.client, batch, 120)
    expect_equal((batch.status, batch.metadata), ("completed", {"for": "a test"}), "the end")
    expect_equal(batch.request_counts.model_dump(), {"total": 200, "completed": 198, "failed": 2}, "counts")
    got = lines_of(server.client, batch.output_file_id, batch.error_file_id)
    expect_equal(len(lines_of(server.client, batch.error_file_id)), 2, "lines of the error file")
    expect_equal(list(lines_of(server.client, batch.output_file_id))[:4], ["r0", "r1", "r2", "r4"], "the order of answers")
    differ = [name for name in wanted if got.get(name) != wanted[name]]
    expect(not differ and len(got) == 200, f"{differ[:5]} differ: {[(got.get(n), wanted[n]) for n in differ[:1]]}")
    _batches_end_in_each_way(server, server.client)
    _a_full_disk_costs_no_answer(server, server.client, wanted)
    _the_front_serves_others_meanwhile(server, server.client)
    _what_is_wrong_with_batches_is_told(server, server.client, batch)
    server.end().expect(0)


def _leave_a_batch_that_cannot_be_sent(folder, like):
    """As earlier servers kept one whose metadata hold half of a surrogate pair."""
    name = f"batch_{'0' * 24}"
    facts = json.loads((folder / f"{like}.json").read_text()) | {"id": name, "status": "cancelled", "metadata": {"a": "\ud800"}}
    (folder / f"{name}.json").write_text(json.dumps(facts))


def _a_full_disk_costs_no_answer(server, client, wanted):
    lines = [request(f"r{n}", f"where is Jana? {n}", temperature=1, max_tokens=60) for n in range(30)]
    lines[3]["body"]["max_tokens"] = -1
    file = upload(client, lines)
    front, before = server.front(), _successes(server)
    resource.prlimit(front, resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    batch = order(client, file)
    waiting = wait_for(client, batch, lambda now: now.errors is not None)
    expect_equal((waiting.status, waiting.errors.data[0].code), ("in_progress", "storage"), "a batch whose disk is full")
    full = server.get("/v1/files", *multipart(b"x" * (2 << 20)))
    expect_equal((full[0], json.loads(full[2])["error"]["code"]), (507, "insufficient_storage"), "an upload")
    resource.prlimit(front, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    batch = ended(client, batch)
    expect_equal((batch.status, batch.errors), ("completed", None), "the end, when there is room again")
    expect_equal(batch.request_counts.model_dump(), {"total": 30, "completed": 29, "failed": 1}, "counts")
    got = lines_of(client, batch.output_file_id, batch.error_file_id)
    differ = [name for name, line in got.items() if line != wanted[name]]
    expect(not differ and len(got) == 30, f"{differ[:5]} differ")
    expect_equal(_successes(server) - before, 29, "answers that were computed")
    client.files.delete(file.id)


def _successes(server):
    return summed(metrics_of(server.url + "/metrics", server.key), "vllm:request_success_total")


def multipart(data):
    """(body, headers) of an upload."""
    head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return head + data + b"\r\n--b--\r\n", {"Content-Type": "multipart/form-data; boundary=b"}


def _the_front_serves_others_meanwhile(server, client):
    """A file whose lines the front itself refuses; one that is cancelled before it is counted. A front that serves nobody while it reads
    tells of no line or of all. It reads for longer than a busy machine lets a client wait."""
    count = 100_000
    many = b'{"url":"/v1/chat/completions"}\n' * count
    file = client.files.create(file=("many", many), purpose="batch")
    batch = order(client, file)
    seen = set()
    while (now := json.loads(server.get(f"/v1/batches/{batch.id}")[2]))["status"] in ("validating", "in_progress"):
        seen.add(now["request_counts"]["failed"])
        time.sleep(0.01)
    expect_equal(ended(client, batch).request_counts.failed, count, "refused lines")
    expect(len(seen - {0, count}) > 1, f"the front answered nobody while it read the file: it told of {seen}")
    client.files.delete(file.id)
    file = client.files.create(file=("long", b"{}\n" * 1_000_000), purpose="batch")
    batch = order(client, file)
    expect_equal((batch.status, client.batches.cancel(batch.id).status), ("validating", "cancelling"), "cancelled at once")
    expect_equal(ended(client, batch).status, "cancelled", "a batch that was cancelled while its lines were counted")
    client.files.delete(file.id)


def _two_batches_get_on_side_by_side(client):
    file = upload(client, [request(f"b{n}", "who?", max_tokens=12, ignore_eos=True) for n in range(200)])
    one, other = order(client, file), order(client, file)
    wait_for(client, other, lambda now: now.request_counts.completed > 0)
    expect_equal(client.batches.retrieve(one.id).status, "in_progress", "the first one when the second has answers")
    for batch in (one, other):
        expect_equal(ended(client, batch).request_counts.completed, 200, "answers")
    client.files.delete(file.id)


def _batches_end_in_each_way(server, client):
    slow = [request(f"s{n}", "who?", max_tokens=400) for n in range(100)]  # more than the planner gets at a time
    for line in slow:
        line["body"]["ignore_eos"] = True
    _two_batches_get_on_side_by_side(client)
    file = upload(client, slow)
    one, other = order(client, file), order(client, file)
    for batch in (one, other):
        wait_for(client, batch, lambda now: now.status == "in_progress")
    problem = refused("ConflictError", lambda: client.files.delete(file.id), 409, "file_in_use")
    expect(file.id in str(problem), str(problem))
    expect(client.batches.cancel(one.id).status in ("cancelling", "cancelled"), "the batch is cancelled")
    one = ended(client, one)
    expect_equal((one.status, one.request_counts.completed), ("cancelled", 0), "a batch that was cancelled before its first answer")
    open_lines = wait_until(lambda: summed(metrics_of(server.url + "/metrics", server.key), "poise:open_lines"), "lines of the other one")
    expect_equal(open_lines, 64, "lines that the planner has: twice as many as may run, or 64")
    client.batches.cancel(other.id)
    ended(client, other)
    late = ended(client, order(client, file, window="1s"))
    expect_equal(late.status, "expired", "a batch whose window is over")
    errors = lines_of(client, late.error_file_id)
    expect(errors and all(line["error"]["code"] == "batch_expired" for line in errors.values()), str(errors)[:300])
    expect_equal(late.request_counts.completed + late.request_counts.failed, 100, "every line is counted")
    empty = ended(client, order(client, client.files.create(file=("e", b"\n\n"), purpose="batch")))
    expect_equal((empty.status, empty.errors.data[0].code), ("failed", "empty_file"), "a batch of nothing")
    client.files.delete(file.id)
    refused("NotFoundError", lambda: client.files.retrieve(file.id), 404, "file_not_found")


def _what_is_wrong_with_batches_is_told(server, client, batch):
    file = upload(client, [request("a", "x"), {**request("b", "x"), "url": "/v1/chat/completions"}, "no line"])
    chat = {**request("c", "/v1/completions"), "url": "/v1/chat/completions"}  # names the other endpoint, and is none
    hidden = json.dumps(request("d", "x")).replace("/v1", "\\/v1")
    of_chats = client.files.create(file=("in", json.dumps(chat).encode() + b"\n" + hidden.encode() + b"\n[]\n"), purpose="batch")
    of_chats = ended(client, order(client, of_chats, "/v1/chat/completions"))
    errors = [json.loads(text)["response"]["body"]["error"] for text in client.files.content(of_chats.error_file_id).text.splitlines()]
    expect_equal([one["code"] for one in errors], ["no_chat_template", "invalid_value", "invalid_json"], "errors of chats")
    refused("BadRequestError", lambda: order(client, file, "/v1/embeddings"), 400, "invalid_value")
    refused("BadRequestError", lambda: order(client, file, window="soon"), 400, "invalid_value")
    refused("NotFoundError", lambda: client.batches.retrieve("batch_0"), 404, "batch_not_found")
    refused("NotFoundError", lambda: client.files.content("../run.json"), 404)
    refused("ConflictError", lambda: client.batches.cancel(batch.id), 409, "batch_not_cancellable")
    refused("BadRequestError", lambda: client.files.create(file=("a", b"x"), purpose="other"), 400, "invalid_value")
    mixed = ended(client, order(client, file))
    expect_equal(mixed.request_counts.model_dump(), {"total": 3, "completed": 1, "failed": 2}, "counts of a mixed file")
    errors = [json.loads(text) for text in client.files.content(mixed.error_file_id).text.splitlines()]
    expect_equal([(one["id"], one["response"]["body"]["error"]["param"]) for one in errors], [("poise-2", "url"), ("poise-3", None)], "errors")
    names = [one.id for one in client.batches.list(limit=2)]
    expect(names[0] == mixed.id and len(set(names)) == len(names) > 4, f"a list in pages: {names}")
    expect_equal(len(client.files.list(purpose="batch").data), 5, "files of inputs")


_A_BATCH_ALONE = """
import asyncio, os, sys, types
from server import batches, files
from server.answers import Answer

class Planner:
    closing, open_lines = False, []
    def open(self, line):
        self.open_lines.append(line)
    def cancel(self, lines):
        pass

async def main(folder):
    synced = []
    os.fdatasync = lambda descriptor: synced.append(os.fstat(descriptor).st_size)
    store = files.FileStore(folder + "/files")
    store.part("file-" + "0" * 24).write_bytes(b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{}}\\n' * 2)
    store.publish("file-" + "0" * 24, "in", "batch")
    metrics = types.SimpleNamespace(finished=lambda *_: None)
    all = batches.Batches(types.SimpleNamespace(run_dir=folder, batch_window=64), Planner(), None, metrics, store)
    batch = all.create({"endpoint": "/v1/completions", "input_file_id": "file-" + "0" * 24, "completion_window": "24h"})
    while len(Planner.open_lines) < 2:
        await asyncio.sleep(0.01)
    line = b'{"id":"poise-1","custom_id":"a","response":{"status_code":400,"request_id":"req-1","body":{"error":{}}},"error":null}'
    batch.take(Planner.open_lines[0], line)
    while not synced or max(synced) == 0:  # the second line goes on
        await asyncio.sleep(0.05)
    print(max(synced), batch.facts["request_counts"]["failed"])
    await all.close()

asyncio.run(main(sys.argv[1]))
"""


@test
def a_batch_has_its_results_on_the_disk_within_a_second(workspace):
    """Without a planner: what a crash of the machine would leave is what was synced."""
    expect_equal(said_alone(_A_BATCH_ALONE, workspace.folder), "118 1\n", "what it says")


@test
def a_result_line_is_taken_apart_in_little_memory(workspace):
    sys.path.insert(0, str(ROOT / "launch"))
    from server.answers import Answer

    line = b'{"id":"poise-7","custom_id":"%b","response":{"status_code":400,"request_id":"req-7","body":{}},"error":null}' % (rb"a\"" * (1 << 20))
    tracemalloc.start()
    answer = Answer(line)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expect_equal((answer.status, answer.body, len(answer.custom_id)), (400, b"{}", (3 << 20) + 2), "its parts")
    expect(peak < 16 << 20, f"it took {peak >> 20} MiB")


if __name__ == "__main__":
    with_clients()
    raise SystemExit(harness.main())
