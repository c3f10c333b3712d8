"""Chooses one candidate of a kind for a need, and explains every rejection.

`compare` sets a Need against Caps field by field and writes sentences. `decide` applies the
three ways of choosing: an explicit name (never falls back), an ordered preference list, and
automatic choice. The answer is a `Decision`: who won, how, and one row per candidate with the
reasons. Knows kinds, never plugin names.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Protocol

from cardcage.core import contracts
from cardcage.core.contracts import CAPS_OF, Caps, DetectResult, Need
from cardcage.core.discovery import Candidate, prefers
from cardcage.core.errors import PluginError, SelectionError
from cardcage.core.loading import describe, missing_requirements
from cardcage.core.policy import Policy

_NOT_COMPARED = frozenset({"requires", "priority", "excludes"})
# Kinds that answer to a name found in a checkpoint: two claims are an error, not a race.
EXCLUSIVE_KINDS = frozenset({"models", "quant"})


@dataclass(slots=True)
class Row:
    """One candidate in a decision. `status` is as in `Candidate`, or chosen, usable, rejected,
    not-asked. `ms` is the time spent on importing its declaration."""

    candidate: Candidate
    status: str
    reasons: list[str] = field(default_factory=list)
    priority: int | None = None
    ms: float | None = None

    @property
    def id(self) -> str:
        return self.candidate.id

    @property
    def version(self) -> str:
        return self.candidate.version

    def text(self) -> str:
        """The last column of the table: the reasons, or the priority of what fits."""
        if self.reasons:
            return "; ".join(self.reasons)
        return "" if self.priority is None else f"priority {self.priority}"


@dataclass(slots=True)
class Decision:
    """An explained choice. `how` is explicit, prefer, auto or module_path; `need` a summary."""

    kind: str
    need: str
    how: str
    chosen: Candidate | None = None
    rows: list[Row] = field(default_factory=list)
    note: str = ""

    def table(self, note: bool = True) -> str:
        """The decision as text: a headline, one aligned line per candidate, and the note."""
        head = f"{self.kind} for {self.need}  [{self.how}]" if self.need else (
            f"{self.kind}  [{self.how}]"
        )  # fmt: skip
        cells = [(r.id, r.version, r.status, r.text()) for r in self.rows]
        widths = [max((len(c[i]) for c in cells), default=0) for i in range(3)]
        lines = [
            f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip()
            for a, b, c, d in cells
        ]
        return "\n".join([head, *lines, *([f"  {self.note}"] if note and self.note else [])])

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, the same facts as the table."""
        return {
            "kind": self.kind,
            "need": self.need,
            "how": self.how,
            "chosen": None if self.chosen is None else self.chosen.id,
            "note": self.note,
            "rows": [
                {
                    "id": r.id,
                    "version": r.version,
                    "status": r.status,
                    "reasons": list(r.reasons),
                    "imported": r.candidate.declaration is not None,
                    "ms": None if r.ms is None else round(r.ms, 1),
                }
                for r in self.rows
            ],
        }


class Pool(Protocol):
    """What the resolver needs of a registry."""

    policy: Policy

    def candidates(self, kind: str | None = None) -> list[Candidate]: ...
    def load(self, candidate: Candidate) -> Any: ...


def need_class(kind: str) -> type[Need]:
    """The Need type of a kind, by the naming rule XCaps <-> XNeed of the contracts."""
    found: type[Need] = getattr(contracts, CAPS_OF[kind].__name__.removesuffix("Caps") + "Need")
    return found


# ---- need against caps --------------------------------------------------------------------------


def compare(need: Need, caps: Caps) -> list[str]:
    """Why these capabilities do not fit the need: one sentence per field, [] when they fit.

    None in either side means "any" / "does not matter". Sets: membership. `features`: the caps
    must contain the need's. AtLeast, Between, MultipleOf: their own reason. Fields that a Need
    does not have are information for people and are not compared.
    """
    found = []
    for spec in fields(caps):
        if spec.name in _NOT_COMPARED or not hasattr(need, spec.name):
            continue
        reason = _field_reason(spec.name, getattr(need, spec.name), getattr(caps, spec.name))
        if reason:
            found.append(reason)
    for exclude in caps.excludes:
        if all(_equal(getattr(need, k, None), v) for k, v in exclude.when.items()):
            found.append(exclude.reason)
    return found


