"""The base of all kinds of rows. A kind defines everything in which its rows differ from other rows.

Other modules hold a kind and call it. Its methods come in the order in which a row passes them: raw row, token ids,
labels, comparisons, predictions, scored row, words.

Letters: N rows, K answers or steps per row, A attributes, G = N A rankings, M comparisons per ranking.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from datasets import Features
from jinja2 import Template
from transformers import PreTrainedTokenizerBase

from ...errors import explaining
from ..checks import Row, find_traps, unread_parts
from ..formats import apply_template, convert_row, template_arguments

#: Column that `score` adds to the rows of models whose labels are not read as usual.
LABELS_AS = "labels_as"

#: An evaluated item of a scored row, the rewards of its answers, and their grades.
ScoredItem = tuple[Row, list[float], list[float]]


class RowKind:
    """A kind of data rows. Subclasses are frozen dataclasses; their fields are the settings that they read.

    Attributes:
        name: The rows, in the plural: "pairs".
        unit: The items that a verdict counts: "pairs", "answers" or "steps".
        does: Words for a right reward, in the sentence "The model ... in 70 % of the pairs".
        swapped: What may be swapped if the model is worse than chance.
        lacks: What excludes a scored row from a verdict.
        centered: The penalty of `center_rewards_coefficient`.
        too_long: Words for rows with too many tokens, such as "rankings with an answer".
        columns: The columns of a prepared row.
        optional_columns: Further columns of labels that a prepared row may have.
        token_columns: The columns of token ids among `columns`.
        scored_columns: For each column that `score` rewards, the names of the columns of rewards and of token counts.
        are_pairs: Whether each row has two answers. Streams have such rows, since a stream is not known beforehand.
        raw_columns: Columns of raw rows that prepared rows leave out.
        has_own_tokens: Whether `tokenize` decides on special tokens and truncation, and prepared rows have only the
            columns of `features`.
        has_traps: Whether raw rows are searched for likely mistakes, see `checks.find_traps`.
        compares_with_zero: Whether each reward is compared with the constant 0, not with another reward of its row.
        is_one_sequence: Whether all rewards of a row are read in the same sequence.
        orders_answers: Whether a row may have several grades, so that the order of its answers is evaluated.
        weighs_comparisons: Whether each comparison, not each row, counts once in a mean.
        predicts_scores: Whether a reward predicts a score in the same unit: neither is a probability.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    does: ClassVar[str] = "prefers the chosen answer"
    swapped: ClassVar[str] = "chosen and rejected"
    lacks: ClassVar[str] = "a reward that is not finite"
    centered: ClassVar[str] = "the squared sum of both rewards of a comparison"
    too_long: ClassVar[str]
    columns: ClassVar[tuple[str, str]]
    optional_columns: ClassVar[tuple[str, ...]] = ()
    token_columns: ClassVar[tuple[str, ...]]
    scored_columns: ClassVar[Mapping[str, tuple[str, str]]]
    are_pairs: ClassVar[bool] = False
    raw_columns: ClassVar[tuple[str, ...]] = ()
    has_own_tokens: ClassVar[bool] = False
    has_traps: ClassVar[bool] = True
    compares_with_zero: ClassVar[bool] = False
    is_one_sequence: ClassVar[bool] = False
    orders_answers: ClassVar[bool] = False
    weighs_comparisons: ClassVar[bool] = False
    predicts_scores: bool = False

    def labels_as(self, args: Any) -> str | None:
        """Return how `from_scored` reads labels, if not as usual; `score` writes it to the column `LABELS_AS`."""
        return None

    def of(self, args: Any, **of_solutions: Any) -> Self:
        """Return the kind with the settings of a `RewardConfig`. Only solutions have further settings."""
        return self

    # ---- raw rows

    def converted(self, row: Row) -> tuple[Row, list[str]]:
        """Convert a raw row, and describe each conversion: see `convert_row`."""
        return convert_row(row)

    def is_raw(self, row: Row) -> bool:
        """Check whether a converted row has the columns of this kind in text form."""
        raise NotImplementedError

    def is_tokenized(self, row: Row) -> bool:
        """Check whether a row has this kind's columns of token ids."""
        return all(name in row for name in self.columns)

    def check_dataset(self, columns: Collection[str], name: str) -> Self:
        """Check the columns of a dataset, and return the kind of its rows.

        Args:
            columns: The columns of its converted rows.
            name: Its name in errors.

        Raises:
            UserError: The dataset cannot be read as this kind.
        """
        return self

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        """Check a raw row, and return its answers by their place in the row.

        Args:
            row: A converted row.
            where: Beginning of error messages, see `checks.row_of`.
        """
        raise NotImplementedError

    def with_prompt(self, row: Row, answer: Any, tokenizer: Any) -> Any:
        """Return the text or messages to tokenize: an answer of a checked raw row, after the row's prompt."""
        return row.get("prompt", answer[:0]) + with_eos(answer, tokenizer)

    def tokenized(self, row: Row, ids_K: list[list[int]]) -> dict[str, Any]:
        """Return the prepared columns of a checked raw row, from the token ids of its answers."""
        return self.with_answers(ids_K)

    def tokenize(
        self, rows_N: Sequence[Row], places: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[dict[str, Any], list[str]]]:
        """Return the prepared columns and the traps of each raw row.

        Args:
            rows_N: Raw rows.
            places: Beginning of error messages for each row.
            tokenizer: The tokenizer.
        """
        checked, prepared = list[tuple[Any, ...]](), []
        for (row, forms), where in zip(map(self.converted, rows_N), places, strict=True):
            answers = self.raw_answers(row, where)
            wholes = {place: self.with_prompt(row, answer, tokenizer) for place, answer in answers.items()}
            checked.append((row, forms, where, answers, wholes))
        ids_of = ids_of_texts((whole for *_, wholes in checked for whole in wholes.values()), tokenizer)
        for row, forms, where, answers, wholes in checked:
            tokenized = (
                tokenize_conversation(whole, tokenizer, row, f"{where}: `{place}`", ids_of)
                for place, whole in wholes.items()
            )
            ids_K, unread_K = zip(*tokenized, strict=True)
            traps = list[str]()
            if self.has_traps:
                traps = [f"form {form}" for form in forms]
                traps += [*chain(*unread_K), *find_traps(row, [*answers.values()], [*ids_K], tokenizer)]
            prepared.append((self.tokenized(row, [*ids_K]), traps))
        return prepared

    def features(self, dataset: Any) -> Features | None:
        """Return the types of the columns of a prepared dataset; None infers them."""
        return None

    # ---- prepared rows

    def answers(self, row: Row) -> list[Any]:
        """Return the token ids of each answer of a prepared row."""
        return [row[column] for column in self.token_columns]

    def with_answers(self, ids_K: list[list[int]]) -> dict[str, Any]:
        """Return the columns of token ids for these answers."""
        return dict(zip(self.token_columns, ids_K, strict=True))

    def labels(self, row: Row) -> dict[str, Any]:
        """Return the labels of a prepared row by name."""
        names = {*self.columns, *self.optional_columns} - {*self.token_columns}
        return {name: row[name] for name in sorted(names) if name in row}

    def check_labels(self, row: Row, where: str) -> None:
        """Raise UserError if a prepared row has labels that cannot be learned."""

    def check_prepared(self, prepared: Any, name: str) -> None:
        """Check a whole prepared dataset."""

    # ---- comparisons

    def rewards_of(self, scores_SA: torch.Tensor) -> torch.Tensor:
        """Return the rewards, given the model's outputs at the scored positions."""
        return scores_SA

    def grades(self, labels: Mapping[str, Any]) -> Any:
        """Return a grade for each answer, given the labels of a row; or a list for each attribute; None for none."""
        return labels.get("grades")

    def compared(self, grade_GK: np.ndarray, learns_ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which answers are compared.

        Args:
            grade_GK: Grades; NaN for missing answers.
            learns_ties: Whether answers with equal grades are compared.

        Returns:
            Both answers of each comparison of a ranking, [M] each; -1 is the constant 0. And the probability that the
            first is better, [G, M]; NaN if they are not compared.
        """
        raise NotImplementedError

    # ---- predictions

    def outputs(self, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs of `compute_loss`, given the rewards by row, [N, K] or [N, A, K]."""
        return {"rewards": rewards}

    def predictions(self, rewards: torch.Tensor, grade: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `predict` and `compute_metrics` get for each row: predictions, and labels.

        Args:
            rewards: Rewards by row, [N, K] or [N, A, K].
            grade: Grades in the same shape; NaN for missing answers or steps.
        """
        return torch.where(grade.isnan(), torch.nan, rewards), grade.nan_to_num()

    def label_ids(self, labels: np.ndarray) -> np.ndarray:
        """Return the labels of all rows in their final type."""
        return labels

    # ---- scored rows

    def scored(self, columns: Collection[str], rows: Sequence[Row]) -> Self | None:
        """Return the kind of scored rows with these columns; None if they are of another kind."""
        return self if {reward for reward, _ in self.scored_columns.values()} <= set(columns) else None

    def lists_answers(self, row: Row) -> bool:
        """Check whether a scored row has lists of right and wrong answers, as in RewardBench 2."""
        return False

    def token_counts(self, row: Row) -> list[Any] | None:
        """Return the number of tokens of each answer of a scored row; None if they are unknown."""
        return row.get("tokens")

    def from_scored(self, row: Row) -> Iterator[ScoredItem]:
        """Yield the items that a scored row adds to a verdict. A NaN reward with a grade counts as left out."""
        raise NotImplementedError

    # ---- words

    def describe_loss(self, args: Any, columns: Sequence[str]) -> str:
        """Describe the loss of a training for the model card, by the template ``NAME.md.jinja`` in this folder.

        Args:
            args: The settings.
            columns: The columns of the prepared data.
        """
        template = Path(__file__).with_name(f"{self.name}.md.jinja").read_text(encoding="utf-8")
        return Template(template).render(args=args, columns=columns)


def ids_of_texts(dialogues: Iterable[Any], tokenizer: Any) -> dict[str, list[int]]:
    """Tokenize all texts among texts and conversations in one call, which is much faster than one call each."""
    texts = [dialogue for dialogue in dialogues if isinstance(dialogue, str)]
    ids = tokenizer(text=texts, return_attention_mask=False)["input_ids"] if texts else []
    return dict(zip(texts, ids, strict=True))


def tokenize_conversation(
    dialogue: str | list[dict[str, Any]],
    processing_class: PreTrainedTokenizerBase,
    row: Mapping[str, Any],
    where: str,
    ids_of: Mapping[str, list[int]] | None = None,
) -> tuple[list[int], list[str]]:
    """Tokenize one text or one conversation; return the ids, and traps of parts that the chat template does not write.

    Args:
        dialogue: A complete text (see `with_eos`), or messages that `checks.check_conversation` accepts.
        processing_class: The tokenizer.
        row: The row; messages are rendered with its ``tools`` and ``chat_template_kwargs``, if any.
        where: Beginning of error messages.
        ids_of: Token ids of texts, see `ids_of_texts`; by default of this text.

    Raises:
        UserError: The messages cannot be rendered.
    """
    if isinstance(dialogue, str):
        return (ids_of or ids_of_texts([dialogue], processing_class))[dialogue], []
    with explaining(
        f"{where}, whose roles are {[message['role'] for message in dialogue]}, cannot be rendered as a chat",
        "Correct the row, its `tools` or `chat_template_kwargs`, or the tokenizer's chat template "
        "(`chat_template_path` trains with another).",
    ):
        variables = template_arguments(row)
        if type(processing_class).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            # Mistral's tokenizer: tokenizing its rendered text would give different tokens
            settings: Any = variables | {"tokenize": True, "return_dict": True}
            tokens: Any = processing_class.apply_chat_template(dialogue, **settings)
            return tokens["input_ids"], []
        render: Callable[..., str] = partial(apply_template, processing_class, **variables)
        text = render(dialogue)
        unread = unread_parts(dialogue, variables, text, render)
    return processing_class(text=text, add_special_tokens=False, return_attention_mask=False)["input_ids"], unread


def with_eos(dialogue: Any, processing_class: Any) -> Any:
    """Append the end-of-sequence token to a text that does not end with it; return messages unchanged."""
    eos = processing_class.eos_token or ""
    return dialogue + eos if isinstance(dialogue, str) and not dialogue.endswith(eos) else dialogue


def numbers_in(value: Any) -> list[float]:
    """Return the rewards of a scored row's answers as a list. Null becomes nan."""
    numbers: list[float] = np.atleast_1d(np.array(value, dtype=np.float64)).tolist()
    return numbers or [float("nan")]
