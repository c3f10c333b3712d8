"""Reads config sources into layers: TOML and YAML files, environment, flags, overrides.

A `Layer` is a nested dictionary plus, for every key in it, where it was written. `config`
merges layers and validates the result. Also here: the table of flat names that users of vLLM
know, each mapped to our path or refused with one sentence.

Source: vLLM 0.30 engine argument names.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cardcage.core.config_schema import Settings, one_or_many
from cardcage.core.errors import ConfigError
from cardcage.core.resolver import did_you_mean

ENV_PREFIX = "CARDCAGE_"
# Variables that are not config paths.
ENV_SPECIAL = frozenset(
    {"CARDCAGE_PLUGINS", "CARDCAGE_DEBUG", "CARDCAGE_HOME", "CARDCAGE_CONFIG_DIR"}
)
# What Docker links and Kubernetes set for a service that happens to be called "cardcage".
_INJECTED = re.compile(r"CARDCAGE_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")

PathKey = tuple[str | int, ...]


@dataclass(slots=True)
class Layer:
    """One source. `where(path)` names the place of a key, such as `a.toml:12`."""

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[PathKey, int] = field(default_factory=dict)
    reasons: dict[PathKey, str] = field(default_factory=dict)
    named: dict[PathKey, str] = field(default_factory=dict)

    def where(self, path: PathKey) -> str:
        """The source of a key: its own name, or file and the nearest known line above it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.named:
                return self.named[path[:end]]
            if path[:end] in self.lines:
                return f"{self.source}:{self.lines[path[:end]]}"
        return self.source

    def put(self, path: PathKey, value: Any, name: str, reason: str = "") -> None:
        """Set one key and remember what it was called in this source."""
        here = self.data
        for part in path[:-1]:
            inner = here.setdefault(str(part), {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{name}: {path_text(path)} is set as a value and as a table")
            here = inner
        here[str(path[-1])] = value
        plain = plain_path(path)
        self.named[plain] = name
        if reason:
            self.reasons[plain] = reason


# ---- paths --------------------------------------------------------------------------------------

_PART = re.compile(r'\s*(?:"([^"]*)"|\'([^\']*)\'|([^.\s"\']+))\s*(?:\.|$)')


def split_path(text: str) -> PathKey:
    """The parts of a dotted path; parts with dots or slashes are quoted as in TOML.

    Raises:
        ConfigError: not a path.
    """
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise ConfigError(f"{text!r} is not a config path such as kv.block_size")
        parts.append(next(p for p in match.groups() if p is not None))
        position = match.end()
    if not parts or text.endswith("."):
        raise ConfigError(f"{text!r} is not a config path such as kv.block_size")
    return tuple(parts)


def path_text(path: Iterable[str | int]) -> str:
    """A path as users write it: `kv.tiers[0].use`, `plugin."acme/fa4".splits`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        text += "." if text else ""
        text += part if re.fullmatch(r"[\w+-]+", part) else f'"{part}"'
    return text


def plain_path(path: PathKey) -> PathKey:
    """A path without the `+` of an appending last key."""
    last = path[-1]
    return (*path[:-1], last.removesuffix("+")) if isinstance(last, str) else path


def field_at(path: PathKey) -> Any:
    """The pydantic field of a path, or None when the tree has no such key (or is free there)."""
    model: Any = Settings
    found = None
    for part in plain_path(path):
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
        found = model.model_fields.get(str(part))
        if found is None:
            return None
        model = found.annotation
    return found


def leaf_paths(model: type[BaseModel] = Settings, prefix: str = "") -> list[str]:
    """Every key of the tree that is not itself a table, as dotted text."""
    found = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += leaf_paths(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def nearest_path(path: Iterable[str | int]) -> str:
    """`; did you mean "scheduler.max_num_seqs"?` for an unknown key, or nothing."""
    parts = [str(p) for p in path if not isinstance(p, int)]
    known = leaf_paths()
    tables = [n for n in Settings.model_fields if n not in known]
    hint = did_you_mean(".".join(parts), known + tables)
    if hint or not parts:
        return hint
    by_last = {p.rsplit(".", 1)[-1]: p for p in reversed(known)}
    close = did_you_mean(parts[-1], list(by_last))
    match = re.search(r'"(.*)"', close)
    return f'; did you mean "{by_last[match[1]]}"?' if match else ""


# ---- text values (environment, flags) -----------------------------------------------------------


def _kinds(annotation: Any) -> set[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(a) for a in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {str}
    return {origin or annotation}


def is_flag(path: PathKey) -> bool:
    """Whether a path holds true or false, so that a bare flag means true."""
    info = field_at(path)
    return info is not None and _kinds(info.annotation) == {bool}


def parse_text(path: PathKey, text: str, name: str) -> Any:
    """A value from the text of a variable or flag, by the type that the path has.

    Lists and tables are JSON. "null" is none where none is allowed. Text that fits no type
    is returned as it is, for the validation to refuse with its message.

    Raises:
        ConfigError: a list or table that is not JSON.
    """
    info = field_at(path)
    if info is None:
        return _loose(text)
    kinds = _kinds(info.annotation)
    if text == "null" and type(None) in kinds:
        return None
    kinds.discard(type(None))
    if kinds == {bool}:
        word = text.strip().lower()
        return {"true": True, "1": True, "false": False, "0": False}.get(word, text)
    if kinds == {str}:
        return text
    if kinds & {int, float}:
        return _loose(text)
    if text.lstrip()[:1] in "[{":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}: {text!r} is not JSON: {error}") from error
    one_word = any(getattr(m, "func", None) is one_or_many for m in info.metadata)
    if one_word or _table(path) is not None:
        return text
    raise ConfigError(f'{name}: {path_text(path)} is a list or table; write JSON such as ["a"]')


def _loose(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# ---- files --------------------------------------------------------------------------------------


def file_layer(path: str | Path) -> Layer:
    """A layer from a TOML or YAML file, by its suffix.

    Raises:
        ConfigError: missing, unreadable, of another suffix, or not a table at the top.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    suffix = path.suffix.lower()
    if suffix == ".toml":
        data, lines = _toml(path, text)
    elif suffix in (".yaml", ".yml"):
        data, lines = _yaml(path, text)
    else:
        raise ConfigError(f"config file {path}: the name must end in .toml, .yaml or .yml")
    return Layer(str(path), data, lines)


def _toml(path: Path, text: str) -> tuple[dict[str, Any], dict[PathKey, int]]:
    import tomllib

    try:
        return tomllib.loads(text), _toml_lines(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: {error}") from error


_BARE = r'(?:[\w-]+|"[^"]*"|\'[^\']*\')'
_KEYS = rf"{_BARE}(?:\s*\.\s*{_BARE})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_KEYS})\s*\]\]?\s*(?:#.*)?$")
_ASSIGN = re.compile(rf"\s*({_BARE[:-1]}|[\w-]+\+)(?:\s*\.\s*{_BARE})*)\s*=")


def _toml_lines(text: str) -> dict[PathKey, int]:
    """Line numbers of keys and tables; for messages only, so multi-line strings do not matter."""
    lines: dict[PathKey, int] = {}
    counts: dict[PathKey, int] = {}
    table: PathKey = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, assign = _HEADER.match(line), _ASSIGN.match(line)
        if header:
            path = split_path(header[2])
            for end in range(len(path) - 1, 0, -1):
                if path[:end] in counts:
                    path = (*path[:end], counts[path[:end]], *path[end:])
                    break
            if header[1] == "[[":
                counts[path] = counts.get(path, -1) + 1
                lines.setdefault(path, number)
                path = (*path, counts[path])
            table = path
            lines[table] = number
        elif assign:
            lines[plain_path((*table, *split_path(assign[1])))] = number
    return lines


def _yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[PathKey, int]]:
    import yaml

    lines: dict[PathKey, int] = {}
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _yaml_lines(path, node, (), lines)
        data = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: {error}") from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path}: the top must be a table, not {type(data).__name__}")
    return data, lines


