#!/usr/bin/env python3
"""`poise serve` as clients see it: the `openai` package from PyPI, and plain sockets for what no client would send. Batches are in batches.py."""

import base64
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import DEMO_MODEL, ROOT, expect, expect_equal, request, test, wait_until  # noqa: E402
from served import (  # noqa: E402
    KEY,
    SERVE_VENV,
    Server,
    ask,
    children_of,
    ended,
    lines_of,
    metrics_of,
    order,
    refused,
    said_alone,
    serving,
    summed,
    upload,
    with_clients,
    words_of,
)

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def chat_model(workspace):
    folder = workspace / "chatting"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def answers_of_run(workspace, model, lines):
    """What `poise run` makes of these lines, by custom_id: bodies without what differs each time."""
    workspace.run(workspace.write_requests("in.jsonl", lines), workspace / "out.jsonl", model=model).expect(0)
    return {name: comparable(line["response"]["body"]) for name, line in harness.read_results(workspace / "out.jsonl").items()}


def comparable(body):
    body = body if isinstance(body, dict) else body.model_dump(exclude_unset=True)
    return {name: value for name, value in body.items() if name not in ("id", "created", "model", "_request_id")}


LINES = [
    request("greedy", "where is Jana?"),
    request("sampled", "who lives in Lorun?", temperature=0.8, seed=5, max_tokens=40, top_p=0.9),
    request("logprobs", "Paris is", logprobs=3, max_tokens=6),
    request("echo", "Paris is", logprobs=1, echo=True, max_tokens=1),
    request("echoed", "Paris is", echo=True, max_tokens=9),
    request("scored", [5, 6, 7, 8], logprobs=0, echo=True, max_tokens=0),
    request("stopped", "who lives in Lorun?", stop=["."], max_tokens=30),
    {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "where is Jana?"}], "temperature": 0, "max_tokens": 12}},
    {"custom_id": "chat-logprobs", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "who?"}], "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}},
]  # fmt: skip


SEVERAL = [
    request("three", "who lives in Lorun?", n=3, temperature=1.1, seed=3, max_tokens=12, logprobs=1),
    {"custom_id": "chat-two", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "where is Jana?"}], "temperature": 1, "seed": 4, "max_tokens": 9, "n": 2.0}},
]  # fmt: skip


def joined(chunks, chat):
    """(text, logprobs, finish_reason, usage) of a stream."""
    text, values, reason, usage = "", [], None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content if chat else choice.text) or ""
            if choice.logprobs:
                values += [one.logprob for one in choice.logprobs.content] if chat else choice.logprobs.token_logprobs
            reason = choice.finish_reason or reason
    return text, values, reason, usage


@test
def answers_are_those_of_a_run_whole_and_as_streams(workspace):
    model = chat_model(workspace)
    wanted = answers_of_run(workspace, model, LINES + SEVERAL)
    with serving(workspace, model=model) as server:
        client = server.client
        client.served = str(model)
        for line in LINES:
            body = wanted[line["custom_id"]]
            expect_equal(comparable(ask(client, line)), body, f"the answer to {line['custom_id']}")
            chat = "chat" in line["url"]
            text, values, reason, usage = joined(ask(client, line, stream=True, stream_options={"include_usage": True}), chat)
            choice = body["choices"][0]
            expect_equal(text, choice["message"]["content"] if chat else choice["text"], f"text of the stream {line['custom_id']}")
            kept = choice["logprobs"] or {"content": [], "token_logprobs": []}
            kept = [one["logprob"] for one in kept["content"]] if chat else kept["token_logprobs"]
            expect_equal((values, reason), (kept, choice["finish_reason"]), f"end of the stream {line['custom_id']}")
            expect_equal(usage.model_dump(exclude_unset=True), body["usage"], f"usage of the stream {line['custom_id']}")
        many = client.completions.create(model=model.name, prompt=["where is Jana?", "Paris is"], temperature=0, max_tokens=8, n=1)
        expect_equal([choice.index for choice in many.choices], [0, 1], "indices")
        expect_equal(many.choices[0].text, wanted["greedy"]["choices"][0]["text"], "the first of two prompts")
        _several_choices_are_those_of_a_run(client, wanted)
        _streams_tell_of_the_prompt(server)
        _a_batch_of_chats_is_a_run(client, wanted)
        _the_model_is_described(server, model)
        _what_is_wrong_is_told(server)
        _many_at_once(server, client)
        _metrics_add_up(server, client)


