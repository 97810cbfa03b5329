#!/usr/bin/env python3
"""lm-evaluation-harness, as PyPI has it: every answer and metric equal to that of its `hf` backend (tests/golden/evaluation), through poise's
own model class and through `local-completions` with `poise serve`.

What it needs of PyPI comes into build/python-venv (environment.py); the script goes on with its interpreter.
"""

import contextlib
import functools
import gc
import io
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from environment import with_packages  # noqa: E402
from harness import ROOT, expect, expect_equal, test, wait_until  # noqa: E402

sys.path.insert(0, str(ROOT / "tests" / "golden"))
import make_evaluation_golden as golden  # noqa: E402

# Of a likelihood: an absolute part, and a few of float32's last digits where it is the sum of many tokens'.
_ABSOLUTE, _RELATIVE = 1e-4, 2.0**-22


def near(have, want):
    return abs(have - want) <= _ABSOLUTE + _RELATIVE * abs(want)


def expect_same(got, want, where):
    """Texts, numbers of right answers and what is greedy exactly; log likelihoods nearly."""
    expect_equal(got.keys(), want.keys(), f"tasks of {where}")
    for task, wanted in want.items():
        pairs = zip(flat(got[task]["resps"]), flat(wanted["resps"]), strict=True)
        for place, (have, hf) in enumerate(pairs):
            same = near(have, hf) if isinstance(hf, float) else have == hf
            expect(same, f"{where}, {task}, answer {place}: {have!r}, hf has {hf!r}")
        for name, hf in wanted["metrics"].items():
            have = got[task]["metrics"][name]
            # A perplexity is e to the power of a mean of likelihoods.
            same = abs(have - hf) <= 1e-6 * hf if task in golden.TEXTS else have == hf
            expect(same, f"{where}, {task}, {name}: {have}, hf has {hf}")


def flat(value):
    return [one for part in value for one in flat(part)] if isinstance(value, list) else [value]


@contextlib.contextmanager
def used(workspace):
    """Inside, poise's programs and the harness leave what they leave in the workspace."""
    before = dict(os.environ)
    kept = {"TMPDIR": str(workspace.folder), "HF_DATASETS_CACHE": str(workspace / "datasets"), "HF_HUB_OFFLINE": "1"}
    os.environ.update(workspace.environment(kept))
    tempfile.tempdir = None  # read again
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


@contextlib.contextmanager
def silent():
    """Without progress bars."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def evaluated(*arguments, **more):
    with silent():
        return golden.evaluated(*arguments, **more)


def by_our_class(name):
    def run(workspace):
        import poise.lm_eval

        hf = json.loads(golden.HF.read_text())[name]
        with used(workspace):
            folder = golden.assembled(name, workspace.folder)
            with contextlib.closing(poise.lm_eval.PoiseLM(str(folder), dtype="float32", device="cpu")) as model:
                expect_same(evaluated(model, None, golden.TASKS), hf["whole"], name)
                model.max_length -= golden.LESS
                expect_same(evaluated(model, None, golden.LONG_ONES), hf["less"], f"{name} with a shorter max_length")
                model.max_length += golden.LESS
                if "chats" in hf:
                    expect_same(evaluated(model, None, golden.CHOICES[:1] + golden.GENERATED, chat=True), hf["chats"], f"chats of {name}")

    run.__name__ = f"our_class_says_what_hf_says_of_{name}"
    return run


@test
def the_command_takes_what_lm_eval_takes(workspace):
    """Without the harness's own 13,000 task files, of which it makes an index for 8 s of a core."""
    import lm_eval.tasks
    import poise.lm_eval

    words = ["poise-lm-eval", "run", "--model", "poise", "--device", "cpu", "--output_path", str(workspace / "said")]
    words += ["--model_args", f"model={harness.DEMO_MODEL},dtype=float32", "--tasks", "generate.yaml"]
    ours_alone = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    with used(workspace), contextlib.chdir(golden.FOLDER), contextlib.redirect_stdout(io.StringIO()) as table:
        with mock.patch("lm_eval.tasks.TaskManager", ours_alone), mock.patch.object(sys, "argv", words), silent():
            poise.lm_eval.main()
    gc.collect()  # the model's programs end with it
    (said,) = (workspace / "said").rglob("results_*.json")
    hf = json.loads(golden.HF.read_text())["demo"]["whole"]["generate"]["metrics"]
    expect_equal({name: json.loads(said.read_text())["results"]["generate"][name] for name in hf}, hf, "metrics")
    expect("|generate|" in table.getvalue(), table.getvalue())


@test
def what_cannot_be_is_said(workspace):
    import poise.lm_eval
    from lm_eval.api.instance import Instance

    def asked(context, **how):
        return [Instance("generate_until", {}, (context, how), 0)]

    with used(workspace), contextlib.closing(poise.lm_eval.PoiseLM(str(harness.DEMO_MODEL), device="cpu")) as model:
        for what, wrong in (
            ("num_beams", lambda: model.generate_until(asked("a", num_beams=4), disable_tqdm=True)),
            ("no room for a context", lambda: model.generate_until(asked("a", max_gen_toks=512), disable_tqdm=True)),
            ('"top_p" must be', lambda: model.generate_until(asked("a", top_p=2.0, do_sample=True), disable_tqdm=True)),
            ("max_length is 513", lambda: poise.lm_eval.PoiseLM(str(harness.DEMO_MODEL), device="cpu", max_length=513)),
            ("--model_args model=DIR", lambda: poise.lm_eval.PoiseLM()),
        ):
            try:
                wrong()
            except ValueError as problem:
                expect(what in str(problem), f"{what!r} wanted in: {problem}")
            else:
                raise harness.Failed(f"{what!r} was expected")


