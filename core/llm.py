"""The offline class: load a model, generate, return everything at once.

`LLM` steps the engine directly in the caller's thread: no event loop, no server, no signal
handlers. Prompts, parameters and text are handled by the same code that serves clients.

Source: class and field names are those of vLLM 0.30's offline API.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cardcage.core.contracts import DeviceFacts, Tokenizer
from cardcage.core.errors import (
    AdmissionError,
    ConfigError,
    EngineError,
    ExecutionError,
    InvalidRequest,
)
from cardcage.core.text.intake import Intake, Prepared
from cardcage.core.text.logprobs import Logprob, all_candidates, candidates
from cardcage.core.text.sample import Sample
from cardcage.core.types import (
    EngineStats,
    FinishReason,
    GenRequest,
    ModelInfo,
    Request,
    SamplingParams,
    TextDelta,
    TokenLogprob,
    TokenOutput,
)

if TYPE_CHECKING:
    from cardcage.core.config import Config

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds from its arrival; None when it never got there."""

    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sample. `logprobs` has one dictionary per token: token id -> `Logprob`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its samples. `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class _Job:
    """One prompt on its way through the engine."""

    def __init__(self, prepared: Prepared, intake: Intake) -> None:
        self.prepared = prepared
        self.arrival_s = time.monotonic()
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        params = prepared.params
        self.samples = [
            Sample(
                i,
                child.request_id,
                intake.detokenizer(prepared.prompt_token_ids, params),
                include_stop=params.include_stop_str_in_output,
                drop_tokens=prepared.score_only,
            )
            for i, child in enumerate(prepared.children)
        ]

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    def output(self, intake: Intake) -> RequestOutput:
        prepared, last = self.prepared, self.samples[0].last
        metrics = RequestMetrics()
        if last is not None:
            ends = [s.last.now_s for s in self.samples if s.last is not None]
            metrics = RequestMetrics(
                last.queued_s,
                last.first_token_s,
                max(ends) - self.arrival_s,
                sum(s.last.num_preemptions for s in self.samples if s.last is not None),
            )
        scored = self.prompt_logprobs
        return RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt_text,
            prompt_token_ids=prepared.prompt_token_ids,
            prompt_logprobs=None if scored is None else all_candidates(scored, intake.vocabulary),
            outputs=[self._completion(sample, intake) for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=last.num_cached_tokens if last is not None else 0,
            metrics=metrics,
        )

    def _completion(self, sample: Sample, intake: Intake) -> CompletionOutput:
        delta = sample.take()
        assert delta is not None, "a finished sample has a last delta"
        out = CompletionOutput(
            sample.index,
            delta.text,
            delta.token_ids,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )
        if self.prepared.params.logprobs is not None:
            out.logprobs = [candidates(entry, intake.vocabulary) or {} for entry in delta.logprobs]
            out.cumulative_logprob = sum(entry.logprob for entry in delta.logprobs)
        return out


class _Run:
    """What one `generate`, `chat` or `stream` still waits for. Several may be open at once."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[_Job, Sample]] = {}
        self.waiting: deque[Request] = deque()
        self.jobs_done = 0
        self.error: ExecutionError | None = None

    def add(self, job: _Job) -> None:
        if not job.prepared.needs_engine:
            for sample in job.samples:
                sample.end(FinishReason.LENGTH)
            return
        for child, sample in zip(job.prepared.children, job.samples):
            self.live[child.request_id] = (job, sample)
            self.waiting.append(child)


class LLM:
    """A model ready to generate, in this process.

    Threads may share it: their requests run together, one thread at a time stepping the engine.

    Args:
        model: model reference; "" is the embedded model.
        dtype: "auto", "float32", "bfloat16" or "float16".
        config: a TOML or YAML file, or a resolved `Config` (then no other option is allowed).
        skip_tokenizer_init: token ids in and out, no text.
        **overrides: any config value: nested (`kv={"bytes": "1GiB"}`) or by its flat name
            (`max_num_seqs=8`).

    Raises:
        ConfigError, ModelError, PluginError: what cannot work, before anything is loaded.
    """

    def __init__(
        self,
        model: str = "",
        dtype: str = "auto",
        config: Config | str | Path | None = None,
        skip_tokenizer_init: bool = False,
        **overrides: Any,
    ) -> None:
        from cardcage.core.host import build_engine

        resolved = _resolve_config(model, dtype, config, skip_tokenizer_init, overrides)
        self._parts: Any = build_engine(resolved)
        self._start(self._parts, resolved.as_dict()["seed"])

    @classmethod
    def from_parts(cls, parts: Any, seed: int | None = 0) -> LLM:
        """An LLM over an engine that is already built (see `host.build_engine`); takes it over."""
        self = cls.__new__(cls)
        self._parts = parts
        self._start(parts, seed)
        return self

    def _start(self, parts: Any, seed: int | None) -> None:
        self._engine = parts.engine
        self._intake = Intake.for_model(parts.info, parts.tokenizer, seed=seed)
        self._next_id = 0
        self._lock = threading.Lock()  # held for a step
        self._runs: dict[str, _Run] = {}  # by the id of each request that the engine has

    # ---- generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for each prompt; outputs come in the order of the prompts.

        Args:
            prompts: a string, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of
                these.
            params: for all prompts, or one for each; None takes the model's defaults.
            use_tqdm: show a progress bar.

        Raises:
            InvalidRequest, ContextTooLong: any prompt is unusable; nothing has run then.
            ExecutionError: the engine failed on a request.
        """
        listed = _as_list(prompts)
        requests = [
            GenRequest(prompt=_prompt(item, i), params=p, default_max_tokens=16)
            for i, (item, p) in enumerate(zip(listed, self._params(params, len(listed))))
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template.

        Raises:
            InvalidRequest: a message is malformed, or the model has no chat template.
        """
        if not isinstance(messages, Sequence):
            raise InvalidRequest(
                f"messages must be a list, got {type(messages).__name__}", "messages"
            )
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        requests = [
            GenRequest(
                messages=conversation,
                params=p,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )
            for conversation, p in zip(conversations, self._params(params, len(conversations)))
        ]
        return self._run(requests, use_tqdm)

    def stream(self, request: GenRequest) -> Iterator[TextDelta]:
        """Run one request and yield what each sample gains, step by step.

        Closing the generator aborts what still runs.

        Raises:
            InvalidRequest, ContextTooLong: the request is unusable; nothing has run then.
            ExecutionError: the engine failed on it.
        """
        prepared = self._intake.prepare(request)
        self._rename(prepared)
        job = _Job(prepared, self._intake)
        run = _Run()
        run.add(job)
        try:
            while run.live:
                self._step(run)
                yield from (d for s in job.samples if (d := s.take()) is not None)
            yield from (d for s in job.samples if (d := s.take()) is not None)
        finally:
            self._abandon(run)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams | Mapping[str, Any]]:
        if params is None:
            return [{}] * count
        if isinstance(params, (SamplingParams, Mapping)):
            return [params] * count
        if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
            raise InvalidRequest(
                f"params must be a SamplingParams or a list of them, got {type(params).__name__}",
                "params",
            )
        if len(params) != count:
            raise InvalidRequest(
                f"{len(params)} sampling params were given for {count} prompts: give one, or one "
                "for each",
                "params",
            )
        return params

    def _run(self, requests: Sequence[GenRequest], use_tqdm: bool) -> list[RequestOutput]:
        jobs = []
        for i, request in enumerate(requests):
            try:
                prepared = self._intake.prepare(request)
            except InvalidRequest as error:
                place = f"item {i}: " if len(requests) > 1 else ""
                raise type(error)(f"{place}{error}", error.param) from None
            self._rename(prepared)
            jobs.append(_Job(prepared, self._intake))
        run = _Run()
        for job in jobs:
            run.add(job)
        bar = _Bar(len(jobs), len(jobs) - len({id(j) for j, _ in run.live.values()}), use_tqdm)
        done = 0
        try:
            while run.live:
                bar.tokens += self._step(run)
                bar.advance(run.jobs_done - done)
                done = run.jobs_done
        finally:
            self._abandon(run)
            bar.close()
        return [job.output(self._intake) for job in jobs]

    def _rename(self, prepared: Prepared) -> None:
        """Ids that count up, as users of offline classes expect."""
        prepared.request_id = str(self._next_id)
        self._next_id += 1
        many = len(prepared.children) > 1
        for i, child in enumerate(prepared.children):
            child.request_id = f"{prepared.request_id}-{i}" if many else prepared.request_id

    def _step(self, run: _Run) -> int:
        """Admit what the queue takes, step once, feed every run's samples.

        Returns the number of tokens. Raises ExecutionError when a request of `run` failed.
        """
        with self._lock, _interrupts_wait():
            if run.error is None and run.live:  # another thread's step may have ended it
                self._admit(run)
                tokens = self._feed(self._engine.step())
            else:
                tokens = 0
        if run.error is not None:
            raise run.error
        return tokens

    def _admit(self, run: _Run) -> None:
        while run.waiting:
            request = run.waiting[0]
            request.arrival_s = time.monotonic()
            try:
                self._engine.add_request(request)
            except AdmissionError:
                if not self._engine.has_work():
                    raise
                break
            self._runs[request.request_id] = run
            run.waiting.popleft()

    def _feed(self, outputs: Iterable[TokenOutput]) -> int:
        aborts: list[str] = []
        tokens = 0
        for output in outputs:
            request_id = output.request_id
            run = self._runs.get(request_id)
            if run is None:
                continue
            job, sample = run.live[request_id]
            if output.finish_reason is FinishReason.ERROR:
                self._runs.pop(request_id)
                run.error = run.error or ExecutionError(
                    f"request {request_id}: {output.error or 'the engine failed'}"
                )
                continue
            if output.prompt_logprobs is not None:
                job.prompt_logprobs = output.prompt_logprobs
            if sample.feed(output):
                aborts.append(request_id)
            if sample.finished:
                del run.live[request_id], self._runs[request_id]
                run.jobs_done += job.finished
            tokens += len(output.token_ids)
        if aborts:
            self._engine.abort(aborts)
        return tokens

    def _abandon(self, run: _Run) -> None:
        """Abort what a failed, interrupted or closed run left and let the engine settle."""
        with self._lock, _interrupts_wait():
            left = [i for i in run.live if self._runs.pop(i, None) is not None]
            if not left:
                return
            self._engine.abort(left)
            try:
                while not self._runs and self._engine.has_work():
                    self._engine.step()
            except EngineError:
                pass  # the first error is the one to report

    # ---- the rest

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the engine runs without one.
        """
        tokenizer = self._intake.tokenizer
        if tokenizer is None:
            raise ConfigError("this LLM has no tokenizer (skip_tokenizer_init, or none found)")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `params=None` means for this model."""
        defaults = dict(self._intake.facts.generation_defaults)
        limit = defaults.pop("max_new_tokens", None)
        return SamplingParams(**defaults, max_tokens=limit or 16)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        stats: EngineStats = self._engine.stats()
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False while blocks of it are in use."""
        return bool(self._engine.reset_prefix_cache())

    @property
    def engine(self) -> Any:
        """The `Engine` underneath, for programs that step it themselves."""
        return self._engine

    @property
    def info(self) -> ModelInfo:
        """Names, context, vocabulary and defaults of the model."""
        info: ModelInfo = self._parts.info
        return info

    def hardware_facts(self) -> DeviceFacts:
        """The device that the model runs on: name, architecture, memory in bytes."""
        facts: DeviceFacts = self._parts.host.hardware.facts()
        return facts

    def explain(self) -> dict[str, Any]:
        """Which plugins were chosen, and why."""
        explained: dict[str, Any] = self._parts.explain
        return explained

    def close(self) -> None:
        """Free the engine's memory. Calling it twice is harmless."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Bar:
    """A tqdm progress bar over prompts with output tokens per second; silent when not wanted."""

    def __init__(self, total: int, done: int, wanted: bool) -> None:
        self.tokens = 0
        self._start = time.monotonic()
        self._bar: Any = None
        if wanted:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc="Prompts", dynamic_ncols=True)

    def advance(self, count: int) -> None:
        if self._bar is not None and count:
            rate = self.tokens / max(time.monotonic() - self._start, 1e-9)
            self._bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
            self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C acts after the block: a step that stops halfway leaves no engine to go on with.

    A second Ctrl-C acts at once. Only the main thread gets signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if len(seen) == 1:
        handler(signal.SIGINT, None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = _plain(prompts)
    unordered = isinstance(prompts, (bytes, bytearray, Set))
    if unordered or not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"prompts must be a string, a prompt or a list of them, got {type(prompts).__name__}",
            "prompts",
        )
    listed: list[Any] = [_plain(item) for item in prompts]
    if listed and all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return [listed]
    return listed


def _plain(value: Any) -> Any:
    """Arrays and tensors, of numpy, torch or others, as lists and numbers."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def _prompt(item: Prompt, index: int) -> str | Sequence[int]:
    """The text or the ids of one item."""
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        keys = {k for k in ("prompt", "prompt_token_ids") if item.get(k) is not None}
        unknown = set(item) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise InvalidRequest(
                f"item {index}: {', '.join(sorted(map(str, unknown)))} is not supported; use "
                "prompt or prompt_token_ids",
                "prompts",
            )
        ids = _plain(item.get("prompt_token_ids"))
        if _is_list(ids):
            return [_plain(token) for token in ids]
        if keys == {"prompt"} and isinstance(item["prompt"], str):
            return item["prompt"]
    elif _is_list(item):
        return [_plain(token) for token in item]
    raise InvalidRequest(
        f"item {index} must be a string, token ids, {{'prompt': text}} or "
        f"{{'prompt_token_ids': ids}}, got {type(item).__name__}",
        "prompts",
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _resolve_config(
    model: str,
    dtype: str,
    config: Config | str | Path | None,
    skip_tokenizer_init: bool,
    overrides: Mapping[str, Any],
) -> Config:
    from cardcage.core.config import Config, load_config

    given: dict[str, Any] = dict(overrides)
    if model:
        given["model"] = model
    if dtype != "auto":
        given["dtype"] = dtype
    if skip_tokenizer_init:
        given["skip_tokenizer_init"] = True
    if isinstance(config, Config):
        if given:
            raise ConfigError(
                f"config is already resolved, so {', '.join(given)} cannot be given beside it"
            )
        return config
    if not isinstance(config, (str, Path, type(None))):
        raise ConfigError(
            f"config must be a Config or the path of a file, got {type(config).__name__}"
        )
    files = [] if config is None else [config]
    return load_config(files, overrides=given)
