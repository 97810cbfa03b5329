#!/usr/bin/env python3
"""Answers of a form: response_format and structured_outputs, in files and over HTTP, against llguidance, jsonschema and the openai client.

The three come into an environment of their own, build/forms-venv, the first time; the script goes on with its interpreter.
"""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: E402
from harness import ROOT, choice, expect, expect_equal, read_results, request, test, wait_until  # noqa: E402

_FORMS = ROOT / "build" / "forms-venv"
MODEL = ROOT / "launch" / "demo" / "chat_model"
VOCABULARY, EOS = 1536, [1, 4]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["owl", "swan"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
COMPACT = {**PERSON, "x-guidance": {"whitespace_flexible": False}}  # llguidance's own; a small model writes white space for ever
LARK = 'start: "I " verb " " /[0-9]{1,3}/\nverb: "have" | "see"'
GBNF = 'root ::= "yes" | "no, " [a-c]+ "."'
FORMS = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": COMPACT, "strict": True}}},
    "object": {"response_format": {"type": "json_object"}},
    "json": {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
    "text": {"structured_outputs": {"json": json.dumps(PERSON)}},
    "regex": {"structured_outputs": {"regex": r"[A-D]{2,5}-\d+"}},
    "choice": {"structured_outputs": {"choice": ["the owl", "the swan", 'a "quoted" one']}},
    "lark": {"structured_outputs": {"grammar": LARK}},
    "gbnf": {"structured_outputs": {"grammar": GBNF}},
}
PROMPTS = ("who lives in Lorun?", "Rosa", "Q: 47 + 38 = ?")


def with_packages():
    """Starts this script again with an interpreter that has the packages."""
    python = _FORMS / "bin" / "python"
    if Path(sys.prefix) == _FORMS:
        return
    mark = _FORMS / "installed"
    if not mark.exists():
        for words in (
            [sys.executable, "-m", "venv", "--clear", "--system-site-packages", _FORMS],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "openai>=1.60", "llguidance>=1.0,<2", "jsonschema", "pyzmq>=25", "tqdm>=4.60"],
        ):
            made = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
            if made.returncode:
                raise SystemExit(f"{made.stdout}{made.stderr}the packages cannot be installed")
        mark.touch()
    os.execv(python, [python, *sys.argv])


def lines_of(forms, **more):
    body = {"max_tokens": 60, "logprobs": 20, "return_tokens_as_token_ids": True, "return_token_ids": True, **more}
    return [request(f"{name}-{i}", prompt, **body, **forms[name]) for name in forms for i, prompt in enumerate(PROMPTS)]


def check_form(name, text, finished):
    """`finished`: it was not cut off by max_tokens."""
    import jsonschema

    if not finished:
        return
    if name in ("schema", "json", "text"):
        jsonschema.validate(json.loads(text), PERSON)
        expect_equal(list(json.loads(text)), list(PERSON["properties"]), "the order of its properties")
    elif name == "object":
        expect(isinstance(json.loads(text), dict), text)
    elif name == "choice":
        expect(text in FORMS["choice"]["structured_outputs"]["choice"], text)
    else:
        pattern = {"regex": r"[A-D]{2,5}-\d+", "lark": r"I (have|see) [0-9]{1,3}", "gbnf": r"yes|no, [a-c]+\."}[name]
        expect(re.fullmatch(pattern, text), f"{name}: {text!r}")


def definition(name):
    """As llguidance's own documentation makes it."""
    import llguidance

    if name == "text":
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(PERSON))
    if name in ("schema", "json"):
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(PERSON), overrides={"whitespace_flexible": False})
    if name == "object":
        return llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}')
    kind, given = next(iter(FORMS[name]["structured_outputs"].items()))
    return llguidance.grammar_from(kind, json.dumps(given) if kind == "choice" else given)