@test
def answers_of_one_token_share_a_run_of_their_context(workspace):
    """The twenty best tokens behind a context are told at once; each is what it is alone."""
    import poise.lm_eval
    from lm_eval.api.instance import Instance

    def asked(ends):
        return [Instance("loglikelihood", {}, ("where is the c", end), 0) for end in ends]

    sent = []
    with used(workspace), contextlib.closing(poise.lm_eval.PoiseLM(str(golden.assembled("llama", workspace.folder)), device="cpu")) as model:
        responses = model._llm.responses
        model._llm.responses = lambda bodies: responses(sent.append(body) or body for body in bodies)
        ends = "bdfhijklmnpqstuvxyz0123456789.?=+:QA"  # none is one token with the c
        alone = [model.loglikelihood(asked(end), disable_tqdm=True)[0] for end in ends]
        sent.clear()
        together = model.loglikelihood(asked(ends + ends[:1] + "oo"), disable_tqdm=True)
    expect_equal(together[: len(ends) + 1], [*alone, alone[0]], "likelihoods")
    expect(1 + len(ends) - 20 <= len(sent) < len(ends), f"{len(sent)} contexts were run for {len(ends)} tokens")
    expect(sum(greedy for _, greedy in together[: len(ends)]) <= 1, f"{together}")


@test
def answers_of_several_tokens_share_what_stands_before_them(workspace):
    """The tokens that are not computed, and the likelihoods of a class that shares nothing."""
    import poise.lm_eval
    from lm_eval.api.instance import Instance

    questions = [f"Q: {first} + 38 = ?\nA:" for first in range(10, 30)]
    pairs = [(question, f" {answer} is the sum") for question in questions for answer in (41, 52, 63, 74)]
    found = {}
    with used(workspace):
        for sharing in ("on", "off"):
            options = {} if sharing == "on" else {"prefix_sharing": "off"}
            with contextlib.closing(poise.lm_eval.PoiseLM(str(harness.DEMO_MODEL), device="cpu", dtype="float32", **options)) as model:
                found[sharing] = model.loglikelihood([Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(pairs)], disable_tqdm=True)
                least = sum(3 * (len(model.tok_encode(question)) - 1) for question in questions)

                def shared():
                    files = workspace.folder.rglob("status.json")
                    return max((harness._json(file).get("shared_prompt_tokens", 0) for file in files), default=0)

                if sharing == "on":
                    wait_until(lambda: shared() >= least, f"{least} shared tokens")  # the status follows
    expect_equal(found["on"], found["off"], "likelihoods")


@contextlib.contextmanager
def served(workspace, folder):
    """The URL of completions of a server."""
    run = workspace / "server"
    environment = {} if "POISE_SERVE_VENV" in os.environ else {"POISE_SERVE_VENV": str(ROOT / "build" / "serve-venv")}
    process = workspace.start("serve", "--model", folder, "--port", "0", "--run-dir", run, "--device", "cpu", "--dtype", "float32", env=environment)

    def url():
        expect(process.poll() is None, harness.said(process))
        with contextlib.suppress(OSError, ValueError):
            return json.loads((run / "run.json").read_text()).get("url")

    try:
        yield wait_until(url, "the server to listen", 240) + "/v1/completions"
    finally:
        process.send_signal(signal.SIGTERM)
        workspace.finish(process, 60).expect(0, "the server has ended")


def by_local_completions(name, adds_bos):
    def run(workspace):
        hf = json.loads(golden.HF.read_text())[name]
        context = golden.MODELS[name][2]
        with used(workspace):
            folder = golden.assembled(name, workspace.folder)
            with served(workspace, folder) as url:
                # As launch/server/README.md says. A window of the client's and the token that it asks for fill the context; of a context
                # that is cut before an answer it keeps one token less than hf, so it is given one more.
                options = {"model": str(folder), "base_url": url, "tokenizer_backend": "huggingface", "num_concurrent": 8, "add_bos_token": adds_bos}
                got = evaluated("local-completions", {**options, "max_length": context}, golden.LONG_ONES)
                expect_same(got, hf["less"], f"{name} through local-completions")
                got = evaluated("local-completions", {**options, "max_length": context + 1}, ("choice", "generate"))
                expect_same(got, {task: hf["whole"][task] for task in got}, f"{name} through local-completions")

    run.__name__ = f"local_completions_says_what_hf_says_of_{name}"
    return run


for one in golden.MODELS:
    test(by_our_class(one))
for one, bos in (("demo", True), ("opt", False)):
    test(by_local_completions(one, bos))

if __name__ == "__main__":
    with_packages()
    sys.path.insert(0, str(ROOT / "launch" / "python"))
    os.environ["PYTHONPATH"] = str(ROOT / "launch" / "python")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    raise SystemExit(harness.main())
