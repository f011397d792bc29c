"""Score texts, conversations, pairs or several answers to a prompt with a saved reward model: ``trl-tpu score``."""

import hashlib
import json
import logging
import math
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from trl_tpu.config.reward_config import help_from_docstring
from trl_tpu.data import checks
from trl_tpu.errors import UserError, UserFileError
from trl_tpu.evaluation.evaluate import Evaluation, NothingCompared
from trl_tpu.report.verdicts import LabeledRewards, Table, as_markdown, printable, read_rows
from trl_tpu.scoring import stream
from trl_tpu.scoring.scorer import TOKENS_A_PASS, Scorer
from trl_tpu.scoring.stream import REASON, Form, look_at, scored_windows
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.utils import Rows, open_rows

logger = logging.getLogger(__name__)

_PARQUET = ".parquet"


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
    """Score rows, write them as they are scored if there is an `output`, and print the verdict on them.

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
        _check_output(args.output, args.dataset_name)
    if args.text:
        for number, text in enumerate(args.text, start=1):
            checks.check_text(text, f"`--text` number {number}")
        given: Rows = iter([{"text": text} for text in args.text])
        count: int | None = len(args.text)
    else:
        given, count = open_rows(str(args.dataset_name), args.dataset_config, args.dataset_split)
    form, rows = look_at(given, args.best_of_n)
    settings: dict[str, Any] = {"bf16": args.bf16, "mesh": args.mesh, "tokens_per_pass": args.tokens_per_pass}
    scorer = Scorer(args.model_name_or_path, args.trust_remote_code, standardize=args.standardize, **settings)
    form = form.of_model(scorer)
    columns = [reward for reward, _ in form.outputs.values()]
    evaluation, ranges, done, faults, fault = Evaluation(), defaultdict[str, list[Any]](list), 0, 0, None
    for scored in _windows(args, scorer, rows, form, count):
        done += len(scored)
        faulty = [row[REASON] for row in scored if row[REASON] is not None]
        faults, fault = faults + len(faulty), fault or next(iter(faulty), None)
        for column in columns:
            values = [row[column] if isinstance(row[column], list) else [row[column]] for row in scored]
            if known := [value for each in values for value in each if value is not None]:
                ranges[column].append((len(known), sum(known), min(known), max(known)))
        if columns != ["reward"] and not (labeled := LabeledRewards.of(scored, columns)).are_lists:
            evaluation.add(labeled.rewards_NK, labeled.labels, labeled.tokens_N2, labeled.groups(None))
        for row in scored if args.text else ():
            print(f"{math.nan if row['reward'] is None else row['reward']:10.4f}  {row['text']}")
    if not args.text:
        with suppress(NothingCompared):
            print(as_markdown({"": evaluation.verdict()}, printable), end="\n\n")
        cells = []
        for column, parts in ranges.items():
            counts, sums, lows, highs = np.array(parts).T
            numbers = (sums.sum() / counts.sum(), lows.min(), highs.max())
            cells.append((column, *(f"{number:.4f}" for number in numbers)))
        table = Table("Rewards", ("column", "mean", "min", "max"), tuple(cells))
        print(table.markdown(printable) if cells else "no row was scored", end="\n\n")
    if faults:
        logger.warning(f"{faults} of {done} rows have no reward, or lack one; `{REASON}` says why: {fault}")
    if args.output:
        print(f"Rewards of {done} rows written to {args.output}")
    return 0 if ranges else 1


def _check_output(output: str, dataset: str | None) -> None:
    """Check, before any work is done, that an output can be written and is no part of a local dataset."""
    path = Path(output).expanduser().resolve()
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise UserFileError(f"`output`, {output}, cannot be written: name a file in a folder that is there.")
    if dataset is not None and path.is_relative_to(Path(dataset).expanduser().resolve()):
        raise UserError(f"`output`, {output}, is the dataset itself or in its folder: name a file elsewhere.")


def _windows(
    args: ScoreArguments, scorer: Scorer, rows: Iterator[Any], form: Form, count: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Yield windows of rows with their rewards: those that an earlier start has written, and new ones once written."""
    done, file = 0, None
    scale = None if scorer.scale is None else [scorer.scale.mean, scorer.scale.std]
    depends_on = {"model": scorer.fingerprint, "best_of_n": args.best_of_n, "scale": scale}
    depends_on |= {"max_length": args.max_length, "bf16": args.bf16}
    with ExitStack() as stack:
        if args.output:
            file = stack.enter_context(RowsFile(args.output, depends_on, stream.WINDOW))
            for kept in file.kept(rows):
                done += len(kept)
                yield kept
        if done:
            logger.warning(f"{done} rows are scored already, by an earlier start of this command, which is resumed.")
        every = 0.5 if sys.stderr.isatty() else 30  # seconds: a log keeps each line
        settings: dict[str, Any] = {"unit": " rows", "mininterval": every, "disable": bool(args.text)}
        bar = stack.enter_context(tqdm(desc="Scoring", total=count, initial=done, **settings))
        for given, scored in scored_windows(scorer, rows, form, args.max_length, first=done):
            if file is not None:
                file.write(given, scored)
            bar.update(len(scored))
            yield scored


