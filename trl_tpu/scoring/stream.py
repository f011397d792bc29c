"""Score rows of several forms, in windows: memory does not grow with the number of rows.

==========================  ==============================================  =======================================
columns                     content                                         columns of rewards and token counts
==========================  ==============================================  =======================================
chosen, rejected            a pair, in any form that training takes         reward_chosen, ..., tokens_chosen, ...
chosen, rejected as lists   several answers each, as in RewardBench 2       the same, lists
completions                 a list of answers                               rewards, tokens: lists
completions                 the steps of a solution, if steps are scored    step_rewards, tokens: lists
completion                  one answer                                      reward, tokens
messages                    a conversation                                  reward, tokens
text                        a text                                          reward, tokens
==========================  ==============================================  =======================================

In all forms but the last two, a ``prompt`` column is put before each answer. The columns ``tools`` and
``chat_template_kwargs`` are passed to the chat template.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from ..data.checks import Row, check_conversation, check_ids, row_of, unread_columns, warn_of_new_traps
from ..data.formats import convert_row, date_written
from ..data.kinds import Pairs, Rankings, Solutions, check_one_form
from ..data.kinds.base import LABELS_AS, ids_of_texts, tokenize_conversation, with_eos
from ..errors import UserError, explaining
from ..modeling.head_spec import HeadSpec
from .scorer import TOKENS_PER_PASS, Scorer

logger = logging.getLogger(__name__)

#: Rows that are tokenized, packed and computed together.
WINDOW = 1024

#: Column with the reason why a row lacks rewards; null if it has all of them.
REASON = "not_scored"

Dialogue = str | list[dict[str, Any]] | np.ndarray  # a text, messages, or token ids

_WITHOUT_PROMPT = ("messages", "text")  # columns of whole conversations
# for each form, its columns to score, each with its reward column and its token count column
_FORMS: tuple[Mapping[str, tuple[str, str]], ...] = (
    *(Pairs.scored_columns, Rankings.scored_columns),
    *({column: ("reward", "tokens")} for column in ("completion", *_WITHOUT_PROMPT)),
)


@dataclass
class Item:
    """One text or conversation of a row, and its results.

    Attributes:
        where: Beginning of error messages: row, column and index.
        ids: Token ids of the item if it can be scored, int32; else None.
        by_attribute: Reward of each attribute of the model, by name.
        fault: Reason why the item has no reward.
    """

    row: Row
    where: str
    dialogue: Dialogue | None = None
    ids: Any = None
    tokens: int | None = None
    reward: float | None = None
    by_attribute: dict[str, float] | None = None
    fault: str | None = None

    @contextmanager
    def keeping_fault(self) -> Iterator[None]:
        """Keep a UserError as the item's fault, and go on."""
        try:
            yield
        except UserError as error:
            self.fault = str(error)


#: Items of a row by column: one item, or a list of items if the column has a list of answers.
Items = dict[str, Item | list[Item]]

#: Input rows, and the same rows with rewards.
Window = tuple[list[Row | UserError], list[dict[str, Any]]]