def check_greedy(name, answer, tokenizer):
    """Each token is the likeliest that the grammar allows, as far as the reported logprobs, which know no grammar, say."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, definition(name))
    tokens = answer["token_ids"]
    passed_over = 0
    for token, best in zip(tokens, answer["logprobs"]["top_logprobs"], strict=True):
        mask = matcher.compute_bitmask()
        allowed = [int(key.removeprefix("token_id:")) for key in best]
        values = {int(key.removeprefix("token_id:")): value for key, value in best.items()}
        allowed = [one for one in allowed if mask[one // 8] >> one % 8 & 1]
        expect(mask[token // 8] >> token % 8 & 1, f"{name}: token {token} of {tokens} is not allowed")
        expect(all(values[one] <= values[token] for one in allowed), f"{name}: {token} was taken instead of one of {allowed}")
        passed_over += values[token] < max(values.values())
        if token not in EOS:
            expect(matcher.consume_token(token), matcher.get_error())
    expect_equal(answer["finish_reason"], "stop" if tokens[-1] in EOS else "length", f"{name}: how it ended")
    return passed_over


@test
def every_answer_has_its_form_and_each_token_is_the_likeliest_allowed_one(workspace):
    import llguidance

    tokenizer = llguidance.LLTokenizer((MODEL / "tokenizer.json").read_text(), n_vocab=VOCABULARY, eos_token=EOS)
    lines = lines_of(FORMS) + [request("free", PROMPTS[0])]
    lines += lines_of({name: FORMS[name] for name in ("schema", "regex")}, n=2, temperature=1.5, max_tokens=80)
    for line in lines[-2 * len(PROMPTS) :]:
        line["custom_id"] = "drawn-" + line["custom_id"]
    lines.append(request("cut-0", PROMPTS[0], max_tokens=3, **FORMS["schema"]))
    path = workspace.write_requests("in.jsonl", lines)
    workspace.run(path, workspace / "a.jsonl", "--policy", "kv-only", model=MODEL).expect(0)
    workspace.run(path, workspace / "b.jsonl", "--policy", "act-only", "--max-num-seqs", "3", model=MODEL).expect(0)
    expect_equal(harness.comparable(workspace / "b.jsonl"), harness.comparable(workspace / "a.jsonl"), "answers of another policy")
    passed_over = ended = 0
    for custom_id, result in read_results(workspace / "a.jsonl").items():
        expect_equal(result["response"]["status_code"], 200, f"{custom_id}: {result}")
        for one in result["response"]["body"]["choices"]:
            name = custom_id.removeprefix("drawn-").split("-")[0]
            if name in FORMS:
                check_form(name, one["text"], one["finish_reason"] == "stop")
                ended += one["finish_reason"] == "stop"
            if name in FORMS and not custom_id.startswith("drawn"):
                passed_over += check_greedy(name, one, tokenizer)
    cut = choice(read_results(workspace / "a.jsonl")["cut-0"])
    expect_equal(cut["finish_reason"], "length", "an answer that max_tokens cuts")
    expect(passed_over > 50 and ended >= 20, f"{passed_over} tokens were barred, {ended} answers came to their end: too few to test anything")
    expect("bars" not in workspace.poise("inspect", workspace / "a.jsonl.poise", "--check").expect(0).out, "")


@test
def greedy_answers_are_those_of_transformers_with_a_processor_of_llguidance(workspace):
    golden = json.loads((ROOT / "tests" / "golden" / "structured.json").read_text())
    lines = [
        request(i, case["prompt"], max_tokens=golden["max_tokens"], return_token_ids=True, **FORMS[case["form"]]) for i, case in enumerate(golden["cases"])
    ]
    path = workspace.write_requests("in.jsonl", lines)
    workspace.run(path, workspace / "out.jsonl", "--dtype", "float32", model=MODEL).expect(0)
    results = read_results(workspace / "out.jsonl")
    for i, case in enumerate(golden["cases"]):
        expect_equal(choice(results[str(i)])["token_ids"], case["tokens"], f"{case['form']}, case {i}")


@test
def a_form_that_cannot_be_followed_ends_its_own_line(workspace):
    deep = {"type": "integer"}
    for _ in range(14):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}, "required": ["a"]}
    endless = "start: " + " ".join(["(a | b)"] * 40000) + '\na: "x"*\nb: "x"+'
    hostile = {
        "type": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
        "reference": {"structured_outputs": {"json": {"$ref": "#/definitions/none"}}},
        "no_json": {"structured_outputs": {"json": "{"}},
        "regex": {"structured_outputs": {"regex": "(["}},
        "grammar": {"structured_outputs": {"grammar": "start: nothing"}},
        "large": {"structured_outputs": {"regex": "a" * (1 << 20)}},
        "deep": {"structured_outputs": {"json": deep}},
        "expressions": {"structured_outputs": {"regex": "(?:a?){60000}a{60000}"}},
        "endless": {"structured_outputs": {"grammar": endless}},
        "repeats": {"structured_outputs": {"regex": r"(((([a-z]{1,50}x?){1,50}){1,50}){1,50}y){1,50}"}},
        "states": {"structured_outputs": {"regex": r"(.*a.{18}){1,30}b"}},
        "nested": {"structured_outputs": {"json": {"enum": [f"value {i}" * 20 for i in range(4000)]}}},
    }
    lines = [request(name, PROMPTS[0], max_tokens=20, **form) for name, form in hostile.items()]
    lines.append(request("of_three", PROMPTS[0], n=3, temperature=1, **hostile["grammar"]))
    hostile["of_three"] = hostile["grammar"]
    # No token is both allowed and of the form.
    lines.append(request("barred", PROMPTS[0], allowed_token_ids=[5], structured_outputs={"choice": ["Paris", "Rome"]}))
    lines += [request(f"good-{i}", prompt, max_tokens=40, **FORMS["schema"]) for i, prompt in enumerate(PROMPTS)]
    lines += [request(f"free-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    ended = workspace.run(workspace.write_requests("in.jsonl", lines), workspace / "out.jsonl", model=MODEL).expect(0)
    expect(ended.cpu_seconds < 25, f"it took {ended.cpu_seconds:.0f} s of computing")
    results = read_results(workspace / "out.jsonl")
    for name in ("type", "reference", "no_json", "regex", "grammar", "large", "deep", "expressions", "endless", "of_three"):
        error = results[name]["response"]["body"]["error"]
        expect_equal(results[name]["response"]["status_code"], 400, f"{name}: its status")
        expect_equal(error["param"], next(iter(hostile[name])), f"{name}: the field at fault")
        expect("\n" not in error["message"], error["message"])
    expect_equal(results["barred"]["response"]["body"]["error"].get("code"), "no_token_allowed", str(results["barred"]))
    expect("the answer's form" in results["barred"]["response"]["body"]["error"]["message"], str(results["barred"]))
    expect("is too " in results["expressions"]["response"]["body"]["error"]["message"], str(results["expressions"]))
    expect("took more than" in results["endless"]["response"]["body"]["error"]["message"], str(results["endless"]))
    for name, result in results.items():
        if name.startswith(("good", "free")):
            expect_equal(result["response"]["status_code"], 200, f"{name}: {result}")
            check_form("schema" if name.startswith("good") else "free", choice(result)["text"], name.startswith("good") and choice(result)["finish_reason"] == "stop")


def grammar_process(run):
    """Of the planner of the run in that directory; None if none lives."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if any(word.endswith(b"grammar_worker.py") for word in words) and parent in run:
            return int(path.parent.name)
    return None


