"""What Prometheus reads at /metrics of a server: the run's metrics, and what the front sees of requests."""

import re
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from .run_metrics import RunCollector

_REASON = re.compile(rb'"finish_reason":"([a-z_]+)"')
# vLLM's bounds.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ADDED = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 1)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))

disable_created_metrics()


class Metrics:
    def __init__(self, settings, planner):
        self._registry = CollectorRegistry()
        self._name = name = settings.names[0]
        ProcessCollector(registry=self._registry)
        self._registry.register(RunCollector(settings.run_dir, settings.run_id, name, tokens=False, fronts=settings.fronts_before))

        def made(kind, metric, words, **more):
            return kind(metric, words, ["model_name"], registry=self._registry, **more).labels(model_name=name)

        self._prompt = made(Counter, "vllm:prompt_tokens", "Tokens of prompts that were answered.")
        self._generated = made(Counter, "vllm:generation_tokens", "Tokens of answers.")
        self._success = Counter("vllm:request_success", "Requests that were answered, by how they ended.", ["finished_reason", "model_name"], registry=self._registry)
        self._failed = made(Counter, "poise:request_failures", "Requests and lines of batches that were refused or failed.")
        self._first_token = made(Histogram, "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", buckets=_FIRST_TOKEN)
        self._added = made(
            Histogram, "poise:first_token_added_seconds", buckets=_ADDED,
            words="What the server adds to a stream's first token: until the planner has the request, and from the planner's token with which the stream begins to the client's connection.",
        )  # fmt: skip
        self._whole = made(Histogram, "vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", buckets=_LATENCY)
        self._queue = made(Histogram, "vllm:request_queue_time_seconds", "How long a request waited for its turn.", buckets=_LATENCY)
        self._prefill = made(Histogram, "vllm:request_prefill_time_seconds", "From a request's turn to its first token.", buckets=_LATENCY)
        self._decode = made(Histogram, "vllm:request_decode_time_seconds", "From a request's first token to its last.", buckets=_LATENCY)
        self._prompts = made(Histogram, "vllm:request_prompt_tokens", "Tokens of a request's prompt.", buckets=_TOKENS)
        self._answers = made(Histogram, "vllm:request_generation_tokens", "Tokens of a request's answer.", buckets=_TOKENS)
        made(Gauge, "poise:open_requests", "Requests over HTTP that are open.").set_function(lambda: len(planner) - planner.open_lines())
        made(Gauge, "poise:open_lines", "Lines of batches that the planner has.").set_function(planner.open_lines)
        made(Gauge, "poise:ready", "1 while requests are answered.").set_function(lambda: planner.ready.is_set())

    def finished(self, opened, answer):
        """A request or a line of a batch has its answer."""
        if answer.status != 200:
            self._failed.inc()
            return
        self._prompt.inc(answer.prompt_tokens)
        self._generated.inc(answer.completion_tokens)
        self._prompts.observe(answer.prompt_tokens)
        self._answers.observe(answer.completion_tokens)
        for reason in _REASON.findall(answer.body)[-1:]:
            self._success.labels(finished_reason=reason.decode(), model_name=self._name).inc()
        whole = time.monotonic() - opened.began
        self._whole.observe(whole)
        if opened.times is not None:
            _, prefill, decode = opened.times
            first_token = max(0.0, opened.token_at - opened.began)
            # It also waits on its way, while the planner is at an iteration.
            self._queue.observe(max(0.0, first_token - prefill))
            self._prefill.observe(prefill)
            self._decode.observe(decode)
            self._first_token.observe(first_token)
        self._observe_added(opened)

    def first_token_sent(self, opened):
        opened.first_sent = time.monotonic()
        self._observe_added(opened)

    def _observe_added(self, opened):
        """Counts a stream's first token once: when it was sent and its answer says when the planner had it, in either order."""
        if opened.counts == 1 and None not in (opened.event_at, opened.first_sent) and not opened.first_counted:
            opened.first_counted = True
            self._added.observe(opened.in_front + max(0.0, opened.first_sent - opened.event_at))

    async def page(self, request):
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
