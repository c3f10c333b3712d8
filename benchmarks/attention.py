"""Speed of the triton_paged attention backend on one GPU, beside torch's fused attention.

    python benchmarks/attention.py --json out.json          decode and prefill tables
    python benchmarks/attention.py --tune --json tune.json  tries launch shapes, prints the best
    python benchmarks/attention.py --tune --quick           near the rows in use only (2-3 minutes)

Each case runs the layers of a model one after the other in a CUDA graph, every layer with a cache
of its own inside one block pool (block ids shuffled), so that no case is served from L2 and the
strides are an engine's. Time is the median of graph replays divided by the layers; `write` and
`plan` are timed apart. Before it is timed, each result is compared with torch's attention on the
same keys. Bytes count each visible key and value once; operations count causal pairs only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cardcage.core.contracts import AttentionNeed, StepMeta
from cardcage.plugins.attention.triton_paged.launcher import Backend
from cardcage.plugins.attention.triton_paged.tuned import DecodeConfig, PrefillConfig

# query heads, KV heads, head size (shared/bench models)
SHAPES = {
    "qwen3-0.6b": (16, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
}
DECODE = [(b, n) for n in (1024, 8192) for b in (1, 32, 128, 256)] + [(64, 8192)]
PREFILL = [512, 2048, 8192]
COLD_BYTES = 512 << 20  # caches of all layers together: several times the L2
TOLERANCE = 2e-2


def num_sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def make_need(shape: str, block_size: int) -> AttentionNeed:
    heads, kv_heads, size = SHAPES[shape]
    return AttentionNeed(
        device_type="cuda",
        arch=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        value_size=size,
        block_size=block_size,
        group_size=heads // kv_heads,
        scale=size**-0.5,
    )


@dataclass
class Case:
    """A batch over a pool: `layers` cache views, dense copies of the first layer to check with."""

    need: AttentionNeed
    query_lens: list[int]
    seq_lens: list[int]
    layers: int
    spread: int = 1  # pages hold this many times the layers' bytes (as with more layers)
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.need
        device = "cuda"
        block_counts = [-(-length // n.block_size) for length in self.seq_lens]
        num_blocks = sum(block_counts) + 1
        part = n.num_kv_heads * n.block_size * n.head_size  # elements
        page = 2 * part * self.layers * self.spread
        self.pool = torch.empty(num_blocks * page, dtype=torch.bfloat16, device=device)
        inner = (n.block_size * n.head_size, n.head_size, 1)
        shape = (num_blocks, n.num_kv_heads, n.block_size, n.head_size)
        for layer in range(self.layers):
            views = [
                self.pool.as_strided(shape, (page, *inner), (2 * layer + i) * part)
                for i in range(2)
            ]
            self.caches.append((views[0], views[1]))
        order = (torch.randperm(num_blocks - 1, device=device) + 1).to(torch.int32)
        width = max(block_counts)
        self.table = torch.zeros(len(self.seq_lens), width, dtype=torch.int32, device=device)
        at = 0
        for r, count in enumerate(block_counts):
            self.table[r, :count] = order[at : at + count]
            at += count
        for cache in self.caches:
            for view in cache:
                for ids in order.split(4096):
                    view[ids.long()] = torch.randn(
                        len(ids), *shape[1:], dtype=torch.bfloat16, device=device
                    )
        self.tokens = sum(self.query_lens)
        self.q = torch.randn(
            self.tokens, n.num_heads, n.head_size, dtype=torch.bfloat16, device=device
        )
        self.k = torch.randn(
            self.tokens, n.num_kv_heads, n.head_size, dtype=torch.bfloat16, device=device
        )
        self.out = torch.empty_like(self.q)
        self.meta = self._meta()

    def _meta(self) -> StepMeta:
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        slots = torch.full((self.tokens,), -1, dtype=torch.int64, device="cuda")
        decodes = next((i for i, q in enumerate(self.query_lens) if q != 1), len(self.query_lens))
        return StepMeta(
            num_reqs=len(self.query_lens),
            num_tokens=self.tokens,
            num_decodes=decodes,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
            query_start_loc=starts.cuda(),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32).cuda(),
            block_table=self.table,
            slot_mapping=slots,
            query_lens_host=self.query_lens,
            seq_lens_host=self.seq_lens,
        )

    def last_slots(self) -> torch.Tensor:
        """The slot of each row's own token, so that writing is timed on real slots."""
        size = self.need.block_size
        slots = []
        for r, (q, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            pos = torch.arange(length - q, length, device="cuda")
            slots.append(self.table[r].long()[pos // size] * size + pos % size)
        return torch.cat(slots)

    def dense(self, request: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, K, L, D] of one request."""
        length, size = self.seq_lens[request], self.need.block_size
        ids = self.table[request, : -(-length // size)].long()
        k, v = (
            view[ids].transpose(0, 1).flatten(1, 2)[:, :length].unsqueeze(0)
            for view in self.caches[layer]
        )
        return k, v

    def check(self) -> float:
        """Largest absolute error of `out` (made from layer 0) over some requests."""
        worst = 0.0
        starts = [0, *itertools.accumulate(self.query_lens)]
        picks = {0, len(self.query_lens) // 2, len(self.query_lens) - 1}
        for r in sorted(picks):
            k, v = self.dense(r)
            q = self.q[starts[r] : starts[r + 1]].transpose(0, 1).unsqueeze(0)
            rows = q.shape[2]
            length = k.shape[2]
            group = self.need.num_heads // self.need.num_kv_heads
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            mask = None
            if rows > 1 and rows != length:
                i = torch.arange(length - rows, length, device="cuda")[:, None]
                mask = torch.arange(length, device="cuda")[None, :] <= i
            want = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=rows > 1 and mask is None, scale=self.need.scale
            )[0].transpose(0, 1)
            got = self.out[starts[r] : starts[r + 1]]
            worst = max(worst, float((got.float() - want.float()).abs().max()))
        return worst

    @property
    def kv_bytes(self) -> int:
        n = self.need
        return sum(self.seq_lens) * n.num_kv_heads * (n.head_size + n.value_size) * 2

    @property
    def flops(self) -> int:
        n = self.need
        pairs = sum(
            q * length - q * (q - 1) // 2
            for q, length in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 2 * pairs * n.num_heads * (n.head_size + n.value_size)


def layers_for(need: AttentionNeed, tokens: int) -> int:
    one = tokens * need.num_kv_heads * 2 * need.head_size * 2
    return max(2, min(28, math.ceil(COLD_BYTES / one)))


def timed(body: Callable[[], None], budget_ms: float = 60.0) -> float:
    """Median milliseconds of one graph replay of `body`."""
    body()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return timed_graph(graph, budget_ms)


def timed_graph(graph: torch.cuda.CUDAGraph, budget_ms: float) -> float:
    def once(times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / times

    once(2)
    per_sample = max(1, min(50, int(budget_ms / 8 / max(once(1), 1e-3))))
    return statistics.median(once(per_sample) for _ in range(8))


def run_case(case: Case, backend: Backend, budget_ms: float = 60.0) -> dict[str, float]:
    """Milliseconds of a layer's attention, its largest error against torch's."""
    plan = backend.plan(case.meta)
    backend.forward(case.q, case.caches[0], plan, out=case.out)
    error = case.check()
    if not error < TOLERANCE:
        raise RuntimeError(f"wrong result: largest error {error} of {TOLERANCE} allowed")

    def body() -> None:
        for cache in case.caches:
            backend.forward(case.q, cache, plan, out=case.out)

    return {"ms": timed(body, budget_ms) / case.layers, "error": error}


def torch_ms(case: Case) -> float:
    """Milliseconds of torch's fused attention on contiguous keys and values of the same size."""
    n = case.need
    batch, length, rows = len(case.seq_lens), case.seq_lens[0], case.query_lens[0]
    layers = max(1, min(case.layers, int(30e9 // case.kv_bytes)))
    shape = (batch, n.num_kv_heads, length, n.head_size)
    pairs = [
        tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for _ in range(layers)
    ]
    q = case.q.view(batch, rows, n.num_heads, n.head_size).transpose(1, 2)

    def body() -> None:
        for k, v in pairs:
            F.scaled_dot_product_attention(
                q, k, v, is_causal=rows > 1, enable_gqa=True, scale=n.scale
            )

    return timed(body) / layers


def try_torch(case: Case) -> float | None:
    try:
        return torch_ms(case)
    except RuntimeError as error:  # out of memory, or no fused kernel for the shape
        print(f"  torch: {str(error).splitlines()[0][:100]}", flush=True)
        return None


def parts_ms(case: Case, backend: Backend) -> dict[str, float]:
    """Milliseconds of `write` (a layer) and `plan` (a step)."""
    case.meta.slot_mapping.copy_(case.last_slots())
    plan = backend.plan(case.meta)

    def write() -> None:
        for cache in case.caches:
            backend.write(case.k, case.k, cache, plan)

    def make_plan() -> None:
        backend.plan(case.meta)

    return {"write_ms": timed(write, 20.0) / case.layers, "plan_ms": timed(make_plan, 20.0)}


# ---- tables --------------------------------------------------------------------------------------


def decode_rows(shapes: Iterable[str], block_size: int) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        need = make_need(shape, block_size)
        backend = Backend(need, num_sms=num_sms())
        for batch, context in DECODE:
            case = Case(need, [1] * batch, [context] * batch, layers_for(need, batch * context))
            row: dict[str, Any] = {"shape": shape, "block": block_size, "batch": batch,
                                   "context": context, "layers": case.layers}  # fmt: skip
            row |= run_case(case, backend)
            row |= parts_ms(case, backend)
            row["gb_s"] = case.kv_bytes / row["ms"] / 1e6
            row["torch_ms"] = try_torch(case)
            rows.append(row)
            report("decode", row)
            del case
            torch.cuda.empty_cache()
    return rows


def spread_rows(block_size: int) -> list[dict[str, Any]]:
    """The pages of a whole model's layers between two blocks of one layer; ragged lengths."""
    rows = []
    need = make_need("llama-3.1-8b", block_size)
    backend = Backend(need, num_sms=num_sms())
    ragged = [97 + 61 * i % 2000 for i in range(128)]
    for name, lens, spread in (("pages of 32 layers", [4096] * 64, 16), ("ragged", ragged, 1)):
        case = Case(need, [1] * len(lens), lens, 2, spread)
        row: dict[str, Any] = {"shape": name, "block": block_size, "batch": len(lens),
                               "context": max(lens), "layers": 2}  # fmt: skip
        row |= run_case(case, backend)
        row["gb_s"] = case.kv_bytes / row["ms"] / 1e6
        rows.append(row)
        report("decode", row)
        del case
        torch.cuda.empty_cache()
    return rows


def prefill_rows(shapes: Iterable[str], block_size: int) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        need = make_need(shape, block_size)
        backend = Backend(need, num_sms=num_sms())
        for tokens in PREFILL:
            case = Case(need, [tokens], [tokens], 4)
            row: dict[str, Any] = {"shape": shape, "block": block_size, "tokens": tokens}
            row |= run_case(case, backend)
            row |= parts_ms(case, backend)
            row["tflop_s"] = case.flops / row["ms"] / 1e9
            row["torch_ms"] = try_torch(case)
            rows.append(row)
            report("prefill", row)
            del case
    return rows


def mixed_rows(shapes: Iterable[str], block_size: int) -> list[dict[str, Any]]:
    """64 decode rows and two prompt chunks of 1,024 tokens, one with a cached prefix."""
    rows = []
    for shape in shapes:
        need = make_need(shape, block_size)
        backend = Backend(need, num_sms=num_sms())
        case = Case(need, [1] * 64 + [1024, 1024], [1024] * 64 + [1024, 4096], 8)
        row: dict[str, Any] = {"shape": shape, "block": block_size}
        row |= run_case(case, backend)
        rows.append(row)
        report("mixed", row)
        del case
    return rows


def report(kind: str, row: dict[str, Any]) -> None:
    cells = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    ]
    print(f"{kind:8s}", "  ".join(cells), flush=True)


# ---- tuning --------------------------------------------------------------------------------------


class Tuner:
    """Tries configs on cases until the time is up; ranks by geometric mean of milliseconds."""

    def __init__(self, budget_s: float) -> None:
        self.stop = time.monotonic() + budget_s
        self.log: list[dict[str, Any]] = []

    def rank(
        self, cases: Sequence[Case], configs: Sequence[DecodeConfig | PrefillConfig]
    ) -> list[tuple[float, DecodeConfig | PrefillConfig]]:
        results = []
        for config in configs:
            if time.monotonic() > self.stop:
                left = len(configs) - len(results)
                print(f"  time is up, {left} configs not tried or failed", flush=True)
                break
            kind = "decode" if isinstance(config, DecodeConfig) else "prefill"
            try:
                times = [
                    run_case(c, Backend(c.need, num_sms=num_sms(), **{kind: config}), 10.0)["ms"]
                    for c in cases
                ]
            except Exception as error:
                self.log.append({"config": asdict(config), "error": str(error)[:200]})
                print(f"  {config}: {str(error)[:90]!r}", flush=True)
                continue
            score = math.exp(statistics.fmean(math.log(t) for t in times))
            results.append((score, config))
            self.log.append({"config": asdict(config), "ms": times, "score": score})
            print(f"  {config}: " + " ".join(f"{t:.4f}" for t in times), flush=True)
        return sorted(results, key=lambda pair: pair[0])


def tune_decode(
    block_size: int, budget_s: float, quick: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    tuner = Tuner(budget_s)

    def cases(names: Iterable[str]) -> list[Case]:
        out = []
        for name in names:
            need = make_need(name, block_size)
            for batch, context in ((1, 1024), (1, 8192), (32, 1024), (128, 1024), (64, 8192)):
                layers = layers_for(need, batch * context)
                out.append(Case(need, [1] * batch, [context] * batch, layers))
        return out

    grid = [
        DecodeConfig(block_n, warps, stages, 8, max(1, 256 // block_n))
        for block_n, warps, stages in itertools.product((64, 32, 128), (4, 2, 8), (3, 4, 2, 5))
        if block_n * stages <= 384
    ]
    if quick:  # the row in use and its neighbours: how the keys are split matters most
        now = Backend(make_need("llama-3.1-8b", block_size), num_sms=num_sms()).decode
        shapes = [replace(now, num_stages=stages) for stages in (now.num_stages, 3)]
        splits = itertools.product((2, 3, 4, 6, 8), (256, 512, 1024))
    else:
        print("decode: kernel shapes on llama-3.1-8b", flush=True)
        ranked = tuner.rank(cases(["llama-3.1-8b"]), grid)
        shapes = [config for _, config in ranked[:3] if isinstance(config, DecodeConfig)]
        splits = itertools.product((2, 4, 8, 16), (128, 256, 512))
    finals = [
        replace(shape, waves=waves, min_tiles=max(1, keys // shape.block_n))
        for shape, (waves, keys) in itertools.product(shapes, list(splits))
    ]
    print("decode: split on all shapes", flush=True)
    tuner.stop = time.monotonic() + budget_s
    ranked = tuner.rank(cases(SHAPES), finals)
    return [
        f"        256: {config},  # score {score:.4f}" for score, config in ranked[:5]
    ], tuner.log


def tune_prefill(
    block_size: int, budget_s: float, quick: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    tuner = Tuner(budget_s)

    def cases(names: Iterable[str]) -> list[Case]:
        return [
            Case(make_need(name, block_size), [tokens], [tokens], 4)
            for name in names
            for tokens in (2048, 8192)
        ]

    tiles = [(128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 32, 8), (128, 64, 4), (128, 32, 4),
             (64, 128, 4), (64, 32, 4), (256, 64, 8), (256, 32, 8)]  # fmt: skip
    grid = [
        PrefillConfig(m, n, warps, stages, tma)
        for (m, n, warps), stages in itertools.product(tiles, (3, 2, 4))
        for tma in ((False, True) if block_size % n == 0 else (False,))
    ]
    best = [c for c in grid if c.block_m == 128 and c.num_warps == 8 and c.num_stages < 4]
    if not quick:
        print("prefill: tiles on llama-3.1-8b", flush=True)
        best = [c for _, c in tuner.rank(cases(["llama-3.1-8b"]), grid)[:5]]  # type: ignore[misc]
    print("prefill: best tiles on all shapes", flush=True)
    tuner.stop = time.monotonic() + budget_s
    ranked = tuner.rank(cases(SHAPES), best)
    return [
        f"        256: {config},  # score {score:.4f}" for score, config in ranked[:5]
    ], tuner.log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--tune", action="store_true", help="try launch shapes instead")
    parser.add_argument("--quick", action="store_true", help="tune near the rows in use only")
    parser.add_argument("--only", choices=["decode", "prefill"], help="one table or one tuning")
    parser.add_argument("--shape", choices=sorted(SHAPES), action="append")
    parser.add_argument("--block-size", type=int, action="append", help="default 16 and 64")
    parser.add_argument("--budget-s", type=float, default=120.0, help="per tuning stage")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs a CUDA device; none is visible to torch")
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "command": sys.argv,
    }
    print(result, flush=True)
    shapes = args.shape or list(SHAPES)
    for size in args.block_size or [16, 64]:
        for kind in ("decode", "prefill"):
            if args.only not in (None, kind):
                continue
            if args.tune:
                tune = tune_decode if kind == "decode" else tune_prefill
                best, log = tune(size, args.budget_s, args.quick)
                result[f"tune_{kind}_{size}"] = {"best": best, "log": log}
                print(f"# {kind}, block size {size}, key bytes 256, {result['device']}")
                print("\n".join(best), flush=True)
            elif kind == "decode":
                result[f"decode_{size}"] = decode_rows(shapes, size) + spread_rows(size)
            else:
                result[f"prefill_{size}"] = prefill_rows(shapes, size)
                result[f"mixed_{size}"] = mixed_rows(shapes, size)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
