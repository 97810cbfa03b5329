#!/usr/bin/env python3
"""The Python package: answers equal to a run's, datasets, models by their hub name, and a wheel in a fresh environment.

What it needs of PyPI comes into build/python-venv (environment.py); the script goes on with its interpreter.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from environment import PIP, with_packages  # noqa: E402
from harness import DEMO_MODEL, ROOT, bin_folder, expect, expect_equal, test, wait_until  # noqa: E402

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_ARITHMETIC = [f"Q: {first} + {first % 7} = ?\nA:" for first in range(40)]


@contextlib.contextmanager
def used(workspace, **more):
    """Inside, the package's programs leave what they leave in the workspace."""
    before = dict(os.environ)
    os.environ.update(workspace.environment(more), TMPDIR=str(workspace.folder))
    tempfile.tempdir = None  # read again
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


@contextlib.contextmanager
def model_that_answers(workspace, model=DEMO_MODEL, environment=None, **options):
    import poise

    with used(workspace, **(environment or {})):
        with poise.LLM(model, device=os.environ.get("POISE_DEVICE") or "cpu", **options) as llm:
            yield llm
    expect_equal([path.name for path in workspace.folder.glob("poise-*")], [], "folders of a closed LLM")


def on_the_hub(workspace, name, changed):
    """The demo model as huggingface_hub keeps one: a snapshot of links to blobs. `changed` changes its files."""
    repository = workspace / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    shutil.copytree(DEMO_MODEL, workspace / "copy")
    changed(workspace / "copy")
    for number, path in enumerate(sorted((workspace / "copy").iterdir())):
        shutil.move(path, repository / "blobs" / f"{number:x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:x}")
    return snapshot


def told(output):
    """Of an output, what a result line has, too."""
    if output.error is not None:
        return output.error.status, output.error.message, output.error.param, output.error.code
    of_prompt = output.prompt_logprobs and [at and {str(token): dataclasses.asdict(one) for token, one in at.items()} for at in output.prompt_logprobs]
    answers = []
    for one in output.outputs:
        values = one.logprobs and [next(iter(at.values())).logprob for at in one.logprobs]
        answers.append((one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason, values))
    return answers, output.prompt_token_ids, of_prompt


def told_by_line(line):
    body, status = line["response"]["body"], line["response"]["status_code"]
    if "error" in body:
        error = body["error"]
        return status, error["message"], error["param"], error["code"]
    answers = []
    for choice in body["choices"]:
        values, text = choice["logprobs"], choice.get("text")
        if "message" in choice:
            values, text = values and [one["logprob"] for one in values["content"]], choice["message"]["content"]
        else:
            values = values and values["token_logprobs"]
        answers.append((choice["index"], text, choice["token_ids"], choice["finish_reason"], choice["stop_reason"], values))
    of_prompt = body if "message" in body["choices"][0] else body["choices"][0]
    return answers, of_prompt["prompt_token_ids"], of_prompt.get("prompt_logprobs")


def answers_of_run(workspace, model, url, bodies):
    lines = [{"custom_id": str(at), "method": "POST", "url": url, "body": {**body, "return_token_ids": True}} for at, body in enumerate(bodies)]
    workspace.run(workspace.write_requests("in.jsonl", lines), workspace / "out.jsonl", "--overwrite", model=model).expect(0)
    found = harness.read_results(workspace / "out.jsonl")
    return [told_by_line(found[str(at)]) for at in range(len(bodies))]