def _field_reason(name: str, value: Any, allowed: Any) -> str | None:
    label = name.replace("_", " ")
    if value is None or allowed is None:
        return None
    try:
        if isinstance(value, frozenset | set):
            lacking = sorted(map(str, value - set(allowed)))
            return f"lacks {label}: {', '.join(lacking)}; has {_show(allowed)}" if lacking else None
        if hasattr(allowed, "reason"):
            reason: str | None = allowed.reason(label, value)
            return reason
        if isinstance(allowed, frozenset | set | tuple | list):
            return None if value in allowed else f"{label} {value} not in {_show(allowed)}"
    except TypeError as error:
        return f"{label} {value!r} cannot be compared with {allowed}: {error}"
    return None if value == allowed else f"{label} {value} is not {allowed}"


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, frozenset | set) and not isinstance(value, frozenset | set):
        return value in wanted
    if isinstance(wanted, frozenset | set):
        return wanted <= set(value)
    return bool(value == wanted)


def _show(values: Any) -> str:
    try:
        ordered = sorted(values)
    except TypeError:
        ordered = sorted(values, key=str)
    return "{" + ", ".join(str(v) for v in ordered) + "}"


def summary(need: Need) -> str:
    """The fields of a need that differ from their defaults, in one line."""
    parts = []
    for spec in fields(need):
        value = getattr(need, spec.name)
        if value is None or (spec.default is not MISSING and value == spec.default):
            continue
        if isinstance(value, frozenset | set):
            value = "+".join(sorted(map(str, value)))
        elif isinstance(value, tuple):
            value = ".".join(map(str, value))
        parts.append(f"{spec.name}={value}")
    return " ".join(parts)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """`; did you mean "x"?` for the nearest spelling, or nothing."""
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


# ---- candidates to rows -------------------------------------------------------------------------


def consider(pool: Pool, candidate: Candidate, need: Need) -> Row:
    """Load a declaration (if allowed) and compare it; never raises for a plugin's faults."""
    if not candidate.usable and candidate.status != "ambiguous":
        return Row(candidate, candidate.status, list(candidate.reasons))
    try:
        declaration = pool.load(candidate)
    except PluginError:
        return Row(candidate, candidate.status, list(candidate.reasons), ms=candidate.load_ms)
    caps: Caps = declaration.caps
    row = Row(candidate, "usable", priority=caps.priority, ms=candidate.load_ms)
    row.reasons = missing_requirements(caps) if caps.requires else []
    if row.reasons:
        row.status = "missing-requirement"
        return row
    row.reasons = compare(need, caps)
    if row.reasons:
        row.status = "rejected"
    return row


def ask(row: Row, need: Need) -> bool:
    """The plugin's own `reasons_against(need)`, for what data cannot say. True = it fits."""
    check = getattr(row.candidate.declaration, "reasons_against", None)
    if check is None:
        return True
    try:
        reasons = list(check(need))
    except Exception as error:
        reasons = [f"reasons_against() raised {describe(error)}: a bug in the plugin"]
    if reasons:
        row.status, row.reasons = "rejected", [str(r) for r in reasons]
    return not reasons


def detect(row: Row) -> DetectResult:
    """A hardware declaration's `detect()`; an exception counts as broken, with its place."""
    started = time.perf_counter()
    try:
        result = row.candidate.declaration.detect()
        if not isinstance(result, DetectResult):
            raise TypeError(f"detect() returned {type(result).__name__}, not DetectResult")
    except (Exception, SystemExit) as error:
        row.status, row.reasons = "broken", [f"detect() failed: {describe(error)}"]
        return DetectResult(0, row.reasons[0])
    row.ms = (row.ms or 0.0) + (time.perf_counter() - started) * 1e3
    row.reasons = [result.reason]
    if result.score <= 0:
        row.status = "rejected"
    return result


