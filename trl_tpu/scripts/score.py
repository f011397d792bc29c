"""Score texts, conversations, pairs or several answers to a prompt with a saved reward model: ``trl-tpu score``."""

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from trl_tpu.config.reward_config import help_from_docstring
from trl_tpu.data import checks
from trl_tpu.errors import UserError
from trl_tpu.scoring import stream
from trl_tpu.scoring.forms import Form
from trl_tpu.scoring.scorer import TOKENS_A_PASS, Scorer
from trl_tpu.scoring.stream import Summary, look_at, scored_windows
from trl_tpu.scripts import rows_file
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.utils import Rows, open_rows

logger = logging.getLogger(__name__)


@help_from_docstring
@dataclass
class ScoreArguments:
    """What to score, and with which model.

    Args:
        model_name_or_path: Folder (or Hub id) of a saved reward model or of its adapters.
        text: Texts to score; the flag may be repeated.
        dataset_name: Rows to score: a local file, a folder, a Hub id, or ``-`` for JSON Lines from the standard
            input. Columns ``text``, ``messages``, ``completions`` (a list of answers, or of the steps of a solution
            where the model judges these), or ``chosen`` and ``rejected`` (answers or lists of them); ``prompt`` too
            where it is explicit; for messages, ``tools`` and ``chat_template_kwargs``, too.
        dataset_config: Configuration of the dataset.
        dataset_split: Split to score; may be left out where there is only one.
        output: File for the rows with their rewards: JSON Lines, or Parquet where its name ends in ``.parquet``. Until
            all rows are scored they are in the folder ``OUTPUT.partial``, and the same command resumes there. A reward
            that cannot be had is null, and ``not_scored`` says why.
        best_of_n: Keep only the best of each prompt's ``completions``, as ``completion`` and ``reward``.
        standardize: Give ``(reward - mean) / std``, by the mean and std in the model's config, which are those of its
            last evaluation's rewards, or of the last ones of its training.
        max_length: Dialogues of more tokens get no reward, as training leaves them out; no limit when None.
        bf16: Compute in bfloat16, over float32 weights; the score head stays in float32.
        mesh: How the devices of PyTorch/XLA share the weights, as in training.
        tokens_per_pass: Tokens that each device computes at a time.
        trust_remote_code: Whether the model may bring its own code.
    """

    model_name_or_path: str
    text: list[str] | None = field(default=None, metadata={"action": "extend"})
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = None
    output: str | None = None
    best_of_n: bool = False
    standardize: bool = False
    max_length: int | None = None
    bf16: bool = False
    mesh: str = "fsdp=-1"
    tokens_per_pass: int = TOKENS_A_PASS
    trust_remote_code: bool = False


def main(args: ScoreArguments) -> int:
    """Score what the arguments name, write the rows where `output` says as they are scored, and print a summary.

    Returns:
        The exit status: 1 where no row could be scored.

    Raises:
        UserError: Several processes are started; not exactly one of `text` and `dataset_name`, several splits and none
            chosen, columns that cannot be scored, or an `output` that is the dataset itself or cannot be written.
    """
    if (processes := os.environ.get("WORLD_SIZE") or "1") != "1":
        raise UserError(f"`trl-tpu score` runs in one process (WORLD_SIZE={processes}). Start it without torchrun.")
    if bool(args.text) == bool(args.dataset_name):
        raise UserError("Give either `--text` (it may be repeated) or `--dataset_name`, and not both.")
    if args.output:
        rows_file.check(args.output, args.dataset_name)
    given, count = _source(args)
    form, rows = look_at(given, args.best_of_n)
    settings: dict[str, Any] = {"bf16": args.bf16, "mesh": args.mesh, "tokens_per_pass": args.tokens_per_pass}
    scorer = Scorer(args.model_name_or_path, args.trust_remote_code, standardize=args.standardize, **settings)
    form = form.of_model(scorer)
    summary = Summary(tuple(reward for reward, _ in form.outputs.values()))
    for row in _all_scored(args, scorer, rows, form, count, summary):
        if args.text:
            reward = math.nan if row["reward"] is None else row["reward"]
            print(f"{reward:10.4f}  {row['text']}")
    if not args.text:
        print("\n".join(summary.lines()))
    if (complaint := summary.complaint()) is not None:
        logger.warning(complaint)
    if args.output:
        print(f"Rewards of {summary.rows} rows written to {args.output}")
    return 0 if summary.has_rewards else 1


def _source(args: ScoreArguments) -> tuple[Rows, int | None]:
    if args.text:
        for number, text in enumerate(args.text, start=1):
            checks.check_text(text, f"`--text` number {number}")
        return iter([{"text": text} for text in args.text]), len(args.text)
    return open_rows(str(args.dataset_name), args.dataset_config, args.dataset_split)


def _all_scored(
    args: ScoreArguments, scorer: Scorer, rows: Iterator[Any], form: Form, count: int | None, summary: Summary
) -> Iterator[dict[str, Any]]:
    """Yield the rows with their rewards, as they are written; those of an earlier start go to the summary only."""
    with ExitStack() as stack:
        file = None
        if args.output:
            file = stack.enter_context(rows_file.RowsFile(args.output, _settings(args, scorer), stream.WINDOW))
            for kept in file.kept(rows):
                summary.add(kept)
        if done := summary.rows:
            logger.warning(f"{done} rows are scored already, by an earlier start of this command, which is resumed.")
        every = 0.5 if sys.stderr.isatty() else 30  # seconds: a log keeps each line
        settings: dict[str, Any] = {"unit": " rows", "mininterval": every, "disable": bool(args.text)}
        bar = stack.enter_context(tqdm(desc="Scoring", total=count, initial=done, **settings))
        for given, scored in scored_windows(scorer, rows, form, args.max_length, first=done):
            if file is not None:
                file.write(given, scored)
            summary.add(scored)
            bar.update(len(scored))
            yield from scored


def _settings(args: ScoreArguments, scorer: Scorer) -> dict[str, Any]:
    """Return what the rewards depend on, beside the rows."""
    return {
        "model": scorer.fingerprint,
        "best_of_n": args.best_of_n,
        "scale": None if scorer.scale is None else [scorer.scale.mean, scorer.scale.std],
        "max_length": args.max_length,
        "bf16": args.bf16,
    }


def make_parser(prog: str | None = None) -> TrlParser:
    """Make the parser of the command's flags."""
    return TrlParser(ScoreArguments, prog=prog)


def run(argv: list[str], config: Mapping[str, Any] | None = None) -> int:
    """Run the command ``trl-tpu score``; returns the exit status. See `take_config` for the arguments."""
    (args,) = make_parser(prog="trl-tpu score").parse_args_and_config(argv, config=config)
    return main(args)
