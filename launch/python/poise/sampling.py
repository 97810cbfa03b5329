"""What an answer is to be like, with vLLM's names and defaults."""

import dataclasses


@dataclasses.dataclass(kw_only=True)
class StructuredOutputsParams:
    """The form of every answer, as vLLM's: one of the first five says it."""

    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def fields(self):
        return {field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name)) != field.default}


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """As vLLM's. A field that poise does not follow may be set; the request then gets an error that says so.

    `max_tokens=None` means as many as the model's context has room for.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def fields(self, chat, context):
        """Those of a request's body: what is not as it would be without saying. `context`: tokens that the model's has."""
        told = {field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name)) != field.default}
        if self.structured_outputs is not None:
            told["structured_outputs"] = self.structured_outputs.fields()
        told["max_tokens"] = context if self.max_tokens is None else self.max_tokens
        if chat and self.logprobs is not None:
            told |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.logprobs is not None:
            told["return_tokens_as_token_ids"] = True
        return told
