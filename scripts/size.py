"""Print how many lines each part of the project has, and its longest file."""

from __future__ import annotations

from pathlib import Path

PARTS = {
    "core (kernel ring)": ("core/*.py",),
    "core/runtime (tensor ring)": ("core/runtime/*.py",),
    "core/text": ("core/text/*.py",),
    "plugins": ("plugins/**/*.py",),
    "tests": ("tests/**/*.py",),
}


def count(path: Path) -> tuple[int, int]:
    """(all lines, lines that are neither blank nor a comment)."""
    lines = path.read_text().splitlines()
    code = [s for line in lines if (s := line.strip()) and not s.startswith("#")]
    return len(lines), len(code)


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    print(f"{'part':<28}{'files':>6}{'lines':>8}{'code':>8}  longest")
    for part, patterns in PARTS.items():
        paths = [p for pattern in patterns for p in sorted(root.glob(pattern))]
        sizes = {p: count(p) for p in paths}
        longest = max(sizes, key=lambda p: sizes[p][0], default=None)
        tail = f"{longest.relative_to(root)} {sizes[longest][0]}" if longest else "-"
        total, code = sum(s[0] for s in sizes.values()), sum(s[1] for s in sizes.values())
        print(f"{part:<28}{len(paths):>6}{total:>8}{code:>8}  {tail}")


if __name__ == "__main__":
    main()
