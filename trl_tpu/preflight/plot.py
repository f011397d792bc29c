"""The report as a picture: what fills a chip's memory, and what limits a step."""

import importlib.util
from pathlib import Path

from ..errors import UserError
from .chips import GiB
from .report import Report

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """See whether a picture can be drawn, before minutes of compiling.

    Raises:
        UserError: matplotlib is not installed, or ``path`` ends in no format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("`--plot` draws with matplotlib, which is not installed: pip install 'trl-tpu[plan]'.")
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
    _draw_roofline(time, report)
    figure.savefig(path, dpi=150)


def _draw_memory(axes: object, report: Report) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    start = 0.0
    for kind, size in report.memory_by_kind().items():
        if size > 0:
            axes.bar(0, size / GiB, bottom=start, label=f"{kind}: {size / GiB:.2f}", width=0.6)
            start += size / GiB
    there = report.case.topology.chip.memory / GiB
    axes.axhline(there, color="black", linestyle="--", label=f"there is: {there:.0f}")
    axes.axhline(report.least.bound / GiB, color="gray", linestyle=":", label="least: state and activations")
    axes.set(xlim=(-0.5, 1.6), xticks=[], ylabel="GiB of a chip", title="Memory")
    axes.legend(loc="center right", fontsize=8)


def _draw_roofline(axes: object, report: Report) -> None:
    """Attainable speed over operations for each byte of memory; the program is a point below the roof."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    chip, program, times = report.case.topology.chip, report.program, report.times
    ridge = chip.peak_flops / chip.memory_bandwidth
    intensity = times.compute * chip.peak_flops / max(program.bytes_accessed, 1.0)
    ends = sorted((min(ridge, intensity) / 10, max(ridge, intensity) * 10))
    points = [ends[0], ridge, ends[1]]
    roof = [min(chip.peak_flops, each * chip.memory_bandwidth) / 1e12 for each in points]
    axes.plot(points, roof, color="black", label=f"{chip.name}: {chip.peak_flops / 1e12:.0f} TFLOP/s")
    flops = times.compute * chip.peak_flops / 1e12
    axes.plot([intensity], [flops / times.fastest], "o", label=f"at best, limited by {times.limit}")
    axes.plot([intensity], [flops / times.slowest], "v", label="if each waits for the other")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations for each byte of memory",
        ylabel="TFLOP/s of a chip",
        title=f"Speed: at most {times.most_pairs_per_second:,.1f} pairs/s, MFU {times.most_mfu:.0%}",
    )
    axes.legend(loc="lower right", fontsize=8)
