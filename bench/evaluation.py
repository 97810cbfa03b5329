#!/usr/bin/env python3
"""How long lm-evaluation-harness takes for a multiple-choice task of 2,000 questions on the demo model: with its `hf` backend, with
`local-completions` and `poise serve`, and with poise's model class. All in float32 on the same two cores, each alone and in turn.

    ENV/bin/pip install lm-eval[api]==0.4.13 torch==2.13.0 transformers==5.24.0 accelerate pyzmq
    ENV/bin/python bench/evaluation.py [--questions 2000] [--repeats 3] [--only NAME…] [--json FILE]

Times are those of the harness's call that answers all requests, tokenizing included, after a first small call; neither loading nor what the
harness does before and behind it. CPU seconds are of all processes that take part: on a machine with other work they are what compares.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "launch" / "demo" / "model"
SYSTEMS = ("hf, batch 1", "hf, batch 8", "hf, batch 64", "hf, batch 256", "local-completions, one at a time", "local-completions", "poise")
_TICKS = os.sysconf("SC_CLK_TCK")


def requests(questions, shots):
    """(context, continuation) as the harness makes them of a task: `shots` solved questions, one question, four answers each."""
    draw = random.Random(3)

    def sum_of_two():
        first, second = draw.randrange(100), draw.randrange(100)
        return f"Q: {first} + {second} = ?\nA:", first + second

    made = []
    for _ in range(questions):
        context = "".join(f"{question} {answer}\n" for question, answer in (sum_of_two() for _ in range(shots)))
        question, answer = sum_of_two()
        for less in (0, *draw.sample((-20, -10, -2, -1, 1, 2, 9, 10, 11), 3)):
            made.append((context + question, f" {answer + less} is the sum"))
    return made


def cpu_of_tree():
    """Seconds that this process and all below it have used."""
    parents, used = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)], used[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
    total = 0.0
    for process in used:
        above = process
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        total += used[process] if above else 0.0
    return total


@contextlib.contextmanager
def model_of(system, folder):
    if system.startswith("hf"):
        from lm_eval.models.huggingface import HFLM

        yield HFLM(pretrained=str(MODEL), dtype="float32", device="cpu", batch_size=int(system.split()[-1]))
    elif system == "poise":
        sys.path.insert(0, str(ROOT / "launch" / "python"))
        from poise.lm_eval import PoiseLM

        with contextlib.closing(PoiseLM(str(MODEL), dtype="float32", device="cpu")) as model:
            yield model
    else:
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        run = pathlib.Path(folder) / "run"
        words = [ROOT / "launch" / "poise", "serve", "--model", MODEL, "--port", "0", "--run-dir", run, "--device", "cpu", "--dtype", "float32"]
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            url = None
            while url is None and process.poll() is None:
                time.sleep(0.2)
                with contextlib.suppress(OSError, ValueError):
                    url = json.loads((run / "run.json").read_text()).get("url")
            yield LocalCompletionsAPI(
                model=str(MODEL), base_url=f"{url}/v1/completions", tokenizer_backend="huggingface", add_bos_token=True, max_length=512,
                **({} if "one" in system else {"num_concurrent": 64, "batch_size": 16}),
            )  # fmt: skip
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def measured(system, questions, shots):
    """In a process of its own: one line of JSON."""
    from lm_eval.api.instance import Instance

    def instances(pairs):
        return [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)]

    with tempfile.TemporaryDirectory() as folder, model_of(system, folder) as model:
        pairs = requests(questions, shots)
        model.loglikelihood(instances(pairs[:64]), disable_tqdm=True)
        began, used = time.monotonic(), cpu_of_tree()
        answers = model.loglikelihood(instances(pairs), disable_tqdm=True)
        seconds, used = time.monotonic() - began, cpu_of_tree() - used
    sums = [likelihood for likelihood, _ in answers]
    right = sum(max(range(4), key=lambda at: sums[place + at]) == 0 for place in range(0, len(sums), 4))
    print(json.dumps({"seconds": seconds, "cpu_seconds": used, "right": right, "sum": sum(sums)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--shots", type=int, default=0, help="solved questions before each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        measured(asked.one, asked.questions, asked.shots)
        return
    found = {system: [] for system in asked.only}
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    words = [sys.executable, __file__, "--questions", str(asked.questions), "--shots", str(asked.shots), "--one"]
    for turn in range(asked.repeats):
        for system in asked.only:
            ended = subprocess.run([*words, system], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
            if ended.returncode:
                raise SystemExit(f"{system}: {ended.stderr}")
            found[system].append(json.loads(ended.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]})
            one = found[system][-1]
            print(f"{turn} {system:33} {one['seconds']:8.2f} s {one['cpu_seconds']:8.2f} CPU s  right {one['right']}  sum {one['sum']:.3f}  load {one['load']:.1f}", flush=True)
    for system, runs in found.items():
        print(f"{system:33} median {statistics.median(run['seconds'] for run in runs):.2f} s, {statistics.median(run['cpu_seconds'] for run in runs):.2f} CPU s")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
