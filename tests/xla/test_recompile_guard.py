"""The guard is on by default: data whose every batch has a shape of its own draws a warning that names the shapes."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import tiny

from trl_tpu import RewardTrainer


@pytest.mark.parametrize("logging_steps", [10, 1])
def test_warns_about_shapes_that_were_not_planned(
    logging_steps: int, config: Callable[..., Any], model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where each step is logged, which runs what it has recorded."""
    from trl_tpu.trainer.reward_trainer import DataCollatorForPreference

    class GrowingCollator:
        """Not one of TRL's collators, so nothing plans its shapes."""

        def __init__(self) -> None:
            self.lengths = iter(range(40 + logging_steps, 90, 8))  # programs that no other test has compiled

        def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            return DataCollatorForPreference(0, pad_to_multiple_of=next(self.lengths))(examples)

    args = config(max_steps=3, logging_steps=logging_steps)
    trainer = RewardTrainer(model_folder, args, GrowingCollator(), train_dataset=tiny.made_up_pairs(32))
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        trainer.train()
    warnings = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    lengths = [40 + logging_steps, 48 + logging_steps]
    assert warnings and all(f"input_ids [16, {length}]" in warnings[-1] for length in lengths)
