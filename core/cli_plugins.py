"""`cardcage plugins`: list what is installed, explain choices, examine, start a new plugin.

The plain list reads metadata only: no plugin, no pydantic and no torch is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cardcage.core.cli import EXIT_FAILED, EXIT_USAGE, Parser
from cardcage.core.contracts import KINDS, Caps, HardwareNeed, Need
from cardcage.core.discovery import Candidate
from cardcage.core.errors import PluginLoadError, SelectionError
from cardcage.core.loading import missing_requirements
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry
from cardcage.core.resolver import Decision, as_need, detect, did_you_mean, need_class

# Config table that chooses a kind, for kinds that have one.
TABLE_OF_KIND = {
    "attention": "attention",
    "executors": "executor",
    "hardware": "hardware",
    "linear": "linear",
    "loaders": "loader",
    "quant": "quant",
}


def main(argv: Sequence[str]) -> int:
    """Run `cardcage plugins ...`; returns the exit code."""
    words = list(argv)
    commands = {"why": _why, "doctor": _doctor, "check": _check, "new": _new}
    if words and words[0] in commands:
        return commands[words[0]](words[1:])
    parser = Parser(
        prog="cardcage plugins",
        description="List installed plugins. Also: plugins why KIND, doctor, new, check ID.",
    )
    parser.add_argument("--kind", help="one kind only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--load", action="store_true", help="import declarations: caps and status")
    parser.add_argument("--markdown", action="store_true", help="the page docs/plugins.md")
    parser.add_argument("--config", action="append", default=[], help="config file (plugins table)")
    args = parser.parse_args(words)
    _check_kind(parser, args.kind)
    registry = Registry.discover(Policy.configured(args.config))
    if args.markdown:
        print(_markdown(registry, args.kind), end="")
        return 0
    rows = [c for c in registry.candidates() if args.kind in (None, c.kind)]
    states = {id(c): _state(registry, c, args.load) for c in rows}
    if args.json:
        print(json.dumps([_facts(c, states[id(c)]) for c in rows], indent=1))
    else:
        _print_list(rows, states, args.load)
        print(registry.summary_line())
    return 0


def _check_kind(parser: Parser, kind: str | None) -> None:
    """An unknown kind is wrong usage; the message names the nearest."""
    if kind is not None and kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or ";"
        parser.error(f'there is no plugin kind "{kind}"{hint} kinds: {", ".join(KINDS)}')


# ---- the list -----------------------------------------------------------------------------------


def _state(registry: Registry, candidate: Candidate, load: bool) -> tuple[str, str]:
    """(status, first reason) of a candidate; with `load`, whether it is ready here."""
    if not load or not (candidate.usable or candidate.status == "ambiguous"):
        return candidate.status, "; ".join(candidate.reasons)
    try:
        declaration = registry.load(candidate)
    except PluginLoadError:
        return candidate.status, "; ".join(candidate.reasons)
    missing = missing_requirements(declaration.caps)
    if missing:
        return "missing-requirement", "; ".join(missing)
    if candidate.status == "ambiguous":
        return "ambiguous", candidate.reasons[0]
    if candidate.kind == "hardware":
        row = registry.consider(candidate, HardwareNeed())
        found = detect(row)
        return ("ready" if found.score > 0 else "not here"), found.reason
    return "ready", "; ".join(candidate.warnings)


def _facts(candidate: Candidate, state: tuple[str, str]) -> dict[str, Any]:
    facts = candidate.as_dict()
    facts["status"] = state[0]
    facts["reasons"] = [state[1]] if state[1] else []
    declaration = candidate.declaration
    if declaration is not None:
        facts["api"] = getattr(declaration, "api", None)
        facts["roles"] = sorted(getattr(declaration, "roles", ()))
        facts["activation"] = getattr(declaration, "activation", "available")
        facts["caps"] = {k: str(v) for k, v in _caps_items(declaration.caps)}
        facts["description"] = _first_line(declaration)
    return facts


def _print_list(
    rows: Sequence[Candidate], states: Mapping[int, tuple[str, str]], load: bool
) -> None:
    cells = [
        (c.kind, c.name, states[id(c)][0], c.version, c.dist, c.location, states[id(c)][1])
        for c in rows
    ]
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(6)]
    kind = None
    for candidate, row in zip(rows, cells, strict=True):
        if row[0] != kind:
            kind = row[0]
            print(kind)
        text = "  ".join(f"{row[i]:<{widths[i]}}" for i in range(1, 6))
        print(f"  {text}  {row[6]}".rstrip())
        declaration = candidate.declaration
        if load and declaration is not None:
            caps = " ".join(f"{k}={v}" for k, v in _caps_items(declaration.caps))
            print(f"      {_first_line(declaration)}")
            roles = ",".join(sorted(getattr(declaration, "roles", ()))) or "any"
            print(f"      api {declaration.api}; roles {roles}; caps {caps or 'any'}")


def _caps_items(caps: Caps) -> list[tuple[str, str]]:
    """The capabilities that say something, as text; sets in order."""
    found = []
    for spec in fields(caps):
        value = getattr(caps, spec.name)
        if value is None or value in (frozenset(), ()) or value == {}:
            continue
        if isinstance(value, frozenset | set):
            value = "{" + ", ".join(sorted(map(str, value))) + "}"
        elif isinstance(value, Mapping):
            value = "{" + ", ".join(value) + "}"
        elif spec.name == "excludes":
            value = "{" + ", ".join(e.reason for e in value) + "}"
        found.append((spec.name, str(value)))
    return found


def _first_line(declaration: Any) -> str:
    doc = (type(declaration).__doc__ or "").strip()
    return doc.splitlines()[0] if doc else "(no description)"


def _markdown(registry: Registry, kind: str | None) -> str:
    """The page of bundled plugins; nothing of this machine is in it, so that it can be compared.

    Raises:
        PluginLoadError: a bundled declaration does not load.
    """
    lines = [
        "# Bundled plugins",
        "",
        "Written by `cardcage plugins --markdown`; do not edit. Third-party plugins use the same",
        "entry-point groups, `cardcage.<kind>`.",
    ]
    for name in KINDS if kind is None else (kind,):
        rows = [c for c in registry.candidates(name) if c.builtin]
        if not rows:
            continue
        lines += ["", f"## {name}", "", "| name | what it is | capabilities |", "|---|---|---|"]
        for candidate in rows:
            declaration = registry.load(candidate)
            caps = ", ".join(f"{k}: {v}" for k, v in _caps_items(declaration.caps)) or "any"
            cells = [f"`{candidate.name}`", _first_line(declaration), caps]
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


# ---- why ----------------------------------------------------------------------------------------


def _why(argv: list[str]) -> int:
    from cardcage.core.config import take_config_args

    args = take_config_args(argv)
    parser = Parser(
        prog="cardcage plugins why",
        description="Explain which plugin of a kind is chosen. Config flags apply.",
    )
    parser.config_flags = True
    parser.add_argument("kind", help=", ".join(KINDS))
    parser.add_argument("need", nargs="*", help="fields of the need: dtype=bfloat16 arch=9.0")
    parser.add_argument("--all", action="store_true", help="ask third-party plugins as well")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(args.rest)
    _check_kind(parser, chosen.kind)
    tree = args.load().as_dict()
    registry = Registry.discover(Policy.from_config(tree["plugins"]))
    hardware = _choose(registry, "hardware", HardwareNeed(), tree)
    need = _need(chosen.kind, chosen.need, tree, hardware)
    if chosen.kind == "hardware":
        decision = hardware
    else:
        order: tuple[str, ...] = ()
        if hardware.chosen is not None:
            preferences = getattr(hardware.chosen.declaration, "preferences", {})
            order = tuple(preferences.get(chosen.kind, ()))
        decision = _choose(registry, chosen.kind, need, tree, order, chosen.all)
    if chosen.json:
        print(json.dumps(decision.as_dict(), indent=1))
    else:
        print(decision.table())
        if hardware.chosen is None and chosen.kind != "hardware":
            print(f"(no hardware could be chosen: {hardware.note}; the need assumes the host)")
    return 0 if decision.chosen is not None else EXIT_FAILED


def _choose(
    registry: Registry,
    kind: str,
    need: Need,
    tree: Mapping[str, Any],
    order: tuple[str, ...] = (),
    ask_all: bool = False,
) -> Decision:
    table = tree.get(TABLE_OF_KIND.get(kind, ""), {})
    try:
        return registry.explain(
            kind, need, table.get("use", "auto"), table.get("prefer", ()), order, ask_all
        )
    except SelectionError as error:
        if kind == "hardware":
            return Decision(kind, "", "explicit", None, [], str(error))
        raise


def _need(kind: str, words: Sequence[str], tree: Mapping[str, Any], hardware: Decision) -> Need:
    """The default need of a kind on this machine and config, with the user's fields."""
    cls = need_class(kind)
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise SystemExit(f"cardcage plugins why: {word!r} is not of the form field=value")
        default = known[name].default if name in known else ""
        values[name] = _parse(text, default)
    need = as_need(kind, values)
    assumed: dict[str, Any] = {}
    if hardware.chosen is not None and "device_type" in known:
        assumed["device_type"] = hardware.chosen.declaration.caps.device_type
        if "arch" in known and assumed["device_type"] not in ("cpu", "null"):
            assumed["arch"] = None  # reading it would create a device context
    if "block_size" in known:
        assumed["block_size"] = tree["kv"]["block_size"]
    if "kv_format" in known:
        assumed["kv_format"] = tree["kv"]["format"]
    if "dtype" in known and tree["dtype"] != "auto":
        assumed["dtype"] = tree["dtype"]
    return replace(need, **{k: v for k, v in assumed.items() if k not in values})


