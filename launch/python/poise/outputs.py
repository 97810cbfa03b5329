"""Answers, with the types and names of vLLM's."""

import dataclasses


@dataclasses.dataclass
class Logprob:
    """`rank` counts from 1 among those that were asked for; None for a sampled token that is not among them."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self):
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestError:
    """Why a request has no answer, as an error line of `poise run` says it."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    status: int = 400

    def __str__(self):
        return self.message


@dataclasses.dataclass
class RequestOutput:
    """A request's answer. Either `outputs` has it, or `error` says why there is none."""

    request_id: str  # the prompt's place among those given, from 0
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    error: RequestError | None = None
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of each prompt token; the first has none


def refused(place, prompt, message):
    """The output of a request that was not sent."""
    return RequestOutput(str(place), prompt, None, [], RequestError(message))


def output_of(place, prompt, response, text_of):
    """Of a result line's `response`. `text_of` gives the text of one token id."""
    body, status = response["body"], response["status_code"]
    if "error" in body:
        error = body["error"]
        known = RequestError(error["message"], error.get("type"), error.get("param"), error.get("code"), status)
        return RequestOutput(str(place), prompt, None, [], known)
    choices = body["choices"]
    ids = choices[0].get("prompt_token_ids", body.get("prompt_token_ids"))
    told = choices[0].get("prompt_logprobs", body.get("prompt_logprobs"))
    values = None if told is None else [at and {int(token): Logprob(**one) for token, one in at.items()} for at in told]
    outputs = [_completion(choice, text_of) for choice in choices]
    return RequestOutput(str(place), prompt, ids, outputs, prompt_logprobs=values)


def _completion(choice, text_of):
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    told = choice.get("logprobs")
    logprobs = None if told is None else list(_logprobs(told, text_of))
    ids = choice.get("token_ids") or []
    together = None
    if logprobs is not None:
        together = sum(one[token].logprob for one, token in zip(logprobs, ids, strict=True))
    return CompletionOutput(
        choice["index"], text or "", ids, together, logprobs, choice["finish_reason"], choice.get("stop_reason")
    )


def _logprobs(told, text_of):
    """Of each position: {token id: Logprob}, the chosen token first. Tokens are named "token_id:N"."""
    if "content" in told:  # a chat's
        for entry in told["content"] or ():
            yield _position(entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]}, text_of)
    else:
        tops = told["top_logprobs"] or [{}] * len(told["tokens"])
        for token, value, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True):
            yield _position(token, value, top or {}, text_of)


def _position(chosen, value, top, text_of):
    ranked = sorted(top.items(), key=lambda pair: -pair[1])
    ranks = {token: rank for rank, (token, _) in enumerate(ranked, 1)}
    found = {}
    for token, logprob in [(chosen, value), *ranked]:
        number = int(token.removeprefix("token_id:"))
        if number not in found:
            found[number] = Logprob(logprob, ranks.get(token), text_of(number))
    return found
