#!/usr/bin/env python3
"""Requests that kill the executor each time it runs them: they get an error line, and all others the answers of an undisturbed run."""

import json

import harness
from harness import choice, comparable, expect, expect_equal, read_results, request, test

VOCABULARY = json.loads((harness.DEMO_MODEL / "config.json").read_text())["vocab_size"]


def fatal(action, token):
    """The environment of executors that cannot bear this input token."""
    return {"POISE_FAILPOINTS": f"executor.tokens:{action}={token}+"}


def others(path, deadly):
    return [line for line in comparable(path) if json.loads(line)["custom_id"] not in deadly]


def of_deaths(workspace, prompts, count=24, most=2):
    """Requests, their undisturbed answers, and a token that is an input in 1 to `most` of them, in `prompts` or in answers alone: each
    of these requests runs it at another time. (requests, token, ids of those that die)"""
    random = workspace.random
    lines = [
        request(i, [random.randrange(4, VOCABULARY) for _ in range(random.randrange(2, 60))], max_tokens=random.randrange(4, 40),
                ignore_eos=True, return_token_ids=True)
        for i in range(count)
    ]
    requests = workspace.write_requests("requests.jsonl", lines)
    workspace.run(requests, workspace / "oracle.jsonl", "--overwrite").expect(0)
    inputs = {}  # token -> ids of requests
    for name, answer in read_results(workspace / "oracle.jsonl").items():
        prompt, tokens = (choice(answer)[which] for which in ("prompt_token_ids", "token_ids"))
        for token in {*prompt, *tokens[:-1]}:
            inputs.setdefault(token, []).append((name, token in prompt))
    token, found = next(
        (token, found) for token, found in sorted(inputs.items())
        if 1 <= len(found) <= most and all(in_prompt == prompts for _, in_prompt in found)
    )
    return requests, token, {name for name, _ in found}


def expect_answers(workspace, output, deadly):
    answers = read_results(output)
    for name in deadly:
        response = answers[name]["response"]
        expect_equal(response["status_code"], 500, f"status of request {name}")
        expect_equal(response["body"]["error"]["code"], "worker_crash", f"request {name}")
    expect_equal(others(output, deadly), others(workspace / "oracle.jsonl", deadly), "the other answers")


@test
def a_request_that_kills_its_executor_becomes_an_error_line(workspace):
    for prompts in (True, False):
        requests, token, deadly = of_deaths(workspace, prompts)
        output = workspace / f"out-{prompts}.jsonl"
        if prompts:  # all answers of such a line end with it
            with open(requests, "a") as file:
                print(json.dumps(request("three", [5, token], n=3, temperature=1, max_tokens=6)), file=file)
            deadly.add("three")
        # Two of the allowed restarts for each; those that the search takes are not counted. Where two deaths have one request in
        # common, as may be while requests decode, no search is announced.
        ended = workspace.run(requests, output, "--restarts", str(2 * len(deadly)), env=fatal("dies_of", token))
        ended.expect(0, f"{len(deadly)} of them errors", *(("died twice at the same place",) if prompts else ()))
        expect_equal(ended.err.count("dies each time it runs line"), len(deadly), f"lines that were given up: {ended.err}")
        expect_answers(workspace, output, deadly)
        workspace.poise("inspect", "--check", f"{output}.poise").expect(0)


@test
def a_request_that_hangs_its_executor_becomes_an_error_line(workspace):
    # One of three: a hang takes the patience of the watchdog, which is longer the slower the machine is.
    requests, token, deadly = of_deaths(workspace, True, count=3, most=1)
    output = workspace / "out.jsonl"
    words = ("--stall-timeout", "2", "--restarts", str(2 * len(deadly)))
    ended = workspace.run(requests, output, *words, env=fatal("hangs_of", token), timeout=600)
    ended.expect(0, "without getting anywhere (a defect of poise)", "died twice at the same place", "dies each time it runs line")
    expect_answers(workspace, output, deadly)


@test
def a_hung_executor_ends_a_run_that_replaces_none(workspace):
    requests, token, _ = of_deaths(workspace, True, count=3)
    ended = workspace.run(requests, workspace / "out.jsonl", "--stall-timeout", "2", env=fatal("hangs_of", token))
    ended.expect(75, "without getting anywhere (a defect of poise)", "--resume")
    expect(ended.seconds < 15 * workspace.slowness(), f"took {ended.seconds:.0f} s")


@test
def an_executor_whose_device_fails_is_replaced(workspace):
    requests = workspace.write_requests("requests.jsonl", [request(i, "Once", max_tokens=12, ignore_eos=True) for i in range(6)])
    workspace.run(requests, workspace / "oracle.jsonl").expect(0)
    (workspace / "fired").mkdir()
    once = {"POISE_FAILPOINTS": "gpu_executor/device.stream:fail@300", "POISE_FAILPOINTS_FIRED": str(workspace / "fired")}
    for options, code in (((), 75), (("--restarts", "1"), 0)):
        for note in (workspace / "fired").iterdir():
            note.unlink()
        ended = workspace.run(requests, workspace / f"out{code}", *options, env=once)
        ended.expect(code, "the device cpu, ", " failed: a failpoint says so")
    expect_equal(comparable(workspace / "out0"), comparable(workspace / "oracle.jsonl"), "the answers")


@test
def one_restart_too_few_ends_the_run_and_resume_goes_on(workspace):
    requests, token, deadly = of_deaths(workspace, True)
    output = workspace / "out.jsonl"
    deaths = fatal("dies_of", token)
    workspace.run(requests, output, "--restarts", "1", env=deaths).expect(75, "gpu_executor crashed", "--resume")
    workspace.run(requests, output, "--resume", "--restarts", str(2 * len(deadly)), env=deaths).expect(0)
    expect_answers(workspace, output, deadly)


if __name__ == "__main__":
    raise SystemExit(harness.main())
