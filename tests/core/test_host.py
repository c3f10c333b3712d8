"""The composition root: choices that need no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cardcage.core.config import load_config
from cardcage.core.contracts import SamplingNeed
from cardcage.core.errors import ConfigError, ModelError, PluginLoadError, SelectionError
from cardcage.core.host import Host, build_engine
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry


def host(**overrides: Any) -> Host:
    return Host(load_config(env={}, overrides={"hardware": {"use": "cpu"}, **overrides}))


def test_an_unknown_loader_is_refused_by_name() -> None:
    with pytest.raises(SelectionError, match='did you mean "gguf"'):
        host(loader={"use": "ggfu"}).open_source("dummy:x")


def test_a_named_loader_is_the_only_one_asked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="safetensors does not recognise the model reference"):
        host(loader={"use": "safetensors"}).open_source("dummy:x")
    with pytest.raises(ModelError, match="config"):  # the dummy loader itself, by its full name
        host(loader={"use": "cardcage/dummy"}).open_source(f"dummy:{tmp_path}")
    with pytest.raises(ModelError, match="no loader recognises"):
        host().open_source("no such thing")


def test_a_logits_plugin_without_draft_rows_excludes_a_speculator(site: Any) -> None:
    site.plugin("acme", "sampling", "mark", "SamplingCaps(draft_rows=False)")
    tree = {"hardware": {"use": "cpu"}, "speculator": {"use": "ngram"}}
    config = load_config(env={}, overrides={**tree, "sampling": {"use": ["mark"]}})
    with pytest.raises(ConfigError, match=r'"mark", which cannot follow drafts.*"ngram"'):
        build_engine(config, registry=Registry.discover(Policy(), [str(site.path)]))


def test_a_logits_plugin_must_say_where_it_stands(site: Any) -> None:
    methods = "".join(
        f"def {n}(self, *a): ...\n" for n in ("validate", "admit", "release", "apply")
    )
    site.plugin("acme", "sampling", "mark", "SamplingCaps()", extra=methods)
    made = Host(
        load_config(env={}, overrides={"hardware": {"use": "cpu"}}),
        Registry.discover(Policy(), [str(site.path)]),
    )
    with pytest.raises(PluginLoadError, match="lacks order, argmax_invariant"):
        made.resolve("sampling", SamplingNeed(), use="mark")