def _yaml_lines(path: Path, node: Any, at: PathKey, lines: dict[PathKey, int]) -> None:
    if node.id == "mapping":
        seen: set[str] = set()
        for key, value in node.value:
            number = key.start_mark.line + 1
            if not (key.id == "scalar" and key.tag == "tag:yaml.org,2002:str"):
                raise ConfigError(f"{path}:{number}: keys must be text, got {key.value!r}")
            if key.value in seen:
                raise ConfigError(f"{path}:{number}: {path_text((*at, key.value))} is set twice")
            seen.add(key.value)
            here = plain_path((*at, key.value))
            lines[here] = number
            _yaml_lines(path, value, here, lines)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            lines[(*at, index)] = value.start_mark.line + 1
            _yaml_lines(path, value, (*at, index), lines)


# ---- environment --------------------------------------------------------------------------------


def env_layer(env: Mapping[str, str]) -> Layer:
    """A layer from CARDCAGE_A__B variables; lists and tables are JSON.

    Raises:
        ConfigError: a variable with our prefix that names no config path.
    """
    layer = Layer("environment")
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in ENV_SPECIAL:
            continue
        if name.startswith("CARDCAGE_TEST_") or _INJECTED.fullmatch(name):
            continue
        path = tuple(p.lower() for p in name.removeprefix(ENV_PREFIX).split("__"))
        if field_at(path) is None and path[0] not in ("plugin",) and not _free(path):
            raise ConfigError(f"environment variable {name}: no such key{nearest_path(path)}")
        value = parse_text(path, env[name], name)
        layer.put(_shorthand(path, value), value, name)
    return layer


