"""PRMTrainer: TRL's constructor and methods, up to its version 1.13."""

from typing import Any

from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedTokenizerBase

from ...data.checks import row_of
from ...data.measure import NO_LABEL, SOLUTION
from ...data.tokenize import keep_fitting, map_rows
from ...errors import UserError
from ...modeling.build import check_positions
from ...trainer.reward_trainer import RewardTrainer
from ...trainer.utils import compute_accuracy as compute_accuracy

_OF_TOKENS = ("step_separator", "max_length", "max_completion_length", "train_on_last_step_only")
_FEATURES = Features(dict.fromkeys(("input_ids", "labels"), Sequence(Value("int64"))))  # else labels would stay bools


class PRMTrainer(RewardTrainer):
    """Trains a token classifier to tell of each step of a solution whether it is right.

    The arguments are those of `RewardTrainer`, and so those of TRL's trainer of this name, but for these:

    Args:
        model: An `AutoModelForTokenClassification` with two labels, or one with PEFT adapters; no name of one.
        args: A `PRMConfig`.
        data_collator: Makes padded batches; `DataCollatorForTokenClassification` by default.
        train_dataset: Solutions: `prompt`, `completions` (a list of steps) and `labels` (whether each is right); or
            token ids in `input_ids` and `labels`, 0 or 1 at the end of a step and -100 elsewhere.
        eval_dataset: The same, or a dict of such datasets.
        compute_metrics: Called with logits of both labels, [solutions, steps, 2], and labels, -100 where there is no
            step. Accuracy is measured anyway.
    """

    _tag_names = ["trl", "prm"]

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        if not isinstance(dataset, Dataset):
            raise UserError(f"The {dataset_name} dataset is no `Dataset` with a length: load it without streaming.")
        if "input_ids" not in dataset.column_names:
            settings = {name: getattr(args, name) for name in _OF_TOKENS}
            settings |= {"tokenizer": processing_class, "is_eval": dataset_name != "train"}
            given = {"name": dataset_name, "tokenize": self.tokenize_row, "settings": settings}
            how: dict[str, Any] = {"fn_kwargs": given, "remove_columns": dataset.column_names, "features": _FEATURES}
            dataset = map_rows(dataset, _tokenize, args.dataset_num_proc, dataset_name, with_indices=True, **how)
        weight: Any = self.model.get_input_embeddings().weight
        prepared = keep_fitting(dataset, SOLUTION, num_embeddings=len(weight), max_length=None, name=dataset_name)
        return check_positions(prepared, self.model, dataset_name)

    @staticmethod
    def tokenize_row(
        features: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        step_separator: str,
        max_length: int | None,
        max_completion_length: int | None,
        train_on_last_step_only: bool,
        is_eval: bool,
    ) -> dict[str, list[int]]:
        """Tokenize a solution: return its `input_ids`, and `labels` that are -100 but at the last token of a step.

        Args:
            features: `prompt`, `completions` and `labels`.
            tokenizer: Adds no special tokens, but its BOS, if it has one, before the prompt.
            step_separator: Put after each step.
            max_length: Most tokens; those after are cut.
            max_completion_length: The same, of the steps.
            train_on_last_step_only: Whether all labels but the last become -100,
            is_eval: but not in evaluation.
        """
        texts, bos = (step_separator, features["prompt"], *features["completions"]), tokenizer.bos_token_id
        separator_ids, prompt_ids, *steps = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        prompt_ids = [bos] * (bos is not None) + prompt_ids
        input_ids, labels = list[int](), list[int]()
        for place, (ids, label) in enumerate(zip(steps, features["labels"], strict=True), start=1):
            input_ids += ids + separator_ids
            is_left_out = train_on_last_step_only and not is_eval and place < len(steps)
            labels += [NO_LABEL] * (len(input_ids) - len(labels) - 1) + [NO_LABEL if is_left_out else int(label)]
        input_ids = prompt_ids + input_ids[:max_completion_length]
        labels = [NO_LABEL] * len(prompt_ids) + labels[:max_completion_length]
        return {"input_ids": input_ids[:max_length], "labels": labels[:max_length]}


def _tokenize(row: dict[str, Any], index: int, name: str, tokenize: Any, settings: dict[str, Any]) -> Any:
    """Return the columns that ``tokenize`` makes of a raw row; raise UserError, which names the row, if it is bad."""
    prompt, steps, labels = (row[column] for column in ("prompt", "completions", "labels"))
    are_texts = isinstance(steps, list) and all(isinstance(text, str) for text in (prompt, *steps))
    if not are_texts or not isinstance(labels, list) or [label in (0, 1) for label in labels] != [True] * len(steps):
        raise UserError(f"{row_of(index, name)}: `prompt` must be text, `completions` texts, `labels` 0 or 1 of each.")
    return tokenize(row, **settings)
