"""Score texts, conversations or pairs with a saved reward model, in plain torch: ``trl-tpu score``."""

import sys

if __name__ == "__main__":  # the command exports the `env` of its YAML file before the imports below read it
    from trl_tpu.cli import main as command

    raise SystemExit(command(["score", *sys.argv[1:]]))

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from trl_tpu.data import checks
from trl_tpu.data.tokenize import prepare_preference_dataset
from trl_tpu.errors import UserError
from trl_tpu.scripts import datafiles, rows_file
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.scorer import Dialogue, Scorer, reward_column
from trl_tpu.trainer.field_help import help_from_docstring

logger = logging.getLogger(__name__)


@help_from_docstring
@dataclass
class ScoreArguments:
    """What to score, and with which model.

    Args:
        model_name_or_path: Folder (or Hub id) of a saved reward model or of its adapters.
        text: Texts to score; the flag may be repeated.
        dataset_name: Rows to score: a local file, a folder, a Hub id. Columns ``text``, ``messages``, or pairs in
            ``chosen`` and ``rejected`` (``prompt`` too where it is explicit); for messages, ``tools`` and
            ``chat_template_kwargs``, too.
        dataset_config: Configuration of the dataset.
        dataset_split: Split to score; may be left out where there is only one.
        output: JSON Lines file for the rows with their rewards. Until all rows are scored it is called
            ``OUTPUT.partial``. A reward that is not finite is null.
        batch_size: Dialogues per forward pass.
        max_length: Dialogues of more tokens get no reward, as training leaves them out; no limit when None.
        trust_remote_code: Whether the model may bring its own code.
    """

    model_name_or_path: str
    text: list[str] | None = field(default=None, metadata={"action": "extend"})
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = None
    output: str | None = None
    batch_size: int = 8
    max_length: int | None = None
    trust_remote_code: bool = False


def score_texts(
    model_folder: str,
    texts_or_conversations: Sequence[Dialogue],
    batch_size: int = 8,
    max_length: int | None = None,
) -> list[float]:
    """Compute rewards of texts or conversations by a saved reward model, in plain torch and float32.

    Args:
        model_folder: Folder (or Hub id) of a saved reward model or of its adapters.
        texts_or_conversations: Texts, or lists of messages (``{"role": ..., "content": ...}``).
        batch_size: Dialogues per forward pass.
        max_length: Dialogues of more tokens get nan, as training leaves them out; no limit when None.

    Returns:
        One reward per dialogue, in order.

    Raises:
        UserError: Messages for a tokenizer without a chat template, a model without a pad token, no tokens.
    """
    scorer = Scorer(model_folder)
    ids = [scorer.token_ids(dialogue, index=index) for index, dialogue in enumerate(texts_or_conversations)]
    return [rewards["reward"] for rewards in scorer.score({"dialogue": ids}, batch_size, max_length)]


def score_dataset(
    scorer: Scorer, rows: Dataset, batch_size: int = 8, max_length: int | None = None
) -> dict[str, list[float]]:
    """Compute rewards of a dataset's rows.

    Args:
        scorer: The model.
        rows: N rows with ``chosen`` and ``rejected`` (in any form that training takes), else ``messages`` or ``text``.
        batch_size: Dialogues per forward pass.
        max_length: Dialogues of more tokens get nan; no limit when None.

    Returns:
        New columns of N rewards: ``reward_chosen`` and ``reward_rejected``, or ``reward``.

    Raises:
        UserError: None of these columns, or a row that cannot be scored.
    """
    ids = _tokenized(scorer, rows)
    scored = list(scorer.score(ids, batch_size, max_length))
    return {column: [rewards[column] for rewards in scored] for column in map(reward_column, ids)}