def _several_choices_are_those_of_a_run(client, wanted):
    for line in SEVERAL:
        body, chat = wanted[line["custom_id"]], "chat" in line["url"]
        expect_equal(len(body["choices"]), line["body"]["n"], "choices of the run")
        expect_equal(comparable(ask(client, line)), body, f"the answer to {line['custom_id']}")
        chunks = list(ask(client, line, stream=True, stream_options={"include_usage": True}))
        expect_equal(chunks[-1].usage.model_dump(exclude_unset=True), body["usage"], "usage of the stream")
        for choice in body["choices"]:
            own = [one for chunk in chunks for one in chunk.choices if one.index == choice["index"]]
            text = "".join((one.delta.content if chat else one.text) or "" for one in own)
            expect_equal(text, choice["message"]["content"] if chat else choice["text"], f"choice {choice['index']} of {line['custom_id']}")
            expect_equal([one.finish_reason for one in own if one.finish_reason], [choice["finish_reason"]], "how it ended")
            values = [value for one in own if one.logprobs for value in one.logprobs.token_logprobs]
            expect_equal(values, choice["logprobs"]["token_logprobs"] if choice["logprobs"] else [], "logprobs")
    both = client.completions.create(model=client.served, prompt=["a", "b"], n=2, temperature=1, max_tokens=3, stream=True)
    expect_equal({one.index for chunk in both for one in chunk.choices}, {0, 1, 2, 3}, "indices of two prompts with two answers each")
    refused("BadRequestError", lambda: client.completions.create(model=client.served, prompt="x", n=2, temperature=0), 400)
    refused("BadRequestError", lambda: client.completions.create(model=client.served, prompt=["x"] * 200, n=128), 400)


def _streams_tell_of_the_prompt(server):
    """With the end: in a completion's choice, or beside a chat's, as in the whole answer."""
    names = {"prompt_token_ids", "prompt_logprobs", "scores"}
    told = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 2}
    for path, body, among in (
        ("/v1/completions", {"prompt": "Paris is", **told}, 2),
        ("/v1/completions", {"prompt": "Paris is", "score_from": 1, "score_best": 2}, 1),
        ("/v1/chat/completions", {"messages": LINES[-1]["body"]["messages"], **told}, 2),
    ):
        asked = [json.dumps(body | more).encode() for more in ({}, {"stream": True})]
        whole = json.loads(server.get(path, asked[0])[2])
        last = json.loads(server.get(path, asked[1])[2].split(b"data: ")[-2])
        place = [one if "chat" in path else one["choices"][0] for one in (last, whole)]
        found, wanted = ({name: one[name] for name in names & one.keys()} for one in place)
        expect_equal(len(wanted), among, f"what {path} tells of the prompt")
        expect_equal(found, wanted, f"what the end of a stream of {path} tells of the prompt")


def _a_batch_of_chats_is_a_run(client, wanted):
    chats = [line for line in LINES + SEVERAL if "chat" in line["url"]]
    batch = ended(client, order(client, upload(client, chats), "/v1/chat/completions"))
    got = {name: comparable(line["response"]["body"]) for name, line in lines_of(client, batch.output_file_id).items()}
    expect_equal(got, {line["custom_id"]: wanted[line["custom_id"]] for line in chats}, "answers to chats")


