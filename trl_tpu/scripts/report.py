"""Report on runs and on scored files, in numbers, words and pictures: ``trl-tpu report``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from trl_tpu.report.page import RunHistory, read_run, verdicts_of, write_page
from trl_tpu.report.verdicts import ScoredRows, as_markdown, printable, read_scored


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's words."""
    parser = argparse.ArgumentParser(
        prog="trl-tpu report",
        description="Say whether a reward model is worth a PPO run: its verdict on held-out pairs with intervals, "
        "calibration and length bias, and its training, on a page with pictures.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="RUN_OR_SCORED_FILE",
        help="The folder of a training run, or a file of rows that `trl-tpu score --output` wrote (.jsonl, .parquet). "
        "Several are in the same axes.",
    )
    parser.add_argument("--output", metavar="FOLDER", help="Where to write; by default `report` beside the first.")
    parser.add_argument(
        "--eval_by", metavar="COLUMN", help="A column of scored files that groups rows; `subset` where there is one."
    )
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu report``; returns the exit status."""
    args = make_parser().parse_args(argv)
    sources = [Path(each).expanduser() for each in args.sources]
    runs, scored = read(sources, args.eval_by)
    page = write_page(runs, scored, Path(args.output).expanduser() if args.output else default_folder(sources[0]))
    print(as_markdown(verdicts_of(runs, scored), printable), end="\n\n")
    print(f"Report written to {page}")
    return 0


def read(sources: Sequence[Path], eval_by: str | None = None) -> tuple[list[RunHistory], dict[str, ScoredRows]]:
    """Read runs and scored files, named as their folder or file is, or by their whole path where two have one name.

    Raises:
        UserError: One is not there, or is neither.
    """
    short = [source.resolve().name for source in sources]
    names = [name if short.count(name) == 1 else str(source) for name, source in zip(short, sources, strict=True)]
    named = dict(zip(names, sources, strict=True))
    runs = [read_run(source, name) for name, source in named.items() if source.is_dir()]
    return runs, {name: read_scored(source, eval_by) for name, source in named.items() if not source.is_dir()}


def report_on_run(folder: Path) -> Path:
    """Write the report on a run to its folder, and return the page's path.

    Raises:
        UserError: The run has logged nothing, or the report cannot be written.
    """
    return write_page(*read([folder]), default_folder(folder))


def default_folder(source: Path) -> Path:
    """Return where the report on a run, or on a scored file, is written if nothing else is said."""
    return source / "report" if source.is_dir() else source.with_name(f"{source.stem}-report")
