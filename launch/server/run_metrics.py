"""What Prometheus may know of a run: RUN/status.json, which the planner writes twice a second, in metrics. Of a server, too.

vLLM's names where the meaning is the same; `poise:` for what only poise has.
"""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from supervisor.shared.files import read_json

_BLOCK_TOKENS = 16


class RunCollector:
    """Reads the files at each scrape. `name`: the label model_name. `tokens`: whether it has the counts of tokens and answers."""

    def __init__(self, directory, run_id, name, tokens=True, fronts=0):
        self._directory = directory
        self._run_id = run_id
        self._name = name
        self._tokens = tokens
        self._fronts = fronts

    def status(self):
        status = read_json(f"{self._directory}/status.json")
        return status if status.get("run_id") == self._run_id else {}

    def collect(self):
        status = self.status()
        yield from self._of_requests(status)
        yield from self._of_memory(status)
        yield from self._of_work(status)
        yield self._restarts()

    # ---- parts

    def _counter(self, name, words, value):
        made = CounterMetricFamily(name, words, labels=["model_name"])
        made.add_metric([self._name], value)
        return made

    def _gauge(self, name, words, value):
        made = GaugeMetricFamily(name, words, labels=["model_name"])
        made.add_metric([self._name], value)
        return made

    def _histogram(self, name, words, counted):
        made = HistogramMetricFamily(name, words, labels=["model_name"])
        total, buckets = 0, []
        for bound, count in zip([*counted.get("bounds", ()), "+Inf"], counted.get("counts", (0,))):
            total += count
            buckets.append((bound if bound == "+Inf" else repr(float(bound)), total))
        made.add_metric([self._name], buckets, counted.get("sum", 0.0))
        return made

    def _of_requests(self, status):
        yield self._gauge("vllm:num_requests_running", "Requests under way.", status.get("running", 0))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for their turn.", status.get("waiting", 0))
        yield self._counter("vllm:num_preemptions", "Requests that gave their blocks back and are computed again.", status.get("preemptions", 0))
        yield self._histogram("vllm:iteration_tokens_total", "Rows of an iteration.", status.get("iteration_tokens", {}))
        yield self._counter("vllm:prefix_cache_hits", "Tokens of prompts that were not computed: other requests' blocks hold them.", status.get("shared_prompt_tokens", 0))
        if self._tokens:
            yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", status.get("prompt_tokens", 0))
            yield self._counter("vllm:generation_tokens", "Tokens that were generated.", status.get("generated_tokens", 0))
            yield self._gauge("poise:requests", "Lines of the run.", status.get("requests", 0))
            yield self._gauge("poise:requests_done", "Lines with a result, errors included.", status.get("done", 0))
            yield self._gauge("poise:requests_failed", "Lines with an error.", status.get("errors", 0))
        else:
            words = "Seconds from one token of an answer to its next."
            yield self._histogram("vllm:inter_token_latency_seconds", words, status.get("token_seconds", {}))

    def _of_memory(self, status):
        pools = status.get("pools", [])
        total, taken = (sum(pool[what] for pool in pools) for what in ("total", "taken"))
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the blocks of context that are taken: 1 is all.", taken / total if total else 0.0)
        info = GaugeMetricFamily("vllm:cache_config_info", "How the context is kept.", labels=["block_size", "num_blocks", "model_name"])
        info.add_metric([str(_BLOCK_TOKENS), str(total), self._name], 1)
        yield info
        blocks = GaugeMetricFamily("poise:blocks", "Blocks of context, by what they hold and where.", labels=["kind", "place", "state", "model_name"])
        for pool in pools:
            blocks.add_metric([pool["kind"], pool["place"], "taken", self._name], pool["taken"])
            blocks.add_metric([pool["kind"], pool["place"], "free", self._name], pool["total"] - pool["taken"])
        yield blocks
        yield self._gauge("poise:resident_layers", "Layers whose weights stay on the device.", status.get("resident_layers", 0))
        yield self._gauge("poise:host_pool_bytes", "Host memory of the blocks.", status.get("host_pool_bytes", 0))
        yield self._gauge("poise:device_memory_bytes", "Memory that the plan takes on the device.", status.get("device_bytes", 0))

    def _of_work(self, status):
        policy = InfoMetricFamily("poise:policy", "The policy in force.", labels=["model_name"])
        policy.add_metric([self._name], {"policy": status.get("policy", "")})
        yield policy
        moved = CounterMetricFamily("poise:link_bytes", "Bytes over the link, by what they are.", labels=["class", "model_name"])
        for what in ("weights", "kv", "act", "stores"):
            moved.add_metric([what, self._name], status.get("link_bytes", {}).get(what, 0))
        yield moved
        busy = status.get("busy_seconds", {})
        link = CounterMetricFamily("poise:link_busy_seconds", "Seconds in which the link moved bytes, by where to.", labels=["to", "model_name"])
        link.add_metric(["device", self._name], busy.get("copy_in", 0.0))
        link.add_metric(["host", self._name], busy.get("copy_out", 0.0))
        yield link
        yield self._counter("poise:gpu_busy_seconds", "Seconds in which the device computed.", busy.get("compute", 0.0))
        last = (status.get("balance") or {}).get("last") or []
        wall = sum(one.get("seconds", 0) for one in last)
        for name, what, words in (("link", "t_pcie", "the link moved bytes to the device"), ("gpu", "t_compute", "the device computed")):
            share = sum(one.get(what, 0) for one in last) / wall if wall else 0.0
            yield self._gauge(f"poise:{name}_busy_ratio", f"Share of the last {len(last) or 'few'} iterations' time in which {words}.", share)
        yield self._counter("poise:iterations", "Iterations that began.", status.get("iteration", 0))

    def _restarts(self):
        pids = read_json(f"{self._directory}/restarted.json").get("pids", {})
        made = CounterMetricFamily("poise:restarts", "Processes that replaced another.", labels=["process", "model_name"])
        for name in ("loader", "planner", "gpu_executor"):
            made.add_metric([name, self._name], len(pids.get(name, ())))
        if not self._tokens:
            made.add_metric(["front", self._name], self._fronts)
        return made
