"""Process rewards: models that judge each step of a solution. TRL's config and trainer, up to its version 1.13."""

import sys
from dataclasses import dataclass
from typing import Any

from ..config.checks import check_choices, check_limits
from ..config.reward_config import RewardConfig, help_from_docstring
from ..data.solutions import tokenize_solution
from ..modeling.build import build_dataset
from ..trainer.reward_trainer import RewardTrainer
from ..trainer.utils import compute_accuracy as compute_accuracy

# TRL's modules of both, which files of earlier runs name too
sys.modules |= dict.fromkeys((f"{__name__}.prm_config", f"{__name__}.prm_trainer"), sys.modules[__name__])

_OF_PAIRS = "center_rewards_coefficient margin_scale label_smoothing label_smoothing_factor eval_by truncation_mode"
_OF_RANKINGS = "loss_type=plackett_luce|regression average_over=comparisons ties attributes step_separator=^None$"


@help_from_docstring
@dataclass
class PRMConfig(RewardConfig):
    r"""Settings of a [`PRMTrainer`]: those of TRL's config of that name, and a [`RewardConfig`]'s.

    Parameters:
        learning_rate (`float`, *optional*, defaults to `1e-5`):
            The initial learning rate for AdamW.
        max_length (`int`, *optional*, defaults to `1024`):
            Solutions are cut after this many tokens, prompt included. `None` cuts nothing.
        max_completion_length (`int`, *optional*):
            The steps of a solution are cut after this many tokens, all together.
        step_separator (`str`, *optional*, defaults to `"\n"`):
            What follows each step; at its last token the step is judged.
        train_on_last_step_only (`bool`, *optional*, defaults to `False`):
            Whether only the last label of each solution is trained on. Evaluation takes all.
        neutral_steps (`str`, *optional*):
            What becomes of steps whose label is -1, neither right nor wrong as in PRM800K: `"ignore"` leaves them out,
            `"wrong"` counts them as 0. Without it such labels are an error.

    Raises:
        UserError: For settings of pairs, whose texts are left out or cut at either end.
    """

    learning_rate: float = 1e-5
    max_completion_length: int | None = None
    step_separator: str = "\n"  # type: ignore[misc]  # None where dialogues are judged
    train_on_last_step_only: bool = False
    neutral_steps: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, {"neutral_steps": ("ignore", "wrong", None)})
        refused = dict.fromkeys([*_OF_PAIRS.split(), *_OF_RANKINGS.split()], "leave it out")
        check_limits(self, refused, "not for process rewards")


class PRMTrainer(RewardTrainer):
    """Trains a token classifier to tell of each step of a solution whether it is right.

    The arguments are those of `RewardTrainer`, and so those of TRL's trainer of this name, but for these:

    Args:
        model: A model's name, or an `AutoModelForTokenClassification` with two labels, perhaps with PEFT adapters.
        args: A `PRMConfig`.
        data_collator: Makes padded batches; `DataCollatorForTokenClassification` by default.
        train_dataset: Solutions: `prompt`, `completions` (a list of steps) and `labels` (whether each is right); or
            token ids in `input_ids` and `labels`, 0 or 1 at the end of a step and -100 elsewhere.
        eval_dataset: The same, or a dict of such datasets.
        compute_metrics: Called with logits of both labels, [solutions, steps, 2], and labels, -100 where there is no
            step. Accuracy is measured anyway.
    """

    _tag_names = ["trl", "prm"]
    _trl_tpu_config = PRMConfig
    tokenize_row = staticmethod(tokenize_solution)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return build_dataset(dataset, self.model, processing_class, args, dataset_name, False, self.tokenize_row)
