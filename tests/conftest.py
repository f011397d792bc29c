"""What all tests share: examples of property tests that are the same in every run, and quick compiles.

Folders say what a test needs: `unit` nothing but the package, `train` training in plain torch, `xla` one XLA device,
`xla8` eight of them, `tpu` the TPU's own compiler, `torchtpu` torch's own device for TPUs. `support` has what tests
use, and the scripts that they start in processes of their own.
"""

import gc
import os

import xla_flags
from hypothesis import settings

# before torch_xla is imported, here or in a process that a test starts
os.environ.setdefault("XLA_FLAGS", xla_flags.QUICK)

settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=1000)  # others in every run: `make test-long`
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """What is imported is no garbage, which transformers looks for at every start of training."""
    gc.collect()
    gc.freeze()