def _tokenized(scorer: Scorer, rows: Dataset) -> dict[str, list[list[int]]]:
    """Tokenize all dialogues of a dataset, by their column; so every row is checked before the first is scored."""
    columns = rows.column_names
    if set(checks.RAW_COLUMNS) <= set(columns):
        read = rows.select_columns([name for name in columns if name != "margin"])  # which is for the loss alone
        pairs: Any = prepare_preference_dataset(
            read, scorer.tokenizer, num_embeddings=scorer.num_embeddings, max_length=None, num_proc=None, name="scored"
        )
        return {column: list(pairs[ids]) for column, ids in zip(checks.RAW_COLUMNS, checks.TOKEN_COLUMNS, strict=True)}
    column = next((name for name in ("messages", "text") if name in columns), None)
    if column is None:
        raise UserError(
            f"Rows to score need the columns chosen and rejected, or messages, or text; they have {columns}."
        )
    used = rows.select_columns([name for name in (column, "tools", "chat_template_kwargs") if name in columns])
    return {column: [scorer.token_ids(row[column], row, column, index) for index, row in enumerate(used)]}


def main(args: ScoreArguments) -> None:
    """Score what the arguments name, write the rows where `output` says as they are scored, and print a summary.

    Raises:
        UserError: Not exactly one of `text` and `dataset_name`, several splits and none chosen, or an `output` that
            is the dataset itself or cannot be written.
    """
    if bool(args.text) == bool(args.dataset_name):
        raise UserError("Give either `--text` (it may be repeated) or `--dataset_name`, and not both.")
    if args.output:
        rows_file.check(args.output, args.dataset_name)
    rows = _rows(args)
    scorer = Scorer(args.model_name_or_path, args.trust_remote_code)
    ids = _tokenized(scorer, rows)
    scored: dict[str, list[float]] = {reward_column(column): [] for column in ids}
    if args.output and (replaced := set(scored) & set(rows.column_names)):
        logger.warning(f"The output has new rewards in place of the dataset's: {', '.join(sorted(replaced))}.")
    rewards = scorer.score(ids, args.batch_size, args.max_length)
    with rows_file.opened(args.output) as file:
        for index, row_rewards in enumerate(rewards):
            for column, reward in row_rewards.items():
                scored[column].append(reward)
            if file is not None:
                print(rows_file.json_line({**rows[index], **row_rewards}), file=file, flush=True)
    if args.text:
        for text, reward in zip(args.text, scored["reward"], strict=True):
            print(f"{reward:10.4f}  {text}")
    else:
        print(summary(scored))
    if args.output:
        print(f"Rewards of {len(rows)} rows written to {args.output}")


def _rows(args: ScoreArguments) -> Any:
    if args.text:
        for number, text in enumerate(args.text, start=1):
            checks.check_text(text, f"`--text` number {number}")
        return Dataset.from_dict({"text": args.text})
    name = str(args.dataset_name)
    splits = datafiles.load(name, name=args.dataset_config)
    if args.dataset_split is None and len(splits) > 1:
        raise UserError(f"{name} has several splits: {', '.join(splits)}. Choose one with `--dataset_split`.")
    return datafiles.pick_split(splits, args.dataset_split or next(iter(splits)), name)


def summary(scored: dict[str, list[float]]) -> str:
    """Sum rewards up in a few lines: count, accuracy and margin of pairs, mean and range of each column."""
    lines = []
    if "reward_chosen" in scored:
        margins = [c - r for c, r in zip(scored["reward_chosen"], scored["reward_rejected"], strict=True)]
        margins = [margin for margin in margins if math.isfinite(margin)]
        if margins:
            right = sum(margin > 0 for margin in margins)
            lines += [
                f"pairs            {len(margins)}",
                f"accuracy         {right / len(margins):.4f}",
                f"ties             {sum(margin == 0 for margin in margins)}",
                f"mean margin      {sum(margins) / len(margins):.4f}",
            ]
    for column, rewards in scored.items():
        finite = [reward for reward in rewards if math.isfinite(reward)]
        if finite:
            mean = sum(finite) / len(finite)
            lines.append(f"{column:<16} mean {mean:.4f}, min {min(finite):.4f}, max {max(finite):.4f}")
    return "\n".join(lines) or "no row was scored"


def make_parser(prog: str | None = None) -> TrlParser:
    """Make the parser of the command's flags."""
    return TrlParser(ScoreArguments, prog=prog)


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu score``; returns the exit status."""
    (args,) = make_parser(prog="trl-tpu score").parse_args_and_config(argv)
    main(args)
    return 0
