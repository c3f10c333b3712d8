"""The in-process executor on a tiny random model: loading, steps, failures, sizes, reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cardcage.core.config import load_config
from cardcage.core.contracts import ExecutorNeed, ModelSource
from cardcage.core.errors import ConfigError, EngineDead, ExecutionError, ResourceError
from cardcage.core.host import Host
from cardcage.core.types import SamplingParams, SlotAdmit, StepPlan
from cardcage.plugins.executors.inprocess.executor import failure
from cardcage.plugins.executors.inprocess.loading import choose_dtype

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 131,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67]


class Setup:
    """An executor for the tiny model, and the blocks that hand-made plans use."""

    def __init__(self, folder: Path, context: int = 256, **changes: Any) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**CONFIG, "max_position_embeddings": context}))
        tree: dict[str, Any] = {
            "hardware": {"use": "cpu"}, "dtype": "float32", "kv": {"bytes": 2**22},
            "scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        }  # fmt: skip
        for key, value in changes.items():
            if isinstance(value, dict):
                tree[key] = {**tree.get(key, {}), **value}
            else:
                tree[key] = value
        self.host = Host(load_config(overrides=tree))
        hardware = self.host.choose_hardware()
        self.source: ModelSource = self.host.open_source(f"dummy:{path}")
        need = ExecutorNeed(device_type=hardware.device_type)
        self.executor = self.host.resolve("executors", need)
        self.steps = 0

    def load(self) -> Any:
        return self.executor.load(self.source)

    def plan(
        self,
        slots: list[int],
        starts: list[int],
        lens: list[int],
        admits: list[SlotAdmit] | None = None,
        releases: list[int] | None = None,
    ) -> StepPlan:
        self.steps += 1
        num = len(slots)
        return StepPlan(
            self.steps, np.array(slots, np.int32), np.array(starts, np.int32),
            np.array(lens, np.int32), np.zeros(num, np.int32), np.ones(num, np.bool_),
            admits or [], releases or [],
        )  # fmt: skip

    def admit(self, slot: int, params: SamplingParams | None = None) -> SlotAdmit:
        blocks = list(range(1 + 4 * slot, 5 + 4 * slot))
        params = params or SamplingParams(temperature=0.0)
        return SlotAdmit(slot, f"r{slot}", PROMPT, len(PROMPT), 0, params, slot, (), (blocks,))

    def generate(self, slot: int, num: int, params: SamplingParams | None = None) -> list[int]:
        admit = self.admit(slot, params)
        tickets = [self.executor.execute(self.plan([slot], [0], [len(PROMPT)], [admit]))]
        out = []
        for i in range(num - 1):
            tickets.append(self.executor.execute(self.plan([slot], [len(PROMPT) + i], [1])))
            if len(tickets) >= self.executor.max_in_flight:
                out.append(int(tickets.pop(0).wait().token_ids[0, 0]))
        out += [int(ticket.wait().token_ids[0, 0]) for ticket in tickets]
        self.executor.execute(self.plan([], [], [], releases=[slot])).wait()
        return out


@pytest.fixture
def setup(tmp_path: Path):
    made: list[Setup] = []

    def build(**changes: Any) -> Setup:
        made.append(Setup(tmp_path, **changes))
        return made[-1]

    yield build
    for one in made:
        one.executor.close()


def test_declaration_is_light() -> None:
    code = (
        "import sys; from cardcage.plugins.executors.inprocess import InProcess; "
        "assert InProcess.name == 'inprocess'; assert 'torch' not in sys.modules; "
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_load_offers_the_capacity(setup) -> None:
    one = setup()
    capacity = one.load()
    assert [g.kind for g in capacity.groups] == ["full"]
    assert capacity.pool_bytes == 2**22
    assert (capacity.max_slots, capacity.max_model_len) == (4, 256)
    report = one.executor.explain()
    json.dumps(report)
    assert report["kv_pool_why"] == "kv.bytes"
    assert report["graphs"] == "off: cpu captures no graphs"
    assert report["kv_blocks"] == {"full0": 2**22 // capacity.groups[0].page_bytes - 1}
    assert report["dtype"] == "float32 (as configured)"


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.9, min_tokens=3),
])  # fmt: skip
def test_one_or_two_steps_in_flight_give_the_same_tokens(setup, params) -> None:
    inline = setup(scheduler={"steps_in_flight": 1})
    inline.load()
    assert inline.executor.explain()["steps_run"] == "inside execute()"
    thread = setup(scheduler={"steps_in_flight": 2})
    thread.load()
    assert thread.executor.max_in_flight == 2
    assert thread.executor.explain()["steps_run"] == "on a thread beside the planner"
    tokens = inline.generate(1, 12, params)
    assert thread.generate(1, 12, params) == tokens
    assert len(set(tokens)) > 1


def test_slots_can_be_reused_and_reset(setup) -> None:
    one = setup()
    one.load()
    first = one.generate(2, 5)
    assert one.generate(2, 5) == first
    one.executor.execute(one.plan([0], [0], [18], [one.admit(0)])).wait()
    one.executor.reset()
    assert one.generate(0, 5) == first


@pytest.mark.parametrize("steps", [1, 2])
def test_a_failed_step_reports_its_cause_and_reset_recovers(setup, steps, monkeypatch) -> None:
    one = setup(scheduler={"steps_in_flight": steps})
    one.load()
    expected = one.generate(0, 3)
    runner = one.executor._loaded.runner
    whole = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda inp: 1 / 0)
    failed = one.executor.execute(one.plan([0], [0], [18], [one.admit(0)]))
    later = one.executor.execute(one.plan([0], [18], [1]))
    with pytest.raises(ExecutionError, match=r"step \d+ failed: ZeroDivisionError") as caught:
        failed.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not isinstance(caught.value, EngineDead)
    with pytest.raises(ExecutionError, match="earlier step failed"):
        later.wait()
    assert failed.done()
    monkeypatch.setattr(runner.model, "forward", whole)
    one.executor.reset()
    assert one.generate(0, 3) == expected


def test_a_plan_that_breaks_an_invariant_fails_its_ticket(setup) -> None:
    one = setup()
    one.load()
    one.executor.execute(one.plan([0], [0], [18], [one.admit(0)])).wait()
    ticket = one.executor.execute(one.plan([0], [0], [18], [one.admit(0)]))
    with pytest.raises(ExecutionError, match="slot 0 is taken"):
        ticket.wait()


def test_failures_in_words() -> None:
    memory = failure(4, torch.OutOfMemoryError("tried to allocate 2 GiB"))
    assert "ran out of device memory; lower kv.utilization" in str(memory)
    assert isinstance(failure(4, torch.AcceleratorError("illegal access")), EngineDead)
    kept = ExecutionError("as it is", rows=(1,))
    assert failure(4, kept) is kept


def test_unloaded_and_closed_executors(setup) -> None:
    one = setup()
    assert one.executor.explain() == {}
    with pytest.raises(ExecutionError, match="no model is loaded"):
        one.executor.execute(one.plan([], [], [])).wait()
    one.executor.reset()
    one.load()
    with pytest.raises(Exception, match="holds a model already"):
        one.load()
    one.executor.close()
    one.executor.close()
    assert one.executor.explain() == {}


def test_context_is_cut_or_refused_when_the_pool_is_small(setup) -> None:
    # One token takes 512 bytes: 2 layers, K and V, 2 heads, 16 channels, 4 bytes each.
    small = {"bytes": 2**20, "block_size": 16}
    assert setup(context=2000, kv=small).load().max_model_len == 2000
    cut = setup(context=4096, kv=small)
    assert cut.load().max_model_len == 2048 - 16  # the null block takes one
    assert "was cut from the model's 4096 to 2032" in cut.executor.explain()["max_model_len_why"]
    with pytest.raises(ResourceError, match="max_model_len = 2032 would fit"):
        setup(context=4096, max_model_len=4096, kv=small).load()


def test_max_model_len_of_the_user(setup) -> None:
    assert setup(max_model_len=100).load().max_model_len == 100
    with pytest.raises(ConfigError, match="more than the model's context of 256"):
        setup(max_model_len=300).load()


def test_dtype_choice() -> None:
    host = SimpleNamespace(name="h", dtypes=lambda: ("float32", "bfloat16"))
    chip = SimpleNamespace(name="c", dtypes=lambda: ("bfloat16", "float16", "float32"))
    assert choose_dtype("auto", {"dtype": "bfloat16"}, host)[0] == torch.float32
    assert choose_dtype("auto", {"torch_dtype": "torch.float16"}, chip)[0] == torch.float16
    assert choose_dtype("auto", {"dtype": "float32"}, chip)[0] == torch.bfloat16
    assert choose_dtype("auto", {"text_config": {"dtype": "float16"}}, chip)[0] == torch.float16
    assert choose_dtype("float32", {}, chip) == (torch.float32, "as configured")
    with pytest.raises(ConfigError, match="float16 does not run on h"):
        choose_dtype("float16", {}, host)


def test_batches_on_the_executor_equal_single_requests(setup) -> None:
    one = setup(dtype="float32")
    one.load()
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=20)]
    alone = [one.generate(slot, 4, params[slot]) for slot in range(2)]
    admits = [one.admit(slot, params[slot]) for slot in range(2)]
    first = one.executor.execute(one.plan([0, 1], [0, 0], [18, 18], admits)).wait()
    rest = [one.executor.execute(one.plan([0, 1], [18 + i] * 2, [1, 1])).wait() for i in range(3)]
    for slot in range(2):
        assert [int(r.token_ids[slot, 0]) for r in (first, *rest)] == alone[slot]


@pytest.mark.gpu
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, frequency_penalty=0.5, logprobs=2),
])  # fmt: skip
def test_graphs_equal_eager_without_a_host_sync(tmp_path: Path, params: SamplingParams) -> None:
    tokens = []
    for eager in (True, False):
        gpu = {"hardware": {"use": "auto"}, "dtype": "bfloat16", "kv": {"bytes": 2**24}}
        one = Setup(tmp_path, enforce_eager=eager, **gpu)
        one.load()
        one.generate(0, 4, params)  # compiles and captures
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tokens.append([one.generate(slot, 12, params) for slot in range(3)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ("replays" in one.executor.explain()["graphs"]) != eager
        one.executor.close()
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_pool_is_sized_from_utilization(tmp_path: Path) -> None:
    one = Setup(tmp_path, hardware={"use": "auto"}, kv={"bytes": None, "utilization": 0.5})
    capacity = one.load()
    free, total = one.host.choose_hardware().memory()
    assert 0.3 * total < capacity.pool_bytes < 0.5 * total
    assert total - free < 0.55 * total
    one.executor.close()