@test
def a_killed_grammar_process_and_a_killed_run_change_no_answer(workspace):
    lines = [
        request(f"{name}-{i}", f"{prompt} {i}", max_tokens=48, temperature=0.8 * (i % 2), **FORMS[name])
        for i, prompt in enumerate(PROMPTS * 3)
        for name in ("schema", "regex", "object")
    ]
    path = workspace.write_requests("in.jsonl", lines)
    workspace.run(path, workspace / "whole.jsonl", model=MODEL).expect(0)
    output = workspace / "out.jsonl"
    slow = workspace.paced(0.06)
    process = workspace.start(*workspace.run_words(path, output, "--max-num-seqs", "6", *slow, model=MODEL))
    run = Path(f"{output}.poise")
    killed = 0
    for _ in range(2):
        planner = wait_until(lambda: workspace.children(run).get("planner"), "a planner", 60)
        worker = wait_until(lambda: grammar_process({planner}), "a grammar process", 60)
        os.kill(worker, signal.SIGKILL)
        killed += 1
        wait_until(lambda: (other := grammar_process({planner})) and other != worker, "another grammar process", 60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not workspace.children(run), "the run's processes to be gone", 30)
    expect(not output.exists(), "the run was over before it was killed")
    workspace.run(path, output, "--resume", model=MODEL).expect(0)
    expect_equal(harness.comparable(output), harness.comparable(workspace / "whole.jsonl"), "answers after kills")


