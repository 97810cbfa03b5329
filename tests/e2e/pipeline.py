#!/usr/bin/env python3
"""Requests in, results out: the whole path on the CPU device, with the trained demo model."""

import json
import shutil
import subprocess
import sys

import harness
from harness import DEMO, choice, comparable, expect, expect_equal, read_results, request, test
from mixed_requests import BAD_LINES, good_request, is_error, message


@test
def the_demo_model_answers_its_questions(workspace):
    output = workspace / "answers.jsonl"
    ended = workspace.run(DEMO / "questions.jsonl", output).expect(0)
    score = subprocess.run(
        [sys.executable, str(DEMO / "score.py"), str(output)], capture_output=True, text=True, check=False
    )
    expect(score.returncode == 0, f"{score.stdout}{score.stderr}")
    expect("0 errors" in ended.err, f"no summary: {ended.err}")


@test
def the_chat_model_answers_its_questions(workspace):
    """Held-out last turns of conversations, at least 95 % right: plain, and with packed weights and context."""
    for name, options in (("plain", ()), ("packed", ("--quantization", "int4", "--kv-cache-dtype", "int8"))):
        output = workspace / f"{name}.jsonl"
        workspace.run(DEMO / "chat_questions.jsonl", output, *options, model=DEMO / "chat_model").expect(0)
        score = subprocess.run(
            [sys.executable, str(DEMO / "score.py"), str(output), "--answers", str(DEMO / "chat_answers.json")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        expect(score.returncode == 0, f"{name}: {score.stdout}{score.stderr}")


def logprobs(answer):
    """Of all tokens but the first, which nothing foretells."""
    return answer["logprobs"]["token_logprobs"][1:]


@test
def quantised_keys_and_values_leave_its_answers_right(workspace):
    """And the log probabilities of questions and answers near: int8 changes them little, int4 more."""
    questions = [json.loads(line) for line in (DEMO / "questions.jsonl").read_text().splitlines()]
    told = [line | {"body": line["body"] | {"logprobs": 0, "echo": True}} for line in questions]
    requests = workspace.write_requests("q.jsonl", told)
    right_text = json.loads((DEMO / "answers.json").read_text())
    right_text = {line["custom_id"]: line["body"]["prompt"] + right_text[line["custom_id"]] for line in questions}
    answers = {}
    for kind, least, most_off in (("auto", 212, 0.0), ("int8", 210, 0.005), ("int4", 202, 0.1)):
        output = workspace / f"{kind}.jsonl"
        workspace.run(requests, output, "--kv-cache-dtype", kind).expect(0)
        answers[kind] = {name: choice(result) for name, result in read_results(output).items()}
        right = sum(answers[kind][name]["text"] == text for name, text in right_text.items())
        expect(right >= least, f"{kind}: {right} answers are right")
        pairs = [
            pair
            for name, answer in answers[kind].items()
            if answer["text"] == answers["auto"][name]["text"]
            for pair in zip(logprobs(answer), logprobs(answers["auto"][name]), strict=True)
        ]
        off = sum(abs(a - b) for a, b in pairs) / len(pairs)
        expect(off <= most_off and (kind == "auto" or off > most_off / 100), f"{kind}: off by {off} in the mean")


@test
def demo_prints_prompts_and_answers(workspace):
    ended = workspace.poise("demo", "--no-install", env={"POISE_BIN": str(harness.bin_folder())}).expect(0)
    for line in (DEMO / "show.jsonl").read_text().splitlines():
        prompt = json.loads(line)["body"]["prompt"].splitlines()[0]
        expect(prompt in ended.out, f"{prompt!r} is not shown:\n{ended.out}")
    expect("A: 85" in ended.out, f"47 + 38 is not 85:\n{ended.out}")
    for line in ("user: What do I like?", "assistant: You like figs."):
        expect(line in ended.out, f"{line!r} is not shown:\n{ended.out}")
    expect("8 prompts answered" in ended.err and "4 chats answered" in ended.err, ended.err)


@test
def what_a_model_has_beyond_its_config_is_told_to_the_user(workspace):
    model = workspace / "model"
    shutil.copytree(harness.DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"enable_bias": False}))
    told = "warning: 36 tensors are not needed and not loaded"
    for options in ((), ("--keep-loader",)):
        workspace.run(DEMO / "show.jsonl", workspace / f"{len(options)}.jsonl", *options, model=model).expect(0, told)
    workspace.poise("stop").expect(0)
    workspace.poise("load", "--model", model).expect(0, told)
    workspace.poise("stop").expect(0)


@test
def two_thousand_requests_with_a_hundred_bad_ones_give_two_thousand_results(workspace):
    random = workspace.random
    bad = {number: BAD_LINES[i % len(BAD_LINES)] for i, number in enumerate(random.sample(range(2000), 100))}
    lines = []
    for number in range(2000):
        name = f"r{number}"
        lines.append(bad[number][0](random, name) if number in bad else good_request(random, name, longest=12))
    requests = workspace.write_requests("requests.jsonl", lines)
    output = workspace / "results.jsonl"
    workspace.run(requests, output, timeout=300).expect(0, "2000 results", "100 errors; the first: ")
    results = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    expect_equal(len(results), 2000, "result lines")
    errors = [result for result in results if is_error(result)]
    expect_equal(len(errors), 100, "error lines")
    by_name = {result["custom_id"]: result for result in results if result["custom_id"]}
    for number, (_, word) in bad.items():
        result = by_name.get(f"r{number}")
        if result is None:  # its custom_id could not be read: the message names the line
            found = [error for error in errors if message(error).startswith(f"line {number + 1}: ")]
            expect_equal(len(found), 1, f"error lines that name line {number + 1}")
            result = found[0]
        expect(is_error(result), f"line {number + 1} was answered: {lines[number]}")
        expect(word in message(result), f"line {number + 1}: {word!r} is not in {message(result)!r}")
    for number in set(range(2000)) - set(bad):
        result = by_name[f"r{number}"]
        expect(not is_error(result), f"line {number + 1}: {json.dumps(lines[number])} got {result}")


