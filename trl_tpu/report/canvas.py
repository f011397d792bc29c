"""What all pictures share: colors that everyone can tell apart, on a light page and on a dark one."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito (2008), https://jfly.uni-koeln.de/color/, without those that a light or a dark page would hide
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P")
GRAY = "#7d7d7d"  # as far from white as from black

_STYLE: Any = {  # matplotlib's stubs want each key as a literal
    "text.parse_math": False,  # names come from the data
    "svg.fonttype": "path",  # drawn as here, whatever fonts a reader has
    "svg.hashsalt": "trl_tpu",  # the same file from the same numbers
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.framealpha": 0.0,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.color": GRAY,
    "lines.linewidth": 1.8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
}
_SIZE = (5.6, 3.4)  # inches; of a phone's width its letters stay readable


@dataclass(frozen=True)
class Picture:
    """A picture, and in words what it shows.

    Attributes:
        name: Of its file, less the ending.
        title: In a line.
        words: For who cannot see it, or does not know how to read it.
        draw: Draws it into axes.
        height: In inches.
    """

    name: str
    title: str
    words: str
    draw: Callable[[Any], None]
    height: float = _SIZE[1]

    def render(self, form: str) -> bytes:
        """Return it as ``svg`` or ``png``, with a transparent ground."""
        written = io.BytesIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in letters that it has not
            self._figure.savefig(written, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
        return written.getvalue()

    @cached_property
    def _figure(self) -> Figure:
        """Made and laid out, which takes longer than to write it in one form."""
        figure = Figure(figsize=(_SIZE[0], self.height), layout="constrained")
        axes = figure.subplots()
        self.draw(axes)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=2, fontsize=11)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure


def color(index: int) -> str:
    """Return the color of one of several things."""
    return COLORS[index % len(COLORS)]


def shortened(name: str, most: int = 28) -> str:
    """Return a name that fits beside an axis, in one line."""
    plain = "".join(letter if letter.isprintable() else " " for letter in name)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"
