"""Report on runs and on scored files, in numbers, text and figures: ``trl-tpu report``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from trl_tpu.report.pages import Verdicts, read_run, write_page
from trl_tpu.report.verdicts import as_markdown, printable, read_scored


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="trl-tpu report",
        description="Show whether a reward model is worth a PPO run: write a page with its verdict on held-out pairs "
        "(with intervals, calibration and length bias) and its training, in numbers and figures.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="RUN_OR_SCORED_FILE",
        help="The folder of a training run, or a file of rows that `trl-tpu score --output` wrote (.jsonl, .parquet). "
        "Several sources share the same axes.",
    )
    parser.add_argument("--output", metavar="FOLDER", help="Folder of the report; by default in or next to the first.")
    parser.add_argument(
        "--eval_by", metavar="COLUMN", help="Column of scored files that groups rows; by default `subset`, if present."
    )
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu report``; return the exit status."""
    args = make_parser().parse_args(argv)
    output = Path(args.output).expanduser() if args.output else None
    page, verdicts = write_report([Path(path).expanduser() for path in args.sources], output, args.eval_by)
    print(as_markdown(verdicts, printable), end="\n\n")
    print(f"Report written to {page}")
    return 0


def write_report(
    sources: Sequence[Path], output: Path | None = None, eval_by: str | None = None
) -> tuple[Path, Verdicts]:
    """Write the report on runs and scored files; return the path of its page, and the verdicts by source name.

    The name of a source is the name of its folder or file, or its full path if another source has the same name.

    Args:
        sources: Folders of runs, and scored files.
        output: Folder of the report. By default `report` in the folder of the first source if this is a run, or
            `NAME-report` next to it if this is a file. The names of further sources are appended, so that a run keeps
            its own report.
        eval_by: Column of scored files that groups rows.

    Raises:
        UserError: A source is missing, or is neither a run nor a scored file; a run has logged nothing; or the report
            cannot be written.
    """
    short = [source.resolve().name for source in sources]
    pairs, first = zip(short, sources, strict=True), sources[0]
    named = {name if short.count(name) == 1 else str(source): source for name, source in pairs}
    runs = [read_run(source, name) for name, source in named.items() if source.is_dir()]
    scored = {name: read_scored(source, eval_by) for name, source in named.items() if not source.is_dir()}
    name = "-".join(["report", *(source.stem for source in sources[1:])])[:200]
    folder = output or (first / name if first.is_dir() else first.with_name(f"{first.stem}-{name}"))
    return write_page(runs, scored, folder)
