"""Where this checkout's folders are, for tests that start processes."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
EXAMPLES = ROOT / "examples"
