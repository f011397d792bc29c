"""Benchmarks, run as `python -m tests.benchmarks.NAME`. This is set before any library is imported."""

import os
import sys
from pathlib import Path

# Plain torch, except for the processes that a benchmark starts on XLA.
os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