@test
def a_halted_grammar_process_and_one_that_starts_slowly_change_no_answer(workspace):
    lines = [request(f"{name}-{i}", f"{prompt} {i}", max_tokens=48, **FORMS[name]) for i, prompt in enumerate(PROMPTS) for name in ("schema", "regex")]
    path = workspace.write_requests("in.jsonl", lines)
    workspace.run(path, workspace / "whole.jsonl", model=MODEL).expect(0)
    for at_a_time in ("1", "6"):
        output = workspace / f"out-{at_a_time}.jsonl"
        words = workspace.run_words(path, output, "--max-num-seqs", at_a_time, "--stall-timeout", "5", *workspace.paced(0.03), model=MODEL)
        process = workspace.start(*words)
        planner = wait_until(lambda: workspace.children(Path(f"{output}.poise")).get("planner"), "a planner", 60)
        worker = wait_until(lambda: grammar_process({planner}), "a grammar process", 60)
        time.sleep(0.5)
        os.kill(worker, signal.SIGSTOP)
        ended = workspace.finish(process, 120).expect(0)
        expect("the process of grammars neither spoke nor computed for 15 s; another one goes on" in ended.err, ended.err)
        expect_equal(harness.comparable(output), harness.comparable(workspace / "whole.jsonl"), "answers after a halt")
    folder = workspace / "venv"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\nsleep 9\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    needs = ROOT / "launch" / "server" / "grammar_requirements.txt"
    (folder / "installed").write_text(hashlib.sha256(needs.read_bytes() + sys.version.encode()).hexdigest())
    output = workspace / "late.jsonl"
    late = subprocess.run(
        [sys._base_executable, "-s", ROOT / "launch" / "start.py", *map(str, workspace.run_words(path, output, "--stall-timeout", "5", model=MODEL))],
        capture_output=True, text=True, check=False, env=workspace.environment({"POISE_GRAMMAR_VENV": str(folder), "PYTHONPATH": ""}), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    expect_equal(late.returncode, 0, late.stderr)
    expect("the process of grammars is being started" in late.stderr, late.stderr)
    expect_equal(harness.comparable(output), harness.comparable(workspace / "whole.jsonl"), "answers after a slow start")


@test
def an_answer_that_another_process_began_has_the_time_for_each_token_that_it_had_before(_):
    from supervisor.lifecycle import grammar_worker

    def compute(seconds):
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    class Slow:
        def compute_bitmask(self):
            compute(0.1)
            return b"\xff" * 4

        def consume_tokens(self, tokens):
            compute(0.1 * len(tokens))
            return True

        def is_error(self):
            return False

        def deep_copy(self):
            return self

    own, other = socket.socketpair()
    child = os.fork()
    if child == 0:
        own.close()
        grammars = object.__new__(grammar_worker.Grammars)
        grammars._words, grammars._compiled, grammars._answers = 1, {"slow": Slow()}, {}
        grammar_worker.SECONDS, grammar_worker.Grammars = 0.5, lambda hello: grammars
        grammar_worker.serve(other)
    other.close()
    own.sendall(grammar_worker.framed(b"{", b"}"))
    own.sendall(grammar_worker.framed(b"{", json.dumps({"drop": [], "wishes": [{"id": 1, "grammar": "slow", "tokens": [7] * 9}]}).encode()[1:]))
    own.settimeout(30)
    expect_equal(own.recv(100), grammar_worker.framed(b"m", b""), "it has started")
    said = own.recv(100)
    own.close()
    expect_equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0 if said else -signal.SIGPROF, "how it ended")
    expect_equal(said, grammar_worker.framed(b"m", b"\xff" * 4), "a mask after nine tokens")


