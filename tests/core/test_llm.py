"""The offline class over a fake engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cardcage.core.errors import (
    AdmissionError,
    ConfigError,
    ContextTooLong,
    EngineDead,
    ExecutionError,
    InvalidRequest,
)
from cardcage.core.llm import LLM
from cardcage.core.types import (
    FinishReason,
    GenRequest,
    Request,
    SamplingParams,
    TokenOutput,
)
from tests.support.fake_engine import ByteTokenizer, FakeEngine, make_info, make_parts

TOKENS = ByteTokenizer()
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def llm_of(**engine: Any) -> LLM:
    return LLM.from_parts(make_parts(**engine))


def test_every_form_of_prompt_gives_the_same_answer() -> None:
    ids = TOKENS.encode("ab x")
    with llm_of() as llm:
        forms: list[Any] = [
            "ab x",
            {"prompt": "ab x"},
            {"prompt_token_ids": ids},
            ids,
            ["ab x"],
            [{"prompt_token_ids": ids}],
            [ids],
        ]
        outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(o) == 1 for o in outputs)
    assert len({o[0].outputs[0].text for o in outputs}) == 1
    assert outputs[0][0].prompt == "ab x"
    assert outputs[2][0].prompt is None
    assert outputs[2][0].prompt_token_ids == ids


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    prompts = [f"p{i}" for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=20 - i) for i in range(20)]
    with llm_of(max_seqs=3) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt for o in outputs] == prompts
        assert [len(o.outputs[0].token_ids) for o in outputs] == [20 - i for i in range(20)]
        assert [o.request_id for o in outputs] == [str(i) for i in range(20)]
        assert llm.generate([], GREEDY) == []


def test_fields_of_an_output() -> None:
    params = SamplingParams(temperature=1, max_tokens=4, n=2, seed=3, logprobs=2, prompt_logprobs=1)
    with llm_of() as llm:
        output = llm.generate("abx", params, use_tqdm=False)[0]
    assert output.finished
    assert [c.index for c in output.outputs] == [0, 1]
    assert output.outputs[0].text != output.outputs[1].text
    for completion in output.outputs:
        assert completion.finish_reason == "length"
        assert completion.stop_reason is None
        assert completion.cumulative_logprob == pytest.approx(-2.0)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 4
        first = completion.logprobs[0][completion.token_ids[0]]
        assert first.rank == 1
        assert first.decoded_token == completion.text[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.metrics.first_token_s is not None
    assert output.metrics.finished_s is not None


def test_stop_strings_and_stop_tokens() -> None:
    script = {
        tuple(TOKENS.encode("s")): list(b"one STOP two"),
        tuple(TOKENS.encode("t")): list(b"one;two"),
        tuple(TOKENS.encode("e")): [*b"hi", TOKENS.eos_token_ids[0]],
    }
    with llm_of(script=script, per_step=3) as llm:
        params = SamplingParams(temperature=0, stop="STOP", stop_token_ids=(59,), max_tokens=50)
        outputs = llm.generate(["s", "t", "e"], params, use_tqdm=False)
        ends = [(o.outputs[0].text, o.outputs[0].stop_reason) for o in outputs]
        assert ends == [("one ", "STOP"), ("one", 59), ("hi", None)]
        assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}
        again = llm.generate(["s"], GREEDY, use_tqdm=False)
        assert len(again[0].outputs[0].token_ids) == 6


def test_chat_takes_one_conversation_or_many() -> None:
    one = [{"role": "user", "content": "hi"}]
    with llm_of() as llm:
        single = llm.chat(one, GREEDY, use_tqdm=False)
        many = llm.chat([one, one], GREEDY, use_tqdm=False)
        assert len(single) == 1
        assert [o.outputs[0].text for o in many] == [single[0].outputs[0].text] * 2
        assert single[0].prompt is not None
        assert single[0].prompt.endswith("<|im_start|>assistant\n")
        going = llm.chat(
            [*one, {"role": "assistant", "content": "Well"}],
            GREEDY,
            use_tqdm=False,
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert going[0].prompt is not None
        assert going[0].prompt.endswith("<|im_start|>assistant\nWell")


@pytest.mark.parametrize(
    ("prompts", "error", "text"),
    [
        (["ok", ""], None, ""),
        (["ok", 7], InvalidRequest, "item 1"),
        (["ok", {"text": "x"}], InvalidRequest, "item 1"),
        (["ok", {"prompt": 3}], InvalidRequest, "item 1"),
        (["ok", [1, 10**6]], InvalidRequest, "item 1"),
        (["ok", [1] * 300], ContextTooLong, "300 tokens"),
    ],
)
def test_a_bad_item_raises_before_anything_runs(prompts: Any, error: Any, text: str) -> None:
    parts = make_parts()
    with LLM.from_parts(parts) as llm:
        if error is None:
            assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == 2
        else:
            with pytest.raises(error, match=text):
                llm.generate(prompts, GREEDY, use_tqdm=False)
            assert not parts.engine.seen


def test_params_must_match_the_prompts() -> None:
    with llm_of() as llm, pytest.raises(InvalidRequest, match=r"2 sampling params.*3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY], use_tqdm=False)


def test_more_prompts_than_the_queue_takes() -> None:
    with llm_of(max_seqs=2, max_queue=3) as llm:
        outputs = llm.generate([f"p{i}" for i in range(30)], GREEDY, use_tqdm=False)
        assert all(o.finished for o in outputs)


def test_a_queue_that_never_takes_is_an_error() -> None:
    class Closed(FakeEngine):
        def add_request(self, request: Request) -> None:
            raise AdmissionError("closed")

    parts = make_parts()
    parts.engine = Closed()
    with LLM.from_parts(parts) as llm, pytest.raises(AdmissionError):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_interrupt_aborts_everything_and_the_engine_goes_on() -> None:
    parts = make_parts()
    steps = 0

    class Interrupted(FakeEngine):
        def step(self, block: bool = True) -> list[TokenOutput]:
            nonlocal steps
            steps += 1
            if steps == 3:
                raise KeyboardInterrupt
            return super().step(block)

    engine = parts.engine = Interrupted()
    with LLM.from_parts(parts) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
        assert not engine.has_work()
        assert engine.free_blocks == engine.num_blocks
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished


def test_engine_errors_are_raised() -> None:
    class Failing(FakeEngine):
        def step(self, block: bool = True) -> list[TokenOutput]:
            outputs = super().step(block)
            for output in outputs:
                output.finish_reason, output.error = FinishReason.ERROR, "no finite logit"
            return outputs

    parts = make_parts()
    parts.engine = Failing()
    with LLM.from_parts(parts) as llm, pytest.raises(ExecutionError, match="no finite logit"):
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    with llm_of(fail_at_step=2) as llm, pytest.raises(EngineDead):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_unseeded_requests_repeat_from_run_to_run() -> None:
    params = SamplingParams(temperature=1, max_tokens=8)
    texts = []
    for _ in range(2):
        with llm_of() as llm:
            texts.append(
                [o.outputs[0].text for o in llm.generate(["a", "a"], params, use_tqdm=False)]
            )
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_without_a_tokenizer_ids_flow() -> None:
    parts = make_parts()
    parts.tokenizer = None
    with LLM.from_parts(parts) as llm:
        output = llm.generate({"prompt_token_ids": [1, 2]}, GREEDY, use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].text == ""
        with pytest.raises(InvalidRequest, match="without one"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="stop needs a tokenizer"):
            llm.generate([1], SamplingParams(stop="x"), use_tqdm=False)
        with pytest.raises(ConfigError):
            llm.get_tokenizer()


def test_scoring_a_prompt() -> None:
    with llm_of() as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        output = llm.generate("abx", params, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == []
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 3
        assert llm.stats().steps == 1
        assert llm.generate("x", SamplingParams(max_tokens=0), use_tqdm=False)[0].finished


def test_streaming_one_request() -> None:
    with llm_of() as llm:
        request = GenRequest(prompt="x", params={"temperature": 0, "max_tokens": 5})
        deltas = list(llm.stream(request))
        assert len(deltas) == 5
        assert deltas[-1].finish_reason == "length"
        half = llm.stream(request)
        next(half)
        half.close()
        assert llm.stats().num_running == 0


def test_defaults_and_helpers(capsys: pytest.CaptureFixture[str]) -> None:
    info = make_info(generation_defaults={"temperature": 0.2, "max_new_tokens": 3})
    with LLM.from_parts(make_parts(info=info)) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens) == (0.2, 3)
        assert llm.get_tokenizer().vocab_size == TOKENS.vocab_size
        llm.generate("x", GREEDY)
        assert "tok/s" in capsys.readouterr().err
        assert llm.reset_prefix_cache()
    llm.close()


def test_a_resolved_config_allows_nothing_beside_it() -> None:
    from cardcage.core.config import load_config

    with pytest.raises(ConfigError, match=r"already resolved.*dtype"):
        LLM(config=load_config(env={}), dtype="float32")


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", {"a", "b"}, {"prompt_token_ids": b"ab"}, [b"ab"], [[b"a"]], [[1.5]]]
)
def test_what_is_no_prompt_is_refused(prompts: Any) -> None:
    with llm_of() as llm, pytest.raises(InvalidRequest):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_arrays_are_prompts() -> None:
    ids = TOKENS.encode("ab x")
    array = np.array(ids)
    with llm_of() as llm:
        forms: list[Any] = [array, [array], list(array), {"prompt_token_ids": array}]
        outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(o[0].prompt_token_ids == ids for o in outputs)


@pytest.mark.parametrize("params", ["x", 5, [None], [5], ["x"], [{"bogus": 1}], {"bogus": 1}])
def test_what_are_no_params_is_refused(params: Any) -> None:
    with llm_of() as llm, pytest.raises(InvalidRequest):
        llm.generate(["a"], params, use_tqdm=False)


def test_params_may_be_a_mapping() -> None:
    with llm_of() as llm:
        outputs = llm.generate(["a", "b"], {"max_tokens": 2, "temperature": 0}, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 2]


def test_messages_must_be_a_list() -> None:
    with llm_of() as llm, pytest.raises(InvalidRequest, match="messages"):
        llm.chat(None)  # type: ignore[arg-type]


def test_config_must_be_a_config_or_a_path() -> None:
    with pytest.raises(ConfigError, match="path of a file"):
        LLM(config=5)  # type: ignore[arg-type]


def test_generate_inside_a_stream_takes_nothing_from_it() -> None:
    request = GenRequest(prompt="ab", params=SamplingParams(temperature=0, max_tokens=9))
    with llm_of() as llm:
        alone = [i for delta in llm.stream(request) for i in delta.token_ids]
        mixed: list[int] = []
        for delta in llm.stream(request):
            mixed += delta.token_ids
            assert llm.generate("x", GREEDY, use_tqdm=False)[0].finished
    assert mixed == alone
    assert len(alone) == 9


def test_threads_share_an_engine() -> None:
    prompts = [f"p{i}" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=30)
    with llm_of() as llm:
        alone = [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda p: llm.generate(p, params, use_tqdm=False), prompts)
            assert [o[0].outputs[0].token_ids for o in found] == alone


@pytest.fixture
def _default_interrupts() -> Iterator[None]:
    """Ctrl-C as in a terminal: a run in the background starts with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_interrupts")
def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    whole: list[bool] = []

    class Slow(FakeEngine):
        def step(self, block: bool = True) -> list[TokenOutput]:
            if not whole:
                signal.raise_signal(signal.SIGINT)
            outputs = super().step(block)
            whole.append(True)
            return outputs

    parts = make_parts()
    parts.engine = Slow()
    before = signal.getsignal(signal.SIGINT)
    with LLM.from_parts(parts) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=50), use_tqdm=False)
        assert whole
        assert signal.getsignal(signal.SIGINT) is before
        assert llm.generate("a", GREEDY, use_tqdm=False)[0].finished
