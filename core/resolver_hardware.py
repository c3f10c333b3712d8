"""The one kind with a rule of its own: which platform runs when nobody named one.

A third-party plugin that detects its device beats the built-ins; two such plugins are an
error. Among the built-ins an accelerator beats the host. The host is taken on its own only
when no accelerator is visible and no installed hardware plugin is broken or blocked: falling
back to the CPU in silence would hide exactly the failure that matters.
"""

from __future__ import annotations

from cardcage.core.contracts import Need
from cardcage.core.discovery import prefers
from cardcage.core.resolver import Decision, Pool, Row, ask, consider, detect, summary

# A row in one of these states may be the accelerator that the user bought.
_SUSPECT = frozenset({"broken", "blocked", "incompatible", "missing-requirement"})


def automatic_hardware(pool: Pool, need: Need) -> Decision:
    """Ask every installed hardware plugin whether its device is here, and apply the rule."""
    decision = Decision("hardware", summary(need), "auto")
    scores: dict[int, int] = {}
    for candidate in pool.candidates("hardware"):
        row = consider(pool, candidate, need)
        decision.rows.append(row)
        if row.status != "usable":
            continue
        if getattr(candidate.declaration, "activation", "available") == "opt-in":
            row.status, row.reasons = "not-asked", ["opt-in: used only when named in the config"]
        elif ask(row, need):
            scores[id(row)] = detect(row).score
    winner = _pick(pool, decision, scores)
    if winner is not None:
        winner.status, decision.chosen = "chosen", winner.candidate
    order = {"chosen": 0, "usable": 1}
    decision.rows.sort(key=lambda r: (order.get(r.status, 2), -scores.get(id(r), 0), r.id))
    return decision


def _pick(pool: Pool, decision: Decision, scores: dict[int, int]) -> Row | None:
    here = [r for r in decision.rows if r.status == "usable"]
    foreign = [r for r in here if not r.candidate.builtin]
    if len(foreign) > 1:
        preferred = [r for r in foreign if prefers(pool.policy, r.candidate)]
        if len(preferred) == 1:
            return preferred[0]
        ids = " and ".join(r.id for r in foreign)
        decision.note = f"{ids} both detect a device; choose one with hardware.use"
        return None
    if foreign:
        return foreign[0]
    ranked = sorted(here, key=lambda r: (-scores[id(r)], r.id))
    accelerators = [r for r in ranked if r.candidate.declaration.caps.device_type != "cpu"]
    if accelerators:
        return accelerators[0]
    suspects = [r for r in decision.rows if r.status in _SUSPECT]
    if suspects:
        ids = ", ".join(f"{r.id} ({r.status})" for r in suspects)
        decision.note = (
            f"the CPU is not taken on its own while {ids} may be your accelerator; "
            'repair or uninstall it, or set hardware.use = "cpu"'
        )
        return None
    if not ranked:
        decision.note = "no device was found"
        return None
    return ranked[0]
