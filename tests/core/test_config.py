"""The config: schema limits, layers and their order, origins, flat names, flags, patches."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cardcage.core.config import (
    Config,
    json_schema,
    load_config,
    nearest_flag,
    take_config_args,
)
from cardcage.core.config_schema import Settings, parse_bytes
from cardcage.core.config_sources import (
    FLAT,
    ONLY,
    field_at,
    leaf_paths,
    path_text,
    split_path,
)
from cardcage.core.errors import ConfigError


def load(**options: Any) -> Config:
    options.setdefault("env", {})
    return load_config(**options)


def error(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**options)
    return str(caught.value)


def toml(folder: Path, text: str, name: str = "a.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


# ---- schema -------------------------------------------------------------------------------------


def test_every_field_is_described() -> None:
    def check(model: type[BaseModel]) -> None:
        assert (model.__doc__ or "").strip()
        for name, info in model.model_fields.items():
            inner = info.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                check(inner)
            else:
                assert info.description, f"{model.__name__}.{name}"

    check(Settings)


def test_the_tree_is_frozen() -> None:
    tree = load().tree
    with pytest.raises(ValueError, match="frozen"):
        tree.seed = 3  # type: ignore[misc]
    first = load().as_dict()
    first["server"]["frontends"].append("x")
    assert load().as_dict()["server"]["frontends"] == ["openai-http"]


def test_as_dict_is_json() -> None:
    assert json.loads(json.dumps(load().as_dict())) == load().as_dict()


@pytest.mark.parametrize(
    ("text", "value"),
    [("64GiB", 64 * 2**30), ("1.5 GiB", 3 * 2**29), ("512mb", 512 * 10**6), ("1048576", 2**20),
     ("2k", 2000), (7, 7), (True, True)],
)  # fmt: skip
def test_sizes(text: Any, value: Any) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", -1),
        ("seed", True),
        ("seed", 1.0),
        ("seed", "1"),
        ("dtype", "float64"),
        ("dtype", "half"),
        ("max_model_len", 0),
        ("max_model_len", 10**12),
        ("kv.block_size", 0),
        ("kv.block_size", 16.5),
        ("kv.bytes", "10 potatoes"),
        ("kv.bytes", 5),
        ("kv.utilization", 0),
        ("kv.utilization", 1.01),
        ("kv.utilization", float("nan")),
        ("scheduler.max_num_seqs", 10**9),
        ("scheduler.max_num_batched_tokens", 0),
        ("scheduler.policy", "lifo"),
        ("scheduler.watermark", 1.0),
        ("scheduler.steps_in_flight", 3),
        ("sampling.max_logprobs", -2),
        ("server.port", 70000),
        ("server.frontends", []),
        ("server.host", ""),
        ("server.process", "thread"),
        ("server.max_body_bytes", 10),
        ("speculator.k", 0),
        ("plugins.mode", "some"),
        ("attention.use", ""),
        ("attention.prefer", ["auto", "x"]),
        ("attention.rules", [{"layers": "re:.*", "use": "torch_reference"}]),  # not yet
        ("kv.tiers", [{"use": "cpu", "module_path": "x"}]),
        ("kv.tiers", [{}]),
        ("kv.tiers", {"use": "cpu"}),
        ("model", None),
    ],
)
def test_absurd_values_are_refused_by_path(path: str, value: Any) -> None:
    assert path in error(overrides={path: value})


def test_values_that_contradict_each_other() -> None:
    text = error(overrides={"long_prefill_token_threshold": 512, "max_num_batched_tokens": 256})
    assert "512" in text
    assert "256" in text


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kv.block_size", ("kv", "block_size")),
        ('plugin."acme-fa/fa4".num_splits', ("plugin", "acme-fa/fa4", "num_splits")),
        ("seed", ("seed",)),
    ],
)
def test_paths_round_trip(text: str, parts: tuple[str, ...]) -> None:
    assert split_path(text) == parts
    assert path_text(parts) == text


@pytest.mark.parametrize("text", ["", ".", "a..b", "a.", 'a."b', "a b"])
def test_bad_paths(text: str) -> None:
    with pytest.raises(ConfigError):
        split_path(text)


def test_flat_names_lead_to_existing_paths() -> None:
    for name, path in FLAT.items():
        assert field_at(split_path(path)) is not None, name
    assert not set(FLAT) & set(ONLY)
    assert not set(Settings.model_fields) & set(ONLY)


# ---- order of sources ---------------------------------------------------------------------------

SOURCES = ("default", "patch", "system", "first", "second", "env", "cli", "override")


@pytest.mark.parametrize("top", range(len(SOURCES)))
def test_precedence(tmp_path: Path, top: int) -> None:
    """With the sources up to `top` present, the highest one wins and is named."""
    system = tmp_path / "system"
    system.mkdir()
    path, files, options = "scheduler.max_num_seqs", [], {}
    env = {"CARDCAGE_CONFIG_DIR": str(system)}
    present = SOURCES[: top + 1]
    if "system" in present:
        toml(system, "[scheduler]\nmax_num_seqs = 102\n", "x.toml")
    for index, name in enumerate(("first", "second")):
        if name in present:
            text = f"[scheduler]\nmax_num_seqs = {103 + index}\n"
            files.append(toml(tmp_path, text, f"{name}.toml"))
    if "env" in present:
        env["CARDCAGE_SCHEDULER__MAX_NUM_SEQS"] = "105"
    if "cli" in present:
        options["cli"] = {path: "106"}
    if "override" in present:
        options["overrides"] = {path: 107}
    config = load(files=files, env=env, **options)
    if "patch" in present:
        config = config.with_patches([(path, 101, "cpu: small")])
    origin = config.origin(path)
    assert origin.value == (256 if top == 0 else 100 + top)
    assert config.tree.scheduler.max_num_seqs == origin.value
    expected = {
        "default": "default",
        "patch": "plugin default",
        "system": f"{system / 'x.toml'}:2",
        "first": f"{tmp_path / 'first.toml'}:2",
        "second": f"{tmp_path / 'second.toml'}:2",
        "env": "CARDCAGE_SCHEDULER__MAX_NUM_SEQS",
        "cli": f"--{path}",
        "override": f"override {path}",
    }
    assert origin.source == expected[SOURCES[top]]
    assert origin.reason == ("cpu: small" if SOURCES[top] == "patch" else "")
    assert config.is_set(path) is (top >= 2)


def test_tables_merge_and_lists_replace(tmp_path: Path) -> None:
    a = toml(tmp_path, '[kv]\nblock_size = 32\n[server]\nfrontends = ["a", "b"]\n', "a.toml")
    b = toml(tmp_path, '[kv]\nutilization = 0.5\n[server]\nfrontends = ["c"]\n', "b.toml")
    tree = load(files=[a, b]).tree
    assert (tree.kv.block_size, tree.kv.utilization) == (32, 0.5)
    assert tree.server.frontends == ("c",)


def test_a_plus_appends(tmp_path: Path) -> None:
    a = toml(tmp_path, '[server]\n"frontends+" = ["grpc"]\n')
    config = load(files=[a], cli={"server.frontends+": '["batch"]'})
    assert config.tree.server.frontends == ("openai-http", "grpc", "batch")
    assert config.origin("server.frontends").source == "--server.frontends+"
    assert "appends to a list only" in error(cli={"kv.block_size+": "3"})


def test_yaml_and_toml_are_equal(tmp_path: Path) -> None:
    a = toml(tmp_path, 'seed = 3\n[attention]\nprefer = ["x", "auto"]\n[kv]\nbytes = "1GiB"\n')
    b = toml(tmp_path, "seed: 3\nattention:\n  prefer: [x, auto]\nkv:\n  bytes: 1GiB\n", "b.yaml")
    assert load(files=[a]).as_dict() == load(files=[b]).as_dict()
    assert load(files=[b]).origin("kv.bytes").source == f"{b}:5"
    assert load(files=[toml(tmp_path, "", "c.yml")]).as_dict() == load().as_dict()


def test_free_tables_keep_an_origin_per_leaf(tmp_path: Path) -> None:
    a = toml(tmp_path, '[plugin."acme/fa4"]\nnum_splits = 8\n')
    config = load(files=[a], cli={'plugin."acme/fa4".depth': "2"})
    assert config.as_dict()["plugin"] == {"acme/fa4": {"num_splits": 8, "depth": 2}}
    assert config.origin('plugin."acme/fa4".num_splits').source == f"{a}:2"
    assert config.origin('plugin."acme/fa4".depth').source.startswith("--plugin")


def test_every_leaf_has_an_origin() -> None:
    config = load()
    assert set(config.origins) == set(leaf_paths())
    with pytest.raises(ConfigError, match=r'did you mean "kv\.block_size"'):
        config.origin("kv.blocksize")


# ---- errors in files ----------------------------------------------------------------------------


def test_errors_name_file_line_path_and_the_nearest_key(tmp_path: Path) -> None:
    a = toml(
        tmp_path,
        'model = "x"\n[kv]\nblock_size = 0\n\n[[kv.tiers]]\nuse = "a"\n[[kv.tiers]]\nuse = "b"\n'
        'colour = 1\n[scheduler]\nmax_num_seq = 3\n[attention]\nprefer = ["auto", "b"]\n',
    )
    lines = error(files=[a]).splitlines()
    assert f"{a}:3: kv.block_size: Input should be greater than or equal to 1, got 0" in lines
    assert f"{a}:9: kv.tiers[1].colour: unknown key" in lines
    assert f'{a}:11: scheduler.max_num_seq: unknown key; did you mean "max_num_seqs"?' in lines
    assert any(line.startswith(f"{a}:13: attention.prefer: ") for line in lines)


def test_a_key_of_another_table_is_found(tmp_path: Path) -> None:
    a = toml(tmp_path, "max_num_seqs = 3\n")
    assert 'did you mean "scheduler.max_num_seqs"' in error(files=[a])
    b = toml(tmp_path, "[schedular]\nmax_num_seqs = 3\n", "b.toml")
    assert f'{b}:1: schedular: unknown key; did you mean "scheduler"?' in error(files=[b])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "x = = 1", "line 1"),
        ("a.yaml", "a: [1", "a.yaml"),
        ("a.yaml", "- 1\n", "the top must be a table"),
        ("a.yaml", "kv:\n  block_size: 8\n  block_size: 9\n", "a.yaml:3: kv.block_size is set"),
        ("a.yaml", "1: 2\n", "keys must be text"),
        ("a.json", "{}", "must end in .toml"),
    ],
)  # fmt: skip
def test_broken_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in error(files=[toml(tmp_path, text, name)])


def test_missing_file() -> None:
    assert "nowhere.toml" in error(files=["nowhere.toml"])


def test_secrets_are_not_quoted_in_errors() -> None:
    text = error(overrides={"server.api_keys": [123456]})
    assert "123456" not in text


# ---- environment --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("MODEL", "123", "model", "123"),
        ("SEED", "5", "seed", 5),
        ("MAX_MODEL_LEN", "null", "max_model_len", None),
        ("ENFORCE_EAGER", "True", "enforce_eager", True),
        ("KV__PREFIX_CACHING", "0", "kv.prefix_caching", False),
        ("KV__BYTES", "1GiB", "kv.bytes", 2**30),
        ("KV__UTILIZATION", "0.5", "kv.utilization", 0.5),
        ("ATTENTION__USE", "acme/fa4", "attention.use", "acme/fa4"),
        ("ATTENTION", "acme/fa4", "attention.use", "acme/fa4"),
        ("KV", '{"block_size": 8}', "kv.block_size", 8),
        ("SERVER__FRONTENDS", '["a"]', "server.frontends", ["a"]),
        ("SERVER__API_KEYS", "k1", "server.api_keys", ["k1"]),
        ("SERVED_MODEL_NAME", '["a", "b"]', "served_model_name", ["a", "b"]),
        ("SPECULATOR__OPTIONS__DEPTH", "3", "speculator.options.depth", 3),
        ("PLUGINS__PIN__ACME", "sha256:x", "plugins.pin.acme", "sha256:x"),
    ],
)
def test_variables(name: str, text: str, path: str, value: Any) -> None:
    config = load(env={f"CARDCAGE_{name}": text})
    assert config.origin(path).value == value
    assert config.origin(path).source == f"CARDCAGE_{name}"


def test_plugin_options_from_the_environment() -> None:
    config = load(env={"CARDCAGE_PLUGIN": '{"acme/fa4": {"x": 1}}'})
    assert config.origin('plugin."acme/fa4".x').value == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("MODLE", "x", 'did you mean "model"'),
        ("KV__BLOCK_SIZ", "3", 'did you mean "kv.block_size"'),
        ("KV__BLOCK_SIZE", "many", "CARDCAGE_KV__BLOCK_SIZE: kv.block_size"),
        ("ENFORCE_EAGER", "yes", "valid boolean"),
        ("SERVER__FRONTENDS", "grpc", "write JSON"),
        ("SERVER__FRONTENDS", "[grpc", "is not JSON"),
    ],
)
def test_wrong_variables(name: str, text: str, message: str) -> None:
    assert message in error(env={f"CARDCAGE_{name}": text})


def test_variables_that_are_not_ours() -> None:
    env = {
        "CARDCAGE_SERVICE_HOST": "10.0.0.1",
        "CARDCAGE_PORT": "tcp://10.0.0.1:8000",
        "CARDCAGE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "CARDCAGE_SERVICE_PORT_HTTP": "8000",
        "CARDCAGE_PLUGINS": "none",
        "CARDCAGE_DEBUG": "1",
        "CARDCAGE_HOME": "/x",
        "CARDCAGE_TEST_GGUF": "/x",
        "OTHER": "1",
    }
    assert load(env=env).as_dict() == load().as_dict()


# ---- overrides and flat names -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "path", "value"),
    [
        ({"max_num_seqs": 3}, "scheduler.max_num_seqs", 3),
        ({"max_num_batched_tokens": 64}, "scheduler.max_num_batched_tokens", 64),
        ({"gpu_memory_utilization": 0.5}, "kv.utilization", 0.5),
        ({"block_size": 32}, "kv.block_size", 32),
        ({"enable_prefix_caching": False}, "kv.prefix_caching", False),
        ({"quantization": "gguf"}, "quant.use", "gguf"),
        ({"served_model_name": "m"}, "served_model_name", ["m"]),
        ({"attention_backend": "triton_paged"}, "attention.use", "triton_paged"),
        ({"attention": "triton_paged"}, "attention.use", "triton_paged"),
        ({"hardware": "cpu"}, "hardware.use", "cpu"),
        ({"kv": {"block_size": 8}}, "kv.block_size", 8),
        ({"kv.block_size": 8}, "kv.block_size", 8),
        ({"plugin": {"a/b": {"x": 1}}}, 'plugin."a/b".x', 1),
        ({"max_model_len": 77}, "max_model_len", 77),
    ],
)
def test_overrides(values: dict[str, Any], path: str, value: Any) -> None:
    assert load(overrides=values).origin(path).value == value


@pytest.mark.parametrize(
    "values",
    [
        {"enable_chunked_prefill": True},
        {"tensor_parallel_size": 1},
        {"pipeline_parallel_size": 1, "data_parallel_size": 1},
        {"trust_remote_code": False, "enable_lora": False, "swap_space": 0},
        {"tokenizer_mode": "auto", "speculative_config": None},
    ],
)
def test_fixed_names_with_the_value_that_holds(values: dict[str, Any]) -> None:
    assert load(overrides=values).as_dict() == load().as_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel_size": 2}, "not supported yet"),
        ({"tensor_parallel_size": True}, "not supported yet"),
        ({"enable_chunked_prefill": False}, "always chunked"),
        ({"trust_remote_code": True}, "never run"),
        ({"swap_space": 4}, "recomputed"),
        ({"max_num_seq": 3}, 'did you mean "max_num_seqs"'),
        ({"kv": {"blocksize": 3}}, 'did you mean "block_size"'),
        ({"kv": 3}, "kv is a table (keys: block_size"),
        ({"nonsense_option": 3}, "there is no such option"),
    ],
)
def test_wrong_overrides(values: dict[str, Any], message: str) -> None:
    assert message in error(overrides=values)


# ---- flags --------------------------------------------------------------------------------------


def test_flags_are_taken_and_the_rest_is_left() -> None:
    line = (
        "MODEL --config a.toml --kv.block_size=32 --kv.utilization 0.5 --max-num-seqs 8 "
        "--enforce-eager --no-enable-prefix-caching --url http://x --json -q "
        '--plugin."a/b".x=1 --attention triton_paged -- --seed'
    )
    args = take_config_args(line.split(), keep=("--url",))
    assert args.files == ["a.toml"]
    assert args.rest == ["MODEL", "--url", "http://x", "--json", "-q", "--", "--seed"]
    config = load(cli=args.values)
    assert config.tree.kv.block_size == 32
    assert config.tree.kv.utilization == 0.5
    assert config.tree.scheduler.max_num_seqs == 8
    assert config.tree.enforce_eager is True
    assert config.tree.kv.prefix_caching is False
    assert config.tree.attention.use == "triton_paged"
    assert config.as_dict()["plugin"] == {"a/b": {"x": 1}}


def test_flags_with_fixed_meaning() -> None:
    args = take_config_args(["--enable-chunked-prefill", "--tensor-parallel-size", "1"])
    assert load(cli=args.values).as_dict() == load().as_dict()
    args = take_config_args(["--no-enable-chunked-prefill"])
    assert "always chunked" in error(cli=args.values)
    args = take_config_args(["--tensor-parallel-size=2"])
    assert "--tensor" not in args.rest
    assert "not supported yet" in error(cli=args.values)


def test_no_before_a_table_is_not_ours() -> None:
    assert take_config_args(["--no-hardware", "x"]).rest == ["--no-hardware", "x"]


def test_a_flag_without_its_value() -> None:
    with pytest.raises(ConfigError, match="--seed needs a value"):
        take_config_args(["--seed", "--port", "1"])


def test_nearest_flag() -> None:
    assert nearest_flag("--max-num-seq=3") == '; did you mean "--max-num-seqs"?'
    assert nearest_flag("--zzzzzz") == ""


# ---- patches ------------------------------------------------------------------------------------


class Patch:
    path, value, reason = "kv.block_size", 64, "xpu: wide reads"


def test_patches_fill_only_what_is_unset() -> None:
    config = load(overrides={"kv.utilization": 0.5})
    patched = config.with_patches([("kv.utilization", 0.8, "cpu: x"), Patch()])
    assert patched.tree.kv.utilization == 0.5
    assert patched.origin("kv.block_size").value == 64
    assert patched.origin("kv.block_size").reason == "xpu: wide reads"
    assert config.tree.kv.block_size == 16  # the old config stays


def test_patches_of_two_plugins_must_agree() -> None:
    config = load().with_patches([("kv.block_size", 64, "a: x")])
    assert config.with_patches([("kv.block_size", 64, "b: x")]).tree.kv.block_size == 64
    with pytest.raises(ConfigError, match=r"a: x .*64.* and b: x .*32.* disagree"):
        config.with_patches([("kv.block_size", 32, "b: x")])
    user = load(overrides={"kv.block_size": 8}).with_patches([("kv.block_size", 64, "a: x")])
    assert user.with_patches([("kv.block_size", 32, "b: x")]).tree.kv.block_size == 8


def test_wrong_patches_name_their_plugin() -> None:
    with pytest.raises(ConfigError, match=r"acme: x: proposes kv\.blocksize"):
        load().with_patches([("kv.blocksize", 1, "acme: x")])
    with pytest.raises(ConfigError, match=r"kv\.block_size: .*proposed by acme: x"):
        load().with_patches([("kv.block_size", 0, "acme: x")])


def test_appending_to_a_patched_list() -> None:
    config = load(overrides={"server.frontends+": ["grpc"]})
    patched = config.with_patches([("server.frontends", ["batch"], "acme: x")])
    assert patched.tree.server.frontends == ("batch", "grpc")


def test_a_config_crosses_a_process_boundary() -> None:
    config = load(overrides={"seed": 3}).with_patches([("kv.block_size", 64, "a: x")])
    copy = pickle.loads(pickle.dumps(config))
    assert copy.as_dict() == config.as_dict()
    assert copy.origins == config.origins
    assert copy.with_patches([("kv.utilization", 0.5, "b: x")]).tree.kv.utilization == 0.5


# ---- schema document ----------------------------------------------------------------------------


def test_json_schema_holds_every_key_and_plugin_options() -> None:
    schema = json_schema({"acme/fa4": {"type": "object"}})
    assert set(schema["properties"]) == set(Settings.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["plugin"]["properties"]["acme/fa4"] == {"type": "object"}