@dataclass(frozen=True)
class Form:
    """Columns of a row to score, and columns to write.

    Args:
        outputs: For each column to score, the names of its reward column and its token count column.
        best_only: Whether only the best of each row's completions is kept.
        spec: The outputs of the model.
    """

    outputs: Mapping[str, tuple[str, str]]
    best_only: bool
    spec: HeadSpec

    @classmethod
    def of(cls, columns: Iterable[str], best_only: bool, spec: HeadSpec) -> "Form":
        """Find the form of rows with these columns, and warn about columns that the output overwrites.

        Raises:
            UserError: The columns have no form that can be scored, or two forms; `best_only` is set without
                completions; or the model scores steps, but the rows have none.
        """
        present, forms = list(columns), _FORMS
        if spec.step_separator is not None:
            forms = () if best_only else (Solutions.scored_columns,)
        elif best_only:
            forms = ({"completions": ("reward", "tokens")},)
        else:
            check_one_form(present, "The dataset")
        outputs = next((form for form in forms if form.keys() <= set(present)), None)
        if outputs is None:
            raise UserError(
                "Rows to score need chosen and rejected, completions, completion, messages or text; for best-of-N, "
                f"completions; for a model that scores steps, prompt and completions. These rows have {present}."
            )
        form = cls(outputs, best_only, spec)
        # writing an empty row gives the names of all new columns
        if replaced := form.written({}, {column: Item({}, "") for column in outputs}).keys() & set(present):
            logger.warning(f"Columns of the output overwrite the dataset's: {', '.join(sorted(replaced))}.")
        return form

    def read(self, row: Row | UserError, where: str, tokenizer: Any) -> Items:
        """Read the items of a row; an invalid item gets a fault.

        Args:
            row: A row, or an error that stands for an invalid row.
            where: Beginning of error messages.
            tokenizer: The model's tokenizer. Its EOS token is added to texts.
        """
        if isinstance(row, UserError):
            return {column: Item({}, where, fault=str(row)) for column in self.outputs}
        if self.spec.step_separator is not None:
            solution = Item(row, where)
            with solution.keeping_fault():
                solutions = Solutions(self.spec.step_separator, is_eval=True)
                steps = enumerate(solutions.sequences_to_score(row, where, tokenizer))
                return {"completions": [Item(row, f"{where}: `completions[{step}]`", ids) for step, ids in steps]}
            return {"completions": solution}
        row = convert_row(row)[0]
        if "completion" in row and "completions" in self.outputs:  # also a row without a label, after rows with one
            row.setdefault("completions", [row["completion"]])
        items: Items = {}
        for column in self.outputs:
            answer, place = row.get(column), f"{where}: `{column}"
            prompt = None if column in _WITHOUT_PROMPT else row.get("prompt")
            if isinstance(answer, list) and (column == "completions" or (answer and not isinstance(answer[0], dict))):
                answers = enumerate(answer)
                items[column] = [_read(row, prompt, each, f"{place}[{at}]`", tokenizer) for at, each in answers]
            elif column == "completions":
                items[column] = Item(row, place, fault=f"{place}` must be a list of answers, got {answer!r:.80}")
            else:
                items[column] = _read(row, prompt, answer, f"{place}`", tokenizer)
        return items

    def unread_columns(self, row: Row) -> list[str]:
        """Return traps for the columns of a converted row whose text is not scored."""
        prompt = None if self.outputs.keys() & set(_WITHOUT_PROMPT) else row.get("prompt")
        return unread_columns(row, prompt, [row.get(column) for column in self.outputs])

    def written(self, row: Row, items: Items) -> dict[str, Any]:
        """Return the row with its rewards, its token counts, and a reason if it lacks rewards.

        Rewards of a model's attributes go to the column ``REWARD_COLUMN_by_attribute``.
        """
        flat_items = flatten_items(items)
        faults = list(dict.fromkeys(item.fault for item in flat_items if item.fault))
        more = f" (and {len(faults) - 1} more without a reward)" if len(faults) > 1 else ""
        written = dict(row)
        if self.best_only:
            answers = written.pop("completions", None)
            rewards = {place: item.reward for place, item in enumerate(flat_items) if item.reward is not None}
            best = max(rewards, key=rewards.__getitem__, default=None)  # the first of equal rewards
            written["completion"] = None if best is None else answers[best]
            items = {"completions": Item(row, "") if best is None else flat_items[best]}
        for column, (reward, tokens) in self.outputs.items():
            scored = items[column]
            columns = {"reward": reward, "tokens": tokens}
            columns |= {"by_attribute": f"{reward}_by_attribute"} if self.spec.attributes else {}
            for field, name in columns.items():
                values = [getattr(item, field) for item in flatten_items({column: scored})]
                written[name] = values if isinstance(scored, list) else values[0]
        written.pop(LABELS_AS, None)  # of another model
        if self.spec.labels_as is not None and "completions" in self.outputs and not self.best_only:
            written[LABELS_AS] = self.spec.labels_as
        return written | {REASON: f"{faults[0]}{more}" if faults else None}


