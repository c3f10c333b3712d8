"""Run the named workloads through the offline class and write one JSON row per measurement.

    python benchmarks/run.py c1 c2 c3 c4 --out benchmarks/results/NAME.json
    python benchmarks/run.py w1 w2 w3 w4 --model dummy:benchmarks/models/qwen3-0.6b

Figures are wall-clock seconds around `LLM.generate`; decode milliseconds are the time after the
first token divided by the number of further tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import workloads
from cardcage import LLM, SamplingParams


def run_wave(llm: LLM, wave: workloads.Wave) -> tuple[float, list[Any]]:
    """(seconds, outputs) of one wave."""
    prompts = [{"prompt_token_ids": ids} for ids, _ in wave]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for _, n in wave
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for (_, n), output in zip(wave, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == n, "a request stopped early"
    return seconds, outputs


def rows_of(name: str, llm: LLM, salt: int) -> list[tuple[str, str, float]]:
    """(workload, metric with unit, value) for one repetition."""
    if name == "w2":
        return [row for batch in (1, 32, 128) for row in _decode(llm, batch, salt)]
    gpu = name.startswith("w")
    waves = getattr(workloads, name)(salt) if gpu else getattr(workloads, name)()
    if name in ("c4", "w4"):
        seconds = [run_wave(llm, wave)[0] for wave in waves]
        return [(name, "second wave s", seconds[1]), (name, "first wave s", seconds[0])]
    llm.reset_prefix_cache()
    seconds, _ = run_wave(llm, waves[0])
    if name in ("c3", "w3"):
        prompt = len(waves[0][0][0])
        return [(name, "first token ms", seconds * 1e3), (name, "prefill tok/s", prompt / seconds)]
    if name == "c1":
        llm.reset_prefix_cache()
        first, _ = run_wave(llm, [(waves[0][0][0], 1)])
        decode = (waves[0][0][1] - 1) / (seconds - first)
        return [(name, "first token ms", first * 1e3), (name, "decode tok/s", decode)]
    return [(name, "output tok/s", sum(n for _, n in waves[0]) / seconds)]


def _decode(llm: LLM, batch: int, salt: int) -> list[tuple[str, str, float]]:
    """Decode step time: a long run less a short one, so that prefill cancels out."""
    wave = workloads.w2(batch, salt)[0]
    run_wave(llm, [(p, 4) for p, _ in wave])  # whatever is captured on first use is captured here
    llm.reset_prefix_cache()
    short, _ = run_wave(llm, [(p, 2) for p, _ in wave])
    llm.reset_prefix_cache()
    long, _ = run_wave(llm, wave)
    return [(f"w2 batch {batch}", "step ms", (long - short) / (wave[0][1] - 2) * 1e3)]


def device_name(llm: LLM) -> str:
    facts = llm.hardware_facts()
    return f"{facts.name}, {facts.num_sms} cores" if facts.device_type == "cpu" else facts.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", help="c1 c2 c3 c4 c5 w1 w2 w3 w4")
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    overrides = {}
    for item in args.set:
        key, _, value = item.partition("=")
        try:
            overrides[key] = json.loads(value)
        except json.JSONDecodeError:
            overrides[key] = value
    started = time.perf_counter()
    with LLM(args.model, dtype=args.dtype, config=args.config, **overrides) as llm:
        ready = time.perf_counter() - started
        print(f"ready in {ready:.2f} s", flush=True)
        found: dict[tuple[str, str], list[float]] = {("load", "ready s"): [ready]}
        warm = [([5] * 8, 4)]
        run_wave(llm, warm)
        for repetition in range(args.repetitions):
            for name in args.workloads:
                for workload, metric, value in rows_of(name, llm, repetition + 1):
                    found.setdefault((workload, metric), []).append(value)
                    print(f"{workload:14} {metric:16} {value:10.3f}", flush=True)
        device = device_name(llm)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    rows = [
        {
            "workload": workload,
            "model": args.model or "embedded",
            "metric": metric.rsplit(" ", 1)[0],
            "unit": metric.rsplit(" ", 1)[1],
            "value": round(statistics.median(values), 4),
            "all": [round(v, 4) for v in values],
            "repetitions": len(values),
            "device": device,
            "dtype": args.dtype,
            "commit": commit,
            "command": "python benchmarks/run.py " + " ".join(sys.argv[1:]),
        }
        for (workload, metric), values in found.items()
    ]
    for row in rows:
        print(f"median {row['workload']:14} {row['metric']:12} {row['value']:10.3f} {row['unit']}")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
