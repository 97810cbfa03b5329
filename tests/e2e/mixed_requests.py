"""Request files as users write them: every shape of good request, and many ways for a line to be wrong.

Not a test script: pipeline.py and others draw their inputs from here.
"""

import json

from harness import request

_SUBJECTS = ("the owl", "the swan", "a lamp", "Rosa", "Milo", "the harbour", "seven figs", "Nora")
_OPENINGS = ("Q: 47 + 38 = ?\nA:", "Q: What does the owl say?\nA:", "Once there was", "Rosa lives in Kelden.", "Q: Repeat:")
# Of the logits, and how an answer ends.
_WISHES = (
    {"presence_penalty": 1.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 2},
    {"logit_bias": {"10": 3.5, "300": -100, "40": 1}},
    {"bad_words": ["the", "is", "."]},
    {"allowed_token_ids": list(range(20, 420, 7))},
    {"temperature": 1.2, "min_p": 0.1},
    {"stop": ["a", "e"], "include_stop_str_in_output": True},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"truncate_prompt_tokens": 5},
    {"n": 3, "temperature": 1.0},
)


def good_request(random, name, longest=40):
    """One that gets an answer."""
    words = [random.choice(_OPENINGS)] + [random.choice(_SUBJECTS) for _ in range(random.randrange(longest))]
    prompt = " ".join(words)
    if random.random() < 0.2:
        prompt = [random.randrange(4, 400) for _ in range(random.randint(1, 3 * longest))]
    body = {"max_tokens": random.choice((1, 2, 5, 8, 16, 24))}
    if random.random() < 0.3:
        body |= {"temperature": random.choice((0.5, 1.0, 1.7)), "top_p": random.choice((0.5, 0.9, 1))}
        body |= {"top_k": random.choice((0, 5, 40))}
        if random.random() < 0.5:
            body["seed"] = random.randrange(1 << 31)
    if random.random() < 0.2:
        body["logprobs"] = random.choice((0, 1, 5, 20))
    if random.random() < 0.15:
        body["echo"] = True
    if random.random() < 0.2:
        body["stop"] = random.choice(("\n", [".", "\n"], ["the"]))
    if random.random() < 0.1:
        body["stop_token_ids"] = [random.randrange(4, 400)]
    if random.random() < 0.2:
        body["ignore_eos"] = True
    if random.random() < 0.3:
        body["return_token_ids"] = True
    if random.random() < 0.25:
        body |= random.choice(_WISHES)
    if random.random() < 0.05:
        body |= {"max_tokens": 0, "echo": True, "logprobs": 1}
    return request(name, prompt, **body)


def _broken(change):
    def make(random, name):
        line = good_request(random, name)
        change(line)
        return json.dumps(line)

    return make


def _set(**body):
    return _broken(lambda line: line["body"].update(body))


def _top(**fields):
    return _broken(lambda line: line.update(fields))


# Each makes a line that must become an error line, and a word its message must hold.
BAD_LINES = [
    (lambda random, name: '{"custom_id": "' + name, "JSON"),
    (lambda random, name: "not json at all " + name, "JSON"),
    (lambda random, name: f'["{name}"]', "object"),
    (_set(max_tokens="5"), "max_tokens"),
    (_set(max_tokens=True), "max_tokens"),
    (_set(max_tokens=1.5), "max_tokens"),
    (_set(max_tokens=-1), "max_tokens"),
    (_set(temperature=-0.5), "temperature"),
    (_set(temperature="hot"), "temperature"),
    (_set(top_p=0), "top_p"),
    (_set(top_p=1.01), "top_p"),
    (_set(logprobs=21), "logprobs"),
    (_set(n=129), "n"),
    (_set(logit_bias={"five": 1}), "logit_bias"),
    (_set(presence_penalty=2.5), "presence_penalty"),
    (_set(prompt=[]), "prompt"),
    (_set(prompt=[10**9]), "prompt"),
    (_set(prompt=[-1]), "prompt"),
    (_set(prompt={"a": 1}), "prompt"),
    (_set(prompt=["one", "two"]), "prompt"),
    (_set(prompt=[5] * 5000, truncate_prompt_tokens=None), "context"),  # else it may be cut to fit
    (_set(stop=7), "stop"),
    (_set(max_tokens=0, echo=False), "max_tokens"),
    (_top(url="/v1/embeddings"), "url"),
    (_top(method="GET"), "method"),
    (_top(body=None), "body"),
    (_broken(lambda line: line["body"].pop("prompt")), "prompt"),
]


def is_error(result):
    return result["response"]["status_code"] != 200


def message(result):
    return result["response"]["body"]["error"]["message"]