def flatten_items(items: Items) -> list[Item]:
    """Return a row's items in one flat list."""
    return [item for value in items.values() for item in (value if isinstance(value, list) else [value])]


def _read(row: Row, prompt: Any, answer: Any, where: str, tokenizer: Any) -> Item:
    """Read an answer, after the prompt if there is one. A text gets an EOS token, as in training."""
    item = Item(row, where)
    with item.keeping_fault():
        check_conversation(answer, where)
        if prompt is not None:
            if type(prompt) is not type(answer):
                raise UserError(f"{where} and `prompt` must both be texts, or both lists of messages.")
            check_conversation(prompt, f"{where}: its `prompt`")
        item.dialogue = (answer[:0] if prompt is None else prompt) + with_eos(answer, tokenizer)
    return item


def tokenize(items: list[Item], scorer: Scorer, max_length: int | None, warned: set[str]) -> list[Item]:
    """Tokenize items as in training, and return the ones that can be scored; the rest get a fault.

    Args:
        items: The items of some rows.
        scorer: The model with its tokenizer.
        max_length: Maximum number of tokens of an item; None for no limit.
        warned: Traps that are logged already; new ones are added.
    """
    ids_of = ids_of_texts((item.dialogue for item in items), scorer.tokenizer)
    most = scorer.positions if max_length is None else min(max_length, scorer.positions)
    for item in [item for item in items if item.dialogue is not None]:
        with item.keeping_fault():
            ids: Any = item.dialogue
            if not isinstance(ids, np.ndarray):
                ids, traps = tokenize_conversation(ids, scorer.tokenizer, item.row, item.where, ids_of)
                warn_of_new_traps(traps, warned, item.where.replace("Row", "in row", 1))
            check_ids(ids, item.where, scorer.num_embeddings)
            item.tokens = len(ids)
            if len(ids) > most:
                item.fault = f"{item.where} has {len(ids)} tokens; max_length or the model's positions allow {most}"
            else:
                item.ids = np.asarray(ids, np.int32)
    return [item for item in items if item.ids is not None]


def score(
    model: str | Scorer,
    rows: Iterable[Row | Dialogue],
    *,
    max_length: int | None = None,
    best_of_n: bool = False,
    bf16: bool = False,
    mesh: str = "fsdp=-1",
    tokens_per_pass: int = TOKENS_PER_PASS,
    standardize: bool = False,
    trust_remote_code: bool = False,
) -> Iterator[dict[str, Any]]:
    """Score any number of rows with a saved reward model, on the devices that training would use.

    Tokens that several conversations share are computed once. Up to rounding, rewards equal the rewards of scoring one
    conversation at a time.

    Args:
        model: Folder or Hub id of a saved reward model or of its adapters. Pass a `Scorer` to load a model only once;
            the scorer's settings then replace the settings below.
        rows: Rows of one of the forms in `trl_tpu.scoring.stream`: a dataset, a list, an iterator; or texts, or lists
            of messages.
        max_length: Longer conversations, in tokens, get no reward; training leaves them out too. None for no limit.
        best_of_n: Whether only the best of each row's ``completions`` is kept, as ``completion`` and ``reward``.
        bf16: Whether to compute in bfloat16 with float32 weights.
        mesh: Mesh axes that shard the weights over PyTorch/XLA's devices, as in training.
        tokens_per_pass: Number of tokens that each device computes at a time.
        standardize: Whether to return ``(reward - mean) / std``, with the mean and std in the model's config.
        trust_remote_code: Whether to run code that comes with the model.

    Returns:
        An iterator over the rows in order. Each row gains its rewards, its token counts, and ``not_scored``: the
        reason why a reward is None.

    Raises:
        UserError: There are no rows, their columns cannot be scored, or the folder has no saved reward model.
    """
    named: Iterable[Any] = (
        {"text" if isinstance(row, str) else "messages": row} if isinstance(row, str | list) else row for row in rows
    )
    form, stream = inspect_rows(named, best_of_n, model)
    if not isinstance(model, Scorer):
        settings: dict[str, Any] = {"bf16": bf16, "mesh": mesh, "tokens_per_pass": tokens_per_pass}
        model = Scorer(model, trust_remote_code, standardize=standardize, **settings)
    return chain.from_iterable(scored for _, scored in scored_windows(model, stream, form, max_length))


