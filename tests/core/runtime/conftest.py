"""Makes tests/support importable for the tests of the tensor ring."""

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).resolve().parents[2] / "support")
if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)
