"""`poise demo`: set-up, build, a few prompts answered by the bundled model as `poise run` does it, and a chat."""

import json
import os
import subprocess
import sys

from ..development.setup import add_install_option, build_programs
from ..lifecycle import scratch
from ..shared.options import normalised, parser
from ..shared.paths import ROOT, command_line, is_bundle
from ..shared.trouble import DONE, Refusal, brief, nothing_kept, say, shown, tell
from . import run

_MODEL = ROOT / "launch" / "demo" / "model"
_PROMPTS = ROOT / "launch" / "demo" / "show.jsonl"
_CHAT_MODEL = ROOT / "launch" / "demo" / "chat_model"
_CHATS = ROOT / "launch" / "demo" / "chat_show.jsonl"


def demo(words):
    made = parser("demo", "Sets up, builds, and answers a few prompts and chats with two bundled tiny models.")
    add_install_option(made)
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    given = made.parse_args(normalised(words))
    if not os.environ.get("POISE_BIN") and not is_bundle():
        build_programs()
    works = [(_MODEL, _PROMPTS, _prompt, "prompts")]
    if subprocess.run([sys.executable, "-s", "-c", "import jinja2"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        works.append((_CHAT_MODEL, _CHATS, _chat, "chats"))
    else:
        say("no chat is shown: chat lines need Python's package jinja2 (Debian: apt-get install python3-jinja2)")
    with scratch.folder("demo") as folder:
        for model, requests, in_words, what in works:
            output = os.path.join(folder, f"{what}.jsonl")
            code = run.run(["--model", str(model), "-i", str(requests), "-o", output, "--device", given.device])
            if code != DONE:
                nothing_kept("demo")
                return code
            _print_answers(requests, output, in_words, what)
    model, prompts = (brief(path) for path in (_MODEL, _PROMPTS))
    tell("\nNext, your own requests (OpenAI batch lines) and your own model:")
    tell("  " + command_line("run", "--model", model, "-i", prompts, "-o", "results.jsonl"))
    tell("What was ordered, layer by layer:")
    tell("  " + command_line("inspect", "results.jsonl.poise"))
    return DONE


def _prompt(request, choice):
    return (request["prompt"] + choice["text"]).splitlines()


def _chat(request, choice):
    return [f"{message['role']}: {message['content']}" for message in [*request["messages"], choice["message"]]]


def _print_answers(requests, output, in_words, what):
    with open(output, encoding="utf-8") as file:
        results = {result["custom_id"]: result for result in map(json.loads, file)}
    with open(requests, encoding="utf-8") as file:
        asked = [json.loads(line) for line in file if line.strip()]
    for request in asked:
        body = results[request["custom_id"]]["response"]["body"]
        if "error" in body:
            raise Refusal(f"the demo's request {shown(request['custom_id'])} was refused: {body['error']['message']}")
        tell("")
        for line in in_words(request["body"], body["choices"][0]):
            tell("  " + line)
    say(f"{len(asked)} {what} answered")
