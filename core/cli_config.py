"""`cardcage config show | schema`: the resolved config with origins, and its JSON schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from cardcage.core.cli import EXIT_USAGE, Parser
from cardcage.core.config import SECRET, Config, json_schema, take_config_args
from cardcage.core.contracts import HardwareNeed
from cardcage.core.errors import EngineError
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry


def main(argv: Sequence[str]) -> int:
    """Run `cardcage config ...`; returns the exit code."""
    args = take_config_args(argv)
    parser = Parser(prog="cardcage config", description=(__doc__ or "").splitlines()[0])
    parser.config_flags = True
    sub = parser.add_subparsers(dest="what", required=True, parser_class=Parser)
    show = sub.add_parser(
        "show", help="print every value", epilog="Config flags (--config F, --kv.block_size=32) too"
    )
    show.config_flags = True
    show.add_argument("--origin", action="store_true", help="also print where each came from")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument(
        "--no-hardware", action="store_true", help="leave out what the platform proposes"
    )
    schema = sub.add_parser("schema", help="print the JSON schema of config files")
    schema.add_argument("--no-plugins", action="store_true", help="leave out plugins' options")
    chosen = parser.parse_args(args.rest)
    if chosen.what == "schema":
        if args.files or args.values:
            print("cardcage config schema takes no config flags", file=sys.stderr)
            return EXIT_USAGE
        print(json.dumps(json_schema(None if chosen.no_plugins else _plugin_schemas()), indent=1))
        return 0
    config = args.load()
    if not chosen.no_hardware:
        config = _with_hardware(config)
    _show(config, chosen.origin, chosen.json)
    return 0


def _with_hardware(config: Config) -> Config:
    """The config with the platform's proposals, as an engine would run with."""
    tree = config.as_dict()
    registry = Registry.discover(Policy.from_config(tree["plugins"]))
    table = tree["hardware"]
    try:
        decision = registry.resolve("hardware", HardwareNeed(), table["use"], table["prefer"])
        platform = registry.build(decision, HardwareNeed(), None, None)
    except EngineError as error:
        print(f"cardcage: without the platform's proposals: {error}", file=sys.stderr)
        return config
    proposals = platform.defaults(tree).items()
    return config.with_patches([(p, d.value, f"{platform.name}: {d.reason}") for p, d in proposals])


def _show(config: Config, origins: bool, as_json: bool) -> None:
    rows: list[tuple[str, Any, str]] = []
    for path, origin in config.origins.items():
        value = "***" if path.split("[")[0] in SECRET and origin.value else origin.value
        source = f"{origin.source} ({origin.reason})" if origin.reason else origin.source
        rows.append((path, value, source))
    if as_json:
        if origins:
            print(json.dumps({p: {"value": v, "source": s} for p, v, s in rows}, indent=1))
        else:
            print(json.dumps({p: v for p, v, _ in rows}, indent=1))
        return
    texts = [(f"{path} = {json.dumps(value)}", source) for path, value, source in rows]
    width = max(len(text) for text, _ in texts)
    for text, source in texts:
        print(f"{text:<{width}}  # {source}" if origins else text)


def _plugin_schemas() -> dict[str, Any]:
    """Options of every usable plugin, by id; where two kinds share an id, by dist/kind:name."""
    registry = Registry.discover(Policy.configured())
    found: dict[str, Any] = {}
    for candidate in registry.candidates():
        if not candidate.usable:
            continue
        try:
            declaration = registry.load(candidate)
        except EngineError:
            continue
        options = getattr(declaration, "options", None)
        if options is not None:
            key = candidate.id
            if sum(c.id == key for c in registry.candidates()) > 1:
                key = f"{candidate.dist}/{candidate.kind}:{candidate.name}"
            found[key] = options.model_json_schema()
    return found
