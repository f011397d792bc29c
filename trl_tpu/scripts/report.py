"""Report on runs and on scored files, in numbers, words and pictures: ``trl-tpu report``."""

import sys

if __name__ == "__main__":  # as the command does: it reads the `env` of a YAML file first
    from trl_tpu.cli import main as command

    raise SystemExit(command(["report", *sys.argv[1:]]))

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trl_tpu.errors import UserError, UserFileError
from trl_tpu.evaluation.best_of_n import BestOfN
from trl_tpu.evaluation.verdict import Verdict
from trl_tpu.report.curves import curves_of
from trl_tpu.report.findings import findings
from trl_tpu.report.page import GENERATOR, Judged, Report, page_of
from trl_tpu.report.pictures import pictures_of
from trl_tpu.report.run_history import RunHistory, read_run
from trl_tpu.report.scored_rows import REWARDS, ScoredRows, read_scored
from trl_tpu.report.tables import Table, print_tables, tables_of
from trl_tpu.report.verdict_file import VERDICT_FILE, write_verdict

PAGE = "index.html"


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
    runs, scored = read_sources(sources, args.eval_by)
    folder = Path(args.output).expanduser() if args.output else default_folder(sources[0])
    report = report_of(runs, scored)
    written = write(report, folder)
    for each in report.judged:
        print("\n".join([each.name, *(f"- {said}" for said in findings(each.verdict))]))
        print_tables(tables_of(each.verdict))
    print(f"Report written to {written}")
    return 0


def read_sources(sources: Sequence[Path], eval_by: str | None) -> tuple[list[RunHistory], list[ScoredRows]]:
    """Read runs and scored files.

    Raises:
        UserFileError: One is not there.
        UserError: One is neither.
    """
    runs, scored = [], []
    for source in sources:
        if not source.exists():
            raise UserFileError(f"There is no {source}. Name a run's folder, or a file of scored rows.")
        if source.is_dir() or source.name == "trainer_state.json":
            runs.append(read_run(source if source.is_dir() else source.parent))
        else:
            scored.append(read_scored(source, eval_by))
    return runs, scored


def report_on_run(folder: Path) -> Path:
    """Write the report on a run to its folder, and return the page's path.

    Raises:
        UserError: The run has logged nothing, or the report cannot be written.
    """
    runs, _ = read_sources([folder], None)
    return write(report_of(runs, []), default_folder(folder))


def default_folder(source: Path) -> Path:
    """Return where the report on a run, or on a scored file, is written if nothing else is said."""
    return source / "report" if source.is_dir() else source.with_name(f"{source.stem}-report")


def report_of(runs: Sequence[RunHistory], scored: Sequence[ScoredRows]) -> Report:
    """Judge, draw and compare what was read.

    Raises:
        UserError: Nothing can be said of a file, since none of its rewards is finite.
    """
    names = _distinct([each.name for each in runs])
    runs = [replace(each, name=name) for name, each in zip(names, runs, strict=True)]
    judged = [
        Judged(f"{each.name}: {name}" if name else each.name, verdict)
        for each in runs
        for name, verdict in each.verdicts.items()
    ]
    for each in scored:
        if (found := each.verdict or each.best_of_n) is not None:
            judged.append(Judged(each.name, found, each))
    names = _distinct([each.name for each in judged])
    judged = [Judged(name, each.verdict, each.rows) for name, each in zip(names, judged, strict=True)]
    of_training, missing = curves_of(runs) if runs else ([], [])
    notes = [f"Nothing was logged on the way of: {', '.join(missing).lower()}."] if missing else []
    notes += [
        f"{each.name} has rewards, but nothing says which answer is better." for each in scored if each.kind == REWARDS
    ]
    notes += [f"The lengths of {each.name}'s answers are not known." for each in scored if each.lengths is None]
    if runs and not scored:
        notes.append(
            "Rewards against length, and the pairs that go most wrong: give a file of `trl-tpu score --output`."
        )
    notes += [f"{each.name} has no {VERDICT_FILE} of its evaluation." for each in runs if not each.verdicts]
    named = [*(each.name for each in runs), *(each.name for each in scored)]
    return Report(
        title=f"Reward model report: {', '.join(named[:3])}{' and others' if len(named) > 3 else ''}",
        facts=_facts(runs, judged),
        judged=judged,
        of_verdicts=pictures_of({each.name: each.verdict for each in judged}, scored),
        of_training=of_training,
        speed=_speed(runs) if runs else None,
        notes=notes,
    )


def write(report: Report, folder: Path) -> Path:
    """Write the page, its pictures as PNG files beside it, and each verdict as JSON; return the page's path.

    Raises:
        UserError: The folder cannot be written to, or has a page that is not ours.
    """
    page = folder / PAGE
    if page.is_file() and GENERATOR not in page.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{page} is there, and no report of ours, so it stays. Name another folder: --output.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in report.pictures:
            (folder / f"{picture.name}.png").write_bytes(picture.render("png"))
        for number, each in enumerate(report.judged, start=1):
            name = VERDICT_FILE if len(report.judged) == 1 else f"verdict-{number}.json"
            write_verdict(each.verdict, folder / name)
        page.write_text(page_of(report), encoding="utf-8")
    except OSError as error:
        raise UserError(f"`--output`: {folder} cannot be written to: {error}. Name another folder.") from error
    return page


def _facts(runs: Sequence[RunHistory], judged: Sequence[Judged]) -> Table:
    """Compare runs and verdicts, a line each, by what decides."""
    rows = [_fact(each.name, each.verdict) for each in judged]
    for each in runs:
        if not each.verdicts:
            accuracies = each.evaluated("accuracy")
            last = next(iter(accuracies.values()))[1][-1] if accuracies else None
            rows.append((each.name, _number(last), "", "", "", ""))
    header = ("", "accuracy", "95 %", "length alone", "length controlled", "ECE")
    return Table("In short", header, tuple(rows))


def _speed(runs: Sequence[RunHistory]) -> Table:
    """Say what runs took, as far as they have logged it when they ended."""

    def cells(run: RunHistory) -> tuple[str, ...]:
        last = {name: run.last(name) for name in ("num_tokens", "train_runtime", "train_samples_per_second")}
        steps_a_second, evaluated = run.last("train_steps_per_second"), run.last("eval_samples_per_second")
        return (
            run.name,
            f"{run.step:,} of {run.max_steps:,}",
            *("" if value is None else f"{value:,.0f}" for value in last.values()),
            f"{1 / steps_a_second:.3g}" if steps_a_second else "",
            "" if evaluated is None else f"{evaluated:,.0f}",
        )

    header = ("", "steps", "tokens", "seconds", "pairs/s", "seconds a step", "pairs/s in evaluation")
    return Table("Training, with its evaluations and saves", header, tuple(map(cells, runs)))


def _fact(name: str, verdict: Verdict | BestOfN) -> tuple[str, ...]:
    accuracy = verdict.accuracy
    interval = f"{accuracy.low:.3f} to {accuracy.high:.3f}"
    if isinstance(verdict, BestOfN):
        return name, _number(accuracy.value), interval, "", "", ""
    length = verdict.length
    of_length = ("", "") if length is None else (_number(length.length_only), _number(length.controlled))
    return name, _number(accuracy.value), interval, *of_length, _number(verdict.calibration.ece)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _distinct(names: Iterable[str]) -> list[str]:
    """Number names that come again."""
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return made