@test
def without_llguidance_such_lines_get_an_error_that_names_the_remedy(workspace):
    lines = [request("formed", PROMPTS[0], **FORMS["regex"]), request("free", PROMPTS[0])]
    path = workspace.write_requests("in.jsonl", lines)
    nowhere = {"POISE_GRAMMAR_VENV": str(path / "none"), "PYTHONPATH": ""}  # the input is no folder
    process = subprocess.run(
        [sys._base_executable, "-s", ROOT / "launch" / "start.py", *map(str, workspace.run_words(path, workspace / "out.jsonl", model=MODEL))],
        capture_output=True, text=True, check=False, env=workspace.environment(nowhere), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    expect_equal(process.returncode, 0, process.stderr)
    results = read_results(workspace / "out.jsonl")
    expect_equal(results["free"]["response"]["status_code"], 200, "a line without a form")
    message = results["formed"]["response"]["body"]["error"]["message"]
    expect("pip install llguidance" in message, message)


@test
def the_openai_client_gets_answers_of_its_form_whole_and_streamed(workspace):
    from served import serving

    with serving(workspace, model=MODEL) as server:
        client, name = server.client, str(MODEL)
        messages = [{"role": "user", "content": PROMPTS[0]}]
        asked = {"model": name, "messages": messages, "max_tokens": 60, "temperature": 0, "response_format": FORMS["schema"]["response_format"]}
        whole = client.chat.completions.create(**asked).choices[0]
        check_form("schema", whole.message.content, True)
        expect_equal(whole.finish_reason, "stop", "how it ended")
        parts = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True) if part.choices]
        expect_equal("".join(part.delta.content or "" for part in parts), whole.message.content, "the stream's text")
        for form in ("regex", "choice"):
            made = client.completions.create(model=name, prompt=PROMPTS[1], max_tokens=40, temperature=0, extra_body=FORMS[form])
            check_form(form, made.choices[0].text, made.choices[0].finish_reason == "stop")
        for bad, streams in ((FORMS["regex"] | {"structured_outputs": {"regex": "(["}}, False), ({"structured_outputs": {"regex": "("}}, True)):
            try:
                list(client.completions.create(model=name, prompt="x", max_tokens=5, stream=streams, extra_body=bad))
                expect(False, "a regex that does not compile was answered")
            except Exception as refused:  # the client's own kinds
                expect("structured_outputs" in str(refused), repr(refused))
        began = time.monotonic()
        made = client.completions.create(model=name, prompt="Rosa", max_tokens=4, temperature=0)
        expect(made.choices[0].text and time.monotonic() - began < 20, "a free answer behind refused ones")


@test
def python_has_forms_too(workspace):
    sys.path.insert(0, str(ROOT / "launch" / "python"))
    from poise import LLM, SamplingParams, StructuredOutputsParams

    forms = [StructuredOutputsParams(**FORMS[name]["structured_outputs"]) for name in ("regex", "choice", "json")]
    forms.append(StructuredOutputsParams(json_object=True, disable_any_whitespace=True))
    with LLM(model=str(MODEL), device="cpu") as llm:
        made = llm.generate([PROMPTS[0]] * 4, [SamplingParams(temperature=0, max_tokens=60, structured_outputs=form) for form in forms], use_tqdm=False)
        for name, output in zip(("regex", "choice", "json", "object"), made, strict=True):
            check_form(name, output.outputs[0].text, output.outputs[0].finish_reason == "stop")
        (refused,) = llm.generate(["x"], SamplingParams(structured_outputs=StructuredOutputsParams(whitespace_pattern=" ")), use_tqdm=False)
        expect("whitespace_pattern" in refused.error.message, str(refused.error))


if __name__ == "__main__":
    with_packages()
    sys.exit(harness.main())
