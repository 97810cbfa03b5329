"""The requests of `poise bench`, made as vLLM's datasets of the same names: prompts and lengths of answers.

Prompts are token ids and every answer is as long as asked (ignore_eos), so that the work is the same for every system and
seed. Only sharegpt has texts; without a tokenizer, every four characters count as one token.
"""

import json
import random
import subprocess

from ..shared.paths import PLANNER, program
from ..shared.trouble import Refusal, shown

DATASETS = ("fixed", "random", "sharegpt", "prefix_repetition")
_FIRST_ID = 4  # OPT's special tokens have lower ids
_CHARACTERS_A_TOKEN = 4  # estimate, where there is no tokenizer
# vLLM's throughput benchmark leaves out conversations beyond these bounds.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


def make_requests(given, vocabulary, longest):
    """[(token ids of the prompt, tokens of the answer)]. Refuses if both together exceed `longest`."""
    draw = random.Random(given.seed)
    maker = {"fixed": _fixed, "random": _random, "sharegpt": _sharegpt, "prefix_repetition": _prefix_repetition}
    requests = maker[given.dataset_name](given, vocabulary, draw)
    for prompt, answer in requests:
        if len(prompt) + answer > longest:
            raise Refusal(f"a request of {len(prompt)} + {answer} tokens is longer than the model's {longest} positions")
    return requests


def write_requests(path, requests):
    with open(path, "w", encoding="utf-8") as file:
        for number, (prompt, answer) in enumerate(requests):
            body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": f"bench-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def _ids(count, vocabulary, draw):
    return [draw.randrange(min(_FIRST_ID, vocabulary - 1), vocabulary) for _ in range(count)]


def _fixed(given, vocabulary, draw):
    return [(_ids(given.input_len, vocabulary, draw), given.output_len) for _ in range(given.num_prompts)]


def _random(given, vocabulary, draw):
    """Lengths are uniform over [n (1 - ratio), n (1 + ratio)]."""

    def length(middle):
        spread = middle * given.random_range_ratio
        return max(1, draw.randint(int(middle - spread), int(middle + spread)))

    return [
        (_ids(length(given.input_len), vocabulary, draw), length(given.output_len)) for _ in range(given.num_prompts)
    ]


def _prefix_repetition(given, vocabulary, draw):
    """--prefix-repetition-num-prefixes prefixes, each used by an equal share of the requests, in random order."""
    count = given.prefix_repetition_num_prefixes
    prefixes = [_ids(given.prefix_repetition_prefix_len, vocabulary, draw) for _ in range(count)]
    requests = [
        (
            prefixes[number * count // given.num_prompts] + _ids(given.prefix_repetition_suffix_len, vocabulary, draw),
            given.prefix_repetition_output_len,
        )
        for number in range(given.num_prompts)
    ]
    draw.shuffle(requests)
    return requests


def _sharegpt(given, vocabulary, draw):
    conversations = _conversations(given.dataset_path)
    draw.shuffle(conversations)
    requests = []
    lengths = _Lengths(given, vocabulary, draw)
    for asked, answered in conversations:
        if len(requests) == given.num_prompts:
            break
        prompt = lengths.prompt(asked)
        answer = given.output_len if given.output_len_given else lengths.count(answered)
        if _SHORTEST <= min(len(prompt), answer) and len(prompt) <= _LONGEST_PROMPT and len(prompt) + answer <= _LONGEST:
            requests.append((prompt, answer))
    lengths.close()
    if len(requests) < given.num_prompts:
        raise Refusal(f"{shown(given.dataset_path)} has only {len(requests)} conversations of a suitable length")
    return requests


def _conversations(path):
    """The first two turns of each conversation that has them: [{"conversations": [{"value": …}, …]}, …]."""
    if path is None:
        raise Refusal("--dataset-name sharegpt needs --dataset-path FILE, a JSON file in ShareGPT's format")
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        turns = [entry.get("conversations", entry.get("conversation", [])) for entry in entries]
        return [(two[0]["value"], two[1]["value"]) for two in turns if len(two) >= 2]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise Refusal(f"{shown(path)} is not in ShareGPT's format: {type(problem).__name__} {shown(problem)}") from None


class _Lengths:
    """Turns texts into token ids: by the model's tokenizer (`poise-planner encode`), or random ids, one for every few characters."""

    def __init__(self, given, vocabulary, draw):
        self._vocabulary, self._draw = vocabulary, draw
        self._tool = None
        if not given.skip_tokenizer_init:
            command = [str(program(PLANNER)), "encode", "--model", given.model]
            self._tool = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _encode(self, text):
        try:
            self._tool.stdin.write(json.dumps(text) + "\n")
            self._tool.stdin.flush()
            return json.loads(self._tool.stdout.readline())
        except (OSError, ValueError):
            sentence = "the model's tokenizer cannot be used (why stands above); --skip-tokenizer-init does without"
            raise Refusal(sentence) from None

    def prompt(self, text):
        return self._encode(text) if self._tool else _ids(self.count(text), self._vocabulary, self._draw)

    def count(self, text):
        return len(self._encode(text)) if self._tool else -(-len(text) // _CHARACTERS_A_TOKEN)

    def close(self):
        if self._tool:
            try:
                self._tool.stdin.close()
            except OSError:
                pass  # it had ended
            self._tool.wait()