def inspect_rows(rows: Iterable[Any], best_only: bool, model: str | Scorer) -> tuple[Form, Iterator[Row | UserError]]:
    """Detect the form of rows from the first row; return the form and an iterator over all rows.

    Args:
        rows: The rows, with a UserError in place of each invalid row.
        best_only: Whether only the best of each row's completions is kept.
        model: The model, or its folder or Hub id: rows are checked before the weights are loaded.

    Raises:
        UserError: There are no rows, the first row is invalid or its columns cannot be scored, or the model has no
            config.
    """
    remaining = iter(rows)
    first = next(remaining, UserError("There are no rows to score."))
    if isinstance(first, UserError):
        raise first
    converted, forms = convert_row(first)
    if forms:
        logger.warning(f"The rows to score have {', '.join(forms)}.")
    with explaining(f"{model} cannot be loaded as a reward model"):
        spec = model.outputs if isinstance(model, Scorer) else HeadSpec.saved(model)
    return Form.of({**first, **converted}, best_only, spec), chain([first], remaining)


def scored_windows(
    scorer: Scorer, rows: Iterable[Row | UserError], form: Form, max_length: int | None = None, first: int = 0
) -> Iterator[Window]:
    """Yield windows of `WINDOW` rows: the input rows, and the same rows with rewards.

    Args:
        scorer: The model.
        rows: The rows, with a UserError in place of each invalid row.
        form: The form of the rows.
        max_length: Maximum number of tokens of an item that gets a reward; None for no limit.
        first: The number of the first row, for error messages.
    """
    remaining, warned = iter(rows), set[str]()
    computing: list[Callable[[], Window]] = []
    while window_rows := list(islice(remaining, WINDOW)):
        computing.append(_start(scorer, window_rows, form, max_length, first, warned))
        first += len(window_rows)
        # an accelerator computes this window while the host tokenizes the next one
        if len(computing) > (scorer.device.type != "cpu"):
            yield computing.pop(0)()
    for window in computing:
        yield window()


def _start(
    scorer: Scorer, rows: list[Row | UserError], form: Form, max_length: int | None, first: int, warned: set[str]
) -> Callable[[], Window]:
    """Start to compute the rewards of a window; the returned function waits for them.

    Traps that are not in ``warned`` yet are logged, and added.
    """
    items_of_rows = list[Items]()
    for number, row in enumerate(rows, first):
        items_of_rows.append(items := form.read(row, row_of(number, "scored"), scorer.tokenizer))
        for item in flatten_items(items)[:1]:
            warn_of_new_traps(form.unread_columns(item.row), warned, f"scored dataset: in row {number}")
    ready = tokenize([item for items in items_of_rows for item in flatten_items(items)], scorer, max_length, warned)
    chats = ((item.dialogue, item.row) for item in ready if isinstance(item.dialogue, list))
    date_written(scorer.tokenizer, chats)  # warns if the chat template writes a date
    rewards = scorer.start([item.ids for item in ready])

    def finish() -> Window:
        for item, (reward, *by_attribute) in zip(ready, rewards().tolist(), strict=True):
            if np.isfinite(reward):
                item.reward = reward
                item.by_attribute = dict(zip(scorer.outputs.attributes, by_attribute, strict=True))
            else:
                item.fault = f"{item.where}: the reward is {reward}, not a finite number"
        both = zip(rows, items_of_rows, strict=True)
        return rows, [form.written({} if isinstance(row, UserError) else row, items) for row, items in both]

    return finish
