"""`LLM`: a model that answers prompts, as vLLM's class of that name."""

import collections
import itertools
import json
import os

from . import programs
from .engine import Engine, EngineError
from .outputs import output_of, refused
from .sampling import SamplingParams

_workers = programs.shared("workers")

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
# Requests that the planner has at a time: more than may run, so that none is missing while others are sent.
_LEAST_WINDOW, _OFTEN_AT_A_TIME = 1024, 256
_MOST_ENDED = 8  # lines that ended the process which renders chats: no other is tried then (supervisor/lifecycle/chat_worker.py)
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


class LLM:
    """Starts the programs and loads the model; both stay until `close`, the end of a `with`, or the interpreter's exit.

    Options are those of `poise serve` with `_` for `-`: `LLM(model=DIR, gpu_memory="24GiB", policy="kv-only")`. A flag is True.
    `verbose`: what the programs say goes to stderr.
    """

    def __init__(self, model, *, verbose=False, **options):
        self._seqs = options.get("max_num_seqs") or _OFTEN_AT_A_TIME
        self._has_tokenizer = not options.get("skip_tokenizer_init")
        self.model = os.fspath(model)
        self._engine = Engine(["--model", self.model, *_words(options)], verbose)
        self.folder = self._engine.model_folder()  # where the model lies, if `model` is a name
        self._tokens, self._chat = _workers.Tokens(programs.planner(), self.folder), _workers.ChatTemplate(self.folder)
        self._chats_ended = 0

    @property
    def max_model_len(self):
        """Tokens of prompt and answer together."""
        return self._engine.context

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        """A RequestOutput for each prompt, in their order. A prompt is text, {"prompt": text}, or {"prompt_token_ids": ids} or a list of ids.

        `sampling_params`: one for all, or a list with one for each. A request that is refused has its `error`; the others are answered."""
        return self._ordered(self._completions(prompts, sampling_params), use_tqdm)

    def chat(self, messages, sampling_params=None, use_tqdm=True, **options):
        """As `generate`, of one conversation (a list of messages) or several. `options`: `tools`, `add_generation_prompt`,
        `continue_final_message` and `chat_template_kwargs`."""
        return self._ordered(self._chats(messages, sampling_params, options), use_tqdm)

    def as_completed(self, prompts, sampling_params=None, use_tqdm=False):
        """An iterator over RequestOutputs in the order in which they are finished; `request_id` is the prompt's place. Prompts are read
        while others are answered, so they may come from a generator. What is open when the iterator is closed is cancelled."""
        return self._finished(self._completions(prompts, sampling_params), use_tqdm)

    def chat_as_completed(self, messages, sampling_params=None, use_tqdm=False, **options):
        return self._finished(self._chats(messages, sampling_params, options), use_tqdm)

    def responses(self, bodies):
        """An iterator over (place, `response` of a result line) of completion requests as a file's lines have them, in the order in
        which they are finished. `bodies` may be a generator, which is read as `as_completed` reads prompts."""
        lines = ((place, _line(_COMPLETIONS, json.dumps(body).encode()), None) for place, body in enumerate(bodies))
        for place, line in self._engine.answers(lines, self._window()):
            yield place, json.loads(line)["response"]

    def encode(self, text, add_special_tokens=True):
        """The token ids of a text."""
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise ValueError(f"the text has half of a surrogate pair at place {problem.start}, which is no character") from None
        return self._asked(self._tokens.encode, text, add_special_tokens)

    def decode(self, token_ids):
        return self._asked(self._tokens.decode, token_ids)

    @staticmethod
    def _asked(question, *arguments):
        try:
            return question(*arguments)
        except _workers.WorkerEnded:
            raise EngineError("the tokenizer's process has ended twice on this") from None

    def close(self):
        """Ends the programs. Safe to call twice."""
        self._tokens.close()
        self._chat.close()
        self._engine.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- requests

    def _completions(self, prompts, params):
        """(how many or None, an iterator of (body, prompt's text, sampling, url))."""
        if isinstance(prompts, str | dict) or _is_ids(prompts):
            prompts = [prompts]
        return _count(prompts), ((*_completion(prompt), own, _COMPLETIONS) for prompt, own in _pairs(prompts, params))

    def _chats(self, messages, params, options):
        unknown = sorted(set(options) - set(_CHAT_FIELDS))
        if unknown:
            raise TypeError(f"there is no option {unknown[0]!r} of a chat; there are {', '.join(_CHAT_FIELDS)}")
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            messages = [messages]
        more = {name: value for name, value in options.items() if value is not None}
        return _count(messages), (({"messages": one, **more}, None, own, _CHAT) for one, own in _pairs(messages, params))

    def _lines(self, requests, texts, refusals):
        """(place, batch line, rendered chat prompt or None) of each; what cannot be sent becomes a refusal."""
        for place, (body, text, params, url) in enumerate(requests):
            fields = params.fields(url == _CHAT, self.max_model_len)
            try:
                whole = {**body, **fields, "return_token_ids": True}
                raw = json.dumps(whole, default=_plain, allow_nan=False, ensure_ascii=False).encode()
            except (TypeError, ValueError, RecursionError) as problem:
                refusals.append(refused(place, text, f"this request cannot be written as JSON: {problem}"))
                continue
            line = _line(url, raw)
            entry = None
            if url == _CHAT and self._has_tokenizer:
                entry = self._rendered(line)
                text = json.loads(entry).get("prompt")
            texts[place] = text
            yield place, line, entry

    def _window(self):
        return max(_LEAST_WINDOW, 2 * self._seqs)

    def _rendered(self, line):
        if self._chats_ended >= _MOST_ENDED:
            return _workers.chat_error("the chat template was ended on too many lines before this one")
        try:
            entry, ended = self._chat.entry(line)
        except _workers.BadTemplate as problem:
            raise ValueError(str(problem)) from None
        self._chats_ended += ended
        return entry

    def _finished(self, requests, use_tqdm):
        count, requests = requests
        texts, refusals = {}, collections.deque()
        lines = self._lines(requests, texts, refusals)
        with _Bar(count, use_tqdm) as bar:
            for place, line in self._engine.answers(lines, self._window()):
                while refusals:
                    yield bar.count(refusals.popleft())
                yield bar.count(output_of(place, texts.pop(place), json.loads(line)["response"], self._text_of))
            while refusals:
                yield bar.count(refusals.popleft())

    def _ordered(self, requests, use_tqdm):
        return sorted(self._finished(requests, use_tqdm), key=lambda output: int(output.request_id))

    def _text_of(self, number):
        return self._asked(self._tokens.text_of, number) if self._has_tokenizer else None


