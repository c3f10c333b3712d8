"""Perplexity of a model under several quantizations, side by side in one table.

    python benchmarks/perplexity.py --schemes none fp8/weights int8 --out NAME.json
    python benchmarks/perplexity.py --model FOLDER --tokens 2000

The text is `benchmarks/data/corpus.u16` (token ids of the embedded model, little-endian uint16),
cut in windows of `--window` tokens that start afresh; every token but a window's first is scored
given those before it. Perplexity = exp(-mean log-probability). "none" is the model as it is in
`--dtype`; other schemes are those of the online quantizer. `SCHEME/weights` leaves the inputs
unquantized, `SCHEME/least_error` searches scales, and both can be combined. The change against
the first scheme is printed in percent.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from cardcage import LLM, SamplingParams

DEFAULT = [
    "none", "fp8", "fp8/weights", "int8", "int8/weights", "fp8_per_channel/weights/least_error",
    "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "int8_per_channel",
]  # fmt: skip
CORPUS = Path(__file__).parent / "data" / "corpus.u16"


def windows(num_tokens: int, size: int) -> list[list[int]]:
    """The corpus's first tokens in windows of `size`; a last window of one token is left out."""
    ids = np.fromfile(CORPUS, dtype="<u2")[:num_tokens].astype(int).tolist()
    cut = [ids[at : at + size] for at in range(0, len(ids), size)]
    return [w for w in cut if len(w) > 1]


def overrides(scheme: str) -> dict[str, Any]:
    """The config that runs a scheme."""
    if scheme == "none":
        return {}
    name, *flags = scheme.split("/")
    unknown = set(flags) - {"weights", "least_error"}
    if unknown:
        raise SystemExit(f"{scheme}: {unknown.pop()!r} is neither 'weights' nor 'least_error'")
    options = {"scheme": name}
    if "weights" in flags:
        options["activations"] = "none"
    if "least_error" in flags:
        options["scales"] = "least_error"
    return {"quant": {"use": "online"}, "plugin": {"online": options}}


def measure(model: str, dtype: str, scheme: str, cut: list[list[int]]) -> dict[str, Any]:
    """Mean log-probability of the scored tokens, and what ran it."""
    started = time.perf_counter()
    llm = LLM(model, dtype=dtype, max_model_len=max(map(len, cut)) + 1, **overrides(scheme))
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for window in cut:
        (output,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        scored = output.prompt_logprobs[1:]
        total += sum(entry[token].logprob for entry, token in zip(scored, window[1:], strict=True))
        count += len(scored)
        llm.reset_prefix_cache()
    ran = time.perf_counter()
    used = llm.explain()["executor"]["model"]["linear"]
    llm.close()
    return {
        "scheme": scheme,
        "tokens": count,
        "perplexity": math.exp(-total / count),
        "load_s": round(loaded - started, 1),
        "run_s": round(ran - loaded, 1),
        "linear": used,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="", help="model reference; empty: the embedded model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--schemes", nargs="+", default=DEFAULT)
    parser.add_argument("--out", type=Path, help="write the rows as JSON, with the command")
    args = parser.parse_args()
    cut, rows = windows(args.tokens, args.window), []
    for scheme in args.schemes:
        row = measure(args.model, args.dtype, scheme, cut)
        row["change_percent"] = (
            100 * (row["perplexity"] / rows[0]["perplexity"] - 1) if rows else 0.0
        )
        rows.append(row)
        print(
            f"{scheme:<36} perplexity {row['perplexity']:9.4f}  {row['change_percent']:+7.3f} %"
            f"  {row['tokens']} tokens, {row['run_s']} s",
            flush=True,
        )
    if args.out is not None:
        about = {
            "command": "python benchmarks/perplexity.py " + " ".join(sys.argv[1:]),
            "dtype": args.dtype,
            "window": args.window,
            "machine": platform.processor() or platform.machine(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
