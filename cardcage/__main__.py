"""`python -m cardcage` is the `cardcage` command."""

from cardcage.core.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