class _Bar:
    """tqdm's, where it is there."""

    def __init__(self, total, shown):
        self._bar, self._tokens = None, 0
        if shown:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc="answered", unit="prompt", dynamic_ncols=True)

    def count(self, output):
        if self._bar is not None:
            self._tokens += sum(len(one.token_ids) for one in output.outputs)
            seconds = self._bar.format_dict["elapsed"]
            self._bar.set_postfix_str(f"{self._tokens / seconds:.0f} tokens/s" if seconds else "", refresh=False)
            self._bar.update()
        return output

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.close()


def _line(url, body):
    return b'{"custom_id":"-","method":"POST","url":"%b","body":%b}' % (url.encode(), body)


def _completion(prompt):
    """(body, text) of a prompt as users give it."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt if isinstance(prompt, str) else None
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", text)
    return {"prompt": prompt}, text


def _pairs(items, params):
    """Each with its own sampling."""
    if params is None or isinstance(params, SamplingParams):
        return zip(items, itertools.repeat(params or SamplingParams()), strict=False)
    items_count, params_count = _count(items), _count(params)
    if items_count is not None and params_count is not None and items_count != params_count:
        raise ValueError(f"{params_count} sampling_params for {items_count} prompts: give one for all, or one for each")
    return zip(items, params, strict=True)


def _count(items):
    return len(items) if hasattr(items, "__len__") else None


def _is_ids(prompts):
    return isinstance(prompts, list) and bool(prompts) and all(isinstance(one, int) for one in prompts)


def _plain(value):
    """Arrays and numbers of numpy, torch and others as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is neither text nor a list of token ids")


def _words(options):
    """Keyword arguments as options of `poise serve`."""
    words = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
    return words