@test
def answers_are_those_of_a_run(workspace):
    """Of a model that is named as on the hub, and lies in its cache."""
    from poise import EngineError, SamplingParams

    snapshot = on_the_hub(workspace, "someone/demo", lambda folder: (folder / "chat_template.jinja").write_text(_TEMPLATE))
    given = [
        ("where is Jana?", {"max_tokens": 12, "temperature": 0}),
        ("who lives in Lorun?", {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "top_k": 40}),
        ("who lives in Lorun?", {"max_tokens": 20, "temperature": 1.2, "seed": 7}),
        (None, {"max_tokens": 4}),
        ([5, 6, 7, 8], {"max_tokens": 9, "logprobs": 3, "stop_token_ids": [9], "ignore_eos": True}),
        ([5] * 600, {"max_tokens": 4}),
        ("Q: 47 + 38 = ?\nA:", {"max_tokens": 9, "temperature": 0, "logprobs": 0, "stop": ["\n"]}),
        ("Q: 47 + 38 = ?\nA:", {"max_tokens": 9, "temperature": 5}),
        ("who lives in Lorun?", {"max_tokens": 9, "n": 3, "temperature": 1.1, "logprobs": 1}),
        ([5, 6, 7, 8], {"max_tokens": 2, "prompt_logprobs": 2}),
    ]
    samplings = [SamplingParams(**fields) for _, fields in given]
    chats = [[{"role": "user", "content": "where is Jana?"}], [{"role": "user"}, "no message"]]
    with model_that_answers(workspace, "someone/demo", {"HF_HUB_CACHE": str(workspace / "hub")}) as llm:
        prompts = [prompt for prompt, _ in given]
        outputs = llm.generate(prompts, samplings, use_tqdm=False)
        again = llm.generate([{"prompt": prompts[0]}, {"prompt_token_ids": prompts[4]}], samplings[0], use_tqdm=False)
        strange = llm.generate(["a", object(), "\ud800"], samplings[0], use_tqdm=False)
        chatted = llm.chat(chats, SamplingParams(temperature=0, logprobs=1), use_tqdm=False)
        of_chat = llm.chat(chats[0], SamplingParams(n=2, prompt_logprobs=0, max_tokens=3), use_tqdm=False)[0]
        _a_killed_tokenizer_is_started_again(workspace, llm)
        complains(ValueError, lambda: llm.encode("a\ud800"), "half of a surrogate pair at place 1")
        expect_equal(llm.decode(llm.encode("where is Jana?", add_special_tokens=False)), "where is Jana?", "decoded")
        for text, wrong in (("3 sampling_params for 2", lambda: llm.generate(["a", "b"], samplings[:3])), ("no option 'tool'", lambda: llm.chat(chats, tool=1))):
            complains((ValueError, TypeError), wrong, text)
    complains(EngineError, lambda: llm.generate("a", use_tqdm=False), "is closed")
    bodies = [{"prompt": prompt, **fields} for prompt, fields in given]
    expect_equal([told(one) for one in outputs], answers_of_run(workspace, snapshot, "/v1/completions", bodies), "answers")
    expect_equal([one.request_id for one in outputs], [str(at) for at in range(len(given))], "ids")
    expect_equal([bool(one.error) for one in outputs], [at in (3, 5, 7) for at in range(len(given))], "errors")
    expect_equal(outputs[0].prompt, prompts[0], "the prompt")
    expect_equal([len(outputs[8].outputs), len(outputs[9].prompt_logprobs), outputs[9].prompt_logprobs[0]], [3, 4, None], "several answers, and values of a prompt")
    expect_equal([len(of_chat.outputs), len(of_chat.prompt_logprobs)], [2, len(of_chat.prompt_token_ids)], "the same of a chat")
    expect_equal(again[0], outputs[0], "the same prompt in a dict")
    expect_equal(again[1].prompt_token_ids, prompts[4], "ids in a dict")
    top = outputs[4].outputs[0]
    expect(all(3 <= len(at) <= 4 for at in top.logprobs) and list(top.logprobs[0])[0] == top.token_ids[0], f"{top.logprobs}")
    expect_equal("".join(at[token].decoded_token for at, token in zip(top.logprobs, top.token_ids)), top.text, "tokens' texts")
    expect_equal([bool(one.error) for one in strange], [False, True, True], "what is no JSON")
    bodies = [{"messages": one, "temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 1} for one in chats]
    expect_equal([told(one) for one in chatted], answers_of_run(workspace, snapshot, "/v1/chat/completions", bodies), "chats")
    expect_equal(chatted[0].prompt, "user: where is Jana?\n", "a chat's prompt")


def _a_killed_tokenizer_is_started_again(workspace, llm):
    ids = llm.encode("where is Jana?")
    os.kill(_child_with(b"encode"), signal.SIGKILL)
    expect_equal(llm.encode("where is Jana?"), ids, "ids by another process")


def _children_of(pid):
    return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]


def _child_with(word):
    """The process of ours whose command line has this word."""
    (own,) = [pid for pid in _children_of(os.getpid()) if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    return own


def complains(kinds, what, text):
    try:
        what()
    except kinds as problem:
        expect(text in str(problem), f"{text!r} wanted in: {problem}")
        return
    raise harness.Failed(f"{text!r} was expected")


@test
def answers_come_as_they_are_finished_and_survive_deaths(workspace):
    import poise

    greedy = poise.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with model_that_answers(workspace, max_num_seqs=8) as llm:
        wanted = [told(one) for one in llm.generate(_ARITHMETIC, greedy, use_tqdm=False)]
        read = []
        endless = llm.as_completed((read.append(0) or _ARITHMETIC[0] for _ in range(100_000)), greedy)
        expect_equal([told(next(endless)) for _ in range(3)], [wanted[0]] * 3, "first answers")
        endless.close()
        expect(len(read) < 3000, f"{len(read)} prompts were read before three were answered")
        (run,) = workspace.folder.glob("poise-*/run")
        answers = {}
        for output in llm.as_completed(_ARITHMETIC, greedy):
            answers[int(output.request_id)] = told(output)
            if len(answers) in (2, 12):  # the front's socket loses its peer
                os.kill(workspace.children(run)["planner" if len(answers) == 2 else "gpu_executor"], signal.SIGKILL)
        expect_equal([answers[at] for at in range(len(wanted))], wanted, "answers while processes die")
        harness.kill(_child_with(b"--front"))  # the supervisor: nothing replaces it, and until it has ended its children may answer
        complains(poise.EngineError, lambda: llm.generate("a", use_tqdm=False), "poise was ended by SIGKILL")
    complains(poise.EngineError, lambda: poise.LLM(workspace / "none", device="cpu"), "not there")
    complains(poise.EngineError, lambda: poise.LLM(DEMO_MODEL, gpu_memry="1GiB"), "did you mean --gpu-memory?")
    complains(poise.EngineError, lambda: poise.LLM("no/where", device="cpu"), "no/where: there is no folder of that name")
    workspace.poise("plan", "--model", "no/where", "-i", "x", env={"HF_HUB_OFFLINE": "1"}).expect(2, "does not have it whole; HF_HUB_OFFLINE forbids")


@test
def nothing_stays_of_a_program_that_is_killed(workspace):
    code = f"import sys, time; sys.path.insert(0, {str(ROOT / 'launch' / 'python')!r})\nfrom poise import LLM\n"
    code += f"llm = LLM({str(DEMO_MODEL)!r}, device='cpu')\nprint('ready', flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**workspace.environment(), "TMPDIR": str(workspace.folder)}) as program:
        expect_equal(program.stdout.readline(), "ready\n", "the program")
        (folder,) = workspace.folder.glob("poise-*")
        expect_equal(len(workspace.children(folder / "run")), 3, "processes")
        program.kill()
    wait_until(lambda: not folder.exists(), "its folder to be removed")
    wait_until(lambda: not workspace.leftovers(), "its processes to end")


@test
def datasets_come_back_with_answers(workspace):
    import pandas
    import poise
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": text, "number": at} for at, text in enumerate(_ARITHMETIC[:5])] + [{"question": None, "number": 5}]
    greedy = poise.SamplingParams(temperature=0, max_tokens=6, stop="\n")
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, workspace / "in.parquet")
    more = {"prompt": "question", "use_tqdm": False}
    with model_that_answers(workspace) as llm:
        listed = poise.batch(iter(rows), llm, greedy, **more)
        frame = poise.batch(pandas.DataFrame(rows, index=list("abcdef")), llm, greedy, **more)
        of_table = poise.batch(table, llm, greedy, **more)
        for name in ("out.parquet", "out.arrow", "out.jsonl"):
            made = poise.batch(workspace / "in.parquet", llm, greedy, output=workspace / name, **more)
            expect_equal(made, of_table, name)
        again = poise.batch(workspace / "out.arrow", llm, greedy, answer="second", **more)
        texts = poise.batch(_ARITHMETIC[:2], llm, greedy, use_tqdm=False)
        several = poise.batch(_ARITHMETIC[:2], llm, poise.SamplingParams(n=2, max_tokens=3), use_tqdm=False)
        several_of_table = poise.batch(table.slice(0, 2), llm, poise.SamplingParams(n=2, max_tokens=3), **more)
        made_up = poise.batch(rows[:2], llm, greedy, prompt=lambda row: row["question"] * 2, use_tqdm=False)
        complains(ValueError, lambda: poise.batch(listed, llm, **more), 'has a column "answer" already')
        complains(ValueError, lambda: poise.batch(rows, llm), 'no column "prompt"')
        complains(ValueError, lambda: poise.batch("rows.csv", llm), ".parquet")
        wanted = [one.outputs[0].text for one in llm.generate(_ARITHMETIC[:5], greedy, use_tqdm=False)]
    expect_equal([row["answer"] for row in listed], [*wanted, None], "answers")
    expect_equal([row["answer_finish_reason"] for row in listed], ["stop"] * 5 + [None], "reasons")
    expect('"prompt" is missing' in listed[5]["answer_error"] and listed[4]["answer_error"] is None, f"{listed[4:]}")
    expect_equal([{**row} for row in of_table.to_pylist()], listed, "a table's rows")
    expect_equal(list(frame["answer"][:5]), wanted, "a frame's answers")
    expect_equal(list(frame.index), list("abcdef"), "a frame's index")
    expect_equal(pyarrow.parquet.read_table(workspace / "out.parquet"), of_table, "the parquet file")
    expect_equal([json.loads(line) for line in (workspace / "out.jsonl").read_text().splitlines()], listed, "the lines")
    expect_equal(again.column("second"), again.column("answer"), "the second time")
    expect_equal([row["answer"] for row in texts], wanted[:2], "plain texts")
    expect_equal([[len(row[name]) for name in ("answer", "answer_finish_reason")] for row in several], [[2, 2]] * 2, "two answers a row")
    expect_equal([len(row["answer"]) for row in several_of_table.to_pylist()], [2, 2], "two answers a row of a table")
    expect(len(made_up) == 2 and "answer" in made_up[0], f"{made_up}")


_IN_A_FRESH_ONE = """
import poise
from poise import LLM, SamplingParams
with LLM(model=poise.__path__[0] + "/programs/launch/demo/model", device="cpu") as llm:
    print(llm.generate("Q: 47 + 38 = ?\\nA:", SamplingParams(temperature=0, max_tokens=8, stop="\\n"))[0].outputs[0].text)
"""


@test
def a_wheel_answers_in_a_fresh_environment_and_leaves_nothing(workspace):
    """Its programs are those under test: a wheel compiles what is not built."""

    def done(*words, **environment):
        environment |= {"PATH": os.environ["PATH"], "HOME": str(workspace.folder), "XDG_RUNTIME_DIR": str(workspace.runtime)}
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_", "http", "HTTP"))}
        ended = subprocess.run([*map(str, words)], cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False)
        expect(ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    fresh = workspace / "fresh"
    python = fresh / "bin" / "python"
    build = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"  # as pip does it
    done(sys.executable, "-c", build, workspace / "wheels", POISE_BIN=str(bin_folder()))
    (wheel,) = (workspace / "wheels").iterdir()
    done(sys.executable, "-m", "venv", "--without-pip", fresh)
    done(sys.executable, *PIP, "--python", python, "install", "--no-compile", wheel)
    expect(any("poise" in path.name for path in fresh.rglob("*")), "nothing is installed")
    expect_equal(done(python, "-c", _IN_A_FRESH_ONE).strip(), "85", "the answer")
    expect(done(fresh / "bin" / "poise", "version").startswith("poise "), "poise version")
    refused = subprocess.run([fresh / "bin" / "poise-lm-eval"], env={"HOME": str(workspace.folder)}, capture_output=True, text=True, check=False)
    expect(refused.returncode == 1 and "pip install 'poise[lm-eval]'" in refused.stderr, refused.stderr)
    done(sys.executable, *PIP, "--python", python, "uninstall", "--yes", "poise")
    left = [path for path in fresh.rglob("*") if "poise" in str(path.relative_to(fresh))]
    expect(not left, f"{left[:5]} stay behind")


if __name__ == "__main__":
    with_packages()
    sys.path.insert(0, str(ROOT / "launch" / "python"))
    raise SystemExit(harness.main())
