"""The torture run: many seeds hold, runs repeat, planted faults are found and shrunk."""

from __future__ import annotations

import pytest

from cardcage.core.torture import main, plugin_kinds, run_torture
from cardcage.core.torture_faults import FAULTS
from tests.support.core_rig import kind_of


@pytest.mark.parametrize("block", range(6))
def test_seeds_hold(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        report = run_torture(seed, requests=25, kinds=kind_of, check_every=4)
        assert report.failure is None, (seed, report.failure, report.minimal)


def test_the_world_is_rough_enough() -> None:
    """If these counts fall to zero, the checks above no longer mean anything."""
    reports = [run_torture(seed, requests=40, kinds=kind_of, check_every=8) for seed in range(20)]
    assert sum(r.preemptions for r in reports) > 50
    assert sum(r.cached_tokens for r in reports) > 300
    endings = {name for r in reports for name in r.endings}
    assert {"stop", "length", "abort", "error", "AdmissionError"} <= endings


def test_same_seed_same_trace() -> None:
    digests = [run_torture(seed, requests=15, kinds=kind_of).trace_digest for seed in range(20)]
    again = [run_torture(seed, requests=15, kinds=kind_of).trace_digest for seed in range(20)]
    assert digests == again
    assert len(set(digests)) == 20


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_planted_fault_is_found_and_shrunk(fault: str) -> None:
    for seed in range(50):
        report = run_torture(seed, requests=30, kinds=kind_of, fault=fault)
        if report.failure is not None:
            assert len(report.minimal) <= 15
            return
    pytest.fail(f"{fault} was not found in 50 seeds")


def test_ten_faults() -> None:
    assert len(FAULTS) == 10


def test_kinds_come_through_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin_kinds() is plugin_kinds()
    assert main(["--seed", "5", "--requests", "20"]) == 0
    out = capsys.readouterr().out
    assert "seed 5" in out
    assert "1 seeds held" in out


def test_command_shows_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "0", "--requests", "20", "--plant", "leaked_block"]) == 1
    out = capsys.readouterr().out
    assert "FAILED blocks:" in out
    assert "events it needs" in out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_seeds_repeat() -> None:
    for seed in range(1000):
        reports = [run_torture(seed, requests=12, kinds=kind_of, check_every=8) for _ in range(2)]
        assert reports[0].failure is None, (seed, reports[0].failure)
        assert reports[0].trace_digest == reports[1].trace_digest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_requests() -> None:
    total, seed = 0, 10_000
    while total < 100_000:
        report = run_torture(seed, requests=45, kinds=kind_of, check_every=16)
        assert report.failure is None, (seed, report.failure, report.minimal)
        total += report.requests
        seed += 1
