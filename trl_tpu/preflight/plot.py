"""The report as a picture: what fills a chip's memory, and what limits a step."""

from pathlib import Path
from typing import Any

from ..errors import UserError
from ..parallel.chips import GiB
from .report import Report

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """See whether a picture can be drawn, before minutes of compiling.

    Raises:
        UserError: ``path`` ends in no format, or its folder is not there.
    """
    if not path.endswith(_FORMATS):
        raise UserError(f"`--plot {path}`: the file must end in {', '.join(_FORMATS)}.")
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"`--plot {path}`: there is no folder {Path(path).absolute().parent}.")


def plot_report(report: Report, path: str) -> None:
    """Draw to the file ``path``: memory of a chip by kind, and the seconds of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"{report.case.topology}: {report.case}")
    memory, time = figure.subplots(1, 2)
    _draw_memory(memory, report)
    _draw_time(time, report)
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Any, report: Report) -> None:
    start = 0.0
    for kind, size in report.memory_by_kind.items():
        axes.bar(0, size / GiB, bottom=start, label=f"{kind}: {size / GiB:.2f}", width=0.6)
        start += size / GiB
    there = report.available / GiB
    axes.axhline(there, color="black", linestyle="--", label=f"there is: {there:.0f}")
    axes.axhline(report.least.bound / GiB, color="gray", linestyle=":", label="least: state and activations")
    axes.set(xlim=(-0.5, 1.6), xticks=[], ylabel="GiB of a chip", title="Memory")
    axes.legend(loc="center right", fontsize=8)


def _draw_time(axes: Any, report: Report) -> None:
    for part, seconds in report.seconds.items():
        axes.barh(part, seconds)
    axes.axvline(report.at_best, color="black", linestyle="--", label="at best")
    axes.axvline(report.in_turns, color="gray", linestyle=":", label="if each waits for the other")
    rate = f"at most {report.pairs_per_second[0]:,.1f} pairs/s, MFU {report.mfu:.0%}"
    axes.set(xlabel="seconds of a step, at published speeds", title=f"Speed: {rate},\nlimited by {report.limit}")
    axes.legend(loc="lower right", fontsize=8)
