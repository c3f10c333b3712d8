"""The import rules, over the syntax trees: rings, plugins, kinds, light declarations."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = frozenset({"torch", "triton", "transformers", "fastapi", "uvicorn", "starlette"})
# Not part of the kernel ring: the composition root, processes, and what serves text.
OUTSIDE = frozenset({"host", "process", "client", "llm", "text", "runtime", "http_host"})
# Commands that start an engine or a server: light at the top, heavy where they run.
COMMANDS = frozenset({"cli_serve", "cli_chat", "cli_bench"})
PLUGIN_MAY = (
    "cardcage.core.types",
    "cardcage.core.contracts",
    "cardcage.core.hookspecs",
    "cardcage.core.errors",
    "cardcage.core.model_desc",
    "cardcage.core.runtime",
)
# Frontends speak to the client and share the text layer.
KIND_MAY = {"frontends": ("cardcage.core.client", "cardcage.core.text")}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(["cardcage", *parts])


def imports(path: Path, top_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, imported module) of a file; what stands under TYPE_CHECKING is skipped."""
    tree = tree_of(path)
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], base]).rstrip(".")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        stack += ast.iter_child_nodes(node)


def within(name: str, *prefixes: str) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in prefixes)


def faults(found: Iterator[str]) -> str:
    return "\n".join(sorted(set(found)))


def kernel_ring() -> list[Path]:
    core = ROOT / "core"
    return [p for p in sources("core") if p.relative_to(core).parts[0].split(".")[0] not in OUTSIDE]


def test_the_kernel_ring_imports_nothing_heavy() -> None:
    assert not faults(
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in kernel_ring()
        for line, name in imports(path, top_only=path.stem in COMMANDS)
        if within(name, *HEAVY)
    )


def test_the_kernel_ring_does_not_import_the_tensor_ring() -> None:
    assert not faults(
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in kernel_ring()
        for line, name in imports(path, top_only=path.stem in COMMANDS)
        if within(name, "cardcage.core.runtime")
    )


def test_core_imports_no_plugin() -> None:
    assert not faults(
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in [*sources("core"), ROOT / "cardcage/__init__.py", ROOT / "cardcage/__main__.py"]
        for line, name in imports(path)
        if within(name, "cardcage.plugins")
    )


def test_plugins_import_contracts_and_their_own_kind_only() -> None:
    def found() -> Iterator[str]:
        for path in sources("plugins"):
            kind = path.relative_to(ROOT / "plugins").parts[0]
            may = (*PLUGIN_MAY, f"cardcage.plugins.{kind}", *KIND_MAY.get(kind, ()))
            for line, name in imports(path):
                parents = ("cardcage", "cardcage.__version__", "cardcage.core", "cardcage.plugins")
                if within(name, "cardcage") and name not in parents and not within(name, *may):
                    yield f"{path.relative_to(ROOT)}:{line} imports {name}"

    assert not faults(found())


def test_top_level_names_are_never_imported_bare() -> None:
    assert not faults(
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for folder in ("core", "plugins", "tests", "benchmarks", "examples")
        for path in sources(folder)
        for line, name in imports(path)
        if within(name, "core", "plugins")
    )


def test_vendors_are_named_in_hardware_plugins_only() -> None:
    """Nothing else asks `torch.version.hip`, `is_cuda` and the like: it asks caps and facts."""
    asks = ("torch.version.hip", "torch.version.cuda", "torch.cuda.", "is_cuda", "is_rocm(")
    assert not faults(
        f"{path.relative_to(ROOT)} asks {word}"
        for path in [*sources("core"), *sources("plugins")]
        if "hardware" not in path.parts
        for word in asks
        if word in path.read_text(encoding="utf-8")
    )


# ---- declarations -------------------------------------------------------------------------------


def entries() -> list[tuple[str, str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        (group.removeprefix("cardcage."), name, value)
        for group, named in project["entry-points"].items()
        for name, value in named.items()
    ]


def file_of(module: str) -> Path:
    base = ROOT.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def declaration_closure(module: str) -> Iterator[Path]:
    """The declaration's file and every plugin file that it imports at its top."""
    todo, seen = [module], set()
    while todo:
        path = file_of(todo.pop())
        if path in seen or not path.exists():
            continue
        seen.add(path)
        yield path
        todo += [n for _, n in imports(path, top_only=True) if within(n, "cardcage.plugins")]


@pytest.mark.parametrize(("kind", "name", "value"), entries())
def test_declarations_are_light_and_named_after_their_file(
    kind: str, name: str, value: str
) -> None:
    module, _, _ = value.partition(":")
    assert module == f"cardcage.plugins.{kind}.{name.replace('-', '_')}"
    assert file_of(module).exists()
    heavy = {*HEAVY, "numpy", "tokenizers", "safetensors", "gguf", "jinja2"}
    assert not faults(
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in declaration_closure(module)
        for line, imported in imports(path, top_only=True)
        if within(imported, *heavy, "cardcage.core.runtime")
    )


def test_entry_points_are_alphabetical() -> None:
    names: dict[str, list[str]] = {}
    for kind, name, _ in entries():
        names.setdefault(kind, []).append(name)
    for kind, listed in names.items():
        assert listed == sorted(listed), kind


def test_every_declaration_loads_with_the_heavy_packages_blocked() -> None:
    code = (
        "import sys, json\n"
        f"for name in {sorted(HEAVY | {'numpy'})!r}: sys.modules[name] = None\n"
        "from cardcage.core.registry import Registry\n"
        "from cardcage.core.errors import PluginLoadError\n"
        "registry, bad = Registry.discover(), []\n"
        "for c in registry.candidates():\n"
        "    try: registry.load(c); bad += [f'{c.kind} {c.id}: {w}' for w in c.warnings]\n"
        "    except PluginLoadError as error: bad.append(str(error))\n"
        "print(json.dumps(bad))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CARDCAGE_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


# ---- files --------------------------------------------------------------------------------------


def test_no_package_markers_under_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_module_says_what_it_is() -> None:
    def found() -> Iterator[str]:
        for path in [*sources("core"), *sources("plugins")]:
            if tree_of(path).body and not ast.get_docstring(tree_of(path)):
                yield str(path.relative_to(ROOT))

    assert not faults(found())


def test_public_names_of_the_core_have_docstrings() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

    def found() -> Iterator[str]:
        for path in kernel_ring():
            if path.stem in ("contracts", "types"):
                continue  # protocols and records: documented by the class
            for node in tree_of(path).body:
                public = isinstance(node, kinds) and not node.name.startswith("_")
                if public and not ast.get_docstring(node):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"

    assert not faults(found())


def test_the_page_on_architecture_names_every_file_of_the_core() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`(?:core/)?([a-z_]+(?:_\*)?)\.py`", page)
    patterns = [name.replace("*", ".*") for name in named]
    files = [p.stem for p in (ROOT / "core").glob("*.py") if p.stem != "__init__"]
    assert [f for f in files if not any(re.fullmatch(p, f) for p in patterns)] == []
    assert [n for n in named if n not in files and not n.endswith("_*")] == []
