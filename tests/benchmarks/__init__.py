"""Benchmarks, run as `python -m tests.benchmarks.NAME`. Variables are set before any library is imported."""

import os
import sys
from pathlib import Path

os.environ.setdefault("USE_TORCH_XLA", "0")
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
