"""A model for lm-evaluation-harness: `poise-lm-eval run --model poise --model_args model=DIR …`, or `import poise.lm_eval` before
`lm_eval.simple_evaluate(model="poise", …)`.

What the harness computes with its `hf` backend is computed here in the same way: tokens of context and continuation together, BOS, windows,
truncation on the left, stop strings. All requests of all tasks are handed over at once, the longest contexts first; what several
have in common is computed once.
"""

import transformers
from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from .llm import LLM

_MOST_NEW_TOKENS = 256  # where a task does not say; hf's
_BEST = 20  # tokens that are told of a place, at most
_AT_ONCE = 4096  # texts that are made tokens of together
# Fields of a task's generation_kwargs that mean the same in a request; `do_sample`, `until` and `max_gen_toks` are translated.
_SAMPLING = frozenset(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"))
_NOTHING_HERE = {"use_cache": True, "num_beams": 1}  # what other backends need to be told


@register_model("poise")
class PoiseLM(TemplateLM):
    """`options` are those of `poise.LLM`, without `model`. `batch_size` and `max_batch_size` are ignored: the planner decides."""

    def __init__(
        self, model=None, *, pretrained=None, tokenizer=None, device=None, max_length=None, max_gen_toks=_MOST_NEW_TOKENS, add_bos_token=None,
        prefix_token_id=None, trust_remote_code=False, chat_template_args=None, enable_thinking=None, think_end_token=None, batch_size=None,
        max_batch_size=None, **options,
    ):  # fmt: skip
        super().__init__()
        del batch_size, max_batch_size
        if (model or pretrained) is None:
            raise ValueError("model is missing: --model_args model=DIR")
        if device is not None:
            # In torch's names, and the harness says "cuda" where nobody said anything.
            options["device"] = "cpu" if device == "cpu" else "auto"
        self._llm = LLM(model or pretrained, **{"prefix_sharing": "on"} | options)
        named = tokenizer or self._llm.folder
        self._add_bos, self._prefix_id = add_bos_token, prefix_token_id
        more = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(named, trust_remote_code=trust_remote_code, **more)
        context = self._llm.max_model_len
        self.max_length = context if max_length is None else int(max_length)
        if not 1 <= self.max_length <= context:
            self._llm.close()
            raise ValueError(f"max_length is {self.max_length}; it must be between 1 and the model's context of {context}")
        self.max_gen_toks = int(max_gen_toks)
        self._chat_options = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_options["enable_thinking"] = enable_thinking
        self._think_end = None if think_end_token is None else str(think_end_token)
        self._special = {text: number for text, number in self.tokenizer.get_added_vocab().items() if number in self.tokenizer.all_special_ids}

    def close(self):
        self._llm.close()

    # ---- tokens

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self):
        if self._prefix_id is not None:
            return int(self._prefix_id)
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self._encoded([string], add_special_tokens)[string]

    def _encoded(self, texts, add_special_tokens=None):
        """{text: ids}. Without a word about special tokens, the tokenizer's own are added unless the text begins with BOS."""
        texts = list(dict.fromkeys(texts))
        if add_special_tokens is not None:
            return self._encoded_as(texts, {"add_special_tokens": add_special_tokens})
        prefix = self.tokenizer.decode(self.prefix_token_id)
        whole = [text for text in texts if text.startswith(prefix)]
        more = {} if self._add_bos is None else {"add_special_tokens": self._add_bos}
        return self._encoded_as(whole, {"add_special_tokens": False}) | self._encoded_as([text for text in texts if not text.startswith(prefix)], more)

    def _encoded_as(self, texts, how):
        found = {}
        for begin in range(0, len(texts), _AT_ONCE):
            part = texts[begin : begin + _AT_ONCE]
            ids = self.tokenizer(part, return_attention_mask=False, verbose=False, **how).input_ids
            found.update(zip(part, ids, strict=True))
        return found

    # ---- likelihoods

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [request.args for request in requests]
        split = [_without_spaces(context, continuation) for context, continuation in pairs]
        ids = self._encoded([text for context, continuation in split if context for text in (context, context + continuation)])
        alone = self._encoded([continuation for context, continuation in split if not context], add_special_tokens=False)
        given = []
        for pair, (context, continuation) in zip(pairs, split, strict=True):
            if context:
                before, whole = ids[context], ids[context + continuation]
                given.append((pair, before, whole[len(before) :]))
            elif alone[continuation][:1] == [self.prefix_token_id]:
                given.append((pair, alone[continuation][:1], alone[continuation][1:]))
            else:
                given.append((pair, [self.prefix_token_id], alone[continuation]))
        return self._loglikelihood_tokens(given, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        texts = [request.args[0] for request in requests]
        ids = self._encoded(texts)
        windows = [self._windows(ids[text]) for text in texts]
        scored = iter(self._loglikelihood_tokens([(None, *one) for part in windows for one in part], disable_tqdm=disable_tqdm))
        sums = []
        for text, part in zip(texts, windows, strict=True):
            sums.append(sum(next(scored)[0] for _ in part))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def _windows(self, ids):
        parts = get_rolling_token_windows(token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        return [make_disjoint_window(part) for part in parts]

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """(logprob, whether greedy decoding gives it) of each (cache key, ids of a context, ids of its continuation)."""
        found = [(0.0, True)] * len(requests)  # so much for a continuation of no tokens

        def take(at, score):
            found[at] = score
            if requests[at][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[at][0], score)
            bar.update()

        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            missed = self._score(requests, self._groups(requests), take)
            self._score(requests, [[at] for at in missed], take)
        return found

    def _groups(self, requests):
        """Places of requests. Continuations of one token behind the same context are together: the context runs once, and the best tokens
        behind it are told."""
        groups = {}
        for at, (_, before, after) in enumerate(requests):
            if after:
                groups.setdefault(tuple(before) if len(after) == 1 else at, []).append(at)
        return list(groups.values())

    def _score(self, requests, groups, take):
        """The longest contexts first; those of one context stay together. Gives the places of requests whose token was not among the best."""
        missed = []
        groups.sort(key=lambda group: -len(requests[group[0]][1]))
        bodies = (self._scored(*requests[group[0]][1:], _BEST if len(group) > 1 else 0) for group in groups)
        for place, choice in self._answers(bodies, "loglikelihood"):
            first, *others = groups[place]
            scores = choice["scores"]
            take(first, (sum(scores["logprobs"]), all(scores["best"])))
            last = scores.get("last", {})
            for at in others:
                token = str(requests[at][2][-1])
                if token in last:
                    take(at, (last[token], token == next(iter(last))))
                else:
                    missed.append(at)
        return missed

    def _scored(self, before, after, best):
        if len(after) > self.max_length:
            raise ValueError(f"a continuation has {len(after)} tokens; max_length is {self.max_length}")
        # One more than max_length: the last is never an input.
        ids = (before + after)[-(self.max_length + 1) :]
        return {"prompt": ids, "score_from": len(ids) - len(after), "score_best": best}

    # ---- generation

    def generate_until(self, requests, disable_tqdm=False):
        found = [None] * len(requests)
        ids = self._encoded([request.args[0] for request in requests])
        asked = [self._generated(ids[request.args[0]], request.args[1]) for request in requests]
        order = sorted(range(len(requests)), key=lambda at: -len(asked[at][0]["prompt"]))
        with tqdm(total=len(order), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for place, choice in self._answers((asked[at][0] for at in order), "generate_until"):
                at = order[place]
                found[at] = self._text(choice["token_ids"], asked[at][1])
                self.cache_hook.add_partial("generate_until", requests[at].args, found[at])
                bar.update()
        return found

    def _generated(self, ids, task_says):
        """(a request's body, what ends its text)."""
        told = normalize_gen_kwargs(task_says, self.max_gen_toks)
        until = handle_stop_sequences(told.pop("until"), self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False))
        until = [text for text in until if text]
        most = told.pop("max_gen_toks")
        room = self.max_length - most
        if room < 1:
            raise ValueError(f"max_gen_toks is {most}, which leaves no room for a context; max_length is {self.max_length}")
        sample = told.pop("do_sample", False)
        fields = {name: told.pop(name) for name in _SAMPLING & told.keys()}
        unknown = sorted(name for name, value in told.items() if _NOTHING_HERE.get(name, object()) != value)
        if unknown:
            raise ValueError(f"generation_kwargs has {unknown[0]}, which poise does not know; it knows {', '.join(sorted(_SAMPLING))}")
        fields |= {"temperature": fields.get("temperature", 1.0)} if sample else {"temperature": 0}
        # A special token has no text while an answer grows.
        ends = sorted({self.eot_token_id, *(self._special[text] for text in until if text in self._special)})
        stops = [text for text in until if text not in self._special]
        body = {"prompt": ids[-room:], "max_tokens": most, "stop": stops, "stop_token_ids": ends, "return_token_ids": True, **fields}
        return body, until

    def _text(self, ids, until):
        thought = self._think_end
        if thought is not None and thought.isdigit():
            if int(thought) in ids:
                ids = ids[len(ids) - ids[::-1].index(int(thought)) :]
                return postprocess_generated_text(self.tokenizer.decode(ids, skip_special_tokens=True).lstrip(), until, None)
            thought = None
        return postprocess_generated_text(self.tokenizer.decode(ids, skip_special_tokens=True), until, thought)

    # ---- the engine

    def _answers(self, bodies, what):
        for place, response in self._llm.responses(bodies):
            error = response["body"].get("error")
            if error is not None:
                raise ValueError(f"a request of {what} was refused: {error['message']}")
            yield place, response["body"]["choices"][0]

    # ---- chat templates

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        def rendered(messages):
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt, **self._chat_options,
            )  # fmt: skip

        try:
            return rendered(chat_history)
        except TemplateError:  # of those that know no system prompt
            return rendered([message for message in chat_history if message["role"] != "system"])

    @property
    def tokenizer_name(self):
        return self.tokenizer.name_or_path.replace("/", "__")


def _without_spaces(context, continuation):
    """Spaces at the context's end belong to the continuation: tokens of words begin with them."""
    kept = context.rstrip()
    return (kept, context[len(kept) :] + continuation) if context else (context, continuation)


def main():
    """The command `poise-lm-eval`: lm_eval's own, with this model known."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
