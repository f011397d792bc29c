"""The guard is on by default: data whose every batch has a shape of its own draws a warning that names the shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny

from trl_tpu import RewardTrainer
from trl_tpu.data.collators import DataCollatorForPreference


@pytest.mark.parametrize("logging_steps", [10, 1])
def test_warns_about_shapes_that_were_not_planned(
    logging_steps: int, config: Callable[..., Any], model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where each step is logged, which runs what it has recorded."""
    lengths = iter(range(40 + logging_steps, 90, 8))  # programs that no other test has compiled

    def growing(examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Not one of TRL's collators, so nothing plans its shapes."""
        return DataCollatorForPreference(0, pad_to_multiple_of=next(lengths))(examples)

    args = config(max_steps=3, logging_steps=logging_steps)
    RewardTrainer(model_folder, args, growing, train_dataset=tiny.made_up_pairs(32)).train()
    (warning,) = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    assert warning.startswith("Step 3 ")  # where the second shape, the first after warm-up, has been compiled
    assert all(f"input_ids [16, {length + logging_steps}]" in warning for length in (48, 56))
