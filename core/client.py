"""The asynchronous client of an engine: what every frontend talks to.

`AsyncEngine` checks and tokenizes a `GenRequest`, fans it out to one engine request per sample,
turns the engine's token ids back into text and stops at stop strings. It reaches the engine
through an `EngineLink`: a thread of this process, or a process of its own. Everything here runs
on one event loop; nothing waits for a reader, and a reader that leaves takes its requests along.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cardcage.core.contracts import GenStream, Tokenizer
from cardcage.core.engine_loop import EngineLink, InlineLink
from cardcage.core.errors import AdmissionError, EngineDead, EngineError, ExecutionError
from cardcage.core.text.detokenizer import Detokenizer
from cardcage.core.text.intake import Intake, Limits, Prepared
from cardcage.core.text.sample import Sample
from cardcage.core.types import (
    EngineStats,
    FinishReason,
    GenRequest,
    SamplingParams,
    TextDelta,
    TokenLogprob,
    TokenOutput,
    Usage,
)

if TYPE_CHECKING:
    from cardcage.core.config import Config
    from cardcage.core.metrics import EngineMetrics

logger = logging.getLogger(__name__)
T = TypeVar("T")

_INLINE_CHARS = 20_000  # longer requests are checked, rendered and tokenized in a thread
_STATS_TIMEOUT_S = 2.0


class Stream:
    """The answer to one request: an async iterator of `TextDelta`; see `contracts.GenStream`."""

    def __init__(self, client: AsyncEngine, prepared: Prepared, arrival_s: float) -> None:
        self.request_id = prepared.request_id
        self.prompt_text = prepared.prompt_text
        self.prompt_token_ids: Sequence[int] = prepared.prompt_token_ids
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self.params: SamplingParams = prepared.params
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self._client = client
        self._intake = client.intake
        include = prepared.params.include_stop_str_in_output
        self.samples = [
            Sample(
                i,
                child.request_id,
                self._intake.detokenizer(prepared.prompt_token_ids, prepared.params),
                include_stop=include,
                drop_tokens=prepared.score_only,
            )
            for i, child in enumerate(prepared.children)
        ]
        self._dirty: dict[int, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: EngineError | None = None
        self._closed = False
        self._live = len(self.samples)

    @property
    def usage(self) -> Usage:
        """Tokens so far; final once the iteration has ended."""
        cached = self.samples[0].last.num_cached_tokens if self.samples[0].last else 0
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(sample.num_tokens for sample in self.samples),
            cached_tokens=cached,
        )

    def __aiter__(self) -> GenStream:
        return self

    async def __anext__(self) -> TextDelta:
        while True:
            while self._dirty:
                index = next(iter(self._dirty))
                del self._dirty[index]
                delta = self.samples[index].take()
                if delta is not None:
                    return delta
            if self._error is not None:
                raise self._error
            if self._closed or not self._live:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self, index: int) -> None:
        self._dirty[index] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def feed(self, sample: Sample, output: TokenOutput) -> bool:
        """Take an engine output. Returns True when the engine must abort that sample."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is FinishReason.ERROR:
            self.fail(ExecutionError(output.error or "the engine failed on this request"))
            return False
        was_finished = sample.finished
        abort = sample.feed(output)
        if sample.finished and not was_finished:
            self._live -= 1
        self._wake(sample.index)
        return abort

    def fail(self, error: EngineError) -> None:
        """End the stream with an error and abort whatever of it still runs."""
        if self._error is None and not self._closed:
            self._error = error
            self.cancel()

    def finish_empty(self) -> None:
        """End every sample without a token (nothing was to be generated)."""
        for sample in self.samples:
            sample.end(FinishReason.LENGTH)
            self._dirty[sample.index] = None
        self._live = 0

    def cancel(self) -> None:
        """Abort what still runs, at once. Harmless when all is finished or cancelled."""
        if self._closed:
            return
        self._closed = True
        self._client.forget(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def aclose(self) -> None:
        """`cancel`, in the form that async code closes things with."""
        self.cancel()


class AsyncEngine:
    """The engine client; see `contracts.EngineClient`.

    Args:
        link: how to reach the engine.
        load_tokenizer: makes the tokenizer in this process while the engine loads; None when
            the link brings it, or there is none.
        limits: what requests may ask for.
        seed: makes drawn seeds repeat from run to run.
        make_metrics: makes the counters of requests from the model's info; None for none.
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        load_tokenizer: Callable[[], Tokenizer | None] | None = None,
        limits: Limits | None = None,
        seed: int | None = None,
        make_metrics: Callable[[Any], EngineMetrics] | None = None,
    ) -> None:
        self._link = link
        self._load_tokenizer = load_tokenizer
        self._limits = limits
        self._seed = seed
        self._make_metrics = make_metrics
        self.metrics: EngineMetrics | None = None
        self.metrics_sources: list[Callable[[], bytes]] = []
        self._intake: Intake | None = None
        self._info: Any = None
        self.explain: dict[str, Any] = {}
        self.progress: tuple[str, int, int] = ("starting", 0, 0)
        self._state = "starting"
        self._reason = ""
        self._routes: dict[str, tuple[Stream, Sample]] = {}
        self._streams: dict[Stream, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.dead = asyncio.Event()

    @classmethod
    def from_config(
        cls, config: Config, *, make_metrics: Callable[[Any], EngineMetrics] | None = None
    ) -> AsyncEngine:
        """A client of an engine built from a config: inline or in its own process."""
        tree = config.as_dict()
        if tree["server"]["process"] == "inline":
            from cardcage.core.host import build_engine

            link: EngineLink = InlineLink(lambda progress: build_engine(config, progress))
            return cls(link, seed=tree["seed"], make_metrics=make_metrics)
        from cardcage.core.process import ProcessLink, load_tokenizer

        return cls(
            ProcessLink(config),
            load_tokenizer=lambda: load_tokenizer(config),
            seed=tree["seed"],
            make_metrics=make_metrics,
        )

    # ---- life

    def prelaunch(self) -> None:
        """Start the engine's process, if it has one, before `start` waits for it."""
        spawn = getattr(self._link, "spawn", None)
        if spawn is not None:
            spawn()

    async def start(self) -> None:
        """Build the engine and the tokenizer; returns when requests can be served."""
        loading = None
        if self._load_tokenizer is not None:
            loading = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        try:
            ready = await self._link.start(self)
            tokenizer = await loading if loading is not None else ready.tokenizer
        except BaseException as error:
            if loading is not None:
                loading.cancel()
            self._state, self._reason = "dead", f"start-up failed: {error}"
            await self._link.close()
            raise
        self._info, self.explain = ready.info, ready.explain
        if self._make_metrics is not None:
            self.metrics = self._make_metrics(ready.info)
        self._intake = Intake.for_model(ready.info, tokenizer, limits=self._limits, seed=self._seed)
        if self._state == "starting":
            self._state = "ok"

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def drain(self) -> None:
        """Take no more requests; those in flight go on."""
        if self._state in ("ok", "starting"):
            self._state, self._reason = "draining", "the server is shutting down"

    async def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no stream is open. False when `timeout_s` passed first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self, drain_s: float = 0.0) -> None:
        """Finish or abort what runs (after `drain_s` seconds) and release the engine."""
        self.drain()
        if drain_s > 0:
            await self.wait_idle(drain_s)
        for stream in list(self._streams):
            stream.fail(AdmissionError("the server is shutting down", retry_after_s=5.0))
        await self._link.close()
        self._state, self._reason = "dead", "closed"

    # ---- what frontends ask

    @property
    def intake(self) -> Intake:
        if self._intake is None:
            raise AdmissionError(self._not_ready(), retry_after_s=5.0)
        return self._intake

    @property
    def info(self) -> Any:
        """The model's facts. Raises AdmissionError while the engine starts."""
        if self._info is None:
            raise AdmissionError(self._not_ready(), retry_after_s=5.0)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.intake.tokenizer

    @property
    def max_prompt_chars(self) -> int:
        return self.intake.limits.max_prompt_chars

    def _not_ready(self) -> str:
        if self._state == "dead":
            return self._reason
        what, done, total = self.progress
        share = f" ({100 * done // total}%)" if total else ""
        return f"the engine is starting: {what}{share}"

    def health(self) -> tuple[str, str]:
        """(state, reason): "starting", "ok", "draining" or "dead"."""
        if self._state == "starting":
            return self._state, self._not_ready()
        return self._state, self._reason

    @property
    def num_streams(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    async def render(self, request: GenRequest) -> tuple[str | None, list[int]]:
        """The prompt as text and ids, without submitting it."""
        return await self._in_thread(request, self.intake.render)

    async def prepare(self, request: GenRequest) -> Prepared:
        """Render, tokenize and check a request; nothing is admitted yet."""
        if not request.request_id:
            request = _with_id(request, f"req-{secrets.token_hex(12)}")
        return await self._in_thread(request, self.intake.prepare)

    async def _in_thread(self, request: GenRequest, function: Callable[[GenRequest], T]) -> T:
        size = _size(request)
        if size <= _INLINE_CHARS:
            return function(request)
        return await asyncio.to_thread(function, request)

    async def submit(self, request: GenRequest) -> Stream:
        """Check a request and admit it. See `prepare` and `start_stream` for what it raises."""
        return await self.start_stream(await self.prepare(request))

    async def start_stream(self, prepared: Prepared) -> Stream:
        """Admit a prepared request: all its samples or none.

        Raises:
            AdmissionError: the queue is full, or the engine starts or drains.
            EngineDead: the engine cannot go on.
        """
        if self._state == "dead":
            raise EngineDead(self._reason)
        if self._state != "ok":
            raise AdmissionError(self.health()[1], retry_after_s=5.0)
        stream = Stream(self, prepared, time.monotonic())
        if not prepared.needs_engine:
            stream.finish_empty()
            return stream
        for child in prepared.children:
            if child.request_id in self._routes:
                raise EngineError(f"request id {child.request_id!r} is in use")
        for child, sample in zip(prepared.children, stream.samples):
            child.arrival_s = stream.arrival_s
            self._routes[child.request_id] = (stream, sample)
        self._streams[stream] = None
        self._idle.clear()
        try:
            await self._link.add(prepared.children)
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Cancel the streams with these request ids; unknown ids are ignored."""
        wanted = set(request_ids)
        for stream in [s for s in self._streams if s.request_id in wanted]:
            stream.cancel()

    async def stats(self) -> EngineStats:
        """The engine's counters, read between two steps."""
        value = await self._link.call("stats")
        assert isinstance(value, EngineStats)
        return value

    async def call(self, name: str, *args: Any) -> Any:
        """An administrative call of the engine: pause, resume, reset_prefix_cache."""
        return await self._link.call(name, *args)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token as text (undecodable bytes replaced) and as raw bytes."""
        vocabulary = self.intake.vocabulary
        if vocabulary is None:
            return f"token_id:{token_id}", b""
        data = vocabulary.bytes_of(token_id)
        return data.decode("utf-8", "replace"), data

    def token_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """For each token, the character of the decoded text at which its own text starts."""
        vocabulary = self.intake.vocabulary
        if vocabulary is None:
            return [0] * len(token_ids)
        detokenizer = Detokenizer(vocabulary)
        for token_id in token_ids:
            detokenizer.push(token_id)
        detokenizer.finish()
        return detokenizer.take()[3]

    async def metrics_text(self) -> bytes:
        """Engine metrics, and those of `metrics_sources`, in Prometheus text format."""
        metrics = self.metrics
        if metrics is not None and self._state in ("ok", "draining"):
            try:
                metrics.update(await asyncio.wait_for(self.stats(), _STATS_TIMEOUT_S))
            except (TimeoutError, EngineError):
                logger.debug("engine statistics are not available now")
        parts = [source() for source in self.metrics_sources]
        return b"".join([*parts, metrics.text() if metrics is not None else b""])

    # ---- what the link delivers

    def on_progress(self, what: str, done: int, total: int) -> None:
        if what != self.progress[0]:
            logger.info("starting: %s", what)
        self.progress = (what, done, total)

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        """One step's outputs: into their samples; abort in the engine what a stop string ended."""
        aborts: list[str] = []
        for output in outputs:
            found = self._routes.get(output.request_id)
            if found is None:  # aborted or stopped here; the engine was a step ahead
                continue
            stream, sample = found
            if self.metrics is not None:
                self.metrics.observe(stream, sample, output)
            if stream.feed(sample, output):
                aborts.append(output.request_id)
            if sample.finished:
                self._routes.pop(output.request_id, None)
                if all(s.finished for s in stream.samples):
                    self._end(stream)
        if aborts:
            self._link.abort(aborts)

    def on_dead(self, reason: str) -> None:
        """The engine is gone: every open stream fails with the reason."""
        if self._state == "dead":
            return
        self._state, self._reason = "dead", reason
        self.dead.set()
        for stream in list(self._streams):
            stream.fail(EngineDead(reason))

    def forget(self, stream: Stream) -> None:
        """Drop a stream (its reader left): abort what the engine still runs of it."""
        live = [s.request_id for s in stream.samples if self._routes.pop(s.request_id, None)]
        if live and self._state != "dead":
            self._link.abort(live)
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        if stream in self._streams:
            del self._streams[stream]
            if self.metrics is not None:
                self.metrics.finished(stream)
            if not self._streams:
                self._idle.set()


def _with_id(request: GenRequest, request_id: str) -> GenRequest:
    from dataclasses import replace

    return replace(request, request_id=request_id)


def _size(request: GenRequest) -> int:
    """How much there is to look at: characters, ids and words of prompt and parameters."""
    size = len(request.prompt) if request.prompt is not None else 0
    for message in request.messages or ():
        size += len(str(message.get("content", ""))) if hasattr(message, "get") else 1
    if isinstance(request.params, Mapping):
        for value in request.params.values():
            items = value if isinstance(value, (list, tuple)) else ()
            size += len(value) if hasattr(value, "__len__") else 1
            size += sum(len(item) for item in items if isinstance(item, str))
    return size
