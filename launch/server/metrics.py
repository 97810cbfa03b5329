"""What Prometheus reads at /metrics."""

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response


class Metrics:
    def __init__(self, settings, planner):
        self._registry = CollectorRegistry()
        labels = {"model_name": settings.names[0]}
        made = lambda name, words: Counter(name, words, list(labels), registry=self._registry).labels(**labels)  # noqa: E731
        self._prompt = made("vllm:prompt_tokens", "Tokens of prompts that were answered.")
        self._generated = made("vllm:generation_tokens", "Tokens that were generated.")

    def finished(self, opened, answer):
        self._prompt.inc(answer.prompt_tokens)
        self._generated.inc(answer.completion_tokens)

    async def page(self, request):
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
