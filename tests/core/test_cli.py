"""The command line: speed, exit codes, suggestions, and what each subcommand prints."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cardcage.core import cli
from cardcage.core.contracts import KINDS
from cardcage.core.errors import EngineError, PluginLoadError, ResourceError
from cardcage.core.policy import Policy
from cardcage.core.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
LIGHT_S = 0.3


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def command(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cardcage", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
        check=False,
    )


@pytest.fixture(autouse=True)
def _no_system_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARDCAGE_CONFIG_DIR", str(tmp_path / "none"))


# ---- the command itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("--help",), ("plugins",), ("--version",), ("plugins", "--help")]
)
def test_light_commands_are_quick_and_import_no_torch(
    words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = (
        "import sys; from cardcage.core.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'fastapi', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "print(code, sorted(heavy))"
    )
    # As for users: bytecode is kept from the first run on, whatever this environment says.
    kept = tmp_path_factory.getbasetemp() / "bytecode"
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(kept)}
    best = 9.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT,
            check=False, env=env,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time: what a busy machine adds to the wall time is not the command's.
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
        if best < LIGHT_S:
            break
    assert best < LIGHT_S


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)
    assert run(capsys, "help")[1] == out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from cardcage import __version__

    assert run(capsys, "--version") == (0, f"cardcage {__version__}\n", "")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "commands:" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("plugin",), "there is no command 'plugin'; did you mean \"plugins\"?"),
        (("--verion",), 'did you mean "--version"'),
        (("plugins", "--jsn"), 'did you mean "--json"'),
        (("plugins", "--kind", "atention"), 'did you mean "attention"'),
        (("config", "show", "--orign"), 'did you mean "--origin"'),
        (("config", "show", "--max-num-seq", "3"), 'did you mean "--max-num-seqs"'),
        (("config", "show", "--seed=x"), "--seed: Input should be a valid integer"),
        (("plugins", "why", "attention", "--atention.use=x"), 'did you mean "--attention.use"'),
        (("plugins", "why", "atention"), 'did you mean "attention"'),
        (("plugins", "check", "cardcage/cpu"), "conformance kit"),
        (("config", "schema", "--seed=1"), "takes no config flags"),
    ],
)
def test_wrong_usage_is_code_two_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2, err
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [(PluginLoadError("p is broken"), 3), (ResourceError("no memory"), 1), (EngineError("x"), 1)],
)
def test_errors_of_the_tree_are_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_find", lambda name: fail)
    assert run(capsys, "plugins") == (code, "", f"cardcage: {error}\n")
    monkeypatch.setenv("CARDCAGE_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["plugins"])


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_find", lambda name: fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plugins"])


def test_interrupt_and_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(effect: Any) -> int:
        def act(argv: list[str]) -> Any:
            if isinstance(effect, BaseException):
                raise effect
            return effect

        monkeypatch.setattr(cli, "_find", lambda name: act)
        return cli.main(["plugins"])

    assert outcome(KeyboardInterrupt()) == 130
    assert outcome(SystemExit(5)) == 5
    assert outcome(SystemExit(None)) == 0
    assert outcome(SystemExit("sorry")) == 1
    assert outcome(None) == 0
    assert "sorry" in capsys.readouterr().err


def test_a_missing_part_is_said_plainly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "bench", ("cardcage.core.no_such_module:main", ""))
    code, _, err = run(capsys, "bench")
    assert code == 1
    assert "lacks cardcage.core.no_such_module" in err


def test_module_entry_and_broken_pipe() -> None:
    done = subprocess.run(
        f"{sys.executable} -m cardcage plugins | head -1",
        shell=True, capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.stdout == "attention\n"
    assert "Traceback" not in done.stderr


# ---- plugins ------------------------------------------------------------------------------------


def test_plain_list(capsys: pytest.CaptureFixture[str], site: Any) -> None:
    site.plugin("acme", "kv_tiers", "nvme", "KVTierCaps()", version="1.2")
    site.plugin("evil", "kv_tiers", "evil", "KVTierCaps()")
    code, out, _ = run(capsys, "plugins", "--kind", "kv_tiers")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "kv_tiers"
    assert lines[2].split()[:4] == ["nvme", "available", "1.2", "acme"]
    assert "2 third-party" in lines[-1]
    assert "acme.plugin" not in sys.modules


def test_no_plugins_blocks_third_party(
    capsys: pytest.CaptureFixture[str], site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARDCAGE_PLUGINS", "all")  # restored afterwards
    site.plugin("acme", "kv_tiers", "nvme", "KVTierCaps()")
    _, out, _ = run(capsys, "--no-plugins", "plugins", "--kind", "kv_tiers")
    assert "blocked" in out
    assert "CARDCAGE_PLUGINS=none" in out


def test_policy_of_a_config_file(
    capsys: pytest.CaptureFixture[str], site: Any, tmp_path: Path
) -> None:
    site.plugin("acme", "kv_tiers", "nvme", "KVTierCaps()")
    file = tmp_path / "a.toml"
    file.write_text('[plugins]\ndeny = ["acme"]\n')
    _, out, _ = run(capsys, "plugins", "--kind", "kv_tiers", "--config", str(file))
    assert 'blocked by plugins.deny "acme"' in out


def test_json_list(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plugins", "--json")
    rows = json.loads(out)
    cpu = next(r for r in rows if r["kind"] == "hardware" and r["name"] == "cpu")
    assert cpu["id"] == "cardcage/cpu"
    assert cpu["status"] == "available"
    assert "caps" not in cpu


def test_loaded_list(capsys: pytest.CaptureFixture[str], site: Any) -> None:
    site.plugin("acme", "parsers", "broken", "ParserCaps()", before="1 / 0\n")
    site.plugin("best", "parsers", "lack", "ParserCaps(requires={'nothing-x': 'pip install x'})")
    _, out, _ = run(capsys, "plugins", "--load")
    assert "broken" in out
    assert "ZeroDivisionError" in out
    assert "missing: nothing-x (pip install x)" in out
    assert "api hardware>=1.0,<2" in out
    _, out, _ = run(capsys, "plugins", "--load", "--json", "--kind", "hardware")
    states = {r["name"]: r for r in json.loads(out)}
    assert states["cpu"]["status"] == "ready"
    assert states["cpu"]["caps"]["device_type"] == "cpu"


def test_markdown_is_about_bundled_plugins_alone(
    capsys: pytest.CaptureFixture[str], site: Any
) -> None:
    site.plugin("acme", "hardware", "npu", "HardwareCaps()")
    code, out, _ = run(capsys, "plugins", "--markdown", "--kind", "hardware")
    assert code == 0
    assert "| `cpu` | The host processor" in out
    assert "npu" not in out
    assert str(ROOT) not in out


def test_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "plugins", "why", "attention", "dtype=bfloat16", "head_size=96",
        "--hardware.use=cpu", "--kv.block_size=32",
    )  # fmt: skip
    assert code == 0
    head = out.splitlines()[0]
    assert "dtype=bfloat16" in head
    assert "head_size=96" in head
    assert "block_size=32" in head
    assert "chosen" in out


def test_why_without_a_winner_is_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plugins", "why", "attention", "op=none_such", "--hardware=cpu")
    assert code == 1
    assert "op none_such not in" in out
    assert "no attention plugin fits" in out


def test_why_hardware_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plugins", "why", "hardware", "--hardware", "null", "--json")
    assert code == 0
    assert json.loads(out)["chosen"] == "cardcage/null"


def test_why_all_asks_third_party(capsys: pytest.CaptureFixture[str], site: Any) -> None:
    site.plugin("acme", "attention", "fa4", "AttentionCaps(priority=80)")
    _, out, _ = run(capsys, "plugins", "why", "attention", "--hardware=cpu")
    assert "not-asked" in out
    _, out, _ = run(capsys, "plugins", "why", "attention", "--hardware=cpu", "--all")
    assert "acme/fa4" in out
    assert "not-asked" not in out


@pytest.mark.parametrize("need", ["head_size", "head_size=wide", "colour=red"])
def test_why_with_a_wrong_need(capsys: pytest.CaptureFixture[str], need: str) -> None:
    code, _, err = run(capsys, "plugins", "why", "attention", need)
    assert code in (1, 3)
    assert need.partition("=")[0] in err or "wide" in err


def test_doctor_examines_each_in_its_own_process(
    capsys: pytest.CaptureFixture[str], site: Any
) -> None:
    site.plugin("good", "parsers", "good", "ParserCaps()")
    site.plugin("bad", "parsers", "bad", "ParserCaps()", before="import os; os._exit(11)\n")
    site.plugin("slow", "parsers", "slow", "ParserCaps()", before="import time; time.sleep(0.1)\n")
    site.plugin(
        "patch", "parsers", "patch", "ParserCaps()",
        before="import cardcage.core.policy as p\np.normalize = lambda d: d\n"
        "import os; os.environ['X_SIDE'] = '1'\nimport numpy\n",
    )  # fmt: skip
    site.plugin(
        "raises", "parsers", "raises", "ParserCaps()",
        extra="def reasons_against(self, need): raise KeyError('x')",
    )  # fmt: skip
    code, out, _ = run(capsys, "plugins", "doctor", "--kind", "parsers", "--json")
    rows = {r["id"]: r for r in json.loads(out)}
    assert code == 1
    assert rows["good/good"]["status"] == "good"
    assert rows["good/good"]["ms"] < 1000
    assert rows["bad/bad"]["status"] == "bad"
    assert "code 11" in rows["bad/bad"]["findings"][0]
    assert rows["slow/slow"]["status"] == "warn"
    assert "budget" in rows["slow/slow"]["findings"][0]
    findings = " ".join(rows["patch/patch"]["findings"])
    assert rows["patch/patch"]["status"] == "bad"
    for text in ("patched cardcage.core.policy.normalize", "set env X_SIDE", "imports numpy"):
        assert text in findings
    assert "reasons_against() raised" in rows["raises/raises"]["findings"][0]
    assert not any(m in sys.modules for m in ("good", "bad", "slow", "patch", "raises"))


def test_doctor_stops_what_hangs(site: Any) -> None:
    from cardcage.core.doctor import examine

    site.plugin("hang", "parsers", "hang", "ParserCaps()", before="import time; time.sleep(60)\n")
    registry = Registry.discover(Policy(), [str(site.path)])
    report = examine(registry.candidates("parsers")[0], timeout_s=1.0)
    assert report["status"] == "bad"
    assert "did not end" in report["findings"][0]


# ---- plugins new --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_template_of_every_kind_loads(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], site: Any
) -> None:
    name = f"my-{kind.replace('_', '-')}"
    code, out, _ = run(capsys, "plugins", "new", "--kind", kind, name, "--dir", str(tmp_path))
    assert code == 0
    folder = tmp_path / f"cardcage-{name}"
    assert str(folder) in out
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    group = project["entry-points"][f"cardcage.{kind}"]
    for source in (folder / "src").rglob("*.py"):
        text = source.read_text()
        compile(text, str(source), "exec")
        target = site.path / source.relative_to(folder / "src")
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    site.add(project["name"], {kind: group}, requires=project["dependencies"])
    registry = Registry.discover(Policy(), [str(site.path)])
    candidate = next(c for c in registry.candidates(kind) if not c.builtin)
    assert candidate.usable, candidate.reasons
    declaration = registry.load(candidate)
    assert candidate.warnings == ()
    if kind != "hooks":
        from cardcage.core.resolver import need_class

        built = registry.build(candidate, need_class(kind)(), None, {})
        assert type(built).__module__.endswith(".implementation")
    assert declaration.name == name


@pytest.mark.parametrize("name", ["Bad", "a b", "-x", "12"])
def test_template_names(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plugins", "new", "--kind", "parsers", "--dir", str(tmp_path), "--", name]
    assert cli.main(words) == 2
    assert list(tmp_path.iterdir()) == []


def test_template_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plugins", "new", "--kind", "parsers", "mine", "--dir", str(tmp_path)]
    assert cli.main(words) == 0
    assert run(capsys, *words)[0] == 2


# ---- config, collect-env, hooks -----------------------------------------------------------------


def test_config_show(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("config", "show", "--origin", "--hardware=cpu", "--kv.block_size=32", "--api-key=s3")
    code, out, _ = run(capsys, *words)
    assert code == 0
    rows = dict(line.split(" = ", 1) for line in out.splitlines())
    assert rows["kv.block_size"].split() == ["32", "#", "--kv.block_size"]
    assert "plugin default (cpu: " in rows["scheduler.max_num_batched_tokens"]
    assert rows["model"].endswith("# default")
    assert "s3" not in out.replace("--api-key", "")
    assert "***" in rows["server.api_keys"]


def test_config_show_json_and_without_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "config", "show", "--json", "--no-hardware", "--origin")
    rows = json.loads(out)
    assert rows["scheduler.max_num_seqs"] == {"value": 256, "source": "default"}
    _, out, err = run(capsys, "config", "show", "--json", "--hardware=no-such")
    assert json.loads(out)["hardware.use"] == "no-such"
    assert "unknown" in err


def test_config_schema_holds_plugin_options(capsys: pytest.CaptureFixture[str], site: Any) -> None:
    site.plugin(
        "acme", "parsers", "p", "ParserCaps()", extra="options = Opts",
        before="from pydantic import BaseModel, ConfigDict\n"
        "class Opts(BaseModel):\n"
        "    model_config = ConfigDict(extra='forbid')\n    depth: int = 1\n",
    )  # fmt: skip
    code, out, _ = run(capsys, "config", "schema")
    assert code == 0
    schema = json.loads(out)
    options = schema["properties"]["plugin"]["properties"]["acme/p"]
    assert options["properties"]["depth"]["type"] == "integer"
    _, out, _ = run(capsys, "config", "schema", "--no-plugins")
    assert "properties" not in json.loads(out)["properties"]["plugin"]


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARDCAGE_SECRET_KEY", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    code, out, _ = run(capsys, "collect-env")
    assert code == 0
    assert "OMP_NUM_THREADS: 3" in out
    assert "hush" not in out
    assert "torch: " in out
    _, out, _ = run(capsys, "collect-env", "--json")
    assert json.loads(out)["packages"]["pydantic"]
    done = command("collect-env", "--json")
    assert done.returncode == 0, done.stderr


HOOK = """
from cardcage.core.contracts import HookCaps
from cardcage.core.hookspecs import hookimpl, Command
class Tracer:
    "A hook plugin."
    name = "tracer"; api = "1.0"; caps = HookCaps()
    @hookimpl
    def cardcage_cli_commands(self):
        return [Command("trace", "trace it", lambda argv: print("traced", argv) or 7)]
    @hookimpl
    def cardcage_collect_env(self):
        return {"tracer": "on"}
"""


def test_commands_of_hook_plugins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, site: Any
) -> None:
    site.add("acme", {"hooks": {"tracer": "acme_trace:Tracer"}}, {"acme_trace.py": HOOK})
    assert run(capsys, "trace", "x")[0] == 2  # installed is not active
    monkeypatch.setenv("CARDCAGE_PLUGINS__ALLOW", '["acme"]')
    assert run(capsys, "trace", "x") == (7, "traced ['x']\n", "")
    code, _, err = run(capsys, "trac")
    assert code == 2
    assert 'did you mean "trace"' in err
    assert "tracer: on" in run(capsys, "collect-env")[1]
