"""From GGUF tensor names to Hugging Face names, with the converter's rearrangements undone.

Each Hugging Face name maps to an `Entry`: a stored tensor, maybe one expert's slice of it, and
what must be undone when it is read. Tensors that no rule knows keep their own name, so that the
weight plan reports them.

Source: tensor names of the GGUF format; the converter's row permutation and norm offset are
described at `Entry`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cardcage.core.errors import CheckpointError
from cardcage.plugins.loaders.gguf.reader import GgufFile, GgufTensor


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the values of one Hugging Face tensor come from.

    `expert` picks one slice of a stacked [E, N, K] bank. `heads` > 0: rows were permuted to
    interleaved rotary order, per head new[2 i + j] = old[j D/2 + i], and are put back (whole
    rows move, so packed data stays packed). `minus_one`: the norm was stored as w + 1.
    """

    tensor: GgufTensor
    expert: int | None = None
    heads: int = 0
    minus_one: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes // (1 if self.expert is None else self.tensor.shape[0])


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BY_ARCH: dict[str, dict[str, str]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "olmo2": _SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
}
_EXPERTS: dict[str, dict[str, str]] = {
    "llama": {
        "ffn_gate": "block_sparse_moe.experts.{e}.w1",
        "ffn_up": "block_sparse_moe.experts.{e}.w3",
        "ffn_down": "block_sparse_moe.experts.{e}.w2",
    },
    "qwen3moe": {
        "ffn_gate": "mlp.experts.{e}.gate_proj",
        "ffn_up": "mlp.experts.{e}.up_proj",
        "ffn_down": "mlp.experts.{e}.down_proj",
    },
}
# Already folded into the config by config.py.
_CONSUMED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+?)(_exps)?(?:\.(\d+))?\.(weight|bias)")


def hf_names(file: GgufFile, arch: str, config: dict[str, object]) -> dict[str, Entry]:
    """Hugging Face name -> where its values come from.

    Args:
        file: the open file.
        arch: `general.architecture`.
        config: the config made from the metadata (head counts).

    Raises:
        CheckpointError: two stored tensors map to one name, or rows do not split into heads.
    """
    names: dict[str, Entry] = {}
    for tensor in file.tensors.values():
        if tensor.name in _CONSUMED:
            continue
        for name, entry in _entries(tensor, arch, config):
            if name in names:
                raise CheckpointError(
                    f"{file.path.name}: tensors {names[name].tensor.name!r} and {tensor.name!r} "
                    f"both stand for {name}"
                )
            names[name] = entry
    return names


def _entries(tensor: GgufTensor, arch: str, config: dict[str, object]) -> list[tuple[str, Entry]]:
    gemma_norm = arch.startswith("gemma") and tensor.name.endswith("_norm.weight")
    if tensor.name in _TOP:
        return [(_TOP[tensor.name], Entry(tensor, minus_one=gemma_norm))]
    match = _BLOCK.fullmatch(tensor.name)
    if match is None:
        return [(tensor.name, Entry(tensor))]
    layer, part, stacked, expert, suffix = match.groups()
    prefix = f"model.layers.{layer}."
    if stacked or expert is not None:
        template = _EXPERTS.get(arch, {}).get(part)
        if template is None or (stacked and len(tensor.shape) != 3):
            return [(tensor.name, Entry(tensor))]
        if stacked:
            return [
                (f"{prefix}{template.format(e=e)}.{suffix}", Entry(tensor, expert=e))
                for e in range(tensor.shape[0])
            ]
        return [(f"{prefix}{template.format(e=expert)}.{suffix}", Entry(tensor))]
    place = _BY_ARCH.get(arch, {}).get(part) or _LAYER.get(part)
    if place is None:
        return [(tensor.name, Entry(tensor))]
    heads = 0
    if arch == "llama" and part in ("attn_q", "attn_k"):
        key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        heads = int(str(config[key]))
        if heads < 1 or tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                f"tensor {tensor.name!r} has {tensor.shape[0]} rows, which are no whole number "
                f"of pairs for {heads} heads"
            )
    return [(f"{prefix}{place}.{suffix}", Entry(tensor, heads=heads, minus_one=gemma_norm))]
