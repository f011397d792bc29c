"""PRMTrainer: TRL's constructor and methods, up to its version 1.13."""

from typing import Any

from ...data.row_formats import tokenize_solution
from ...modeling.build import build_dataset
from ...trainer.reward_trainer import RewardTrainer
from ...trainer.utils import compute_accuracy as compute_accuracy
from .prm_config import PRMConfig


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
