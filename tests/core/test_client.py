"""The async client over a fake engine in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cardcage.core.client import AsyncEngine, Stream
from cardcage.core.engine_loop import InlineLink
from cardcage.core.errors import (
    AdmissionError,
    ContextTooLong,
    EngineDead,
    InvalidRequest,
    RequestError,
)
from cardcage.core.text.intake import Limits, salt_key
from cardcage.core.types import GenRequest, SamplingParams, TextDelta
from tests.support.fake_engine import ByteTokenizer, make_info, make_parts

TOKENS = ByteTokenizer()


@asynccontextmanager
async def running(
    parts: Any = None, limits: Limits | None = None, **engine: Any
) -> AsyncIterator[tuple[AsyncEngine, Any]]:
    parts = parts or make_parts(**engine)
    client = AsyncEngine(InlineLink(lambda progress: parts), limits=limits)
    await client.start()
    try:
        yield client, parts.engine
    finally:
        await client.close()
        assert parts.engine.closed


def request(prompt: Any = "hi", **params: Any) -> GenRequest:
    return GenRequest(prompt=prompt, params={"temperature": 0.0, "max_tokens": 8, **params})


async def collect(stream: Stream) -> list[TextDelta]:
    return [delta async for delta in stream]


def text_of(deltas: list[TextDelta], index: int = 0) -> str:
    return "".join(d.text for d in deltas if d.index == index)


async def settled(client: AsyncEngine, engine: Any) -> None:
    """Everything is released within a second."""
    for _ in range(200):
        stats = await client.stats()
        busy = stats.num_running + stats.num_waiting + client.num_streams
        if not busy and engine.free_blocks == engine.num_blocks and not engine.has_work():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"left: {stats}, {client.num_streams} streams, {engine.free_blocks}")


def test_text_usage_and_finish() -> None:
    async def main() -> None:
        async with running() as (client, engine):
            stream = await client.submit(request(logprobs=2))
            deltas = await collect(stream)
            assert len(text_of(deltas)) == 8
            assert deltas[-1].finish_reason == "length"
            assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert sum(len(d.logprobs) for d in deltas) == 8
            assert stream.usage.prompt_tokens == 3
            assert stream.usage.completion_tokens == 8
            await settled(client, engine)

    asyncio.run(main())


def test_samples_have_consecutive_seeds_and_differ() -> None:
    async def main() -> None:
        async with running() as (client, engine):
            stream = await client.submit(request(n=3, seed=7, temperature=1.0))
            deltas = await collect(stream)
            texts = {text_of(deltas, i) for i in range(3)}
            assert len(texts) == 3
            assert sorted(r.seed for r in engine.seen) == [7, 8, 9]
            assert stream.usage.completion_tokens == 24
            assert stream.usage.prompt_tokens == 3

    asyncio.run(main())


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_stop_string_ends_here_and_in_the_engine(per_step: int) -> None:
    prompt = TOKENS.encode("x")
    script = {tuple(prompt): list(b"one STOP two")}

    async def main() -> None:
        async with running(script=script, per_step=per_step) as (client, engine):
            stream = await client.submit(request("x", stop=["STOP"], max_tokens=100))
            deltas = await collect(stream)
            assert text_of(deltas) == "one "
            assert deltas[-1].finish_reason == "stop"
            assert deltas[-1].stop_reason == "STOP"
            assert stream.usage.completion_tokens == 8
            await settled(client, engine)

    asyncio.run(main())


def test_end_of_sequence_counts_and_has_no_text() -> None:
    prompt = TOKENS.encode("x")
    script = {tuple(prompt): [*b"ok", TOKENS.eos_token_ids[0]]}

    async def main() -> None:
        async with running(script=script) as (client, _):
            stream = await client.submit(request("x", skip_special_tokens=False))
            deltas = await collect(stream)
            assert text_of(deltas) == "ok"
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
            assert stream.usage.completion_tokens == 3
            assert deltas[-1].token_ids[-1] == TOKENS.eos_token_ids[0]

    asyncio.run(main())


def test_a_slow_reader_gets_one_merged_delta() -> None:
    async def main() -> None:
        async with running() as (client, engine):
            stream = await client.submit(request(max_tokens=100))
            while (await client.stats()).num_running or not engine.seen:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            deltas = await collect(stream)
            assert len(deltas) == 1
            assert len(deltas[0].text) == 100

    asyncio.run(main())


@pytest.mark.parametrize("when", ["queued", "running", "twice", "finished"])
def test_cancel_in_every_phase_leaves_nothing(when: str) -> None:
    async def main() -> None:
        async with running(step_s=0.001, max_seqs=2) as (client, engine):
            streams = [await client.submit(request(n=2, max_tokens=200)) for _ in range(6)]
            if when == "running":
                await streams[0].__anext__()
            if when == "finished":
                await collect(streams[0])
            for stream in streams:
                stream.cancel()
                if when == "twice":
                    await stream.aclose()
            await settled(client, engine)
            assert await collect(await client.submit(request()))

    asyncio.run(main())


def test_a_pending_reader_wakes_when_its_stream_is_cancelled() -> None:
    async def main() -> None:
        async with running(step_s=0.05) as (client, _):
            stream = await client.submit(request(max_tokens=200))
            reading = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.01)
            stream.cancel()
            await asyncio.wait_for(reading, 1)

    asyncio.run(main())


def test_submit_cancelled_while_it_is_being_admitted() -> None:
    async def main() -> None:
        async with running(step_s=0.05) as (client, engine):
            first = await client.submit(request(max_tokens=50))
            pending = asyncio.create_task(client.submit(request(max_tokens=200)))
            await asyncio.sleep(0)
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            first.cancel()
            await settled(client, engine)

    asyncio.run(main())


def test_a_full_queue_refuses_all_samples_before_any_output() -> None:
    async def main() -> None:
        async with running(step_s=0.01, max_seqs=1, max_queue=2) as (client, engine):
            running_one = await client.submit(request(max_tokens=100))
            await running_one.__anext__()
            with pytest.raises(AdmissionError):
                await client.submit(request(n=5))
            running_one.cancel()
            await settled(client, engine)

    asyncio.run(main())


def test_a_dead_engine_fails_every_stream_and_health_says_why() -> None:
    async def main() -> None:
        async with running(step_s=0.005, fail_at_step=4) as (client, _):
            streams = [await client.submit(request(max_tokens=100)) for _ in range(3)]
            for stream in streams:
                with pytest.raises(EngineDead, match="told to fail"):
                    await collect(stream)
            state, reason = client.health()
            assert state == "dead"
            assert "told to fail" in reason
            with pytest.raises(EngineDead):
                await client.submit(request())

    asyncio.run(main())


def test_starting_and_draining_refuse_with_the_reason() -> None:
    async def main() -> None:
        client = AsyncEngine(InlineLink(lambda progress: make_parts()))
        assert client.health()[0] == "starting"
        with pytest.raises(AdmissionError, match="starting"):
            await client.submit(request())
        await client.start()
        client.drain()
        with pytest.raises(AdmissionError, match="shutting down"):
            await client.submit(request())
        await client.close()

    asyncio.run(main())


def test_start_up_failure_reaches_the_caller() -> None:
    def build(progress: Any) -> Any:
        raise InvalidRequest("no such model")

    async def main() -> None:
        client = AsyncEngine(InlineLink(build))
        with pytest.raises(InvalidRequest, match="no such model"):
            await client.start()
        assert client.health() == ("dead", "start-up failed: no such model")

    asyncio.run(main())


BAD = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 99}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"logit_bias": {999999: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"ext": {"mark": 1}}, "ext"),
]


@pytest.mark.parametrize(("params", "param"), BAD)
def test_bad_parameters_name_the_field(params: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with running(limits=Limits(max_stop=4, max_n=8)) as (client, engine):
            with pytest.raises(RequestError) as caught:
                await client.submit(request(**params))
            assert caught.value.param == param
            assert not engine.seen

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": "x", "priority": 3}, "priority"),
        ({"prompt": "x", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "x", "truncation_side": "up"}, "truncation_side"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
    ],
)
def test_bad_requests_name_the_field(changes: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with running() as (client, _):
            with pytest.raises(RequestError) as caught:
                await client.submit(GenRequest(**changes))
            assert caught.value.param == param

    asyncio.run(main())


def test_ext_reaches_plugins_where_there_are_some() -> None:
    async def main() -> None:
        async with running(make_parts(info=make_info(takes_ext=True))) as (client, engine):
            await collect(await client.submit(request(ext={"mark": 1})))
            assert [r.params.ext for r in engine.seen] == [{"mark": 1}]

    asyncio.run(main())


def test_context_message_has_both_numbers() -> None:
    async def main() -> None:
        async with running() as (client, _):
            with pytest.raises(ContextTooLong, match=r"300 tokens.*256 tokens"):
                await client.submit(request([1] * 300))

    asyncio.run(main())


def test_max_tokens_is_what_the_context_leaves() -> None:
    async def main() -> None:
        async with running() as (client, _):
            stream = await client.submit(request([1] * 250, max_tokens=100))
            await collect(stream)
            assert stream.usage.completion_tokens == 6
            stream = await client.submit(GenRequest(prompt=[1] * 250))
            assert stream.params.max_tokens == 6
            await collect(stream)

    asyncio.run(main())


def test_generation_defaults_fill_what_the_caller_left_out() -> None:
    info = make_info(generation_defaults={"temperature": 0.3, "top_k": 5, "max_new_tokens": 9})

    async def main() -> None:
        async with running(make_parts(info=info)) as (client, _):
            prepared = await client.prepare(GenRequest(prompt="x", params={"top_k": 2}))
            params = prepared.params
            assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 2, 9)
            whole = SamplingParams(max_tokens=3)
            assert (await client.prepare(GenRequest(prompt="x", params=whole))).params == whole

    asyncio.run(main())


def test_bad_words_are_tokenized_with_and_without_a_space() -> None:
    async def main() -> None:
        async with running() as (client, _):
            prepared = await client.prepare(request(bad_words=["z", "ab"]))
            words = prepared.children[0].params.bad_words_ids
            # " z" has another length than "z", so only the bare form is kept.
            assert words == (tuple(TOKENS.encode("z", False)), tuple(TOKENS.encode("ab", False)))

    asyncio.run(main())


def test_max_tokens_zero_never_decodes() -> None:
    async def main() -> None:
        async with running() as (client, engine):
            stream = await client.submit(request(max_tokens=0))
            deltas = await collect(stream)
            assert (deltas[0].text, deltas[0].finish_reason) == ("", "length")
            assert not engine.seen
            stream = await client.submit(request("abc", max_tokens=0, prompt_logprobs=1))
            deltas = await collect(stream)
            assert text_of(deltas) == ""
            assert stream.usage.completion_tokens == 0
            assert stream.prompt_logprobs is not None
            assert len(stream.prompt_logprobs) == len(stream.prompt_token_ids)
            assert stream.prompt_logprobs[0] is None
            assert (await client.stats()).steps == 1

    asyncio.run(main())


def test_cache_salt_is_tagged_and_length_prefixed() -> None:
    assert salt_key(None) == b""
    assert salt_key("ab") == b"salt\x02\x00\x00\x00ab"
    assert salt_key("a") != salt_key("ab")
    with pytest.raises(InvalidRequest):
        salt_key("x" * 129)


def test_abort_by_id_and_pause() -> None:
    async def main() -> None:
        async with running() as (client, engine):
            await client.call("pause", True)
            stream = await client.submit(GenRequest(prompt="x", request_id="mine"))
            await client.abort(["mine", "unknown"])
            assert await collect(stream) == []
            await client.call("resume")
            await settled(client, engine)
            with pytest.raises(ValueError, match="unknown engine call"):
                await client.call("close")

    asyncio.run(main())


def test_two_hundred_cancelled_streams_leave_nothing() -> None:
    async def main() -> None:
        async with running(step_s=0.0005) as (client, engine):

            async def one(i: int) -> None:
                stream = await client.submit(request(n=1 + i % 2, max_tokens=100))
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen > i % 5:
                        break
                await stream.aclose()

            before = len(asyncio.all_tasks())
            for start in range(0, 200, 25):
                await asyncio.gather(*(one(i) for i in range(start, start + 25)))
            await settled(client, engine)
            assert len(asyncio.all_tasks()) == before

    asyncio.run(main())