def _the_model_is_described(server, model):
    expect_equal([one.id for one in server.client.models.list()], [str(model)], "models")
    expect_equal(server.client.models.retrieve(model.name).id, model.name, "a model")
    status, _, tokens = server.get("/tokenize", b'{"prompt": "where is Jana?"}')
    tokens = json.loads(tokens)
    expect_equal((status, tokens["count"]), (200, len(tokens["tokens"])), "tokenize")
    _, _, text = server.get("/detokenize", json.dumps({"tokens": tokens["tokens"][1:]}).encode())
    expect_equal(json.loads(text), {"prompt": "where is Jana?"}, "detokenize")
    _, _, chat = server.get("/tokenize", b'{"messages": [{"role": "user", "content": "a"}]}')
    expect(json.loads(chat)["count"] > 3, f"a chat has tokens: {chat}")
    expect("eos_token" in json.loads(server.get("/tokenizer_info")[2]), "tokenizer_info")


def _what_is_wrong_is_told(server):
    import openai

    client = server.client
    refused("NotFoundError", lambda: client.completions.create(model="another", prompt="x"), 404, "model_not_found")
    refused("NotFoundError", lambda: client.models.retrieve("another"), 404, "model_not_found")
    refused("BadRequestError", lambda: client.completions.create(model=client.served, prompt="x", max_tokens=-1), 400, "invalid_value")
    refused("BadRequestError", lambda: client.completions.create(model=client.served, prompt="x", max_tokens=-1, stream=True), 400)
    refused("BadRequestError", lambda: client.chat.completions.create(model=client.served, messages=[]), 400)
    refused("BadRequestError", lambda: client.completions.create(model=client.served, prompt="x " * 2000), 400, "context_length_exceeded")
    stranger = openai.OpenAI(api_key="wrong", base_url=server.url + "/v1", max_retries=0)
    refused("AuthenticationError", lambda: stranger.models.list(), 401, "invalid_api_key")
    for path, body, status in (
        ("/nothing", None, 404),
        ("/v1/completions", None, 405),
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[1]", 400),
        ("/v1/completions", b'{"prompt": "\xff"}', 400),
        ("/v1/completions", b'{"prompt": NaN}', 400),
        ("/v1/completions", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        ("/v1/completions", b'{"prompt": ["a", 5]}', 400),
        ("/v1/completions", b'{"prompt": "a", "stream": 1}', 400),
        ("/v1/completions", b'{"prompt": "a", "stream_options": {}}', 200),
        ("/detokenize", b'{"tokens": [-1]}', 400),
        ("/detokenize", b'{"tokens": [1000000]}', 400),
        ("/tokenize", b'{"prompt": "\\ud800"}', 400),
        ("/tokenize", b'{"prompt": "\\ud83d\\ude00"}', 200),
        ("/v1/completions", b'{"prompt": "x", "model": "\\ud800"}', 400),
        ("/v1/batches", b'{"metadata": {"a": "\\uDFFF"}}', 400),
        ("/tokenize", b'{"prompt": 5}', 400),
    ):
        got, _, told = server.get(path, body)
        expect_equal(got, status, f"status of {path} {(body or b'')[:40]}: {told[:200]}")
        expect(status == 200 or {"message", "type", "param", "code"} <= set(json.loads(told)["error"]), f"no error: {told[:200]}")


def _many_at_once(server, client):
    """Every stream of 40 has its own answer."""
    prompts = [f"where is {name}?" for name in ("Jana", "Petr", "Eva", "Ivan", "Lena")] * 8

    def stream(prompt):
        return joined(client.completions.create(model=client.served, prompt=prompt, max_tokens=16, temperature=0, stream=True), False)[0]

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        texts = dict.fromkeys(prompts)
        for prompt, text in zip(prompts, pool.map(stream, prompts)):
            expect(texts[prompt] in (None, text), f"{prompt}: {text!r} and {texts[prompt]!r}")
            texts[prompt] = text


def named_in_the_dashboard():
    text = (ROOT / "launch" / "server" / "grafana.json").read_text()
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    return {name for query in queries for name in re.findall(r"(?:vllm|poise):\w+", query)}


USAGE = {"vllm:prompt_tokens_total": "prompt_tokens", "vllm:generation_tokens_total": "completion_tokens"}


def _metrics_add_up(server, client):
    expect_equal(server.get("/metrics", key="wrong")[0], 401, "metrics without the key")
    before = metrics_of(server.url + "/metrics", KEY)
    used = [ask(client, line).usage for line in LINES]
    used.append(joined(ask(client, LINES[1], stream=True, stream_options={"include_usage": True}), False)[3])
    batch = ended(client, order(client, upload(client, LINES[:6])))
    used += [json.loads(text)["response"]["body"]["usage"] for text in client.files.content(batch.output_file_id).text.splitlines()]
    used = [one if isinstance(one, dict) else one.model_dump() for one in used]
    # The planner writes its status twice a second.
    at_rest = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "poise:open_requests", "poise:open_lines")

    def rests():
        now = metrics_of(server.url + "/metrics", KEY)
        return now if not any(summed(now, name) for name in at_rest) else None

    after = wait_until(rests, "a server at rest", 10)
    for name, field in USAGE.items():
        expect_equal(summed(after, name) - summed(before, name), sum(one[field] for one in used), name)
    name = "vllm:request_success_total"
    expect_equal(summed(after, name) - summed(before, name), len(used), name)
    expect(summed(after, "vllm:time_to_first_token_seconds_count") > len(LINES), "first tokens were timed")
    timed = {part: summed(after, f"poise:first_token_added_seconds_{part}") - summed(before, f"poise:first_token_added_seconds_{part}") for part in ("count", "sum")}
    expect_equal(timed["count"], 1, "streams whose first token was timed")
    expect(0 < timed["sum"] < summed(after, "vllm:e2e_request_latency_seconds_sum"), f"what the server adds: {timed}")
    own = {"poise:requests", "poise:requests_done", "poise:requests_failed"}  # of runs with a file
    lacking = named_in_the_dashboard() - own - {name for name, _ in after}
    expect(not lacking, f"the dashboard asks for {lacking}")
    wanted = summed(after, "vllm:generation_tokens_total")
    wait_until(lambda: abs(_tokens_of_page(server) - wanted) < 0.1, f"{wanted} tokens in the curve of the page", 10)
    _the_page_wants_the_key(server)


