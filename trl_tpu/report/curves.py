"""Training as pictures: what runs have logged, over their steps, several runs in the same axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .canvas import DASHES, GRAY, MARKERS, Picture, color, shortened
from .run_history import RunHistory


@dataclass(frozen=True)
class Curve:
    """A metric of training, and of evaluation where that measures it."""

    key: str
    title: str
    label: str
    words: str


CURVES = (
    Curve("loss", "Loss", "loss", "The pairwise loss. Evaluation rising while training falls is overfitting."),
    Curve("accuracy", "Accuracy", "accuracy", "The share of pairs whose chosen answer has the higher reward."),
    Curve(
        "margin", "Margin", "chosen less rejected", "The mean margin. One that only grows makes the model too sure."
    ),
    Curve("learning_rate", "Learning rate", "learning rate", "The learning rate of the optimizer."),
    Curve("grad_norm", "Gradient norm", "gradient norm", "The norm of the gradient before it is clipped."),
)
#: What a picture of the machine's work may be called in logs, and what it is.
MACHINE = (
    (r"(?<!eval)_per_second$|^(tokens|pairs|samples|steps)_per_second", "Speed"),
    (r"(^|_)(step_time|time_per_step|seconds_per_step|step_seconds)", "Time of a step"),
    (r"memory|_gib$|_bytes$", "Memory"),
    (r"compil", "Compiled programs"),
    (r"tflops|mfu", "Operations"),
)


def curves_of(runs: Sequence[RunHistory]) -> tuple[list[Picture], list[str]]:
    """Return the pictures of what runs have logged, and the titles of those of which nothing was logged on the way."""
    pictures, missing = [], []
    for each in CURVES:
        if any(run.series(each.key)[0] or run.evaluated(each.key) for run in runs):
            pictures.append(curve(runs, each))
        else:
            missing.append(each.title)
    for pattern, title in MACHINE:
        names = dict.fromkeys(name for run in runs for name in run.names(pattern) if not name.startswith("eval_"))
        drawn = [name for name in names if any(len(run.series(name)[0]) > 1 for run in runs)]
        pictures += [
            curve(runs, Curve(name, title, name.replace("_", " "), f"`{name}` of the logs.")) for name in drawn
        ]
        if not drawn:
            missing.append(title)
    return pictures, missing


def curve(runs: Sequence[RunHistory], of: Curve) -> Picture:
    """Draw one metric over the steps: training as a line, evaluations with marks, resumes as dotted lines."""

    def draw(axes: Any) -> None:
        for index, run in enumerate(runs):
            name = f"{shortened(run.name)}: " if len(runs) > 1 else ""
            steps, values = run.series(of.key)
            if steps:
                look = {"color": color(index), "linestyle": DASHES[index % len(DASHES)], "alpha": 0.75}
                axes.plot(steps, values, marker="" if len(steps) > 1 else "o", label=f"{name}training", **look)
            for number, (dataset, (at, evaluated)) in enumerate(run.evaluated(of.key).items()):
                # of a single run the color tells evaluation from training, of several which run it is
                own = index if len(runs) > 1 else number + 1
                look = {"color": color(own), "linestyle": DASHES[own % len(DASHES)], "markersize": 5}
                marker = MARKERS[(index + number) % len(MARKERS)]
                label = f"{name}evaluation{f' on {shortened(dataset, 16)}' if dataset else ''}"
                axes.plot(at, evaluated, label=label, marker=marker, **look)
            for step in run.resumed_at:
                shade = GRAY if len(runs) == 1 else color(index)
                axes.axvline(step, color=shade, linestyle=":", label=f"{name}resumed at {step}")
        axes.set(xlabel="step", ylabel=of.label)
        axes.margins(x=0.02)

    return Picture(f"training_{of.key}", of.title, of.words, draw)
