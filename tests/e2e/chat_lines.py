#!/usr/bin/env python3
"""Chat lines: prompts equal to transformers' apply_chat_template, answers in OpenAI's form, templates that misbehave."""

import json
import shutil
import signal
import subprocess
import sys
import time

import harness
from harness import DEMO_MODEL, ROOT, expect, expect_equal, test
from mixed_requests import BAD_LINES

sys.path.insert(0, str(ROOT / "tests" / "golden"))
sys.dont_write_bytecode = True
import make_chat_golden as golden  # noqa: E402
from supervisor.lifecycle import chat_prompts  # noqa: E402

DATE = {"SOURCE_DATE_EPOCH": str(golden.DATE)}
CASES = json.loads((ROOT / "tests" / "golden" / "chat.json").read_text())["cases"]
HELLO = [{"role": "user", "content": "who lives in Lorun?"}]


def line(number, body, url="/v1/chat/completions"):
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}, ensure_ascii=number % 2 == 0)


def write_lines(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def results(path):
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {result["custom_id"]: result["response"] for result in lines}


def error_of(response):
    expect_equal(response["status_code"], 400, f"the status of {response}")
    return response["body"]["error"]


def dummy_model(folder, name):
    """The tokenizer and template of a golden case with a tiny OPT without weights."""
    folder.mkdir()
    golden.make_model(folder, name)
    shape = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "torch_dtype": "float32", "hidden_size": 32, "ffn_dim": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 1024, "vocab_size": 4096,
        "word_embed_proj_dim": 32, "do_layer_norm_before": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def demo_with(folder, template):
    """The demo model with a chat template; None: without."""
    shutil.copytree(DEMO_MODEL, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def run(workspace, model, lines, *more, name="out.jsonl", env=None):
    source = write_lines(workspace / f"{name}.in", lines)
    return workspace.poise("run", "--model", model, "-i", source, "-o", workspace / name, "--device", "cpu", *more, env=env)


@test
def prompts_are_those_of_apply_chat_template(workspace):
    """The ids of a run for each tokenizer, and the text of all templates."""
    for name in golden.TEMPLATES:
        model = dummy_model(workspace / name, name)
        source = write_lines(workspace / f"{name}.jsonl", [line(n, body) for n, body in enumerate(golden.BODIES)])
        text = render(workspace, model, source)
        for n, case in enumerate(CASES[name]):
            if "error" in case:
                reason = case["error"] if "continue_final_message" not in case["error"] else "leaves out the last message"
                expect(reason in text[n + 1].get("error", ""), f"{name} {golden.BODIES[n]}: {text[n + 1]} instead of {case}")
            else:
                expect_equal(text[n + 1].get("prompt"), case["prompt"], f"{name} {golden.BODIES[n]}: {text[n + 1]}")
        if name in ("chatml", "phi"):  # tokenizers that others have, too
            continue
        lines = [line(n, body | {"max_tokens": 1, "return_token_ids": True}) for n, body in enumerate(golden.BODIES)]
        run(workspace, model, lines, "--load-format", "dummy", name=f"{name}.out", env=DATE).expect(0)
        answers = results(workspace / f"{name}.out")
        for n, case in enumerate(CASES[name]):
            answer = answers[f"c{n}"]
            if "ids" in case:
                expect_equal(answer["body"].get("prompt_token_ids"), case["ids"], f"{name} {golden.BODIES[n]}: {answer}")
            else:
                expect_equal(error_of(answer)["code"], "chat_template_error" if "continue" not in case["error"] else "invalid_value", name)


def render(workspace, model, source):
    """The entries by line of what the worker writes."""
    out = workspace / f"{source.name}.rendered"
    words = [sys.executable, "-s", ROOT / "launch" / "supervisor" / "lifecycle" / "chat_worker.py", model, source, out, "0", "1", "yes"]
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, env=workspace.environment(DATE))
    return {entry["line"]: entry for entry in map(json.loads, out.read_text().splitlines())}


HOSTILE = """{%- set kind = messages[0].content -%}
{%- if kind == 'loop' -%}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif kind == 'power' -%}{{ messages[0].content | length ** (8 ** 8) ** 8 }}
{%- elif kind == 'long' -%}{% for i in range(99999) %}{{ kind * 9999 }}{% endfor %}
{%- elif kind == 'memory' -%}{{ kind * 999999999999 }}
{%- elif kind == 'walk' -%}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif kind == 'write' -%}{{ messages.append('more') }}
{%- elif kind == 'recursion' -%}{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}
{%- elif kind == 'address' -%}{{ raise_exception(raise_exception) }}
{%- else -%}{{ kind }}{%- endif -%}"""


@test
def a_template_that_misbehaves_fails_its_line_alone(workspace):
    model = demo_with(workspace / "model", HOSTILE)
    kinds = ["fine", "loop", "long", "memory", "power", "walk", "write", "recursion", "address", "fine too"]
    source = write_lines(workspace / "in.jsonl", [line(n, {"messages": [{"role": "user", "content": kind}]}) for n, kind in enumerate(kinds)])
    given = type("Given", (), {"skip_tokenizer_init": False, "input": str(source), "model": str(model)})
    before = harness.cpu_of_children()
    path = chat_prompts.prepare(given, workspace.folder)
    cpu = harness.cpu_of_children() - before
    expect(cpu < 4, f"{cpu:.1f} s of a core for two lines without an end, each of which has two seconds, and eight others")
    entries = {kinds[entry["line"] - 1]: entry for entry in map(json.loads, path.read_text().splitlines()[1:])}
    expect_equal([entries[kind].get("prompt") for kind in ("fine", "fine too")], ["fine", "fine too"], "prompts beside them")
    for kind, reason in {
        "loop": "took more than 1.5 s of computing", "power": "", "long": "more than 16 MiB", "memory": "memory",
        "walk": "unsafe", "write": "unsafe", "recursion": "without end", "address": "0x…",
    }.items():  # fmt: skip
        expect(reason in entries[kind]["error"], f"{kind}: {entries[kind]}")
        expect_equal(entries[kind]["code"], "chat_template_error", kind)


@test
def lines_behind_too_many_endless_ones_are_not_tried(workspace):
    """Each would take two seconds; the worker is made to end at once."""
    model = demo_with(workspace / "model", "{{ messages[0].content }}")
    source = write_lines(workspace / "in.jsonl", [line(n, {"messages": HELLO}) for n in range(12)])
    given = type("Given", (), {"skip_tokenizer_init": False, "input": str(source), "model": str(model)})
    worker = workspace / "lifecycle" / "chat_worker.py"
    worker.parent.mkdir()
    text = (ROOT / "launch" / "supervisor" / "lifecycle" / "chat_worker.py").read_text()
    worker.write_text(text.replace("return {\"prompt\": renderer.prompt(body)}", f"os.kill(os.getpid(), {int(signal.SIGPROF)})"))
    own = chat_prompts.__file__
    chat_prompts.__file__ = str(worker.with_name("chat_prompts.py"))
    try:
        path = chat_prompts.prepare(given, workspace.folder)
    finally:
        chat_prompts.__file__ = own
    errors = [json.loads(text)["error"] for text in path.read_text().splitlines()[1:]]
    expect_equal(["took more than" in error for error in errors], [True] * 8 + [False] * 4, str(errors))
    expect("too many lines" in errors[-1], errors[-1])


@test
def mixed_lines_have_answers_of_their_own_kind(workspace):
    """Completions, chats and malformed lines in one file; `plan` counts them, a second run gives the same."""
    model = demo_with(workspace / "model", "{% for m in messages %}{{ m.content }}{% endfor %}{% if date %}{{ strftime_now('%Y') }}{% endif %}")
    ask = {"messages": HELLO, "max_completion_tokens": 4, "max_tokens": 99, "temperature": 0}
    lines = [
        line(0, {"prompt": "who lives in Lorun?", "max_tokens": 4, "temperature": 0}, "/v1/completions"),
        line(1, ask),
        line(2, ask | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        line(3, {"messages": []}),
        line(4, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        line(5, ask | {"continue_final_message": True}),
        line(6, ask | {"top_logprobs": 2}),
        line(7, ask | {"chat_template": "{{ 1 }}"}),
        line(8, ask | {"tool_choice": "required"}),
        line(9, {"messages": [{"role": "user", "content": "x " * 5000}]}),
        line(10, ask | {"chat_template_kwargs": {"messages": []}}),
        line(11, ask | {"logprobs": 2}),
        line(12, ask | {"chat_template_kwargs": {"date": True}, "return_token_ids": True}),
        line(13, {"messages": HELLO, "temperature": 0}).replace("/v1/chat/completions", "\\/v1\\/chat\\/completions"),
        line(14, ask).replace("/v1/chat", "/v1/\\u0063hat"),
        "",
        '{"custom_id": "c15", "url": "/v1/chat/completions", "body": {',
    ]
    run(workspace, model, lines, env=DATE).expect(0)
    answers = results(workspace / "out.jsonl")
    text = answers["c0"]["body"]["choices"][0]["text"]
    for name in ("c1", "c2"):
        body = answers[name]["body"]
        expect_equal((body["object"], body["id"]), ("chat.completion", f"chatcmpl-{int(name[1:]) + 1}"), "of a chat")
        message = body["choices"][0]["message"]
        expect_equal((message["role"], message["content"]), ("assistant", text), "the same prompt, the same answer")
        expect_equal(body["choices"][0]["finish_reason"], answers["c0"]["body"]["choices"][0]["finish_reason"], "finish_reason")
    expect_equal(answers["c1"]["body"]["choices"][0]["logprobs"], None, "logprobs that were not asked for")
    content = answers["c2"]["body"]["choices"][0]["logprobs"]["content"]
    expect_equal(len(content), answers["c2"]["body"]["usage"]["completion_tokens"], "one entry a token")
    for entry in content:
        expect_equal(bytes(entry["bytes"]).decode(), entry["token"], "bytes")
        expect_equal((len(entry["top_logprobs"]), entry["top_logprobs"][0]["logprob"]), (2, entry["logprob"]), "greedy takes the best")
    for name, param in {"c3": "messages", "c4": "messages", "c5": "continue_final_message", "c6": "top_logprobs", "c7": "chat_template",
                        "c8": "tool_choice", "c9": "messages", "c10": "chat_template_kwargs", "c11": "logprobs", "c14": "url"}.items():  # fmt: skip
        expect_equal(error_of(answers[name])["param"], param, f"{name}: {answers[name]}")
    expect_equal(error_of(answers["c9"])["code"], "context_length_exceeded", "a long chat")
    expect("image_url" in error_of(answers["c4"])["message"], str(answers["c4"]))
    used = answers["c13"]["body"]["usage"]
    expect(used["completion_tokens"] <= 512, "without a limit the context is one")
    expect_equal(len(answers), 16, "a result for each line")
    expect(not (workspace / "out.jsonl.poise" / "chat.jsonl").exists(), "prompts are kept of an unfinished run alone")
    planned = json.loads(workspace.poise("plan", "--model", model, "-i", workspace / "out.jsonl.in", "--machine", "h200-pcie5", "--json").expect(0).out)
    expect_equal((planned["requests"], planned["refused_lines"]), (5, 11), "what plan counts")


@test
def a_file_of_2000_mixed_lines_has_2000_results(workspace):
    """Completions, chats and a hundred malformed lines, in any order."""
    random, wanted = workspace.random, {}
    model = demo_with(workspace / "model", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    lines = []
    for n in range(2000):
        if n % 20 == 0:
            make, _ = random.choice(BAD_LINES)
            lines.append(make(random, f"c{n}"))
            continue
        text, most = f"{random.choice(('who lives in', 'what is'))} {n}?", random.choice((1, 2))
        wanted[f"c{n}"] = "chat.completion" if random.random() < 0.5 else "text_completion"
        if wanted[f"c{n}"] == "chat.completion":
            lines.append(line(n, {"messages": [{"role": "user", "content": text}], "max_tokens": most}))
        else:
            lines.append(line(n, {"prompt": text, "max_tokens": most}, "/v1/completions"))
    random.shuffle(lines)
    run(workspace, model, lines).expect(0)
    found = [json.loads(text) for text in (workspace / "out.jsonl").read_text().splitlines()]
    expect_equal(len(found), 2000, "results")
    good = {result["custom_id"]: result["response"]["body"]["object"] for result in found if result["response"]["status_code"] == 200}
    expect_equal(good, wanted, "answers and their kinds")
    expect_equal(sum(result["response"]["status_code"] != 200 for result in found), 100, "error lines")


@test
def a_resumed_run_keeps_its_prompts(workspace):
    """The template writes the year; the run is interrupted in one and resumed in another."""
    model = demo_with(workspace / "model", "{{ strftime_now('%Y') }} {{ messages[0].content }}")
    lines = [line(n, {"messages": HELLO, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}) for n in range(12)]
    source = write_lines(workspace / "in.jsonl", lines)
    words = ["run", "--model", model, "-i", source, "-o", workspace / "out.jsonl", "--device", "cpu", "--max-num-seqs", "1"]
    started = workspace.start(*words, *workspace.paced(0.05), env={"SOURCE_DATE_EPOCH": "0"})
    partial = workspace / "out.jsonl.poise" / "results.jsonl.partial"
    until = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and started.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    workspace.finish(started, 60).expect(75)
    expect((workspace / "out.jsonl.poise" / "chat.jsonl").exists(), "the prompts are kept")
    template = model / "chat_template.jinja"
    before = template.read_text()
    template.write_text(before + " ")
    workspace.poise(*words, "--resume").expect(76, "another chat template")
    template.write_text(before)
    workspace.poise(*words, "--resume", env={"SOURCE_DATE_EPOCH": str(golden.DATE)}).expect(0)
    prompts = {str(response["body"]["prompt_token_ids"]) for response in results(workspace / "out.jsonl").values()}
    expect_equal(len(prompts), 1, "prompts of one year")


@test
def what_a_model_lacks_is_said(workspace):
    """No template: an error line. One that does not compile, or no jinja2: nothing starts; files without chat lines run."""
    chat, plain = line(1, {"messages": HELLO}), line(2, {"prompt": "who?", "max_tokens": 1}, "/v1/completions")
    without = demo_with(workspace / "without", None)
    run(workspace, without, [chat, plain]).expect(0)
    answers = results(workspace / "out.jsonl")
    expect_equal((error_of(answers["c1"])["code"], answers["c2"]["status_code"]), ("no_chat_template", 200), str(answers))
    broken = demo_with(workspace / "broken", "{% for %}")
    refused = run(workspace, broken, [chat, plain], name="broken.jsonl").expect(2)
    expect("does not compile" in refused.err and refused.err.count("\n") <= 2, refused.err)
    expect(not (workspace / "broken.jsonl.poise").exists(), "nothing started")
    hidden = workspace / "hidden"
    hidden.mkdir()
    (hidden / "jinja2.py").write_text("raise ImportError('hidden')")
    refused = run(workspace, demo_with(workspace / "good", "{{ 1 }}"), [chat], name="good.jsonl", env={"PYTHONPATH": str(hidden)}).expect(2)
    expect("python3-jinja2" in refused.err, refused.err)
    run(workspace, broken, [plain], name="plain.jsonl", env={"PYTHONPATH": str(hidden)}).expect(0)
    run(workspace, broken, [chat], "--skip-tokenizer-init", name="skip.jsonl").expect(0)
    expect_equal(error_of(results(workspace / "skip.jsonl")["c1"])["param"], "messages", "without a tokenizer")


if __name__ == "__main__":
    harness.main()
