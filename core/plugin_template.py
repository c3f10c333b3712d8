"""`cardcage plugins new`: writes a small plugin project that lists and loads at once.

The implementation's methods come from the kind's Protocol in `contracts`, each raising
NotImplementedError under the contract's own docstring, so the template cannot fall behind.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from string import Template

from cardcage.core.contracts import API, CAPS_OF
from cardcage.core.errors import ConfigError
from cardcage.core.hookspecs import hook_names
from cardcage.core.loading import DECLARATION_METHODS, PROTOCOL_OF, protocol_members

_PYPROJECT = Template("""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$dist"
version = "0.1.0"
description = "A $kind plugin for Cardcage"
requires-python = ">=3.11"
dependencies = ["cardcage>=$host,<2"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."cardcage.$kind"]
$name = "$module.plugin:$cls"

[tool.setuptools.packages.find]
where = ["src"]
""")

_PLUGIN = Template('''\
"""Declaration of the `$name` plugin. Import nothing heavy here: no torch, no numpy."""

from __future__ import annotations

from typing import Any

from cardcage.core.contracts import $caps$more

from $module.options import Options


class $cls:
    """$name: say in one sentence what it is."""

    name = "$name"
    api = "$kind>=$api,<$major"
    caps = $caps()
    options = Options
    roles = frozenset({"core", "worker", "frontend"})
$methods
    def build(self, need: Any, ctx: Any, options: Options) -> Any:
        """Import the implementation and make the object that does the work."""
        from $module.implementation import $cls

        return $cls(need, ctx, options)
''')

_HOOKS = Template('''\
"""Declaration of the `$name` hook plugin. See cardcage.core.hookspecs for every hook."""

from __future__ import annotations

from cardcage.core.contracts import HookCaps
from cardcage.core.hookspecs import hookimpl


class $cls:
    """$name: say in one sentence what it does."""

    name = "$name"
    api = "hooks>=$api,<$major"
    caps = HookCaps()

    @hookimpl
    def cardcage_collect_env(self) -> dict[str, str]:
        return {"$name": "active"}
''')

_OPTIONS = Template('''\
"""Options of `$name`, from [plugin."$dist/$name"] of the config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Give every option a range and one line."""

    model_config = ConfigDict(extra="forbid", frozen=True)
''')

_TEST = Template('''\
"""The declaration loads, is light, and is what the entry point says."""

import subprocess
import sys

from $module.plugin import $cls


def test_declaration():
    assert $cls.name == "$name"
    assert ($cls.__doc__ or "").strip()


def test_import_is_light():
    code = "import sys, $module.plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
''')

_README = Template("""\
# $dist

A `$kind` plugin for Cardcage.

    pip install -e .
    cardcage plugins doctor --kind $kind
    cardcage plugins why $kind --all

$use Rules that keep an engine safe:

- The declaration module imports nothing heavy; the implementation is imported by `build`.
- Importing it changes nothing in the process: no environment, no signal handlers, no logging setup.
- Import only `cardcage.core.{types,contracts,hookspecs,errors,model_desc}` and
  `cardcage.core.runtime`; never patch the host.
- Refuse what you cannot do, in `caps` or `reasons_against`, with the value and what is allowed.
- Start no thread before `build`; stop all of them in `close`, which may be called twice.
""")


def write_template(kind: str, name: str, parent: Path) -> Path:
    """Write the project `cardcage-<name>` below a folder and return its path.

    Raises:
        ConfigError: a name that cannot be an entry name, or a folder that exists.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) or not re.search("[a-z]", name):
        raise ConfigError(f"{name!r} cannot be an entry name: use a-z, 0-9, - and _")
    dist = f"cardcage-{name.replace('_', '-')}"
    folder = parent / dist
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name or --dir")
    files = _files(kind, name, dist)
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def _files(kind: str, name: str, dist: str) -> dict[str, str]:
    from cardcage import __version__

    module = "cardcage_" + re.sub(r"\W|-", "_", name)
    words = "".join(part.capitalize() for part in re.split(r"[_-]", name))
    cls = words if words[0].isalpha() else f"P{words}"
    version = API[kind]
    values = {
        "kind": kind,
        "name": name,
        "dist": dist,
        "module": module,
        "cls": cls,
        "caps": CAPS_OF[kind].__name__,
        "more": ", DetectResult" if kind == "hardware" else "",
        "api": version,
        "major": str(int(version.split(".")[0]) + 1),
        "host": ".".join(__version__.split(".")[:2]),
        "methods": _declaration_methods(kind),
        "use": _usage(kind, name, dist),
    }
    source = f"src/{module}"
    files = {
        "pyproject.toml": _PYPROJECT.substitute(values),
        "README.md": _README.substitute(values),
        f"{source}/__init__.py": "",
        f"tests/test_{module}.py": _TEST.substitute(values),
    }
    if kind == "hooks":
        files[f"{source}/plugin.py"] = _HOOKS.substitute(values)
        return files
    files[f"{source}/plugin.py"] = _PLUGIN.substitute(values)
    files[f"{source}/options.py"] = _OPTIONS.substitute(values)
    files[f"{source}/implementation.py"] = _implementation(kind, name, cls)
    return files


def _usage(kind: str, name: str, dist: str) -> str:
    if kind == "hooks":
        return f'Switch it on with `plugins.allow = ["{dist}"]`; hooks: {", ".join(hook_names())}.'
    return f'Name it in a config as `"{dist}/{name}"`.'


def _declaration_methods(kind: str) -> str:
    bodies = {
        "detect": '''
    def detect(self) -> DetectResult:
        """Say whether the device is here, without creating a context on it."""
        return DetectResult(0, "not implemented yet")
''',
        "recognise": '''
    def recognise(self, ref: str) -> Any:
        """A RefMatch when this loader knows what the reference means, else None."""
        return None
''',
    }
    return "".join(bodies[name] for name in DECLARATION_METHODS.get(kind, ()))


def _implementation(kind: str, name: str, cls: str) -> str:
    protocol = PROTOCOL_OF.get(kind)
    contract = protocol.__name__ if protocol is not None else kind
    members = protocol_members(protocol) if protocol is not None else ()
    methods = [m for m in members if callable(getattr(protocol, m, None))]
    lines = [
        f'"""The work of `{name}`. Heavy imports belong here."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        "",
        f"class {cls}:",
        f'    """Implements {contract} of cardcage.core.contracts."""',
        "",
        *(f"    {m}: Any = None  # see the contract" for m in members if m not in methods),
        *([""] if len(methods) < len(members) else []),
        "    def __init__(self, need: Any, ctx: Any, options: Any) -> None:",
        "        self.need, self.ctx, self.options = need, ctx, options",
    ]
    for member in methods:
        value = getattr(protocol, member)
        shown = ["self"]
        for parameter in list(inspect.signature(value).parameters.values())[1:]:
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            shown.append(f"{parameter.name}{default}")
        doc = inspect.cleandoc(value.__doc__ or "See the contract.").replace("\n", "\n        ")
        lines += [
            "",
            f"    def {member}({', '.join(shown)}):",
            f'        """{doc}"""',
            f'        raise NotImplementedError("{cls}.{member}")',
        ]
    return "\n".join(lines) + "\n"
