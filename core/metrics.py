"""Prometheus metrics of requests, the engine and HTTP, in registries of their own.

Names and buckets are those that dashboards for vLLM expect. Times come from the engine's
timestamps (one monotonic clock), tokens from its outputs. Every series exists from the start,
with zero. Labels never hold a client's text.

Source: metric names of vLLM 0.30; Prometheus text format.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cardcage.core.types import EngineStats, FinishReason, TokenOutput

if TYPE_CHECKING:
    from cardcage.core.client import Stream
    from cardcage.core.text.sample import Sample

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
            7680)  # fmt: skip
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80, 160, 640, 2560)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
        80)  # fmt: skip
_N = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def _series_125(top: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `top`."""
    out, scale = [], 1
    while scale <= top:
        out += [m * scale for m in (1, 2, 5) if m * scale <= top]
        scale *= 10
    return tuple(out)


class _StatsCollector(Collector):
    """The engine's own counters, read from its last snapshot."""

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self._prefix, self._labels = prefix, labels
        self.stats = EngineStats()

    def collect(self) -> Iterable[Any]:
        s, names, values = self.stats, list(self._labels), list(self._labels.values())
        for name, help_text, value in (
            ("num_requests_running", "Requests in the running batch.", s.num_running),
            ("num_requests_waiting", "Requests waiting to run.", s.num_waiting + s.num_parked),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", s.kv_usage),
            ("spec_decode_acceptance_rate", "Share of drafts kept, 0 to 1.", s.acceptance_rate),
            (
                "spec_decode_mean_acceptance_length",
                "Mean tokens of a row with drafts, 1 or more.",
                s.tokens_per_draft_row,
            ),
        ):
            gauge = GaugeMetricFamily(self._prefix + name, help_text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, help_text, value in (
            ("num_preemptions", "Preemptions.", s.preemptions),
            ("prompt_tokens", "Prompt tokens processed.", s.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found cached.", s.cached_prompt_tokens),
            ("generation_tokens", "Tokens generated.", s.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", s.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", s.prefix_hits),
            ("spec_decode_num_drafts", "Rows that verified drafts.", s.draft_rows),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", s.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", s.accepted_tokens),
            ("spec_decode_drafter_failures", "Drafters that failed.", s.drafter_failures),
        ):
            counter = CounterMetricFamily(self._prefix + name, help_text, labels=names)
            counter.add_metric(values, value)
            yield counter
        by_position = CounterMetricFamily(
            self._prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their place among the drafts, from 0.",
            labels=[*names, "position"],
        )
        for position, count in enumerate(s.accepted_per_position):
            by_position.add_metric([*values, str(position)], count)
        yield by_position


class EngineMetrics:
    """Counts what one engine serves.

    Args:
        model_name: the served name, a label of every series.
        max_model_len: the largest token bucket.
        prefix: of every name.
    """

    def __init__(self, model_name: str, max_model_len: int, prefix: str = "vllm:") -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prefix = prefix
        self._collector = _StatsCollector(prefix, self._labels)
        self.registry.register(self._collector)
        tokens = _series_125(max_model_len)
        make = self._histogram
        self.ttft = make("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.itl = make("inter_token_latency_seconds", "Time between tokens.", _ITL)
        self.tpot = make("request_time_per_output_token_seconds", "Mean per request.", _ITL)
        self.e2e = make("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self.queue = make("request_queue_time_seconds", "Arrival to first schedule.", _LATENCY)
        self.inference = make("request_inference_time_seconds", "Schedule to end.", _LATENCY)
        self.prefill = make("request_prefill_time_seconds", "Schedule to first token.", _LATENCY)
        self.decode = make("request_decode_time_seconds", "First to last token.", _LATENCY)
        self.prompt = make("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.generation = make("request_generation_tokens", "Tokens generated.", tokens)
        self.n = make("request_params_n", "Samples asked for.", _N)
        self.max_tokens = make("request_params_max_tokens", "max_tokens asked for.", tokens)
        self.preemptions = make("request_num_preemptions", "Preemptions.", _PREEMPTIONS)
        success = Counter(
            prefix + "request_success",
            "Requests by how they ended, one per request.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._success = {
            reason.value: success.labels(*self._labels.values(), reason.value)
            for reason in FinishReason
        }

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        parent = Histogram(
            self._prefix + name,
            help_text,
            list(self._labels),
            buckets=buckets,
            registry=self.registry,
        )
        child: Histogram = parent.labels(*self._labels.values())
        return child

    def update(self, stats: EngineStats) -> None:
        """Take a newer snapshot of the engine's counters."""
        self._collector.stats = stats

    def observe(self, stream: Stream, sample: Sample, output: TokenOutput) -> None:
        """One engine output, before it reaches its sample."""
        count = len(output.token_ids)
        if not count:
            return
        before = sample.last
        if before is None or before.num_output_tokens == 0:
            if stream.first_token_s is None:
                stream.first_token_s = output.now_s - stream.arrival_s
                self.ttft.observe(stream.first_token_s)
            return
        gap = (output.now_s - before.now_s) / count
        for _ in range(count):
            self.itl.observe(gap)

    def finished(self, stream: Stream) -> None:
        """A request ended, one way or another: one count, whatever its number of samples."""
        usage = stream.usage
        reasons = [sample.finish_reason for sample in stream.samples]
        self._success[next((r for r in reasons if r), "") if all(reasons) else "abort"].inc()
        self.prompt.observe(usage.prompt_tokens)
        self.generation.observe(usage.completion_tokens)
        self.n.observe(stream.params.n)
        if stream.params.max_tokens is not None:
            self.max_tokens.observe(stream.params.max_tokens)
        lasts = [sample.last for sample in stream.samples if sample.last is not None]
        if not lasts:
            return
        total = max(last.now_s for last in lasts) - stream.arrival_s
        self.e2e.observe(total)
        self.preemptions.observe(sum(last.num_preemptions for last in lasts))
        queued = lasts[0].queued_s
        if queued is not None:
            self.queue.observe(queued)
            self.inference.observe(total - queued)
        first = stream.first_token_s
        if first is not None:
            self.decode.observe(total - first)
            if queued is not None:
                self.prefill.observe(first - queued)
            most = max(sample.num_tokens for sample in stream.samples)
            if most > 1:
                self.tpot.observe((total - first) / (most - 1))

    def text(self) -> bytes:
        """Everything in Prometheus text format."""
        return generate_latest(self.registry)


class HttpMetrics:
    """Counts HTTP requests by route (never by raw path), method and status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "http_requests",
            "HTTP requests by route.",
            ["method", "status", "handler"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "http_request_duration_seconds",
            "From the request's head to the last byte of the answer.",
            ["method", "handler"],
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.in_progress = Gauge(
            "http_requests_in_progress",
            "HTTP requests being answered.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
