"""A tiny Llama in every layout, from files through the whole engine, against transformers.

The weights are quantized by the writers of `tests.support.quant_numpy`, saved beside a config
that declares the method, and loaded by name of the folder alone. The oracle is a transformers
model that holds the decoded weights in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from cardcage import LLM, SamplingParams
from cardcage.core.errors import CheckpointError, ModelError
from tests.support import quant_numpy as q
from tests.support.oracle import Oracle

F32, F16 = np.float32, np.float16
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
Layer = tuple[dict[str, torch.Tensor], np.ndarray]  # tensors by suffix, decoded [N, K]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(LlamaConfig(**SIZES))


def affine_codes(w: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Asymmetric codes [N, K], zeros and scales [N, G] of w, by rounding to nearest."""
    n, k = w.shape
    groups = -(-k // group)
    codes, top = np.zeros((n, k), np.int64), (1 << bits) - 1
    zero, scale = np.zeros((n, groups), np.int64), np.zeros((n, groups), F16)
    for g in range(groups):
        part = w[:, g * group : (g + 1) * group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale[:, g] = np.maximum((high - low) / top, 1e-4)
        zero[:, g] = np.clip(np.round(-low / scale[:, g]), 0, top)
        wide = np.round(part / scale[:, g : g + 1].astype(F32)) + zero[:, g : g + 1]
        codes[:, g * group : (g + 1) * group] = np.clip(wide, 0, top)
    return codes, zero, scale


def gptq(bits: int, act_order: bool = False) -> Callable[[str, np.ndarray], Layer]:
    def write(name: str, w: np.ndarray) -> Layer:
        group = 32
        k = w.shape[1]
        tensors = q.gptq_tensors(*affine_codes(w, bits, group), bits)
        tensors["g_idx"] = (np.arange(k) // group).astype(np.int32)
        if act_order:  # one order per input, as the inputs of q, k and v are the same
            seed = 1 if "qkv"[0] in name else 2
            tensors["g_idx"] = np.random.default_rng(seed).permutation(tensors["g_idx"])
        values = q.read_gptq(tensors, bits, group)
        return {s: torch.from_numpy(np.array(t)) for s, t in tensors.items()}, values

    return write


def awq(name: str, w: np.ndarray) -> Layer:
    tensors = q.awq_tensors(*affine_codes(w, 4, 32), 4)
    return {s: torch.from_numpy(t) for s, t in tensors.items()}, q.read_awq(tensors, 4, 32)


def packed(bits: int) -> Callable[[str, np.ndarray], Layer]:
    def write(name: str, w: np.ndarray) -> Layer:
        codes, zero, scale = affine_codes(w, bits, 32)
        tensors = q.ct_tensors(codes, zero, scale, bits)
        return {s: torch.from_numpy(t) for s, t in tensors.items()}, q.read_ct(tensors, bits, 32)

    return write


def eight_bit(
    family: str, rows: int, cols: int, scale_name: str, **more: float
) -> Callable[[str, np.ndarray], Layer]:
    """Codes and a grid of scales; rows or cols 0 = all."""

    def write(name: str, w: np.ndarray) -> Layer:
        n, k = w.shape
        r, c = rows or n, cols or k
        grid = np.zeros((-(-n // r), -(-k // c)), F32)
        for i, j in np.ndindex(grid.shape):
            part = w[i * r : (i + 1) * r, j * c : (j + 1) * c]
            grid[i, j] = np.abs(part).max() / (448 if family == "fp8" else 127)
        scales = np.kron(grid, np.ones((r, c), F32))[:n, :k]
        if family == "fp8":
            raw = np.vectorize(q.nearest_e4m3)(w / scales).astype(np.uint8)
            codes, numbers = torch.from_numpy(raw).view(torch.float8_e4m3fn), q.E4M3[raw]
        else:
            numbers = np.clip(np.round(w / scales), -127, 127)
            codes = torch.from_numpy(numbers.astype(np.int8))
        shaped = torch.from_numpy(grid if rows and (cols or rows == 1) else grid.reshape(-1))
        tensors = {"weight": codes, scale_name: shaped}
        tensors |= {s: torch.tensor([v]) for s, v in more.items()}
        return tensors, q.scaled(numbers, grid, r, c)

    return write


def group(weights: dict[str, Any], acts: dict[str, Any] | None) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": acts}


def compressed(
    format_: str, weights: dict[str, Any], acts: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": format_, "ignore": ["lm_head"],
        "config_groups": {"group_0": group(weights, acts)},
    }  # fmt: skip


GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": False}
INT_GROUPS = {"type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
# Weights only: the answer is that of the decoded weights, up to the order of sums.
WEIGHT_ONLY: dict[str, tuple[dict[str, Any], Callable[[str, np.ndarray], Layer]]] = {
    "gptq2": (GPTQ | {"bits": 2}, gptq(2)),
    "gptq3": (GPTQ | {"bits": 3}, gptq(3)),
    "gptq4": (GPTQ | {"bits": 4}, gptq(4)),
    "gptq8": (GPTQ | {"bits": 8}, gptq(8)),
    "gptq4-act-order": (GPTQ | {"bits": 4, "desc_act": True}, gptq(4, True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "packed4": (compressed("pack-quantized", INT_GROUPS | {"num_bits": 4}), packed(4)),
    "packed8": (compressed("pack-quantized", INT_GROUPS | {"num_bits": 8}), packed(8)),
    "int8": (
        {"quant_method": "int8", "activation_scheme": None}, eight_bit("int8", 1, 0, "weight_scale")
    ),
    "fp8-weights": (
        compressed("float-quantized", CHANNEL | {"type": "float"}),
        eight_bit("fp8", 1, 0, "weight_scale"),
    ),
}  # fmt: skip
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
# Inputs are rounded too: near the decoded weights' answer, measured as a divergence.
QUANTIZED_INPUTS: dict[str, tuple[dict[str, Any], Callable[[str, np.ndarray], Layer]]] = {
    "fp8-tensor": ({"quant_method": "fp8"}, eight_bit("fp8", 0, 0, "weight_scale")),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        eight_bit("fp8", 0, 0, "weight_scale", input_scale=0.05),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        eight_bit("fp8", 128, 128, "weight_scale_inv"),
    ),
    "int8-token": ({"quant_method": "int8"}, eight_bit("int8", 1, 0, "weight_scale")),
    "ct-int8": (
        compressed("int-quantized", CHANNEL | {"type": "int"}, TOKEN | {"type": "int"}),
        eight_bit("int8", 1, 0, "weight_scale"),
    ),
}  # fmt: skip


def is_linear(name: str) -> bool:
    return "layers" in name and name.endswith("_proj.weight")


def save(
    oracle: Oracle, folder: Path, config: dict[str, Any], write: Callable[[str, np.ndarray], Layer]
) -> dict[str, torch.Tensor]:
    """Write the quantized model; returns the decoded weights by name."""
    stored, decoded = {}, {}
    for name, tensor in oracle.tensors.items():
        if not is_linear(name):
            stored[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        tensors, values = write(prefix, tensor.numpy())
        stored |= {f"{prefix}.{s}": t.contiguous() for s, t in tensors.items()}
        decoded[name] = torch.from_numpy(values)
    save_file(stored, folder / "model.safetensors")
    declared = {**oracle.config, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(declared))
    return decoded


def engine(folder: Path, **more: Any) -> LLM:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    cpu = {"kv": {"bytes": "1MiB"}, "hardware": {"use": "cpu"}}
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **sizes, **cpu, **more)


def logprobs(llm: LLM, tokens: list[int]) -> torch.Tensor:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert out.prompt_logprobs is not None
    pairs = zip(out.prompt_logprobs[1:], tokens[1:], strict=True)
    return torch.tensor([entry[t].logprob for entry, t in pairs])


def expected(oracle: Oracle, decoded: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """What transformers says with the decoded weights; the oracle's own are put back."""
    kept = {n: p.data.clone() for n, p in oracle.hf.named_parameters() if n in decoded}
    assert len(kept) == len(decoded)
    for name, p in oracle.hf.named_parameters():
        if name in decoded:
            p.data.copy_(decoded[name])
    logits = oracle.logits(tokens).log_softmax(-1)
    for name, p in oracle.hf.named_parameters():
        if name in kept:
            p.data.copy_(kept[name])
    return logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("layout", list(WEIGHT_ONLY))
def test_weights_only(oracle: Oracle, tmp_path: Path, layout: str) -> None:
    config, write = WEIGHT_ONLY[layout]
    decoded = save(oracle, tmp_path, config, write)
    tokens = oracle.tokens(40)
    with engine(tmp_path) as llm:
        got = logprobs(llm, tokens)
        used = llm.explain()["executor"]["model"]["linear"]
    assert any(not k.startswith("none") for k in used)
    assert torch.allclose(got, expected(oracle, decoded, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", list(QUANTIZED_INPUTS))
def test_quantized_inputs(oracle: Oracle, tmp_path: Path, layout: str) -> None:
    config, write = QUANTIZED_INPUTS[layout]
    decoded = save(oracle, tmp_path, config, write)
    tokens = oracle.tokens(40)
    with engine(tmp_path) as llm:
        got = logprobs(llm, tokens)
        used = llm.explain()["executor"]["model"]["linear"]
    kernel = "int8_matmul" if "int8" in layout else "fp8_matmul"
    assert all(kernel in k for k in used if not k.startswith("none"))
    want = expected(oracle, decoded, tokens)
    assert float((got - want).abs().mean()) < (0.1 if "int8" in layout else 0.4)
    assert not torch.equal(got, want)


@pytest.mark.parametrize("scheme", ["fp8", "fp8_per_block", "int8", "int8_per_channel"])
def test_online(oracle: Oracle, tmp_path: Path, scheme: str) -> None:
    """Plain files, quantized at load: near the float model."""
    save_file(oracle.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(oracle.config))
    tokens = oracle.tokens(40)
    options = {"plugin": {"online": {"scheme": scheme}}, "quant": {"use": "online"}}
    with engine(tmp_path, **options) as llm:
        got = logprobs(llm, tokens)
        used = llm.explain()["executor"]["model"]["linear"]
    assert any(f"{scheme.partition('_')[0]}_matmul" in k for k in used)
    far = 0.1 if "int8" in scheme else 0.4  # e4m3 keeps 3 bits of each number, int8 about 7
    assert float((got - expected(oracle, {}, tokens)).abs().mean()) < far


def test_online_by_pattern(oracle: Oracle, tmp_path: Path) -> None:
    """Patterns hold dots; what they leave alone stays a plain product."""
    save_file(oracle.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(oracle.config))
    options = {"scheme": "int8", "targets": {"*.down_proj": "none", "re:.*o_proj": "fp8"}}
    with engine(tmp_path, quant={"use": "online"}, plugin={"online": options}) as llm:
        used = sorted(llm.explain()["executor"]["model"]["linear"])
    assert [k.partition(" ")[0] for k in used] == ["fp8:g32/group", "int8:row/token", "none"]


@pytest.mark.parametrize(
    ("layout", "gone"),
    [("gptq4", "scales"), ("awq", "qzeros"), ("packed4", "weight_zero_point"),
     ("int8", "weight_scale"), ("fp8-weights", "weight")],
)  # fmt: skip
def test_a_missing_or_extra_tensor_is_named(
    oracle: Oracle, tmp_path: Path, layout: str, gone: str
) -> None:
    from safetensors.torch import load_file

    config, write = WEIGHT_ONLY[layout]
    save(oracle, tmp_path, config, write)
    stored = load_file(tmp_path / "model.safetensors")
    victim = f"model.layers.1.mlp.up_proj.{gone}"
    save_file({n: t for n, t in stored.items() if n != victim}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"missing[^\n]*\n?.*{victim}"):
        engine(tmp_path)
    extra = "model.layers.0.mlp.up_proj.weight_g_idx"
    save_file({**stored, extra: torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"unexpected[^\n]*\n?.*{extra}"):
        engine(tmp_path)


def test_a_config_that_is_not_understood(oracle: Oracle, tmp_path: Path) -> None:
    config, write = WEIGHT_ONLY["int8"]
    save(oracle, tmp_path, config | {"rotation": "hadamard"}, write)
    with pytest.raises(ModelError, match="'rotation' not supported"):
        engine(tmp_path)


def test_online_does_not_take_what_is_quantized_already(oracle: Oracle, tmp_path: Path) -> None:
    from cardcage.core.errors import SelectionError

    save(oracle, tmp_path, *WEIGHT_ONLY["int8"])
    with pytest.raises(SelectionError, match=r"methods int8 not in \{gguf, none\}"):
        engine(tmp_path, quant={"use": "online"})


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_online_experts(tmp_path: Path, scheme: str) -> None:
    """Experts are quantized one by one, the router is left alone."""
    from transformers import MixtralConfig

    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    oracle = Oracle(MixtralConfig(**sizes))
    save_file(oracle.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(oracle.config))
    tokens = oracle.tokens(40)
    options = {"plugin": {"online": {"scheme": scheme}}, "quant": {"use": "online"}}
    with engine(tmp_path, **options) as llm:
        got = logprobs(llm, tokens)
        used = sorted(llm.explain()["executor"]["model"]["linear"])
    assert any(k.startswith("none") for k in used)  # router and head
    assert any("g64/group" in k or "g32/group" in k for k in used)
    # a token that changes its experts moves far, so the middle one is looked at
    assert float((got - expected(oracle, {}, tokens)).abs().median()) < 0.3
