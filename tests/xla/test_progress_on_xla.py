"""The progress bar names the shape being compiled, and unplanned shapes draw a warning."""

import re
from typing import Any

import pytest
import tiny

from trl_tpu import RewardTrainer
from trl_tpu.data.trl_dict import DataCollatorForPreference


def test_progress_bar_names_each_shape_before_its_compilation(config: Any, model_folder: str, capsys: Any) -> None:
    pairs = tiny.made_up_pairs(64)
    args = config(max_steps=4, logging_steps=1, disable_tqdm=False, packing=False, max_shapes=2, eval_strategy="steps")
    args.eval_steps = 3
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, eval_dataset=pairs.select(range(20)))
    planned = trainer.batch_plan.layout.shapes
    trainer.train()
    said = list(dict.fromkeys(re.findall(r"compiling shape [^:]*", capsys.readouterr().err)))
    evaluation = [each for each in said if each.endswith(" for evaluation")]
    training = [each for each in said if each not in evaluation]
    assert evaluation[0] == "compiling shape 1 for evaluation"
    assert training == [f"compiling shape {number} of {planned}" for number in range(1, len(training) + 1)]
    assert planned is not None and 1 <= len(training) <= planned
    assert trainer.state.log_history[0]["compiled_programs"] >= 1


@pytest.mark.parametrize("logging_steps", [10, 1])
def test_unplanned_shapes_draw_a_warning(logging_steps: int, config: Any, model_folder: str, caplog: Any) -> None:
    """Also if every step is logged, which executes its recorded operations at once."""
    lengths = iter(range(40 + logging_steps, 90, 8))  # shapes that no other test has compiled

    def growing(examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Not one of TRL's collators, so its shapes are not planned."""
        return DataCollatorForPreference(0, pad_to_multiple_of=next(lengths))(examples)

    args = config(max_steps=3, logging_steps=logging_steps)
    RewardTrainer(model_folder, args, growing, train_dataset=tiny.made_up_pairs(32)).train()
    (warning,) = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    assert warning.startswith("Step 3 ")  # it compiled the second shape, the first one after warm-up
    assert all(f"input_ids [16, {length + logging_steps}]" in warning for length in (48, 56))