# ---- the three ways to choose -------------------------------------------------------------------


def decide(
    pool: Pool,
    kind: str,
    need: Need,
    use: str = "auto",
    prefer: Sequence[str] = (),
    hardware_order: Sequence[str] = (),
    ask_all: bool = False,
) -> Decision:
    """Choose, without raising when nothing fits: `chosen` is None and `note` says why.

    Args:
        use: "auto", a short name, or a full id `dist/name`. A name never falls back.
        prefer: with use="auto", names in order; a final "auto" allows automatic choice.
        hardware_order: the platform's preference for this kind; names or full ids.
        ask_all: also load third-party declarations that do not take part (for `why --all`).

    Raises:
        SelectionError: an unknown or ambiguous name.
    """
    if use != "auto":
        return _explicit(pool, kind, need, use)
    listed = [name for name in prefer if name != "auto"]
    if not listed:
        return automatic(pool, kind, need, hardware_order, ask_all)
    decision = Decision(kind, summary(need), "prefer")
    for name in listed:
        row = _try(pool, kind, need, find(pool, kind, name))
        decision.rows.append(row)
        if row.status == "usable":
            row.status, decision.chosen = "chosen", row.candidate
            return decision
    if "auto" in prefer:
        rest = automatic(pool, kind, need, hardware_order, ask_all)
        tried = {id(r.candidate) for r in decision.rows}
        decision.rows += [r for r in rest.rows if id(r.candidate) not in tried]
        decision.chosen, decision.how, decision.note = rest.chosen, "prefer, then auto", rest.note
        return decision
    decision.note = f'none of prefer = [{", ".join(listed)}] fits; add a final "auto" to go on'
    return decision


def find(pool: Pool, kind: str, name: str) -> Candidate:
    """The candidate that a short name or full id means.

    Raises:
        SelectionError: unknown (with the nearest spelling) or ambiguous (with the full ids).
    """
    known = pool.candidates(kind)
    live = [c for c in known if c.status != "shadowed"]
    if "/" in name:
        found = [c for c in live if name in (c.id, f"{c.dist}/{c.kind}:{c.name}")]
    else:
        found = [c for c in live if c.name == name]
        plain = [c for c in found if c.status != "ambiguous"]
        preferred = [c for c in found if prefers(pool.policy, c)]
        found = preferred if len(preferred) == 1 else plain or found
        usable = [c for c in found if c.usable]
        found = usable or found
    if len(found) == 1 or (found and all(c.id == found[0].id for c in found)):
        return found[0]
    if found:
        raise SelectionError(f"{kind} {name!r} is ambiguous: {found[0].reasons[0]}")
    names = [c.name for c in live] + [c.id for c in live]
    available = ", ".join(sorted({c.name for c in live})) or "none installed"
    hint = did_you_mean(name, names) or ";"
    raise SelectionError(f'{kind} "{name}" unknown{hint} available: {available}')


def _try(pool: Pool, kind: str, need: Need, candidate: Candidate) -> Row:
    row = consider(pool, candidate, need)
    if row.status == "usable" and ask(row, need) and kind == "hardware":
        detect(row)
    return row


def _explicit(pool: Pool, kind: str, need: Need, use: str) -> Decision:
    decision = Decision(kind, summary(need), "explicit")
    chosen = find(pool, kind, use)
    row = _try(pool, kind, need, chosen)
    decision.rows.append(row)
    if row.status == "usable":
        row.status, decision.chosen = "chosen", chosen
        return decision
    decision.note = f"{chosen.id} was asked for by name, so nothing else is tried"
    others = [c for c in pool.candidates(kind) if c is not chosen]
    decision.rows += [Row(c, "not-asked") if c.usable else consider(pool, c, need) for c in others]
    return decision


