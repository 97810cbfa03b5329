"""/v1/completions and /v1/chat/completions: a request's lines go to the planner, and its answer comes back whole or as a stream."""

import asyncio
import json
import time

from starlette.responses import Response

from .answers import Answer
from .batch_lines import LONGEST_LINE
from .bodies import read_object
from .errors import Refused, too_many
from .planner_link import TooManyRequests
from .protocol import ARRIVED

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_STREAM_FIELDS = ("stream", "stream_options")
_MOST_CHOICES = 128
_MOST_LINES = 256 << 20  # bytes of one body's lines
_SLOW_CLIENT = 120.0  # seconds for a piece of a stream to be taken
_OF_THE_PROMPT = ("prompt_token_ids", "prompt_logprobs", "scores")  # with a stream's end: in a completion's choice, beside a chat's


class Completions:
    def __init__(self, settings, planner, chat, metrics):
        self._settings = settings
        self._planner = planner
        self._chat = chat
        self._metrics = metrics

    async def completions(self, request):
        return await self._answer(request, COMPLETIONS)

    async def chat_completions(self, request):
        return await self._answer(request, CHAT)

    async def _answer(self, request, url):
        raw, body = await read_object(request, self._settings.max_body)
        self.check_model(body)
        stream = self._stream_of(body)
        if self._planner.closing:
            raise Refused(503, "the server is ending", code="server_ending", headers={"Connection": "close"})
        prompts = _prompts_of(body) if url == COMPLETIONS else None
        choices = _choices_of(body)
        if prompts is None:
            bodies = [_as_text(_without_stream(body)) if any(name in body for name in _STREAM_FIELDS) else raw]
        else:
            shared = _without_stream(body)
            bodies = (_as_text({**shared, "prompt": prompt}) for prompt in prompts)
        lines = _lines_of(url, bodies)
        wanted, most = len(lines) * choices, self._settings.max_open_requests
        if wanted > most:
            raise Refused(400, f"{wanted} answers are wanted; this server makes {most} at a time", "prompt" if choices == 1 else "n")
        if self._planner.room() < wanted:
            raise too_many(self._planner.counted)
        entry = await self._chat.entry(lines[0]) if url == CHAT else None
        try:
            opened = self._planner.submit([(line, entry) for line in lines], request.scope[ARRIVED], stream is not None, choices)
        except TooManyRequests:
            raise too_many(self._planner.counted) from None
        name = f"{self._planner.front_id}-{opened[0].id}"
        if stream is None:
            return await self._whole(request, opened, name)
        return _Stream(self, opened, name, url == CHAT, stream, self._settings.names[0])

    def check_model(self, body):
        model = body.get("model")
        if model is not None and model not in self._settings.names:
            given = f'"{model[:200]}"' if isinstance(model, str) else "another"
            raise Refused(404, f'the model {given} is not served here; "{self._settings.names[0]}" is', "model", "model_not_found")

    @staticmethod
    def _stream_of(body):
        """None: the answer comes whole. Else the options of the stream."""
        stream, options = body.get("stream"), body.get("stream_options")
        if stream is not None and not isinstance(stream, bool):
            raise Refused(400, '"stream" must be true or false', "stream")
        if options is not None and (not isinstance(options, dict) or not all(isinstance(value, bool) for value in options.values())):
            raise Refused(400, '"stream_options" must be an object of flags, such as {"include_usage": true}', "stream_options")
        if options and not stream:
            raise Refused(400, '"stream_options" goes with "stream": true', "stream_options")
        return (options or {}) if stream else None

    async def _whole(self, request, opened, name):
        gone = asyncio.ensure_future(_disconnected(request.receive))
        gathered = asyncio.ensure_future(self._gather(opened))
        try:
            await asyncio.wait({gone, gathered}, return_when=asyncio.FIRST_COMPLETED)
            if not gathered.done():
                return Response(status_code=499)  # read by no one: the client has left
            answers = gathered.result()
        finally:
            gone.cancel()
            gathered.cancel()
            self.end(opened)
        if len(answers) == 1:
            return Response(answers[0].body_named(name), answers[0].status, media_type="application/json")
        failed = next((answer for answer in answers if answer.status != 200), None)
        if failed is not None:
            return Response(failed.body, failed.status, media_type="application/json")
        return Response(_as_text(_joined([json.loads(answer.body_named(name)) for answer in answers])), media_type="application/json")

    async def _gather(self, opened):
        answers = []
        for one in opened:
            events = []
            while not events or not isinstance(events[-1], bytes):
                events = await one.next()
            answers.append(self.take(one, events[-1]))
        return answers

    def take(self, opened, line):
        answer = Answer(line)
        self._metrics.finished(opened, answer)
        return answer

    def begun(self, opened):
        """The first tokens of a stream are at its client's connection."""
        self._metrics.first_token_sent(opened)

    def end(self, opened):
        """For whom nobody waits any more."""
        self._planner.cancel(opened)


