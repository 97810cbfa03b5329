"""The section `restart` of gpu_check.py: executors and loaders are ended and restarted in the middle of a run, whose orders are
then replayed."""

import json
import re
import shutil
import signal
import subprocess
import time

_QUESTION = "Once there was a clever wolf"


class _Run:
    """`poise run` in the background."""

    def __init__(self, bench, name, words):
        self.bench, self.output = bench, bench.folder / f"{name}.jsonl"
        self.directory = bench.folder / f"{name}.run"
        command = ["/bin/sh", bench.root / "launch" / "poise", "run", *words, "-o", self.output, "--run-dir", self.directory]
        command += ["--device", bench.given.device]
        self.said = open(bench.folder / f"{name}.log", "w+")
        self.process = subprocess.Popen(
            [str(word) for word in command], env=bench.environment, stdin=subprocess.DEVNULL, stdout=self.said, stderr=self.said
        )
        bench.in_background.append(self)

    def status(self):
        try:
            return json.loads((self.directory / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def wait_for_iteration(self, number):
        while self.process.poll() is None and self.bench.seconds_left() > 0:
            if self.status().get("state") == "running" and self.status().get("iteration", 0) >= number:
                return True
            time.sleep(0.05)
        return False

    def end(self, patience=0.0):
        """Its exit code, after it ended by itself or was ended after `patience`."""
        try:
            return self.process.wait(min(patience, max(self.bench.seconds_left(), 0.1)) or 0.1)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def gone_after(self):
        """Seconds from the request for another executor until the earlier one had ended."""
        try:
            return json.loads((self.directory / "restarted.json").read_text())["seconds"]
        except (OSError, ValueError, KeyError):
            return None

    def executors_log(self):
        return (self.directory / "logs" / "gpu_executor.log").read_text()

    def last_words(self):
        self.said.seek(0)
        lines = [line for line in self.said.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def restart(bench):
    _same_tokens(bench)
    _ready_again(bench)


def _requests(path, count, body):
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _answers(path):
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["custom_id"]: one["response"]["body"]["choices"][0] for one in results}


def _same_tokens(bench):
    """The demo model, long answers, few at a time: the executor is ended three times meanwhile, the loader twice. The works' "demo"
    may ask for another number of them, and for more options."""
    work = bench.works["restart"].get("demo", {})
    body = {"prompt": _QUESTION, "max_tokens": 100, "ignore_eos": True, "temperature": 0.7, "logprobs": 1}
    words = ["--model", bench.root / "launch" / "demo" / "model", "-i", _requests(bench.folder / "long.jsonl", work.get("num_prompts", 150), body)]
    words += ["--policy", "hybrid", "--act-share", "0.5", "--max-num-seqs", "3", *work.get("options", ())]
    plain = _Run(bench, "undisturbed", words)
    if plain.end(bench.seconds_left()) != 0:
        bench.note("tokens after restarts", False, f"the undisturbed run failed: {plain.last_words()}")
        return
    run, restarts, failures = _Run(bench, "disturbed", words), 0, []
    for number, what, how in (
        (40, "gpu_executor", []), (150, "loader", []), (300, "gpu_executor", ["--kill"]), (450, "loader", ["--kill"]), (600, "gpu_executor", []),
    ):  # fmt: skip
        reached = run.wait_for_iteration(number)
        if bench.seconds_left() <= 0:
            break
        if not reached:
            failures.append(f"the run ended before iteration {number}")
            break
        code, text = bench.poise("restart", what, run.directory, *how)
        if code is None:
            break
        if code == 0 and f"the {what} is process" in text:
            restarts += 1
        else:
            failures.append(f"iteration {number}, {what}: restart ended with {code}: {text.strip()[-200:]}")
    code = run.end(bench.seconds_left())
    same = code == 0 and _answers(run.output) == _answers(plain.output)
    told = f"{restarts} restarts, answers and logprobs {'equal' if same else 'NOT equal'}, the run ended with {code}"
    told += "" if code == 0 else f": {run.last_words()}"
    good = same and restarts == 5
    if not good and not failures and bench.seconds_left() <= 0:
        good = None  # the section's time is over
    bench.note("tokens after restarts", good, "; ".join((told, *failures)))
    code, text = bench.poise("replay", run.directory, "--device", bench.given.device)
    bench.note("its orders replayed", None if code is None else code == 0, (text.strip().splitlines() or ["it said nothing"])[-1])


def _ready_again(bench):
    """From the command to work, with pools as large as the machine allows."""
    work = bench.works["restart"]
    model = bench.folder / "restart-model"
    model.mkdir(exist_ok=True)
    shutil.copy(bench.root / "bench" / work["config"], model / "config.json")
    body = {"prompt": [5] * work["input_len"], "max_tokens": work["output_len"], "ignore_eos": True, "temperature": 0}
    words = ["--model", model, "--load-format", "dummy", "--skip-tokenizer-init", "--policy", work["policy"]]
    words += ["-i", _requests(bench.folder / "prompts.jsonl", work["num_prompts"], body), "--max-num-seqs", work["num_prompts"]]
    words += ["--gpu-memory", work["gpu_memory"], "--host-memory", bench.works["host_memory"], *work.get("options", ())]
    run = _Run(bench, "pools", words)
    if not run.wait_for_iteration(3):
        run.end()
        bench.note("ready again", None if bench.seconds_left() <= 0 else False, f"the run came to nothing: {run.last_words()}")
        return
    _successor(bench, run)
    code, text = bench.poise("restart", "gpu_executor", run.directory)
    pool = run.status().get("host_pool_bytes", 0)
    gone = run.gone_after()
    run.end()
    bench.log(run.executors_log())
    found = re.search(r"at work ([\d.]+) s after", text)
    if code is None:
        bench.note("ready again", None, "the section's time is over")
        return
    if code != 0 or not found or gone is None:
        bench.note("ready again", False, f"restart ended with {code}: {text[-300:]}")
        return
    seconds = float(found.group(1))
    told = f"{seconds:.1f} s after an executor with a pool of {pool / 2**30:.1f} GiB was asked to end, "
    told += f"which was gone after {gone:.1f} s; under 10 s wanted"
    bench.note("ready again", seconds < 10, told, seconds=seconds, gone_seconds=gone, pool_bytes=pool)
    words = ["--until", "3", "--gpu-memory", work["gpu_memory"], "--host-memory", bench.works["host_memory"]]
    code, text = bench.poise("replay", run.directory, "--device", bench.given.device, *words)
    bench.note("replayed", None if code is None else code == 0, "; ".join(text.strip().splitlines()[-2:]))


def _successor(bench, run):
    """How long until another loader has adopted weights and pool, and whether it reads anything."""
    code, text = bench.poise("restart", "loader", run.directory)
    found = re.search(r"is process (\d+) now, at work ([\d.]+) s after", text)
    if code != 0 or not found:
        bench.note("a loader's successor", None if code is None else False, f"restart ended with {code}: {text[-300:]}")
        return
    with open(f"/proc/{found.group(1)}/io", encoding="ascii") as file:
        read = int(file.read().split("rchar: ")[1].split()[0])
    seconds = float(found.group(2))
    told = f"{seconds:.2f} s after the old one was asked to leave, {read} bytes read by it; under 2 s wanted"
    bench.note("a loader's successor", seconds < 2 and read < 10**7, told, seconds=seconds, bytes_read=read)