@test
def every_field_of_an_answer_is_there(workspace):
    requests = workspace.write_requests(
        "requests.jsonl",
        [request("a", "Q: 47 + 38 = ?\nA:", stop="\n", logprobs=3, echo=True, return_token_ids=True, max_tokens=8)],
    )
    output = workspace / "results.jsonl"
    workspace.run(requests, output).expect(0)
    result = read_results(output)["a"]
    body = result["response"]["body"]
    answer = choice(result)
    expect_equal(result["response"]["status_code"], 200, "status_code")
    expect_equal(body["object"], "text_completion", "object")
    expect_equal(answer["text"], "Q: 47 + 38 = ?\nA: 85", "text with echo")
    expect_equal(answer["finish_reason"], "stop", "finish_reason")
    prompt, generated = len(answer["prompt_token_ids"]), len(answer["token_ids"])
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    expect_equal({name: body["usage"][name] for name in usage}, usage, "usage")
    logprobs = answer["logprobs"]
    expect(logprobs["token_logprobs"][0] is None, "the first token of a prompt has no logprob")
    expect(len(logprobs["tokens"]) >= prompt, "echo reports the prompt's tokens")
    for value, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"]))[1:]:
        expect(value <= max(top.values()), "the best of top_logprobs is no worse than the chosen one")


@test
def several_choices_are_the_answers_of_neighbouring_seeds(workspace):
    body = {"max_tokens": 12, "temperature": 1.2, "return_token_ids": True, "logprobs": 1}
    several = [request("many", "Once there was", n=128, seed=40, **body), request("three", [5, 6, 7], n=3, seed=9, **body)]
    several += [request("own", "Rosa lives in", n=2, **body), request("none", "Rosa", n=3, temperature=1.0, allowed_token_ids=[7], min_tokens=2, stop_token_ids=[7], max_tokens=4)]
    alone = [request(f"many{i}", "Once there was", seed=40 + i, **body) for i in range(0, 128, 9)]
    alone += [request(f"three{i}", [5, 6, 7], seed=9 + i, **body) for i in range(3)]
    workspace.run(workspace.write_requests("several.jsonl", several), workspace / "several.out").expect(0)
    workspace.run(workspace.write_requests("alone.jsonl", alone), workspace / "alone.out").expect(0)
    results, ones = (read_results(workspace / name) for name in ("several.out", "alone.out"))
    expect_equal(len(results), len(several), "a result for each line")
    for name, count in (("many", 128), ("three", 3), ("own", 2)):
        answer = results[name]["response"]["body"]
        expect_equal([one["index"] for one in answer["choices"]], list(range(count)), "places")
        expect_equal(answer["usage"]["completion_tokens"], sum(len(one["token_ids"]) for one in answer["choices"]), "usage")
        for place, one in enumerate(answer["choices"]):
            if (same := ones.get(f"{name}{place}")) is not None:
                expect_equal({**one, "index": 0}, choice(same), f"choice {place} of {name}")
    expect(len({one["text"] for one in results["many"]["response"]["body"]["choices"]}) > 40, "choices are hardly different")
    expect_equal(results["none"]["response"]["body"]["error"]["code"], "no_token_allowed", "a line whose choices fail")
    status = json.loads(workspace.poise("status", f"{workspace / 'several.out'}.poise", "--json").expect(0).out)
    expect_equal([status["requests"], status["done"], status["errors"]], [4, 4, 1], "lines, not choices")


@test
def blank_lines_crlf_and_a_byte_order_mark_are_no_requests(workspace):
    one, two = (json.dumps(request(name, "Once there was")) for name in ("one", "two"))
    path = workspace / "requests.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{one}\r\n\r\n   \n{two}".encode())
    output = workspace / "results.jsonl"
    workspace.run(path, output).expect(0)
    expect_equal(sorted(read_results(output)), ["one", "two"], "results")


@test
def an_empty_input_gives_an_empty_output(workspace):
    path = workspace / "requests.jsonl"
    path.write_bytes(b"")
    output = workspace / "results.jsonl"
    workspace.run(path, output).expect(0)
    expect_equal(output.read_bytes(), b"", "output")


@test
def the_same_run_twice_gives_the_same_results(workspace):
    random = workspace.random
    requests = workspace.write_requests("requests.jsonl", [good_request(random, i) for i in range(60)])
    for name in ("a", "b"):
        workspace.run(requests, workspace / name).expect(0)
    expect_equal(comparable(workspace / "a"), comparable(workspace / "b"), "second run")


@test
def inspect_shows_the_orders_of_a_run(workspace):
    output = workspace / "answers.jsonl"
    workspace.run(DEMO / "show.jsonl", output).expect(0)
    run = f"{output}.poise"
    table = workspace.poise("inspect", run).expect(0)
    expect(len(table.out.splitlines()) > 5, f"no table:\n{table.out}")
    shown = workspace.poise("inspect", f"{run}/orders.log", "--json").expect(0)
    records = [json.loads(line) for line in shown.out.splitlines()]
    expect(len(records) > 5, "few records")
    status = json.loads(workspace.poise("status", run, "--json").expect(0).out)
    expect_equal(status["state"], "finished", "state")
    expect_equal(status["done"], 8, "done")


if __name__ == "__main__":
    raise SystemExit(harness.main())
