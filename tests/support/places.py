"""Where this checkout's folders are, for tests that start processes, and how XLA compiles fast on CPUs there."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
EXAMPLES = ROOT / "examples"
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Machine code without optimization: the same programs and collectives, in a sixth of the time and slower to run."""