def _tokens_of_page(server):
    """Tokens of the curve at `/`, which is sampled once a second."""
    status, _, body = server.get("/report.json")
    expect_equal(status, 200, "the facts of the page")
    return sum(json.loads(body)["facts"]["log"]["series"]["tokens"])


def _the_page_wants_the_key(server):
    expect_equal([server.get(path, key="wrong")[0] for path in ("/", "/report.json")], [401, 401], "the page without the key")
    challenge = server.get("/", key="wrong")[1]["WWW-Authenticate"]
    expect(challenge.startswith("Basic"), f"a browser would not ask for the key: {challenge}")
    basic = {"Authorization": "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()}
    status, headers, body = server.get("/", headers=basic)
    expect(status == 200 and b"report.json" in body and b"https:" not in body.split(b'id="library"')[0], f"the page: {status}")
    expect("connect-src 'self'" in headers["Content-Security-Policy"], "what the page may ask")
    expect_equal(server.get("/v1/models", headers=basic)[0], 401, "a browser's password is for the page alone")
    for wrong in ("Basic", "Basic !", "Basic " + "A" * 5, "Basic " + base64.b64encode(b"any:no").decode()):
        expect_equal(server.get("/", headers={"Authorization": wrong})[0], 401, wrong)


@test
def the_metrics_of_a_run_are_its_results_usage(workspace):
    lines = [request(f"r{n}", f"where is Jana? {n}", max_tokens=10 + n) for n in range(30)]
    lines[7]["body"]["max_tokens"] = -1
    requests = workspace.write_requests("in.jsonl", lines)
    words = workspace.run_words(requests, workspace / "out.jsonl", "--metrics-port", "0", "--metrics-linger", "20", *workspace.paced(1))
    environment = {"POISE_SERVE_VENV": SERVE_VENV}
    process = workspace.start(*words, env=environment)
    url = wait_until(lambda: re.search(r"metrics at (\S+)", harness.said(process)), "the metrics", 240)[1]
    seen, last = [], {}
    while process.poll() is None:
        with contextlib.suppress(OSError):  # before its beginning and after its end
            last = metrics_of(url)
            seen.append(summed(last, "vllm:generation_tokens_total"))
            with urllib.request.urlopen(url.replace("/metrics", "/report.json"), timeout=5) as answer:
                page = json.loads(answer.read())
        time.sleep(0.2)
    workspace.finish(process).expect(0)
    expect(seen == sorted(seen) and len(set(seen)) > 1, f"the counts do not rise: {seen}")
    expect(sum(page["facts"]["log"]["series"]["tokens"]) > 0 and "generated tokens" in page["head"], f"the page does not move: {page}")
    used = [line["response"]["body"].get("usage", {}) for line in harness.read_results(workspace / "out.jsonl").values()]
    for name, field in USAGE.items():
        expect_equal(summed(last, name), sum(one.get(field, 0) for one in used), name)
    expect_equal([summed(last, f"poise:{name}") for name in ("requests", "requests_done", "requests_failed")], [30, 30, 1], "lines")
    own = {name for name in named_in_the_dashboard() if "request_" in name or "_latency" in name or "first_token" in name or "open_" in name}
    lacking = named_in_the_dashboard() - own - {name for name, _ in last}
    expect(not lacking, f"the dashboard asks for {lacking}")
    workspace.run(requests, workspace / "out.jsonl", "--metrics-linger", "20").expect(2, "--metrics-port")
    _short_runs_linger_until_they_are_interrupted(workspace, environment)


def _short_runs_linger_until_they_are_interrupted(workspace, environment):
    requests = workspace.write_requests("short.jsonl", [request("a", "x", max_tokens=1)])
    words = workspace.run_words(requests, workspace / "short.out", "--overwrite", "--metrics-port", "0", "--metrics-linger", "100")
    for interrupted in (False, True):
        process = workspace.start(*words, env=environment)
        url = wait_until(lambda: re.search(r"metrics at (\S+)", harness.said(process)), "the metrics")[1]
        wait_until(lambda: not workspace.children(workspace / "short.out.poise") and (workspace / "short.out").exists(), "the run's end")
        began = time.monotonic()
        if interrupted:
            process.send_signal(signal.SIGINT)
        else:
            expect_equal(summed(metrics_of(url), "poise:requests_done"), 1, "the counts of a short run")
        workspace.finish(process).expect(0, "is written")
        expect(time.monotonic() - began < 60, "it went on after a signal, or when its counts had been read")
        (workspace / "short.out").unlink()


@test
def a_server_goes_on_when_its_processes_die(workspace):
    line = request("long", "who lives in Lorun?", max_tokens=150, temperature=0.9, seed=7)
    line["body"]["ignore_eos"] = True
    server = Server(workspace, *workspace.paced(1), "--max-open-requests", "4", "--max-body", "64KiB", key=None)
    client = server.client
    client.served = DEMO_MODEL.name
    whole = ask(client, line).choices[0].text
    for name in ("planner", "gpu_executor"):
        stream = iter(ask(client, line, stream=True))
        chunks = [next(stream), next(stream)]
        os.kill(server.child(name), signal.SIGKILL)
        expect_equal(joined([*chunks, *stream], False)[0], whole, f"the stream over the death of the {name}")
    _a_client_that_leaves_is_cancelled(server, client, line)
    _bounds_hold(server, client, line)
    _a_front_that_dies_is_replaced(server, client, line, whole)
    stream = iter(ask(client, line, stream=True))
    chunks = [next(stream)]
    server.process.send_signal(signal.SIGTERM)  # what is open is answered first
    expect_equal(joined([*chunks, *stream], False)[0], whole, "the stream over the end")
    workspace.finish(server.process, 60).expect(0, "the server has ended")
    said = harness.said(server.process)
    expect("Lorun" not in said, "a prompt was printed")
    for log in server.run.rglob("*"):
        expect(not log.is_file() or b"Lorun" not in log.read_bytes(), f"a prompt stands in {log.name}")


def _status(server):
    return json.loads((server.run / "status.json").read_text())


def _a_client_that_leaves_is_cancelled(server, client, line):
    """Twice a second the status says how many requests run; those that are cancelled are never done."""

    def runs(count):
        wait_until(lambda: _status(server)["running"] == count, f"{count} requests to run", 10)

    runs(0)
    before = _status(server)["done"]
    stream = ask(client, line | {"body": {**line["body"], "max_tokens": 400}}, stream=True)
    next(iter(stream))
    runs(1)
    stream.close()
    runs(0)
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True}).encode()
    with connected(server, post(len(body)) + body):
        runs(1)
    runs(0)
    expect_equal(_status(server).get("seconds_left", 0), 0, "what is left where nothing runs")
    expect_equal(_status(server)["done"], before, "requests that were answered though nobody waited for them")