def batch_line(custom_id, url, body):
    return b'{"custom_id":%b,"method":"POST","url":"%b","body":%b}' % (custom_id, url.encode(), body)


def _lines_of(url, bodies):
    """They are written anew, which may make them longer: 1e9 becomes 1000000000.0. Each prompt of a list has its own line."""
    lines, size = [], 0
    for one in bodies:
        lines.append(batch_line(b'"-"', url, one))
        size += len(lines[-1])
        if len(lines[-1]) > LONGEST_LINE or size > _MOST_LINES:
            what = f"a request of {LONGEST_LINE >> 20} MiB" if len(lines[-1]) > LONGEST_LINE else f"requests of {_MOST_LINES >> 20} MiB"
            raise Refused(413, f"the body makes more than {what}; send fewer prompts at a time, or shorter ones", code="request_too_large")
    return lines


def _choices_of(body):
    """How many answers each prompt gets, as the planner reads it: 2.0 is a whole number. What is no such number, the planner refuses."""
    choices = body.get("n")
    return int(choices) if type(choices) in (int, float) and choices in range(1, _MOST_CHOICES + 1) else 1


def _prompts_of(body):
    """The prompts of a list of several; None where there is one, which the planner reads itself."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2 or not isinstance(prompt[0], str | list):
        return None
    kind = type(prompt[0])
    for place, one in enumerate(prompt, 1):
        if not isinstance(one, kind):
            raise Refused(400, f'"prompt" must be a list of strings, or one of lists of token ids; at place {place} it is neither', "prompt")
    return prompt


def _without_stream(body):
    return {name: value for name, value in body.items() if name not in _STREAM_FIELDS}


def _as_text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _joined(bodies):
    """One answer of several prompts': choices in their order, usage in sum."""
    first = bodies[0]
    first["choices"] = [{**choice, "index": index} for index, choice in enumerate(choice for body in bodies for choice in body["choices"])]
    first["usage"] = {name: sum(body["usage"][name] for body in bodies) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return first


def _of_the_prompt(answer):
    return {name: answer[name] for name in _OF_THE_PROMPT if name in answer}


async def _disconnected(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream:
    """The answer as server-sent events: an ASGI application."""

    def __init__(self, completions, opened, name, chat, options, model):
        self._completions = completions
        self._opened = opened
        self._chat = chat
        self._with_usage = options.get("include_usage", False)
        self._each_usage = options.get("continuous_usage_stats", False) and self._with_usage
        kind = ("chatcmpl-", "chat.completion.chunk") if chat else ("cmpl-", "text_completion")
        self._head = {"id": kind[0] + name, "object": kind[1], "created": int(time.time()), "model": model}
        self._usage = [0, 0]

    async def __call__(self, scope, receive, send):
        gone = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._work(send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except (TimeoutError, OSError):
            pass  # the client takes nothing any more
        finally:
            gone.cancel()
            work.cancel()
            self._completions.end(self._opened)

    async def _work(self, send):
        # The first event decides: a request that is refused has its own status.
        if len(self._opened) == 1:
            only = self._opened[0]
            first = await only.next()
            if isinstance(first[0], bytes) and (answer := Answer(first[0])).status != 200:
                self._completions.take(only, first[0])
                return await Response(answer.body, answer.status, media_type="application/json")({"type": "http"}, None, send)
            await self._begin(send)
            await self._rest(send, only, self._parts(0), first)
        else:
            await self._begin(send)
            async with _Together() as tasks:
                for place, opened in enumerate(self._opened):
                    tasks.add(self._rest(send, opened, self._parts(place)))
        if self._with_usage:
            await self._send(send, self._chunk([], self._usage_of(*self._usage)))
        await self._write(send, b"data: [DONE]\n\n", last=True)

    async def _begin(self, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _parts(self, place):
        """Those of a request's choices."""
        choices = self._opened[place].counts
        return [_Part(place * choices + choice, self._chat) for choice in range(choices)]

    async def _rest(self, send, opened, parts, events=None):
        over = begun = False
        while not over:
            events = events or await opened.next()
            over = isinstance(events[-1], bytes)
            answer = self._completions.take(opened, events.pop()) if over else None
            data = self._events(parts, events) + (self._end(parts, answer) if over else b"")
            events = None
            if data:
                await self._write(send, data)
                if not begun:  # the event loop writes behind all that is ready to run now, and before what becomes ready
                    begun = True
                    asyncio.get_running_loop().call_soon(self._completions.begun, opened)

    def _events(self, parts, events):
        data = b""
        for choice, part in enumerate(parts):
            if own := [event for event in events if event.get("choice", 0) == choice]:
                data += self._opening(part)
                for told in part.choices(own):
                    data += self._data(self._chunk([told], self._usage_of(0, part.tokens) if self._each_usage else None))
        return data

    def _end(self, parts, answer):
        """What is left when the answer is whole."""
        body = json.loads(answer.body)
        if answer.status != 200:
            return self._data(body)
        self._usage[0] += answer.prompt_tokens
        self._usage[1] += answer.completion_tokens
        data, beside = b"", _of_the_prompt(body)
        for part, choice in zip(parts, body["choices"], strict=True):
            data += self._opening(part) + self._data(self._chunk([part.closing(choice)]) | beside)
            beside = {}
        return data

    def _opening(self, part):
        """How a message begins, once."""
        if part.begun or not self._chat:
            return b""
        part.begun = True
        return self._data(self._chunk([part.opening()]))

    def _chunk(self, choices, usage=None):
        chunk = {**self._head, "choices": choices}
        if self._with_usage:
            chunk["usage"] = usage
        return chunk

    @staticmethod
    def _usage_of(prompt, completion):
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @staticmethod
    def _data(value):
        return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"

    async def _send(self, send, value):
        await self._write(send, self._data(value))

    @staticmethod
    async def _write(send, data, last=False):
        async with asyncio.timeout(_SLOW_CLIENT):
            await send({"type": "http.response.body", "body": data, "more_body": not last})


class _Together:
    """Tasks that end together: the first error cancels the others."""

    async def __aenter__(self):
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    def add(self, work):
        self._group.create_task(work)

    async def __aexit__(self, *problem):
        try:
            await self._group.__aexit__(*problem)
        except* (TimeoutError, OSError):
            raise TimeoutError from None


class _Part:
    """One of a stream's choices."""

    def __init__(self, index, chat):
        self.index = index
        self._chat = chat
        self.begun = False
        self.tokens = 0
        self._sent = 0  # bytes of text
        self._valued = 0  # tokens whose logprobs or ids were sent
        self._offset = 0  # of logprobs, in characters

    def opening(self):
        return {"index": self.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choices(self, events):
        """Those of the events; text of several that wait is sent at once where nothing else comes with it."""
        text = ""
        for event in events:
            self.tokens = event["tokens"]
            self._sent += len(event["text"].encode())
            if "first" not in event:
                text += event["text"]
                continue
            logprobs = event.get("logprobs")
            if logprobs is not None and not self._chat:
                logprobs["text_offset"] = [offset + self._offset for offset in logprobs["text_offset"]]
                self._offset += sum(map(len, logprobs["tokens"]))
            self._valued = event["tokens"]
            yield self._choice(event["text"], logprobs, event.get("token_ids"))
        if text:
            yield self._choice(text)

    def _choice(self, text, logprobs=None, token_ids=None, finish_reason=None, stop_reason=None):
        choice = {"index": self.index}
        choice |= {"delta": {"content": text} if text or finish_reason is None else {}} if self._chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None or not self._chat:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return choice

    def closing(self, choice):
        """What of the whole answer has not been sent, and how it ended."""
        text = choice["message"]["content"] if self._chat else choice["text"]
        text = text.encode()[self._sent :].decode()
        logprobs, ids = choice.get("logprobs"), choice.get("token_ids")
        if logprobs is not None:
            logprobs = {name: value[self._valued :] if isinstance(value, list) else value for name, value in logprobs.items()}
        ids = None if ids is None else ids[self._valued :]
        return self._choice(text, logprobs, ids, choice["finish_reason"], choice.get("stop_reason")) | _of_the_prompt(choice)