def automatic(
    pool: Pool, kind: str, need: Need, hardware_order: Sequence[str] = (), ask_all: bool = False
) -> Decision:
    """The best that fits: platform's order, then priority, then built-in, then name."""
    if kind == "hardware":
        from cardcage.core.resolver_hardware import automatic_hardware

        return automatic_hardware(pool, need)
    decision = Decision(kind, summary(need), "auto")
    inside, outside = _split(pool, kind, hardware_order)
    rows = [_row(pool, c, need) for c in inside]
    winner = _best(rows, need, hardware_order)
    if outside and (winner is None or ask_all):
        late = [_row(pool, c, need) for c in outside]
        rows += late
        if winner is None:
            winner = _best(late, need, hardware_order)
    else:
        why = f"third-party: takes part with plugins.auto = [...] or {kind}.use = its id"
        rows += [Row(c, "not-asked", [why]) for c in outside]
    rivals = [r for r in rows if r.status == "usable" and r.candidate in inside]
    if winner is not None and kind in EXCLUSIVE_KINDS and rivals[1:]:
        ids = " and ".join(r.id for r in rivals)
        preferred = [r for r in rivals if prefers(pool.policy, r.candidate)]
        winner = preferred[0] if len(preferred) == 1 else None
        if winner is None:
            decision.note = f"{ids} both claim it; choose with plugins.prefer or {kind}.use"
    decision.rows = sorted(rows, key=lambda r: (r is not winner, *_order(r, hardware_order)))
    if winner is not None:
        winner.status, decision.chosen = "chosen", winner.candidate
    elif not decision.note:
        decision.note = f"no {kind} plugin fits" if rows else f"no {kind} plugin is installed"
    return decision


def _row(pool: Pool, candidate: Candidate, need: Need) -> Row:
    if candidate.status == "ambiguous" and not _invited(pool, candidate):
        return Row(candidate, "ambiguous", list(candidate.reasons))
    row = consider(pool, candidate, need)
    declaration = candidate.declaration
    if row.status == "usable" and getattr(declaration, "activation", "available") == "opt-in":
        return Row(candidate, "not-asked", ["opt-in: used only when named in the config"])
    return row


def _invited(pool: Pool, candidate: Candidate) -> bool:
    return candidate.dist in pool.policy.auto or prefers(pool.policy, candidate)


def _split(
    pool: Pool, kind: str, hardware_order: Sequence[str]
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates that take part in automatic choice at once, and third-party ones that wait."""
    inside: list[Candidate] = []
    outside: list[Candidate] = []
    for candidate in pool.candidates(kind):
        joins = candidate.builtin or not (candidate.usable or candidate.status == "ambiguous")
        named = any(_names(ref, candidate) for ref in hardware_order)
        (inside if joins or named or _invited(pool, candidate) else outside).append(candidate)
    return inside, outside


def _names(ref: str, candidate: Candidate) -> bool:
    return ref == candidate.id or (ref == candidate.name and candidate.status != "ambiguous")


def _order(row: Row, hardware_order: Sequence[str]) -> tuple[int, int, bool, str]:
    place = next(
        (i for i, ref in enumerate(hardware_order) if _names(ref, row.candidate)),
        len(hardware_order),
    )
    priority = -1 if row.priority is None else row.priority
    return (place, -priority, not row.candidate.builtin, row.id)


def _best(rows: Sequence[Row], need: Need, hardware_order: Sequence[str]) -> Row | None:
    usable = [r for r in rows if r.status == "usable"]
    for row in sorted(usable, key=lambda r: _order(r, hardware_order)):
        if ask(row, need):
            return row
    return None


def as_need(kind: str, values: Mapping[str, Any]) -> Need:
    """A Need from names and values (command line); unknown names are errors.

    Raises:
        SelectionError: a field that the kind's Need does not have.
    """
    cls = need_class(kind)
    known = [f.name for f in fields(cls)]
    for name in values:
        if name not in known:
            raise SelectionError(
                f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)} "
                f"(fields: {', '.join(known) or 'none'})"
            )
    return cls(**values)