def _bounds_hold(server, client, line):
    streams = [ask(client, line, stream=True) for _ in range(4)]
    problem = refused("RateLimitError", lambda: ask(client, line), 429, "too_many_requests")
    expect(int(problem.response.headers["retry-after"]) >= 1, "when to come again")
    refused("BadRequestError", lambda: client.completions.create(model=client.served, prompt=["a"] * 5), 400)
    for stream in streams:
        stream.close()
    # The status may be older than these requests, and says 0 then.
    wait_until(lambda: summed(metrics_of(server.url + "/metrics"), "poise:open_requests") == 0, "the requests to be forgotten", 10)
    wait_until(lambda: _status(server)["running"] == 0, "the requests to be cancelled", 10)
    status, _, told = server.get("/v1/completions", json.dumps({"prompt": "x" * 70000}).encode())
    expect_equal((status, json.loads(told)["error"]["code"]), (413, "request_too_large"), "a large body")


def _a_front_that_dies_is_replaced(server, client, line, whole):
    stream = ask(client, line, stream=True)
    next(iter(stream))
    front = [pid for pid in children_of(server.process.pid) if "server/start.py" in words_of(pid)]
    expect_equal(len(front), 1, "fronts")
    os.kill(front[0], signal.SIGKILL)
    with contextlib.suppress(Exception):
        for _ in stream:
            pass
    wait_until(server.healthy, "another front", 20)
    expect_equal(ask(client, line).choices[0].text, whole, "the answer of the next front")
    wait_until(lambda: _status(server)["running"] == 0, "the lost request to be dropped", 10)


