"""Fixtures for tests on PyTorch/XLA: on one device, and the same on eight virtual ones (CPU_NUM_DEVICES=8).

What they need is imported in them: the process that hands out tests reads this file, too, and would import torch.
"""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny reward model and its tokenizer, on disk."""
    import tiny

    pairs = tiny.made_up_pairs(200)
    texts = [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]]
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), texts)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Makes a RewardConfig for a global batch of 8 pairs, quiet, in float32."""
    from trl_tpu import RewardConfig
    from trl_tpu.runtime import current

    pairs_per_device = 8 // current().topology().devices

    def make(**settings: Any) -> RewardConfig:
        defaults = {
            "per_device_train_batch_size": pairs_per_device,
            "per_device_eval_batch_size": pairs_per_device,
            "bf16": False,
            "learning_rate": 1e-3,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return RewardConfig(str(tmp_path), **(defaults | settings))

    return make
