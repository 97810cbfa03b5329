#!/usr/bin/env python3
"""`poise serve` as clients see it: the `openai` package from PyPI, and plain sockets for what no client would send.

The package comes into an environment of its own, build/clients-venv, the first time; the script goes on with its interpreter.
"""

import base64
import concurrent.futures
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import urllib.error
import urllib.request
from pathlib import Path

import harness
from harness import DEMO_MODEL, ROOT, expect, expect_equal, request, test, wait_until

_CLIENTS = ROOT / "build" / "clients-venv"
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
KEY = "a-key"


def with_clients():
    """Starts this script again with an interpreter that has the clients."""
    python = _CLIENTS / "bin" / "python"
    if Path(sys.prefix) == _CLIENTS:
        return
    mark = _CLIENTS / "installed"
    if not mark.exists():
        for words in (
            [sys.executable, "-m", "venv", "--clear", "--system-site-packages", _CLIENTS],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "openai>=1.60"],
        ):
            made = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
            if made.returncode:
                raise SystemExit(f"{made.stdout}{made.stderr}the clients cannot be installed")
        mark.touch()
    os.execv(python, [python, *sys.argv])


class Server:
    """A server of its own port, its client, and its end."""

    def __init__(self, workspace, *options, model=DEMO_MODEL, key=KEY, run="server"):
        import openai

        self.run = workspace / run
        environment = {"POISE_API_KEY": key or ""}
        if "POISE_SERVE_VENV" not in os.environ:
            environment["POISE_SERVE_VENV"] = str(ROOT / "build" / "serve-venv")
        words = ["serve", "--model", model, "--port", "0", "--run-dir", self.run, "--device", "cpu", *options]
        self._workspace = workspace
        self._before = self._record().get("run_id")  # of a server that was killed
        self.process = workspace.start(*words, env=environment)
        self.url = wait_until(self._url, "the server to listen", 240)
        self.key = key
        self.client = openai.OpenAI(api_key=key or "none", base_url=self.url + "/v1", max_retries=0, timeout=60)
        wait_until(self.healthy, "the server to be ready", 60)

    def _url(self):
        expect(self.process.poll() is None, harness.said(self.process))
        record = self._record()
        return record.get("url") if record.get("run_id") != self._before else None

    def _record(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run / "run.json").read_text())
        return {}

    def healthy(self):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(self.url + "/health", timeout=5).status == 200

    def get(self, path, body=None, headers=None, key=KEY):
        """(status, headers, body) of a plain request."""
        asked = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {key}", **(headers or {})})
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as answer:
            return answer.code, answer.headers, answer.read()

    def front(self):
        return next(pid for pid in _children_of(self.process.pid) if "server/start.py" in _words_of(pid))

    def child(self, name):
        return self._workspace.children(self.run).get(name)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return self._workspace.finish(self.process, 60)


@contextlib.contextmanager
def serving(workspace, *options, **more):
    server = Server(workspace, *options, **more)
    yield server
    began = time.monotonic()
    server.end().expect(0, "the server has ended")
    expect(time.monotonic() - began < 20, "nothing was open, and the server took as long to end as if something were")


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


def refused(kind, ask, status, code=None):
    import openai

    try:
        ask()
    except getattr(openai, kind) as problem:
        expect_equal(problem.status_code, status, f"status of {problem}")
        expect(code is None or problem.code == code, f"code {problem.code!r} instead of {code!r}: {problem}")
        return problem
    raise harness.Failed(f"{kind} was expected")


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
     "body": {"messages": [{"role": "user", "content": "where is Jana?"}], "temperature": 1, "seed": 4, "max_tokens": 9, "n": 2}},
]  # fmt: skip


def endpoint(client, line):
    return client.chat.completions if "chat" in line["url"] else client.completions


def ask(client, line, **more):
    own = ("ignore_eos", "top_k", "return_token_ids")
    body = {"model": client.served, **line["body"]}
    extra = {name: body.pop(name) for name in own if name in body}
    return endpoint(client, line).create(**body, **more, extra_body=extra or None)


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