@contextlib.contextmanager
def connected(server, data=b""):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as made:
        with contextlib.suppress(OSError):  # it may be closed meanwhile
            made.sendall(data)
        yield made


def answer_of(connection):
    """What comes until the other side closes."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except TimeoutError:
        raise harness.Failed(f"the connection was not closed in time; until then came {data[:200]}") from None
    except OSError:
        pass  # a reset closes it, too
    return data


def post(length, *lines, key=KEY):
    head = [b"POST /v1/completions HTTP/1.1", b"host: x", b"authorization: Bearer " + key.encode(), *lines]
    return b"\r\n".join(head + ([b"content-length: %d" % length] if length is not None else [])) + b"\r\n\r\n"


def status_of(answer):
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


@test
def clients_that_mean_no_good_disturb_nobody(workspace):
    with serving(workspace, "--client-timeout", "1.5", "--max-body", "256KiB") as server:
        server.client.served = DEMO_MODEL.name
        line = LINES[0]
        good = ask(server.client, line).choices[0].text
        slow = post(1000)
        with contextlib.ExitStack() as kept:
            halves = [kept.enter_context(connected(server, data)) for data in (b"", b"POST /v1/comp", slow[:60], slow, slow + b'{"prompt"')]
            for data, wanted in (
                (post(0, *[b"x-%d: y" % n for n in range(200_000)]), (431, None)),
                (post(0, b"x: " + b"y" * (1 << 20)), (431, None)),
                (post(1 << 30), (413,)),
                (post(None, b"transfer-encoding: chunked") + b"10000\r\n%b\r\n" % (b" " * 65536) * 40, (413,)),
                (post(2, b"connection: close") + b"\xff\xfe", (400,)),
                (b"\x16\x03\x01\x02\x00" + bytes(200), (400, None)),
                (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", (431, 400, None)),
                (post(-5), (400, None)),
            ):
                with connected(server, data) as hostile:
                    got = status_of(answer_of(hostile))
                    expect(got in wanted, f"{data[:40]} … got {got} instead of {wanted}")
            expect_equal(ask(server.client, line).choices[0].text, good, "an answer beside them")
            for half in halves:  # each is closed in time, a request without a body with a status
                half.settimeout(10)
                expect(status_of(answer_of(half)) in (None, 408), "a half request was answered")
        wait_until(lambda: _status(server)["running"] == 0, "a status without requests", 10)
        front = server.front()
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{front}/status").read_text())[1]) >> 10
        expect(peak < 200, f"the front took {peak} MiB")
        expect_equal(ask(server.client, line).choices[0].text, good, "an answer after them")


_LINES_ALONE = """
import asyncio, json, sys
from server import completions, planner_link
from server.errors import Refused

