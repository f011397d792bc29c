"""Process reward models: one reward per step of a solution, with the API of TRL up to version 1.13."""

import sys
from typing import Any

from ..config.checks import check_limits
from ..config.reward_config import RewardConfig, dataclass_with_help
from ..data.kinds.solutions import tokenize_solution
from ..modeling.build import build_dataset
from ..trainer.reward_trainer import RewardTrainer
from ..trainer.utils import compute_accuracy as compute_accuracy

# TRL's module names of the config and the trainer; files of earlier runs refer to them
sys.modules |= dict.fromkeys((f"{__name__}.prm_config", f"{__name__}.prm_trainer"), sys.modules[__name__])


@dataclass_with_help
class PRMConfig(RewardConfig):
    r"""Settings of a [`PRMTrainer`]: TRL's `PRMConfig`, plus the settings of [`RewardConfig`].

    Parameters:
        learning_rate (`float`, *optional*, defaults to `1e-5`):
            Initial learning rate for AdamW.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum number of tokens of a solution, including its prompt. Longer solutions are truncated at the end.
            `None` truncates nothing.
        max_completion_length (`int`, *optional*):
            Maximum number of tokens of all steps of a solution together. Longer solutions are truncated at the end. By
            default only `max_length` truncates.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            Text after each step. The reward of a step is read at the last token of this text.
        train_on_last_step_only (`bool`, *optional*, defaults to `False`):
            Whether to train only on the last label of each solution. Evaluation uses all labels.
        neutral_steps (`str`, *optional*):
            How to treat steps with label -1, neither right nor wrong as in PRM800K. `"ignore"` excludes them from the
            loss and the metrics, `"wrong"` counts them as label 0. By default such labels are an error.

    Raises:
        UserError: If a setting applies only to pairs or rankings, such as `truncation_mode` or `ties`.
    """

    learning_rate: float = 1e-5
    max_completion_length: int | None = None
    step_separator: str = "\n"  # type: ignore[misc]  # None in RewardConfig
    train_on_last_step_only: bool = False
    neutral_steps: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, "solutions")


class PRMTrainer(RewardTrainer):
    """Trainer for token classifiers that predict for each step of a solution whether it is right.

    Takes the arguments of `RewardTrainer`, as TRL's `PRMTrainer` does. These have another meaning:

    Args:
        model: Name of a model, or an `AutoModelForTokenClassification` with two labels, optionally with PEFT adapters.
        args: A `PRMConfig`.
        data_collator: Function that makes padded batches. By default `DataCollatorForTokenClassification`.
        train_dataset: Solutions with `prompt`, `completions` (a list of steps) and `labels` (for each step, whether it
            is right, or the probability of that). Or token ids in `input_ids` with `labels` of the same length: 0 to 1
            at the end of a step and -100 elsewhere.
        eval_dataset: Solutions in the same form, or a dict of such datasets.
        compute_metrics: Function of an `EvalPrediction` with logits of both labels [solutions, steps, 2], and labels
            [solutions, steps], -100 for missing steps. Accuracy is always computed.
    """

    _tag_names = ["trl", "prm"]
    _trl_tpu_config = PRMConfig
    tokenize_row = staticmethod(tokenize_solution)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return build_dataset(dataset, self.model, processing_class, args, dataset_name, tokenize_row=self.tokenize_row)