def metrics_of(url, key=None):
    """{(name, labels as text): value} of a page of metrics, every one of which has HELP and TYPE."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    page = urllib.request.urlopen(asked, timeout=10).read().decode()
    values, told = {}, {}
    for line in page.splitlines():
        if line.startswith("# "):
            told.setdefault(line.split()[2], set()).add(line.split()[1])
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        values[name, labels.rstrip("}")] = float(value)
        family = next((one for one in (name, re.sub("_(bucket|sum|count)$", "", name)) if one in told), None)
        expect(family and told[family] == {"HELP", "TYPE"}, f"{name} has {told.get(family)}")
    _lint(page)
    return values


def _lint(page):
    """Debian's promtool, where it is installed: what vLLM's own names force on it, and nothing else."""
    promtool = shutil.which("promtool")
    if promtool:
        found = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        lines = [line for line in (found.stdout + found.stderr).splitlines() if line.strip()]
        forced = ("should not contain ':'", 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix')
        wrong = [line for line in lines if not any(words in line for words in forced)]
        expect(not wrong, f"promtool: {wrong[:5]}")


def summed(values, name):
    return sum(value for (one, _), value in values.items() if one == name)


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
    time.sleep(0.6)  # the planner writes its status twice a second
    after = metrics_of(server.url + "/metrics", KEY)
    for name, field in USAGE.items():
        expect_equal(summed(after, name) - summed(before, name), sum(one[field] for one in used), name)
    name = "vllm:request_success_total"
    expect_equal(summed(after, name) - summed(before, name), len(used), name)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "poise:open_requests", "poise:open_lines"):
        expect_equal(summed(after, name), 0, name)
    expect(summed(after, "vllm:time_to_first_token_seconds_count") > len(LINES), "first tokens were timed")
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
    environment = {} if "POISE_SERVE_VENV" in os.environ else {"POISE_SERVE_VENV": str(ROOT / "build" / "serve-venv")}
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
    wait_until(lambda: _status(server)["running"] == 0, "the requests to be cancelled", 10)
    status, _, told = server.get("/v1/completions", json.dumps({"prompt": "x" * 70000}).encode())
    expect_equal((status, json.loads(told)["error"]["code"]), (413, "request_too_large"), "a large body")


def _a_front_that_dies_is_replaced(server, client, line, whole):
    stream = ask(client, line, stream=True)
    next(iter(stream))
    front = [pid for pid in _children_of(server.process.pid) if "server/start.py" in _words_of(pid)]
    expect_equal(len(front), 1, "fronts")
    os.kill(front[0], signal.SIGKILL)
    with contextlib.suppress(Exception):
        for _ in stream:
            pass
    wait_until(server.healthy, "another front", 20)
    expect_equal(ask(client, line).choices[0].text, whole, "the answer of the next front")
    wait_until(lambda: _status(server)["running"] == 0, "the lost request to be dropped", 10)


def _words_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def upload(client, lines):
    return client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")


def order(client, file, endpoint="/v1/completions", window="24h", **more):
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **more)


def ended(client, batch, seconds=60):
    over = ("completed", "failed", "expired", "cancelled")
    return wait_for(client, batch, lambda now: now.status in over, seconds)


def wait_for(client, batch, condition, seconds=60):
    """The batch once `condition` holds of it; asks ten times a second."""
    until = time.monotonic() + seconds
    while not condition(now := client.batches.retrieve(batch.id)):
        expect(time.monotonic() < until, f"waited {seconds} s in vain for {now}")
        time.sleep(0.1)
    return now


def lines_of(client, *files):
    """Result lines of these files, by custom_id, without times."""
    found = {}
    for file in files:
        for text in client.files.content(file).text.splitlines() if file else ():
            line = json.loads(text)
            expect(line["custom_id"] not in found, f"two lines for {line['custom_id']}")
            found[line["custom_id"]] = line
            (line["response"] or {"body": {}})["body"].pop("created", None)
    return found


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
        children = [server.process.pid, *_children_of(server.process.pid)]
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
    """A file whose lines the front itself refuses; one that is cancelled before it is counted."""
    many = b'{"url":"/v1/chat/completions"}\n' * 30_000
    file = client.files.create(file=("many", many), purpose="batch")
    batch = order(client, file)
    seen = set()
    while (now := json.loads(server.get(f"/v1/batches/{batch.id}")[2]))["status"] in ("validating", "in_progress"):
        seen.add(now["request_counts"]["failed"])
        time.sleep(0.01)
    expect_equal(ended(client, batch).request_counts.failed, 30_000, "refused lines")
    expect(len(seen - {0, 30_000}) > 1, f"the front answered nobody while it read the file: it told of {seen}")
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
        expect_equal(_status(server)["running"], 0, "requests that run")
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
    python = Path(os.environ.get("POISE_SERVE_VENV") or ROOT / "build" / "serve-venv") / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "launch")}
    done = subprocess.run([python, "-c", _LINES_ALONE, workspace.folder], env=environment, capture_output=True, text=True, timeout=60, check=False)
    expect_equal((done.returncode, done.stdout), (0, "True\n413\n413\n20\nNone False\n"), done.stderr)


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
    python = Path(os.environ.get("POISE_SERVE_VENV") or ROOT / "build" / "serve-venv") / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "launch")}
    done = subprocess.run([python, "-c", _A_BATCH_ALONE, workspace.folder], env=environment, capture_output=True, text=True, timeout=60, check=False)
    expect_equal((done.returncode, done.stdout), (0, "118 1\n"), done.stderr)


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
