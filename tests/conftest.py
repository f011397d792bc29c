"""What all tests share: examples of property tests that are the same in every run, and quick compiles.

Folders say what a test needs: `unit` nothing but the package, `train` training in plain torch, `xla` one XLA device,
`xla8` eight of them, `tpu` the TPU's own compiler, `torchtpu` torch's own device for TPUs. `support` has what tests
use, and the scripts that they start in processes of their own.
"""

import gc
import os
from pathlib import Path
from typing import Any

import places
import pytest
from hypothesis import settings

# before torch_xla is imported, here or in a process that a test starts
os.environ.setdefault("XLA_FLAGS", places.QUICK)

settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=100)
settings.register_profile("search", deadline=None, max_examples=1000)  # others in every run: `make test-long`
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """What is imported is no garbage, which transformers looks for at every start of training."""
    gc.collect()
    gc.freeze()


# What fixtures need is imported in them: the process that hands out tests would import torch, too.


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny reward model and its tokenizer, on disk."""
    import tiny

    return tiny.save_tiny(tmp_path_factory.mktemp("model"), tiny.made_up_pairs(200))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of tiny models that are made on the spot."""
    import tiny

    return tiny.tiny_tokenizer(tiny.made_up_pairs(50), vocab_size=300)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Makes a RewardConfig for a global batch of 8 pairs, quiet, in float32."""
    from trl_tpu import RewardConfig
    from trl_tpu.runtime import current

    pairs_per_device = 8 // current().topology().devices

    def make(**settings: Any) -> RewardConfig:
        defaults = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": pairs_per_device,
            "per_device_eval_batch_size": pairs_per_device,
            "bf16": False,
            "learning_rate": 1e-3,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return RewardConfig(**defaults | settings)

    return make