class RowsFile:
    """A file of rows that is written in chunks, can be resumed, and appears when all of them are written.

    It is a context, at whose end the file gets its name, unless an error ends it. Until then the chunks are files in
    the folder ``OUTPUT.partial``, each complete or absent: JSON Lines, or Parquet where the output is Parquet and JSON
    would change a value. Their names have a digest of the rows that they were made from and of the settings, so that
    a command that is started again keeps the chunks of an earlier start, or rejects those of other rows.

    Args:
        output: The file; Parquet where its name ends so, else JSON Lines.
        settings: What the rows depend on, beside those that they are made from.
        chunk: Rows are written and kept in chunks of this many.
    """

    def __init__(self, output: str, settings: Mapping[str, Any], chunk: int) -> None:
        self._path = Path(output).expanduser().resolve()  # the file that a link leads to
        self._settings = json.dumps(settings)
        self._chunk = chunk
        self._chunks: list[Path] = []
        self._changed: set[str] = set()  # columns of which JSON cannot hold all values
        self._folder = self._path.with_name(f"{self._path.name}.partial")

    def kept(self, rows: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
        """Read the chunks of an earlier start, and as many of the rows that they were made from.

        Raises:
            UserError: They were made from other rows, or by another command.
        """
        for found in sorted(self._folder.glob("*-*[!d]")):  # all but .unfinished
            given = list(islice(rows, self._chunk))
            written = read_rows(found)
            if found.stem != self._file_of(given).stem or len(written) != len(given):
                raise UserError(
                    f"{self._folder} cannot be resumed: its rows were made from other data, by another model or with "
                    "other arguments. Give the same, or delete the folder to begin anew."
                )
            self._chunks.append(found)
            yield written

    def write(self, given: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
        """Write a chunk.

        Args:
            given: The rows that it was made from.
            rows: The rows to write.
        """
        self._folder.mkdir(exist_ok=True)
        chunk = self._file_of(given)
        unfinished = chunk.with_suffix(".unfinished")
        as_json = list(map(_as_json, rows))
        both = zip(rows, as_json, strict=True)
        changed = {name for row, spelled in both for name, value in row.items() if spelled[name] != value}
        if changed and self._path.suffix.lower() == _PARQUET:
            with suppress(pa.ArrowException, UnicodeEncodeError):  # of what Parquet cannot hold either
                pq.write_table(pa.Table.from_struct_array(pa.array(rows)), unfinished)
                chunk, changed = chunk.with_suffix(_PARQUET), set()
        if chunk.suffix != _PARQUET:
            unfinished.write_bytes(b"".join(map(json_line, as_json)))
        if new := changed - self._changed:
            self._changed |= new
            logger.warning(
                f"JSON cannot hold all values of {', '.join(sorted(new))}: numbers that are not finite are written as "
                "null, and other values as text. Parquet output keeps numbers, times and bytes."
            )
        unfinished.replace(chunk)
        self._chunks.append(chunk)

    def _file_of(self, given: Sequence[Any]) -> Path:
        """Return the name of the next chunk."""
        digest = hashlib.sha256(self._settings.encode())
        for row in given:
            digest.update(json.dumps(row, default=str).encode())
        return self._folder / f"{len(self._chunks):08}-{digest.hexdigest()[:16]}.jsonl"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        else:
            logger.warning(f"Not all rows are written; those that are, are in {self._folder}.")

    def _finish(self) -> None:
        """Put the chunks together: those of Parquet as a row group each, which is all that is in memory at a time."""
        whole = self._folder / f"whole{_PARQUET}"
        try:
            if self._path.suffix.lower() == _PARQUET:
                # of all keys of a chunk's rows, where a table would look at the first row alone
                schemas = (pa.Table.from_struct_array(pa.array(read_rows(chunk))).schema for chunk in self._chunks)
                schema = pa.unify_schemas(list(dict.fromkeys(schemas)), promote_options="permissive")
                with pq.ParquetWriter(whole, schema) as writer:
                    for chunk in self._chunks:
                        table = pa.Table.from_pylist(read_rows(chunk), schema=schema)
                        writer.write_table(table, row_group_size=self._chunk)
            else:
                with whole.open("wb") as file:
                    for chunk in self._chunks:
                        file.write(chunk.read_bytes())
        except (pa.ArrowException, UnicodeEncodeError) as error:
            raise UserError(
                f"The rows cannot be written as Parquet, whose columns have one type each: {error}. All of them are "
                f"in {self._folder}; keep those, or name an output that ends with .jsonl."
            ) from error
        whole.replace(self._path)
        shutil.rmtree(self._folder)


def json_line(row: dict[str, Any]) -> bytes:
    """Return a row of what JSON can hold as a line of it."""
    # half of a pair of surrogates, which a row may have as \\ud800, is no text that a file holds
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with null for numbers that are not finite, and text for what JSON does not have."""
    return json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)


def make_parser(prog: str | None = None) -> TrlParser:
    """Make the parser of the command's flags."""
    return TrlParser(ScoreArguments, prog=prog)


def run(argv: list[str], config: Mapping[str, Any] | None = None) -> int:
    """Run the command ``trl-tpu score``; returns the exit status. See `take_config` for the arguments."""
    (args,) = make_parser(prog="trl-tpu score").parse_args_and_config(argv, config=config)
    return main(args)
