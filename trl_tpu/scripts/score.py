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
from contextlib import suppress
from dataclasses import field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from trl_tpu.config.reward_config import dataclass_with_help
from trl_tpu.data.tokenize import CODE
from trl_tpu.errors import UserError, explaining
from trl_tpu.report.verdicts import LabeledRewards, Rows, Table, as_markdown, printable, read_rows
from trl_tpu.scoring import stream
from trl_tpu.scoring.scorer import TOKENS_PER_PASS, Scorer
from trl_tpu.scoring.stream import REASON, Form, inspect_rows, scored_windows
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.utils import open_rows

logger = logging.getLogger(__name__)

_PARQUET = ".parquet"


@dataclass_with_help
class ScoreArguments:
    """Arguments of the command: the model, the rows to score and how to score them.

    Args:
        model_name_or_path: Folder (or Hub id) of a saved reward model or of its adapters.
        text: Texts to score; the flag may be repeated.
        dataset_name: Rows to score: a local file, a folder, a Hub id, or ``-`` for JSON Lines from standard input.
            Columns: ``text``, ``messages``, ``completion`` (an answer), ``completions`` (a list of answers, or of a
            solution's steps for a process reward model), or ``chosen`` and ``rejected`` (answers or lists of answers).
            Optional columns: ``prompt`` (not with ``text`` and ``messages``), and for messages ``tools`` and
            ``chat_template_kwargs``.
        dataset_config: Configuration of the dataset.
        dataset_split: Split to score; optional if the dataset has only one.
        output: File for the rows with their rewards: Parquet if its name ends in ``.parquet``, else JSON Lines. Until
            all rows are scored, they are in the folder ``OUTPUT.partial``, and the same command resumes from it. A
            missing reward is null, and ``not_scored`` gives the reason.
        best_of_n: Keep only the best of each prompt's ``completions``, as ``completion`` and ``reward``.
        standardize: Return ``(reward - mean) / std``. The model's config has this mean and std; they come from the
            rewards of its last evaluation or, without one, from the last rewards of its training.
        max_length: Maximum number of tokens. Longer sequences get no reward, as training drops them. None sets no
            limit.
        bf16: Compute in bfloat16 with float32 weights; the score head stays in float32.
        mesh: How PyTorch/XLA shards the weights over the devices, as in training.
        tokens_per_pass: Number of tokens per device in each forward pass.
        trust_remote_code: Whether the model may run its own code.
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
    tokens_per_pass: int = TOKENS_PER_PASS
    trust_remote_code: bool = False


def run(argv: list[str], config: Mapping[str, Any] | None = None) -> int:
    """Run the command: score rows, write each window of rows to `output`, if set, and print the verdict.

    Args:
        argv: The arguments after the command's name.
        config: Values of the YAML file, if `argv` no longer names it.

    Returns:
        The exit status: 1 if no row could be scored, else 0.

    Raises:
        UserError: Several processes are started; `text` and `dataset_name` are both set or both missing; the dataset
            has several splits and none is chosen; its columns cannot be scored; or `output` is inside the dataset.
    """
    (args,) = make_parser("trl-tpu score").parse_args_and_config(argv, config=config)
    if (processes := os.environ.get("WORLD_SIZE") or "1") != "1":
        raise UserError(f"`trl-tpu score` runs in one process (WORLD_SIZE={processes}). Start it without torchrun.")
    if bool(args.text) == bool(args.dataset_name):
        raise UserError("Give either `--text` (it may be repeated) or `--dataset_name`, and not both.")
    if args.output and args.dataset_name:
        output, dataset = (Path(name).expanduser().resolve() for name in (args.output, args.dataset_name))
        if output.is_relative_to(dataset) or (output.exists() and not output.is_file()):  # it would be replaced
            raise UserError(f"`output`, {args.output}, is part of the dataset, or no file: name a file elsewhere.")
    if args.text:
        raw_rows: Rows = iter([{"text": text} for text in args.text])
        count: int | None = len(args.text)
    else:
        raw_rows, count = open_rows(str(args.dataset_name), args.dataset_config, args.dataset_split)
    form, rows = inspect_rows(raw_rows, args.best_of_n, args.model_name_or_path)
    settings: dict[str, Any] = {"bf16": args.bf16, "mesh": args.mesh, "tokens_per_pass": args.tokens_per_pass}
    scorer = Scorer(args.model_name_or_path, args.trust_remote_code, standardize=args.standardize, **settings)
    columns = [reward for reward, _ in form.outputs.values()]
    labeled, ranges, done, faults, fault = LabeledRewards(), defaultdict[str, list[Any]](list), 0, 0, None
    for scored in _windows(args, scorer, rows, form, count):
        done += len(scored)
        faulty = [row[REASON] for row in scored if row[REASON] is not None]
        faults, fault = faults + len(faulty), fault or next(iter(faulty), None)
        for column in columns:
            values = [row[column] if isinstance(row[column], list) else [row[column]] for row in scored]
            if rewards := [reward for row_values in values for reward in row_values if reward is not None]:
                ranges[column].append((len(rewards), sum(rewards), min(rewards), max(rewards)))
        if columns != ["reward"]:
            labeled.add(scored, columns)
        for row in scored if args.text else ():
            print(f"{math.nan if row['reward'] is None else row['reward']:10.4f}  {row['text']}")
    if not args.text:
        with suppress(UserError):  # rows without labels
            print(as_markdown({"": labeled.verdict()}, printable), end="\n\n")
        cells = []
        for column, parts in ranges.items():
            counts, sums, lows, highs = np.array(parts).T
            numbers = (sums.sum() / counts.sum(), lows.min(), highs.max())
            cells.append((column, *(f"{number:.4f}" for number in numbers)))
        table = Table("Rewards", ("column", "mean", "min", "max"), tuple(cells))
        print(table.markdown(printable) if cells else "no row was scored", end="\n\n")
    if faults:
        logger.warning(f"{faults} of {done} rows lack some or all rewards; `{REASON}` gives the reason: {fault}")
    if args.output:
        print(f"Rewards of {done} rows written to {args.output}")
    return 0 if ranges else 1


def _windows(
    args: ScoreArguments, scorer: Scorer, rows: Iterator[Any], form: Form, count: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Yield windows of scored rows: first the windows that an earlier run wrote, then each new window once written."""
    done = 0
    depends_on = {"model": scorer.fingerprint, "best_of_n": args.best_of_n, "scale": str(scorer.scale)}
    depends_on |= {"max_length": args.max_length, "bf16": args.bf16, "code": CODE}
    file = RowsFile(args.output, depends_on, stream.WINDOW) if args.output else None
    for scored in file.written_chunks(rows) if file is not None else ():
        done += len(scored)
        yield scored
    if done:
        logger.warning(f"Resuming an earlier run of this command: {done} rows are scored already.")
    interval = 0.5 if sys.stderr.isatty() else 30  # seconds: a log keeps each line
    settings: dict[str, Any] = {"unit": " rows", "mininterval": interval, "disable": bool(args.text)}
    with tqdm(desc="Scoring", total=count, initial=done, **settings) as bar:
        for source, scored in scored_windows(scorer, rows, form, args.max_length, first=done):
            if file is not None:
                file.write(source, scored)
            bar.update(len(scored))
            yield scored
    if file is not None:
        file.finish()