def _table(path: PathKey) -> type[BaseModel] | None:
    """The model of a path that is a table of the tree, else None."""
    info = field_at(path)
    found = info.annotation if info is not None else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _shorthand(path: PathKey, value: Any) -> PathKey:
    """`attention = "x"` means `attention.use = "x"` wherever a table chooses a plugin."""
    table = _table(path)
    if isinstance(value, str) and table is not None and "use" in table.model_fields:
        return (*path, "use")
    return path


def _free(path: PathKey) -> bool:
    """Whether a path lies inside a free table, such as `speculator.options` or `plugins.pin`."""
    for end in range(len(path) - 1, 0, -1):
        info = field_at(path[:end])
        if info is not None:
            return dict in _kinds(info.annotation)
    return False


# ---- flat names, flags and overrides -----------------------------------------------------------

FLAT: dict[str, str] = {
    "api_key": "server.api_keys",
    "attention_backend": "attention.use",
    "block_size": "kv.block_size",
    "device": "hardware.use",
    "enable_prefix_caching": "kv.prefix_caching",
    "generation_config": "sampling.generation_config",
    "gpu_memory_utilization": "kv.utilization",
    "host": "server.host",
    "kv_cache_dtype": "kv.format",
    "kv_cache_memory_bytes": "kv.bytes",
    "load_format": "loader.use",
    "logits_processors": "sampling.use",
    "logprobs_mode": "sampling.logprobs_mode",
    "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
    "max_logprobs": "sampling.max_logprobs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_queued_reqs": "scheduler.max_num_queued_reqs",
    "max_num_queued_tokens": "scheduler.max_num_queued_tokens",
    "max_num_seqs": "scheduler.max_num_seqs",
    "port": "server.port",
    "quantization": "quant.use",
    "scheduling_policy": "scheduler.policy",
}


@dataclass(frozen=True, slots=True)
class Only:
    """A flat name that we know, of which only some values mean what the engine does."""

    allowed: tuple[Any, ...]
    sentence: str


