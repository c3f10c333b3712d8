"""The resolver: need against caps, the three ways to choose, and the hardware rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cardcage.core.contracts import (
    AtLeast,
    AttentionCaps,
    AttentionNeed,
    Between,
    Caps,
    DetectResult,
    Exclude,
    HardwareCaps,
    HardwareNeed,
    LinearCaps,
    LinearNeed,
    ModelCaps,
    ModelNeed,
    MultipleOf,
    Need,
    SpeculatorCaps,
    SpeculatorNeed,
)
from cardcage.core.discovery import Candidate
from cardcage.core.errors import PluginLoadError, SelectionError
from cardcage.core.policy import Policy
from cardcage.core.resolver import as_need, compare, decide, did_you_mean, need_class, summary


@dataclass
class FakePool:
    """Candidates in memory; `loads` counts what was asked for its declaration."""

    all: list[Candidate]
    policy: Policy = field(default_factory=Policy)
    loads: list[str] = field(default_factory=list)

    def candidates(self, kind: str | None = None) -> list[Candidate]:
        return [c for c in self.all if c.kind == kind]

    def load(self, candidate: Candidate) -> Any:
        self.loads.append(candidate.id)
        if candidate.error is not None:
            candidate.refuse("broken", str(candidate.error))
            raise PluginLoadError(str(candidate.error))
        return candidate.declaration


class Declared:
    def __init__(self, caps: Caps, **extra: Any) -> None:
        self.caps = caps
        self.__dict__.update(extra)


def plugin(
    name: str, caps: Caps, dist: str = "cardcage", kind: str = "attention", **extra: Any
) -> Candidate:
    found = Candidate(kind, name, dist, "1.0", f"{name}:X", "/x", dist == "cardcage")
    error = extra.pop("error", None)
    status = extra.pop("status", None)
    found.declaration = Declared(caps, **extra)
    found.error = error
    if status:
        found.refuse(status, f"it is {status}")
    return found


NEED = AttentionNeed(dtype="bfloat16", head_size=128)


# ---- compare ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "need", "reasons"),
    [
        (AttentionCaps(), NEED, []),
        (AttentionCaps(dtype=frozenset({"bfloat16"})), NEED, []),
        (
            AttentionCaps(dtype=frozenset({"float16", "float32"})),
            NEED,
            ["dtype bfloat16 not in {float16, float32}"],
        ),
        (AttentionCaps(head_size=MultipleOf(16, 256)), NEED, []),
        (
            AttentionCaps(head_size=MultipleOf(96)),
            NEED,
            ["head size 128 is not a multiple of 96"],
        ),
        (
            AttentionCaps(head_size=MultipleOf(16, 64)),
            NEED,
            ["head size 128 is not a multiple of 16 up to 64"],
        ),
        (AttentionCaps(arch=AtLeast((8, 0))), NEED, ["arch () is below (8, 0)"]),
        (AttentionCaps(arch=AtLeast((8, 0))), replace(NEED, arch=(9, 0)), []),
        (AttentionCaps(arch=AtLeast((8, 0))), replace(NEED, arch=None), []),
        (
            AttentionCaps(group_size=Between(2, 8)),
            NEED,
            ["group size 1 is not between 2 and 8"],
        ),
        (
            AttentionCaps(features=frozenset({"lse"})),
            replace(NEED, features=frozenset({"window", "lse"})),
            ["lacks features: window; has {lse}"],
        ),
        (AttentionCaps(features=frozenset({"lse", "window"})), NEED, []),
        (
            AttentionCaps(excludes=(Exclude({"dtype": "bfloat16", "window": 0}, "measured"),)),
            NEED,
            ["measured"],
        ),
        (AttentionCaps(excludes=(Exclude({"dtype": "float16"}, "measured"),)), NEED, []),
        (
            AttentionCaps(excludes=(Exclude({"head_size": frozenset({64, 128})}, "no"),)),
            NEED,
            ["no"],
        ),
        (
            AttentionCaps(excludes=(Exclude({"features": frozenset({"lse"})}, "no lse"),)),
            replace(NEED, features=frozenset({"lse", "window"})),
            ["lacks features: lse, window", "no lse"],
        ),
        (AttentionCaps(head_size=64), NEED, ["head size 128 is not 64"]),
        (
            AttentionCaps(block_size=AtLeast("text")),
            NEED,
            ["block size 16 cannot be compared with"],
        ),
        (SpeculatorCaps(max_drafts=Between(1, 3)), SpeculatorNeed(), ["max drafts 4 is not"]),
        (SpeculatorCaps(needs_hidden=True), SpeculatorNeed(), []),  # not in the need
    ],
)
def test_compare(caps: Caps, need: Need, reasons: list[str]) -> None:
    found = compare(need, caps)
    assert len(found) == len(reasons)
    for got, wanted in zip(found, reasons, strict=True):
        assert wanted in got


def test_every_field_that_does_not_fit_has_its_own_sentence() -> None:
    caps = AttentionCaps(dtype=frozenset({"float16"}), head_size=frozenset({64}), op=None)
    assert len(compare(NEED, caps)) == 2


values = st.one_of(
    st.none(), st.integers(), st.text(max_size=4), st.booleans(), st.tuples(st.integers()),
    st.frozensets(st.text(max_size=2), max_size=3),
)  # fmt: skip
allowed = st.one_of(
    values, st.builds(AtLeast, values), st.builds(MultipleOf, st.integers(1, 9)),
    st.builds(Between, st.integers(), st.integers()),
)  # fmt: skip


@given(value=values, limit=allowed)
def test_compare_never_raises_and_answers_in_sentences(value: Any, limit: Any) -> None:
    need = replace(NEED, head_size=value, features=frozenset())
    caps = AttentionCaps(head_size=limit)
    assert all(isinstance(r, str) and r for r in compare(need, caps))


@given(st.frozensets(st.sampled_from("abcd")), st.frozensets(st.sampled_from("abcd")))
def test_features_are_a_superset(asked: frozenset[str], offered: frozenset[str]) -> None:
    reasons = compare(replace(NEED, features=asked), AttentionCaps(features=offered))
    assert (not reasons) == (asked <= offered)


def test_summary_shows_what_differs_from_the_default() -> None:
    need = replace(NEED, arch=(9, 0), features=frozenset({"lse", "window"}))
    assert summary(need) == "arch=9.0 dtype=bfloat16 head_size=128 features=lse+window"
    assert summary(HardwareNeed()) == ""


def test_as_need_refuses_unknown_fields() -> None:
    assert as_need("attention", {"head_size": 8}) == AttentionNeed(head_size=8)
    with pytest.raises(SelectionError, match='did you mean "head_size"'):
        as_need("attention", {"headsize": 8})
    assert need_class("kv_kinds").__name__ == "KVKindNeed"


def test_did_you_mean() -> None:
    assert did_you_mean("tritn", ["triton", "torch"]) == '; did you mean "triton"?'
    assert did_you_mean("zzz", ["triton"]) == ""


# ---- explicit -----------------------------------------------------------------------------------


def test_explicit_choice_never_falls_back() -> None:
    pool = FakePool([plugin("good", AttentionCaps()), plugin("bad", AttentionCaps(head_size=64))])
    decision = decide(pool, "attention", NEED, use="bad")
    assert decision.chosen is None
    assert decision.how == "explicit"
    assert [(r.id, r.status) for r in decision.rows] == [
        ("cardcage/bad", "rejected"),
        ("cardcage/good", "not-asked"),
    ]
    assert "nothing else is tried" in decision.table()
    assert pool.loads == ["cardcage/bad"]


@pytest.mark.parametrize("use", ["fa4", "acme-fa/fa4", "acme-fa/attention:fa4"])
def test_explicit_third_party_needs_no_invitation(use: str) -> None:
    pool = FakePool([plugin("good", AttentionCaps()), plugin("fa4", AttentionCaps(), "acme-fa")])
    decision = decide(pool, "attention", NEED, use=use)
    assert decision.chosen is not None
    assert decision.chosen.id == "acme-fa/fa4"


def test_unknown_name_suggests() -> None:
    pool = FakePool([plugin("triton_paged", AttentionCaps())])
    with pytest.raises(SelectionError, match='unknown; did you mean "triton_paged"'):
        decide(pool, "attention", NEED, use="triton-paged")
    with pytest.raises(SelectionError, match="available: none installed"):
        decide(FakePool([]), "attention", NEED, use="x")


# ---- prefer -------------------------------------------------------------------------------------


def test_prefer_takes_the_first_usable_and_lists_the_others() -> None:
    pool = FakePool(
        [plugin("a", AttentionCaps(head_size=64)), plugin("b", AttentionCaps()),
         plugin("c", AttentionCaps(priority=80))]
    )  # fmt: skip
    decision = decide(pool, "attention", NEED, prefer=("a", "b"))
    assert decision.how == "prefer"
    assert [(r.id, r.status) for r in decision.rows] == [
        ("cardcage/a", "rejected"),
        ("cardcage/b", "chosen"),
    ]


def test_prefer_without_auto_is_exhausted() -> None:
    pool = FakePool([plugin("a", AttentionCaps(head_size=64)), plugin("b", AttentionCaps())])
    decision = decide(pool, "attention", NEED, prefer=("a",))
    assert decision.chosen is None
    assert 'add a final "auto"' in decision.note


def test_prefer_with_auto_goes_on() -> None:
    pool = FakePool([plugin("a", AttentionCaps(head_size=64)), plugin("b", AttentionCaps())])
    decision = decide(pool, "attention", NEED, prefer=("a", "auto"))
    assert decision.chosen is not None
    assert decision.chosen.name == "b"
    assert [r.id for r in decision.rows] == ["cardcage/a", "cardcage/b"]


# ---- auto ---------------------------------------------------------------------------------------


def chosen(pool: FakePool, **options: Any) -> str | None:
    found = decide(pool, "attention", NEED, **options).chosen
    return None if found is None else found.id


def test_auto_takes_the_highest_priority_then_the_name() -> None:
    caps = AttentionCaps
    pool = FakePool([plugin("b", caps(priority=50)), plugin("a", caps(priority=50)),
                     plugin("c", caps(priority=10))])  # fmt: skip
    assert chosen(pool) == "cardcage/a"
    decision = decide(pool, "attention", NEED)
    assert [r.status for r in decision.rows] == ["chosen", "usable", "usable"]
    assert decision.rows[2].text() == "priority 10"


def test_the_platform_order_comes_before_priority() -> None:
    pool = FakePool([plugin("a", AttentionCaps(priority=80)), plugin("b", AttentionCaps())])
    assert chosen(pool, hardware_order=("b",)) == "cardcage/b"
    assert chosen(pool, hardware_order=("zzz",)) == "cardcage/a"


def test_third_party_waits_unless_invited_or_needed() -> None:
    foreign = AttentionCaps(priority=80)

    def pool(policy: Policy = Policy(), fits: bool = True) -> FakePool:  # noqa: B008
        own = AttentionCaps() if fits else AttentionCaps(head_size=64)
        return FakePool([plugin("own", own), plugin("fa4", foreign, "acme-fa")], policy)

    waiting = pool()
    assert chosen(waiting) == "cardcage/own"
    assert waiting.loads == ["cardcage/own"]
    row = decide(pool(), "attention", NEED).rows[1]
    assert (row.status, "plugins.auto" in row.text()) == ("not-asked", True)
    assert chosen(pool(Policy(auto=("acme-fa",)))) == "acme-fa/fa4"
    assert chosen(pool(), hardware_order=("acme-fa/fa4",)) == "acme-fa/fa4"
    assert chosen(pool(fits=False)) == "acme-fa/fa4"
    assert [r.status for r in decide(pool(), "attention", NEED, ask_all=True).rows] == [
        "chosen",
        "usable",
    ]


def test_bundled_comes_before_third_party_of_equal_rank() -> None:
    pool = FakePool(
        [plugin("z", AttentionCaps()), plugin("a", AttentionCaps(), "acme")],
        Policy(auto=("acme",)),
    )
    assert chosen(pool) == "cardcage/z"


def test_opt_in_is_never_automatic() -> None:
    pool = FakePool([plugin("a", AttentionCaps(), activation="opt-in")])
    assert chosen(pool) is None
    assert chosen(pool, use="a") == "cardcage/a"


def test_ambiguous_names_do_not_take_part() -> None:
    first = plugin("fa", AttentionCaps(), "acme", status="ambiguous")
    second = plugin("fa", AttentionCaps(), "best", status="ambiguous")
    assert chosen(FakePool([first, second])) is None
    assert chosen(FakePool([first, second], Policy(auto=("best",)))) == "best/fa"
    assert chosen(FakePool([first, second]), use="acme/fa") == "acme/fa"


def test_reasons_against_is_asked_in_order_until_one_has_none() -> None:
    asked: list[str] = []

    def check(name: str, *reasons: str) -> Any:
        def ask(need: Need) -> list[str]:
            asked.append(name)
            return list(reasons)

        return ask

    pool = FakePool(
        [
            plugin("a", AttentionCaps(priority=80), reasons_against=check("a", "odd heads")),
            plugin("b", AttentionCaps(priority=50), reasons_against=check("b")),
            plugin("c", AttentionCaps(priority=30), reasons_against=check("c")),
        ]
    )
    decision = decide(pool, "attention", NEED)
    assert decision.chosen is not None
    assert decision.chosen.name == "b"
    assert asked == ["a", "b"]
    assert "odd heads" in decision.table()


def test_reasons_against_that_raises_is_a_bug_of_the_plugin() -> None:
    def boom(need: Need) -> list[str]:
        raise ValueError("oops")

    pool = FakePool([plugin("a", AttentionCaps(), reasons_against=boom)])
    decision = decide(pool, "attention", NEED)
    assert decision.chosen is None
    assert "a bug in the plugin" in decision.rows[0].text()


def test_broken_and_blocked_rows_stay_in_the_table() -> None:
    pool = FakePool(
        [plugin("a", AttentionCaps()), plugin("b", AttentionCaps(), error=ValueError("boom")),
         plugin("c", AttentionCaps(), "acme", status="blocked")]
    )  # fmt: skip
    table = decide(pool, "attention", NEED).table()
    assert "cardcage/b  1.0  broken   boom" in table
    assert "acme/c      1.0  blocked  it is blocked" in table


def test_table_of_the_specification() -> None:
    pool = FakePool(
        [
            plugin("triton_paged", AttentionCaps(priority=50)),
            plugin("torch_reference", AttentionCaps(priority=10)),
            plugin("fa4", AttentionCaps(kv_format=frozenset({"auto"}), block_size=MultipleOf(128)),
                   "acme-fa"),
        ],
        Policy(auto=("acme-fa",)),
    )  # fmt: skip
    need = replace(NEED, kv_format="fp8_e4m3", op=None)
    for candidate in pool.all[:2]:
        candidate.declaration.caps = replace(candidate.declaration.caps, kv_format=None)
    assert decide(pool, "attention", need).table().splitlines() == [
        "attention for dtype=bfloat16 kv_format=fp8_e4m3 head_size=128  [auto]",
        "  cardcage/triton_paged     1.0  chosen    priority 50",
        "  acme-fa/fa4               1.0  rejected  kv format fp8_e4m3 not in {auto}; "
        "block size 16 is not a multiple of 128",
        "  cardcage/torch_reference  1.0  usable    priority 10",
    ]


def test_decision_as_json() -> None:
    import json

    decision = decide(FakePool([plugin("a", AttentionCaps())]), "attention", NEED)
    data = json.loads(json.dumps(decision.as_dict()))
    assert data["chosen"] == "cardcage/a"
    assert data["rows"][0]["imported"] is True


def test_two_claims_of_an_architecture_are_an_error_unless_preferred() -> None:
    caps = ModelCaps(architecture=frozenset({"LlamaForCausalLM"}))
    rows = [plugin("a", caps, kind="models"), plugin("b", caps, "acme", kind="models")]
    need = ModelNeed(architecture="LlamaForCausalLM")
    assert decide(FakePool(rows), "models", need).chosen is rows[0]  # third-party not invited
    decision = decide(FakePool(rows, Policy(auto=("acme",))), "models", need)
    assert decision.chosen is None
    assert "both claim it" in decision.note
    policy = Policy(auto=("acme",), prefer=("acme/b",))
    assert decide(FakePool(rows, policy), "models", need).chosen is rows[1]


def test_caps_fields_that_a_need_lacks_are_information() -> None:
    assert compare(LinearNeed(), LinearCaps(requires={"x": "y"}, priority=1)) == []
    assert {f.name for f in fields(HardwareNeed)} == {"features"}


# ---- hardware -----------------------------------------------------------------------------------


def device(name: str, score: int, dist: str = "cardcage", **extra: Any) -> Candidate:
    kind = extra.pop("device_type", "cpu" if name == "cpu" else "cuda")

    def found() -> DetectResult:
        if score < 0:
            raise OSError("driver is on fire")
        return DetectResult(score, f"{name} found" if score else f"no {name}", score)

    return plugin(
        name, HardwareCaps(device_type=kind), dist, kind="hardware", detect=found, **extra
    )


def hardware(rows: Sequence[Candidate], policy: Policy | None = None, **options: Any) -> Any:
    return decide(FakePool(list(rows), policy or Policy()), "hardware", HardwareNeed(), **options)


def test_accelerator_beats_the_host() -> None:
    assert hardware([device("cpu", 1), device("cuda", 100)]).chosen.name == "cuda"
    assert hardware([device("cpu", 1), device("cuda", 0)]).chosen.name == "cpu"


def test_third_party_that_detects_beats_built_ins() -> None:
    rows = [device("cpu", 1), device("cuda", 100), device("npu", 5, "acme")]
    assert hardware(rows).chosen.id == "acme/npu"
    rows[2] = device("npu", 0, "acme")
    assert hardware(rows).chosen.name == "cuda"


def test_two_third_party_devices_are_an_error() -> None:
    rows = [device("cpu", 1), device("npu", 5, "acme"), device("tpu", 5, "best")]
    decision = hardware(rows)
    assert decision.chosen is None
    assert "acme/npu and best/tpu both detect" in decision.note
    assert hardware(rows, Policy(prefer=("best/tpu",))).chosen.id == "best/tpu"


@pytest.mark.parametrize(
    "suspect",
    [
        device("npu", 5, "acme", error=ImportError("libnpu.so")),
        device("npu", 5, "acme", status="blocked"),
        device("npu", 5, "acme", status="incompatible"),
        device("npu", -1, "acme"),
    ],
    ids=["broken", "blocked", "incompatible", "detect-raises"],
)
def test_no_silent_fall_back_to_the_host(suspect: Candidate) -> None:
    decision = hardware([device("cpu", 1), suspect])
    assert decision.chosen is None
    assert "acme/npu" in decision.note
    assert 'hardware.use = "cpu"' in decision.note
    assert hardware([device("cpu", 1), suspect], use="cpu").chosen.name == "cpu"
    # an accelerator that works is not hindered by a broken one
    assert hardware([device("cuda", 9), device("cpu", 1), suspect]).chosen.name == "cuda"


def test_explicit_platform_without_a_device_is_an_error() -> None:
    decision = hardware([device("cpu", 1), device("cuda", 0)], use="cuda")
    assert decision.chosen is None
    assert decision.rows[0].text() == "no cuda"


def test_null_only_by_name() -> None:
    null = device("null", 1, device_type="null", activation="opt-in")
    assert hardware([device("cpu", 1), null]).chosen.name == "cpu"
    assert hardware([null]).chosen is None
    assert hardware([device("cpu", 1), null], use="null").chosen.name == "null"


def test_preferred_platforms_in_order() -> None:
    rows = [device("cpu", 1), device("cuda", 0), device("xpu", 4)]
    assert hardware(rows, prefer=("cuda", "cpu")).chosen.name == "cpu"
    assert hardware(rows, prefer=("cuda", "auto")).chosen.name == "xpu"


def test_detect_must_return_its_type() -> None:
    odd = plugin("odd", HardwareCaps(), kind="hardware", detect=lambda: True)
    decision = hardware([odd])
    assert decision.chosen is None
    assert "DetectResult" in decision.rows[0].text()