text = chr(0x1F600) * 1000
print(len(completions._as_text({"prompt": text})) < 4020)
for bodies in ([b"x" * (64 << 20)], (b"x" * (16 << 20) for _ in range(20)), [b"x"] * 20):
    try:
        print(len(completions._lines_of("/v1/completions", bodies)))
    except Refused as refused:
        print(refused.status)

async def main(path):
    link = planner_link.PlannerLink(path, 8)
    link._protocol.take(b"gone", [b'{"planner": "one", "context": 64}'])  # it was read after the planner's end
    print(link._protocol.peer, link.ready.is_set())
    link.close()

asyncio.run(main(sys.argv[1] + "/front.sock"))
"""


@test
def no_body_makes_a_message_that_the_planner_does_not_take(workspace):
    expect_equal(said_alone(_LINES_ALONE, workspace.folder), "True\n413\n413\n20\nNone False\n", "what it says")


# An answer may have come to its end before the stream's first token is sent, or the other way round.
_STREAMS_TIMED = """
from types import SimpleNamespace
from server.metrics import Metrics
from server.planner_link import HttpRequest

metrics = Metrics(
    SimpleNamespace(names=["m"], run_dir="nowhere", run_id="", fronts_before=0),
    SimpleNamespace(open_lines=lambda: 0),
)
answer = SimpleNamespace(status=200, body=b"{}", prompt_tokens=1, completion_tokens=1)

def end(opened):
    opened.event_at = 1.0

def finish(opened):
    metrics.finished(opened, answer)

for steps in ((end, metrics.first_token_sent, finish), (metrics.first_token_sent, end, finish), (end, finish, metrics.first_token_sent)):
    opened = HttpRequest(b"{}", None, True, 1)
    for step in steps:
        step(opened)
    print(metrics._registry.get_sample_value("poise:first_token_added_seconds_count", {"model_name": "m"}))
"""


@test
def a_stream_is_timed_once_whatever_comes_first(workspace):
    expect_equal(said_alone(_STREAMS_TIMED, workspace.folder), "1.0\n2.0\n3.0\n", "how many streams were timed")


@test
def what_cannot_be_served_is_refused_in_a_sentence(workspace):
    workspace.poise("serve", "--model", "nowhere").expect(2, "nowhere")
    workspace.poise("serve", "--model", DEMO_MODEL, "--port", "70000").expect(2, "--port")
    workspace.poise("serve", "--model", DEMO_MODEL, "--host", "300.0.0.1").expect(2, "--host")
    workspace.poise("serve", "--model", DEMO_MODEL, "--port", "0", "--api-key", "two words").expect(2, "--api-key")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        workspace.poise("serve", "--model", DEMO_MODEL, "--port", port).expect(2, str(port), "already in use")


if __name__ == "__main__":
    with_clients()
    raise SystemExit(harness.main())
