"""A server under test, and what its clients ask: for serving.py and batches.py. The clients come into an environment of its own,
build/clients-venv, the first time; each script goes on with its interpreter."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import DEMO_MODEL, ROOT, expect, expect_equal, request, wait_until  # noqa: E402

_CLIENTS = ROOT / "build" / "clients-venv"
KEY = "a-key"
SERVE_VENV = os.environ.get("POISE_SERVE_VENV") or str(ROOT / "build" / "serve-venv")


def with_clients():
    """Starts this script again with an interpreter that has the clients."""
    python = _CLIENTS / "bin" / "python"
    if Path(sys.prefix) == _CLIENTS:
        return
    _CLIENTS.parent.mkdir(exist_ok=True)
    with open(_CLIENTS.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_CLIENTS / "installed").exists():
            _make_clients(python)
    os.execv(python, [python, *sys.argv])


def _make_clients(python):
    for words in (
        [sys.executable, "-m", "venv", "--clear", "--system-site-packages", _CLIENTS],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "openai>=1.60"],
    ):
        made = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        if made.returncode:
            raise SystemExit(f"{made.stdout}{made.stderr}the clients cannot be installed")
    (_CLIENTS / "installed").touch()


class Server:
    """A server of its own port, its client, and its end."""

    def __init__(self, workspace, *options, model=DEMO_MODEL, key=KEY, run="server"):
        import openai

        self.run = workspace / run
        environment = {"POISE_API_KEY": key or "", "POISE_SERVE_VENV": SERVE_VENV}
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
        return next(pid for pid in children_of(self.process.pid) if "server/start.py" in words_of(pid))

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


def refused(kind, ask, status, code=None):
    import openai

    try:
        ask()
    except getattr(openai, kind) as problem:
        expect_equal(problem.status_code, status, f"status of {problem}")
        expect(code is None or problem.code == code, f"code {problem.code!r} instead of {code!r}: {problem}")
        return problem
    raise harness.Failed(f"{kind} was expected")


def endpoint(client, line):
    return client.chat.completions if "chat" in line["url"] else client.completions


def ask(client, line, **more):
    own = ("ignore_eos", "top_k", "return_token_ids")
    body = {"model": client.served, **line["body"]}
    extra = {name: body.pop(name) for name in own if name in body}
    return endpoint(client, line).create(**body, **more, extra_body=extra or None)


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


def words_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def children_of(pid):
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


def said_alone(code, *words):
    """What a program of the server's parts, without a server, prints."""
    command = [Path(SERVE_VENV) / "bin" / "python", "-c", code, *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "launch")}, capture_output=True, text=True, timeout=60, check=False)
    expect_equal(done.returncode, 0, done.stderr)
    return done.stdout
