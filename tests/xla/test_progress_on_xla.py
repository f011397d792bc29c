"""The progress bar names shapes, unplanned shapes draw a warning, and nonfinite steps change nothing."""

import re
from pathlib import Path
from typing import Any

import nonfinite_runs as runs
import pytest
import tiny
from counters import CountAtSteps, Counts

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


# ---- nonfinite steps run the same program as others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("packing", "accumulation", "moments"),
    [pytest.param(True, 2, None, marks=pytest.mark.eight), (False, 1, "bfloat16")],
)
def test_skipped_steps_leave_weights_and_moments_unchanged(
    folder: str, tmp_path: Path, packing: bool, accumulation: int, moments: str | None
) -> None:
    """Steps 2, 6 and 7 of 10 have a NaN. They run the same program, without reads from the device."""
    settings: dict[str, Any] = {"packing": packing, "gradient_accumulation_steps": accumulation}
    settings["optim_state_dtype"] = moments
    counter = CountAtSteps()
    skipped = runs.train(folder, tmp_path, [1, 5, 6], 10, callbacks=[counter], **settings)
    without = runs.train(folder, tmp_path, [], 10, left_out=[1, 5, 6], **settings)
    executions_a_step = 1 if accumulation == 1 else accumulation + 1
    assert counter.between(1, 9) == Counts(0, 8 * executions_a_step, 0)
    runs.check_skipped(skipped, without, 3)


def test_optimizer_that_creates_state_in_its_first_step_is_supported(folder: str, tmp_path: Path) -> None:
    """The first two steps are read and skipped. Later steps need no read."""
    counter = CountAtSteps()
    skipped = runs.train(folder, tmp_path, [0, 1, 5], 9, callbacks=[counter], optim="sgd")
    without = runs.train(folder, tmp_path, [], 9, left_out=[0, 1, 5], optim="sgd")
    runs.check_skipped(skipped, without, 3)
    assert counter.between(4, 8) == Counts(0, 4, 0)
