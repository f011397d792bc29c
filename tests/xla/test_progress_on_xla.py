"""Before a shape is compiled, a line says which of how many."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny

from trl_tpu import RewardTrainer


def test_says_each_shape_once_before_it_is_compiled(
    config: Callable[..., Any], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = config(max_steps=4, logging_steps=1, disable_tqdm=False, packing=False, max_shapes=2)
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(64))
    planned = trainer.batch_plan.shapes
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    said = [line for line in lines if "compiling" in line]
    assert lines[0] == said[0] == f"step 1/4: compiling shape 1 of {planned} ..."
    assert [line.partition("compiling ")[2] for line in said] == [
        f"shape {number} of {planned} ..." for number in range(1, len(said) + 1)
    ]
    assert planned is not None and len(said) <= planned
    assert len(lines) == len(said) + 5  # logs, and the end