_ONE_DEVICE = "more than one device is not supported yet; leave it at 1"
ONLY: dict[str, Only] = {
    "async_scheduling": Only((None,), "set scheduler.steps_in_flight = 1 or 2 instead"),
    "cpu_offload_gb": Only((0, 0.0, None), "weight offloading is not supported yet"),
    "data_parallel_size": Only((1, None), _ONE_DEVICE),
    "decode_context_parallel_size": Only((1, None), _ONE_DEVICE),
    "enable_chunked_prefill": Only((True, None), "prefill is always chunked here; leave it on"),
    "enable_expert_parallel": Only((False, None), _ONE_DEVICE),
    "enable_lora": Only((False, None), "LoRA adapters are not supported yet"),
    "kv_transfer_config": Only((None,), "KV connectors are not supported yet"),
    "pipeline_parallel_size": Only((1, None), _ONE_DEVICE),
    "speculative_config": Only((None,), "speculation is configured in the speculator table"),
    "swap_space": Only((0, 0.0, None), "preempted requests are recomputed, never swapped"),
    "tensor_parallel_size": Only((1, None), _ONE_DEVICE),
    "tokenizer_mode": Only(("auto", None), "the loader decides which tokenizer a model has"),
    "trust_remote_code": Only(
        (False, None), "code from a model repository is never run; install a models plugin"
    ),
}


def known_name(name: str) -> PathKey | None:
    """The path that a flag or override name stands for; None when it is unknown.

    Raises:
        ConfigError: not a path.
    """
    flat = name.replace("-", "_") if '"' not in name and not name.startswith("plugin.") else name
    bare, plus = flat.removesuffix("+"), "+" if flat.endswith("+") else ""
    if bare in FLAT:
        flat = FLAT[bare] + plus
    path = split_path(flat)
    inside_plugin = path[0] == "plugin" and len(path) >= 2
    return path if inside_plugin or field_at(path) is not None or _free(path) else None


def check_only(name: str, value: Any) -> bool:
    """True when `name` is known but fixed and `value` is what the engine does anyway.

    Raises:
        ConfigError: the value asks for something else.
    """
    rule = ONLY.get(name.replace("-", "_"))
    if rule is None:
        return False
    if isinstance(value, str):
        value = _loose(value.lower() if value in ("True", "False", "None") else value)
    if not any(value == a and type(value) is type(a) for a in rule.allowed):
        raise ConfigError(f"{name} = {value!r}: {rule.sentence}")
    return True


def mapping_layer(
    source: str, values: Mapping[str, Any], spell: Callable[[str], str], text: bool = False
) -> Layer:
    """A layer from nested dictionaries, dotted keys and flat names, in any mixture.

    Args:
        source: what the layer is called in origins.
        values: text values of flags, or typed values of a program.
        spell: how a name is shown (`--name` for flags).
        text: whether text values are to be parsed by the type of their path.

    Raises:
        ConfigError: a name that is neither a path nor a known flat name.
    """
    layer = Layer(source)
    for name, value in values.items():
        if check_only(name, value):
            continue
        path = known_name(name)
        if path is None:
            names = [*leaf_paths(), *Settings.model_fields, *FLAT, *ONLY]
            hint = did_you_mean(name.replace("-", "_"), names) or nearest_path(split_path(name))
            raise ConfigError(f"{spell(name)}: there is no such option{hint}")
        if text and isinstance(value, str):
            value = parse_text(path, value, spell(name))
        path = _shorthand(path, value)
        table = _table(path)
        if table is not None and not isinstance(value, Mapping):
            keys = ", ".join(table.model_fields)
            raise ConfigError(f"{spell(name)} is a table (keys: {keys}), got {value!r}")
        if isinstance(value, Mapping):
            _put_nested(layer, path, value, spell(name))
        else:
            layer.put(path, value, spell(name))
    return layer


def _put_nested(layer: Layer, path: PathKey, value: Mapping[str, Any], name: str) -> None:
    if not value:
        layer.put(path, {}, name)
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            _put_nested(layer, (*path, key), inner, name)
        else:
            layer.put((*path, key), inner, name)
