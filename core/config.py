"""The resolved config: layers merged in a fixed order, validated, with the origin of each leaf.

Lowest to highest: defaults, patches of plugins and platforms, `/etc/cardcage/*.toml`, config
files in order, CARDCAGE_A__B variables, flags, overrides of the program. Tables merge; lists
replace unless the key ends with `+`, which appends. Nothing is accepted and ignored: an unknown
name is an error that says where it stands and what is nearest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cardcage.core.config_schema import Settings
from cardcage.core.config_sources import (
    FLAT,
    ONLY,
    Layer,
    PathKey,
    env_layer,
    field_at,
    file_layer,
    is_flag,
    known_name,
    leaf_paths,
    mapping_layer,
    nearest_path,
    path_text,
    plain_path,
    split_path,
)
from cardcage.core.errors import ConfigError
from cardcage.core.resolver import did_you_mean

SYSTEM_DIR = "/etc/cardcage"
# Paths whose values are never printed.
SECRET = frozenset({"server.api_keys"})
# Two ways to say one thing: a proposal for the first yields to whoever set the second.
_YIELDS_TO = {"kv.bytes": "kv.utilization"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a leaf's value came from: `default`, `a.toml:12`, an environment name, a flag,
    `override ...`, or `plugin default` with its reason."""

    value: Any
    source: str
    reason: str = ""


