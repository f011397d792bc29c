"""Setup shared by all tests: reproducible property tests and quick compilation.

Folders are named for what their tests need: `unit` only the package, `train` training in plain torch, `xla` one XLA
device, `xla8` eight XLA devices, `tpu` the TPU compiler, `torchtpu` torch's device for TPUs. `support` has helpers and
the scripts that tests start in subprocesses.
"""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environment import QUICK_XLA_FLAGS
from hypothesis import settings

# must be set before torch_xla is imported, here or in a subprocess
os.environ.setdefault("XLA_FLAGS", QUICK_XLA_FLAGS)
# Tests assume a CPU. `tests/gpu/training.py` lists those that also hold on a GPU, and sets the variable.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=1000)  # new examples in every run: `make test-long`
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Exclude imported objects from the garbage collection that transformers runs at every start of training."""
    gc.collect()
    gc.freeze()


# Fixtures import inside their functions: otherwise the process that distributes tests would import torch, too.


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """Restore what accelerate and transformers set for the whole process: the environment, and the level of logs."""
    before, logger = dict(os.environ), logging.getLogger("transformers")
    level = logger.level
    yield
    logger.setLevel(level)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny saved reward model and its tokenizer."""
    import tiny

    return tiny.save_tiny(tmp_path_factory.mktemp("model"), tiny.made_up_pairs(200))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return a tokenizer for tiny models created by tests."""
    import tiny

    return tiny.tiny_tokenizer(tiny.made_up_pairs(50), vocab_size=300)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Return a function that builds a quiet float32 RewardConfig for a global batch of 8 pairs."""
    from training import QUIET

    from trl_tpu import RewardConfig
    from trl_tpu.runtime import current

    pairs_per_device = 8 // current().topology().devices

    def make(**settings: Any) -> RewardConfig:
        sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), pairs_per_device)
        defaults = QUIET | {"output_dir": str(tmp_path), "learning_rate": 1e-3, "save_strategy": "no"}
        return RewardConfig(**defaults | sizes | settings)

    return make