class RowsFile:
    """File of rows that is written in chunks, can be resumed, and appears when all rows are written.

    The file gets its name in `finish`. Until then the chunks are files in the folder ``OUTPUT.partial``, each complete
    or absent: JSON Lines, or Parquet if the output is Parquet and JSON would change a value. The name of a chunk
    contains a digest of its source rows and of the settings. A restarted command uses the digest to keep the chunks of
    an earlier run, or to reject chunks from other rows.

    Args:
        output: Path of the file: Parquet if it ends in ``.parquet``, else JSON Lines.
        settings: All that the rows to write depend on, except their source rows.
        chunk: Number of rows per chunk.
    """

    def __init__(self, output: str, settings: Mapping[str, Any], chunk: int) -> None:
        self._path = Path(output).expanduser().resolve()  # follows links
        self._settings = json.dumps(settings)
        self._chunk = chunk
        self._chunks: list[Path] = []
        self._changed: set[str] = set()  # columns with values that JSON cannot hold
        self._folder = self._path.with_name(f"{self._path.name}.partial")

    def written_chunks(self, rows: Iterator[Any]) -> Iterator[list[dict[str, Any]]]:
        """Yield the chunks of an earlier run; skip their source rows in ``rows``.

        Raises:
            UserError: The chunks were made from other rows, or by another command.
        """
        for path in sorted(self._folder.glob("*-*[!d]")):  # all except .unfinished
            source = list(islice(rows, self._chunk))
            written = read_rows(path)
            if path.stem != self._file_of(source).stem or len(written) != len(source):
                raise UserError(
                    f"{self._folder} cannot be resumed: its rows were made from other data, by another model or "
                    "version, or with other arguments. Use the same command, or delete the folder to start again."
                )
            self._chunks.append(path)
            yield written

    def write(self, source: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
        """Write a chunk.

        Args:
            source: The rows that the chunk was made from.
            rows: The rows to write.
        """
        self._folder.mkdir(exist_ok=True)
        chunk = self._file_of(source)
        unfinished = chunk.with_suffix(".unfinished")
        json_rows = list(map(_as_json, rows))
        both = zip(rows, json_rows, strict=True)
        changed = {name for row, json_row in both for name, value in row.items() if json_row[name] != value}
        if changed and self._path.suffix.lower() == _PARQUET:
            with suppress(pa.ArrowException, UnicodeEncodeError):  # for values that Parquet cannot hold either
                pq.write_table(pa.Table.from_struct_array(pa.array(rows)), unfinished)
                chunk, changed = chunk.with_suffix(_PARQUET), set()
        if chunk.suffix != _PARQUET:
            unfinished.write_bytes(b"".join(map(json_line, json_rows)))
        if new := changed - self._changed:
            self._changed |= new
            logger.warning(
                f"JSON cannot hold all values of {', '.join(sorted(new))}: numbers that are not finite are written as "
                "null, and other values as text. Parquet output keeps numbers, times and bytes."
            )
        unfinished.replace(chunk)
        self._chunks.append(chunk)

    def _file_of(self, source: Sequence[Any]) -> Path:
        """Return the path of the next chunk, from its source rows."""
        digest = hashlib.sha256(self._settings.encode())
        for row in source:
            digest.update(json.dumps(row, default=str).encode())
        return self._folder / f"{len(self._chunks):08}-{digest.hexdigest()[:16]}.jsonl"

    def finish(self) -> None:
        """Join the chunks into the file, and delete them.

        A Parquet file gets one row group per chunk, to hold one chunk in memory.
        """
        whole = self._folder / f"whole{_PARQUET}"
        if self._path.suffix.lower() == _PARQUET:
            advice = f"All rows are in {self._folder}; keep these files, or name an output that ends with .jsonl."
            with explaining("The rows cannot be written as Parquet, whose columns have one type each", advice):
                # the schema of a struct array has the keys of all rows; Table.from_pylist reads the first row only
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
        whole.replace(self._path)
        shutil.rmtree(self._folder)


def json_line(row: dict[str, Any]) -> bytes:
    """Encode a row of JSON values as one line of JSON."""
    # a lone surrogate (\\ud800 in a row) cannot be encoded in UTF-8
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with null for numbers that are not finite, and text for types that JSON does not have."""
    return json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)


def make_parser(prog: str | None = None) -> TrlParser:
    """Make the parser of the command's flags."""
    return TrlParser(cast(Any, ScoreArguments), prog=prog)