@dataclass(frozen=True)
class Config:
    """A validated config. `tree` is the pydantic tree; everything here is read-only."""

    tree: Settings
    origins: Mapping[str, Origin] = field(repr=False)
    layers: tuple[Layer, ...] = field(default=(), repr=False)
    patches: tuple[tuple[str, Any, str], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The tree as fresh, JSON-able nested dictionaries and lists."""
        return self.tree.model_dump(mode="json")

    def origin(self, path: str) -> Origin:
        """The origin of one leaf.

        Raises:
            ConfigError: the tree has no such leaf.
        """
        found = self.origins.get(path_text(split_path(path)))
        if found is None:
            raise ConfigError(f"there is no config key {path!r}{nearest_path(split_path(path))}")
        return found

    def is_set(self, path: str) -> bool:
        """Whether the user set this leaf, in whatever source."""
        return self.origin(path).source not in ("default", "plugin default")

    def with_patches(self, patches: Iterable[Any]) -> Config:
        """A new config with default values proposed by plugins; what the user set stays.

        Args:
            patches: (path, value, reason) tuples, or objects with these attributes. The reason
                starts with the proposer's name.

        Raises:
            ConfigError: an unknown path, a value that the tree refuses, or two proposers that
                want different values.
        """
        merged = {path: (value, reason) for path, value, reason in self.patches}
        for patch in patches:
            path, value, reason = _patch_parts(patch)
            if field_at(split_path(path)) is None:
                hint = nearest_path(split_path(path))
                raise ConfigError(f"{reason}: proposes {path}, which does not exist{hint}")
            if path in _YIELDS_TO and self.origin(_YIELDS_TO[path]).source != "default":
                continue
            before = merged.get(path)
            if before is not None and before[0] != value and not self.is_set(path):
                raise ConfigError(
                    f"{path}: {before[1]} (wants {before[0]!r}) and {reason} (wants {value!r}) "
                    "disagree; set it in your config"
                )
            merged[path] = (value, reason)
        every = tuple((path, value, reason) for path, (value, reason) in merged.items())
        return _resolve(self.layers, every)


def _patch_parts(patch: Any) -> tuple[str, Any, str]:
    if isinstance(patch, tuple):
        path, value, reason = patch
        return path, value, reason
    return patch.path, patch.value, patch.reason


def load_config(
    files: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    cli: Mapping[str, Any] | None = None,
) -> Config:
    """Merge every source and validate.

    Args:
        files: TOML or YAML files, later ones win.
        env: environment; None reads the process's own. CARDCAGE_CONFIG_DIR replaces
            `/etc/cardcage`.
        overrides: a program's values: nested, dotted, or flat names (`max_num_seqs`).
        cli: flags without their dashes, text values (`{"kv.block-size": "32"}`).

    Raises:
        ConfigError: naming file and line (or variable, or flag), path, and the nearest key.
    """
    env = os.environ if env is None else env
    layers = [file_layer(path) for path in _system_files(env)]
    layers += [file_layer(path) for path in files]
    layers.append(env_layer(env))
    layers.append(mapping_layer("command line", cli or {}, lambda name: f"--{name}", text=True))
    layers.append(mapping_layer("override", overrides or {}, lambda name: f"override {name}"))
    return _resolve(tuple(layers), ())


def _system_files(env: Mapping[str, str]) -> list[Path]:
    folder = Path(env.get("CARDCAGE_CONFIG_DIR", SYSTEM_DIR))
    return sorted(folder.glob("*.toml")) if folder.is_dir() else []


# ---- merging ------------------------------------------------------------------------------------


def _resolve(layers: tuple[Layer, ...], patches: tuple[tuple[str, Any, str], ...]) -> Config:
    proposed = Layer("plugin default")
    for path, value, reason in patches:
        proposed.put(split_path(path), value, "plugin default", reason)
    values: dict[str, Any] = {}
    owners: dict[PathKey, Layer] = {}
    for layer in (proposed, *layers):
        _merge(values, layer.data, (), layer, owners)
    try:
        tree = Settings.model_validate(values)
    except ValidationError as error:
        raise _explained(error, owners) from error
    return Config(tree, _origins(tree, owners), layers, patches)


def _merge(
    into: dict[str, Any],
    data: Mapping[str, Any],
    at: PathKey,
    layer: Layer,
    owners: dict[PathKey, Layer],
) -> None:
    for raw, value in data.items():
        key = raw.removesuffix("+")
        path = (*at, key)
        if isinstance(value, Mapping):
            inner = into.get(key)
            if not isinstance(inner, dict):
                inner = into[key] = {}
            if not value:
                owners[path] = layer
            _merge(inner, value, path, layer, owners)
            continue
        if raw != key:
            below = into.get(key, _default(path))
            if not isinstance(value, list | tuple) or not isinstance(below, list | tuple):
                raise ConfigError(f"{layer.where(path)}: {path_text(path)}+ appends to a list only")
            value = [*below, *value]
        into[key] = value
        owners[path] = layer


def _default(path: PathKey) -> Any:
    info = field_at(path)
    return None if info is None else info.get_default(call_default_factory=True)


def _origins(tree: Settings, owners: Mapping[PathKey, Layer]) -> dict[str, Origin]:
    found: dict[str, Origin] = {}
    dump = tree.model_dump(mode="json")
    for text in leaf_paths():
        path = split_path(text)
        value: Any = dump
        for part in path:
            value = value[str(part)]
        inside = {p: o for p, o in owners.items() if p[: len(path)] == path}
        if isinstance(value, dict) and inside:  # a free table: one origin per leaf in it
            for leaf, layer in inside.items():
                held: Any = dump
                for part in leaf:
                    held = held[str(part)]
                found[path_text(leaf)] = Origin(held, layer.where(leaf))
            continue
        owner = owners.get(path)
        if owner is None:
            found[text] = Origin(value, "default")
        else:
            found[text] = Origin(value, owner.where(path), owner.reasons.get(path, ""))
    return found


def _explained(error: ValidationError, owners: Mapping[PathKey, Layer]) -> ConfigError:
    lines = []
    for item in error.errors():
        path: PathKey = item["loc"]
        layer = next(
            (owners[path[:n]] for n in range(len(path), 0, -1) if path[:n] in owners), None
        )
        if layer is None:  # an unknown or misplaced table: any owner of something inside it
            layer = next((o for p, o in owners.items() if path and p[: len(path)] == path), None)
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown key{_nearest_in_table(path)}"
        elif item["type"] not in ("value_error", "missing"):
            secret = path_text(path).split("[")[0] in SECRET
            text += "" if secret else f", got {repr(item['input'])[:80]}"
        reason = layer.reasons.get(path, "") if layer is not None else ""
        place = layer.where(path) if layer is not None else ""
        key = path_text(path)
        if place.endswith((f"-{key}", f" {key}")):
            key = ""
        text += f" (proposed by {reason})" if reason else ""
        lines.append(": ".join(part for part in (place, key, text) if part))
    return ConfigError("\n".join(lines))


def _nearest_in_table(path: PathKey) -> str:
    """The nearest key of the table that the unknown key stands in, else of the whole tree."""
    if any(isinstance(part, int) for part in path):
        return ""
    table = field_at(path[:-1]) if len(path) > 1 else None
    fields = getattr(getattr(table, "annotation", None), "model_fields", None)
    if fields is not None:
        hint = did_you_mean(str(path[-1]), list(fields))
        if hint:
            return hint
    return nearest_path(path)


# ---- flags --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ConfigArgs:
    """The config part of a command line. `rest` is everything that is not ours, in order."""

    files: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)

    def load(self, overrides: Mapping[str, Any] | None = None) -> Config:
        """Resolve with these files and flags."""
        return load_config(self.files, None, overrides, self.values)


def take_config_args(argv: Sequence[str], keep: Iterable[str] = ()) -> ConfigArgs:
    """Split a command line into config flags and the command's own arguments.

    Understood: `--config FILE` (repeatable), `--kv.block_size=32`, `--kv.block-size 32`,
    flat names (`--max-num-seqs 8`), `--enforce-eager` and `--no-enforce-eager` for switches.

    Args:
        argv: arguments after the command's name.
        keep: flags (with dashes) that the command reads itself; left in `rest`.

    Raises:
        ConfigError: a config flag without its value.
    """
    found = ConfigArgs()
    kept = set(keep)
    words = list(argv)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            found.rest += words[position - 1 :]
            break
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in kept:
            found.rest.append(word)
            continue
        bare, switch = _flag(name[2:])
        if bare is None:
            found.rest.append(word)
            continue
        if switch is not None and not equals:
            found.values[bare] = switch
            continue
        if not equals:
            if position >= len(words) or words[position].startswith("--"):
                raise ConfigError(f"{name} needs a value")
            value = words[position]
            position += 1
        if bare == "config":
            found.files.append(value)
        else:
            found.values[bare] = value
    return found


def _flag(name: str) -> tuple[str | None, str | None]:
    """(name without a leading no-, "true"/"false" for a switch); (None, None) when not ours."""
    if name == "config":
        return name, None
    for bare, word in ((name, "true"), (name.removeprefix("no-"), "false")):
        flat = bare.replace("-", "_")
        if flat in ONLY:
            booleans = any(isinstance(a, bool) for a in ONLY[flat].allowed)
            return bare, word if booleans else None
        path = known_name(bare) if flat else None
        if path is not None and (is_flag(plain_path(path)) or bare == name):
            return bare, word if is_flag(plain_path(path)) else None
    return None, None


def nearest_flag(flag: str) -> str:
    """`; did you mean "--max-num-seqs"?` for an unknown flag, or nothing."""
    names = [n.replace("_", "-") for n in (*FLAT, *ONLY)] + leaf_paths() + ["config"]
    hint = did_you_mean(flag.lstrip("-").split("=")[0], names)
    return hint.replace('"', '"--', 1)


def json_schema(plugin_options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """JSON schema of the tree; `plugin_options` maps plugin ids to their options' schemas."""
    schema = Settings.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    if plugin_options:
        schema["properties"]["plugin"]["properties"] = dict(plugin_options)
    return schema
