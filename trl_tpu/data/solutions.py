"""Solutions whose steps are judged: their texts become the token ids of all steps, with a label at the end of each."""

from typing import Any

from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .checks import are_labels, check_text, row_of
from .measure import NO_LABEL, SOLUTION
from .tokenize import keep_fitting, map_rows

_FEATURES = Features(dict.fromkeys(("input_ids", "labels"), Sequence(Value("int64"))))  # else labels would stay bools


def tokenize_solution(
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


def prepare_solutions(
    dataset: Any, tokenize: Any, settings: dict[str, Any], *, num_embeddings: int, num_proc: int | None, name: str
) -> Dataset:
    """Check solutions, and tokenize those that are texts; see `prepare_preference_dataset`.

    Args:
        tokenize: `tokenize_solution`, or what takes its place.
        settings: Its arguments after the first.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(f"The {name} dataset is no `Dataset` with a length: load it without streaming.")
    if "input_ids" not in dataset.column_names:
        given = {"name": name, "tokenize": tokenize, "settings": settings}
        how: dict[str, Any] = {"fn_kwargs": given, "remove_columns": dataset.column_names, "features": _FEATURES}
        dataset = map_rows(dataset, _tokenize, num_proc, name, with_indices=True, **how)  # type: ignore[assignment]
    return keep_fitting(dataset, SOLUTION, num_embeddings=num_embeddings, max_length=None, name=name)  # type: ignore[return-value]


def check_solution(row: Any, where: str) -> None:
    """Raise UserError unless a raw row's prompt and steps are texts."""
    prompt, steps = row.get("prompt"), row.get("completions")
    if not isinstance(steps, list) or not all(isinstance(text, str) for text in (prompt, *steps)):
        raise UserError(f"{where}: `prompt` must be text, and `completions` a list of texts, the steps.")
    for text in (prompt, *steps):
        check_text(text, where)


def _tokenize(row: dict[str, Any], index: int, name: str, tokenize: Any, settings: dict[str, Any]) -> Any:
    """Return the columns that ``tokenize`` makes of a raw row; raise UserError, which names the row, if it is bad."""
    where = row_of(index, name)
    check_solution(row, where)
    steps, labels = row["completions"], row.get("labels")
    if not are_labels(labels, len(steps)):
        raise UserError(f"{where}: `labels` must be 0 or 1 of each of {len(steps)} `completions`, got {labels!r:.80}.")
    return tokenize(row, **settings)
