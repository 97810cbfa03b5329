"""Offline LLM inference from Python: `LLM(model=…).generate(prompts, SamplingParams(…))`."""

from .datasets import batch
from .engine import EngineError
from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestError, RequestOutput
from .sampling import SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "CompletionOutput", "EngineError", "Logprob", "RequestError", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "batch"]