def _parse(text: str, default: Any) -> Any:
    """A field's value from text, by the type of its default. `any` is None."""
    if text == "any":
        return None
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, float):
            return float(text)
        if isinstance(default, tuple):
            return tuple(int(part) for part in text.split(".") if part)
        if isinstance(default, frozenset):
            return frozenset(part for part in text.split("+") if part)
    except (KeyError, ValueError) as error:
        raise SystemExit(f"cardcage plugins why: {text!r} is not a {type(default).__name__}") \
            from error  # fmt: skip
    return text


# ---- doctor, check, new -------------------------------------------------------------------------


def _doctor(argv: list[str]) -> int:
    from cardcage.core.doctor import examine_all

    parser = Parser(
        prog="cardcage plugins doctor",
        description="Import every declaration in a fresh process and report what is wrong.",
    )
    parser.add_argument("--kind", help="one kind only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", action="append", default=[], help="config file (plugins table)")
    args = parser.parse_args(argv)
    _check_kind(parser, args.kind)
    registry = Registry.discover(Policy.configured(args.config))
    reports = examine_all(registry.candidates(args.kind))
    if args.json:
        print(json.dumps(reports, indent=1))
    else:
        width = max((len(f"{r['kind']} {r['id']}") for r in reports), default=0)
        for report in reports:
            label = f"{report['kind']} {report['id']}"
            time = "" if report["ms"] is None else f"{report['ms']:7.1f} ms"
            print(f"{label:<{width}}  {report['status']:<12} {time:>10}  "
                  f"{'; '.join(report['findings'])}".rstrip())  # fmt: skip
    bad = [r for r in reports if r["status"] == "bad"]
    print(f"{len(reports)} plugins, {len(bad)} bad", file=sys.stderr)
    return EXIT_FAILED if bad else 0


def _check(argv: list[str]) -> int:
    print(
        "cardcage plugins check: arrives with the conformance kit (cardcage.testing), which this "
        "version does not have; `cardcage plugins doctor` examines declarations",
        file=sys.stderr,
    )
    return EXIT_USAGE


def _new(argv: list[str]) -> int:
    from cardcage.core.plugin_template import write_template

    parser = Parser(prog="cardcage plugins new", description="Write a plugin project to start from")
    parser.add_argument("name", help="entry name: lower-case letters, digits, - and _")
    parser.add_argument("--kind", required=True, help=", ".join(KINDS))
    parser.add_argument("--dir", default=".", help="where the project's folder is made")
    args = parser.parse_args(argv)
    _check_kind(parser, args.kind)
    folder = write_template(args.kind, args.name, Path(args.dir))
    print(f"{folder}: pip install -e {folder} && cardcage plugins doctor --kind {args.kind}")
    return 0
