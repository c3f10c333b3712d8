"""Keep the docs true: generated pages are current, versions agree, links lead somewhere.

check_docs.py            report what is wrong, exit 1 if anything is
check_docs.py --write    write the generated pages
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ROOT / "docs" / "plugins.md"
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/*.md", "docs/decisions/*.md")


def plugin_page() -> str:
    """The page of bundled plugins as the command prints it."""
    command = [sys.executable, "-m", "cardcage", "--no-plugins", "plugins", "--markdown"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"cardcage plugins --markdown failed:\n{done.stderr}")
    return done.stdout


def version_faults() -> list[str]:
    """pyproject, package and changelog must name one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    package = re.search(r'__version__ = "([^"]+)"', (ROOT / "cardcage/__init__.py").read_text())
    log = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    faults = []
    if package is None or package.group(1) != project:
        faults.append(f"cardcage.__version__ is not pyproject's {project}")
    if not log or log[0] != project:
        faults.append(f"CHANGELOG.md's newest version is not pyproject's {project}")
    return faults


def link_faults() -> list[str]:
    """Relative links and images in the pages must exist."""
    faults = []
    for pattern in PAGES:
        for page in ROOT.glob(pattern):
            for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
                if "://" not in target and not (page.parent / target).exists():
                    faults.append(f"{page.relative_to(ROOT)} links to {target}, which is missing")
    return faults


def main() -> int:
    current = plugin_page()
    if "--write" in sys.argv:
        PLUGINS.write_text(current)
    faults = version_faults() + link_faults()
    if not PLUGINS.exists() or PLUGINS.read_text() != current:
        faults.append("docs/plugins.md is stale: run `make docs`")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
