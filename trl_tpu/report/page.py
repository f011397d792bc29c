"""The page of a run: its history, pictures and verdict."""

import io
import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from zlib import crc32

import numpy as np
from jinja2 import Environment

from ..errors import UserError
from ..evaluation.judge import BestOfN
from ..evaluation.reward_sums import Proportion
from ..evaluation.verdict import LengthBias, Verdict
from .scored_rows import VERDICT_FILE, ScoredRows, read_verdict, text_of, verdict_name, verdict_text, write_verdict
from .tables import as_markdown, markdown_text, printable, sentences_of, tables_of

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class RunHistory:
    """A run's logs.

    Attributes:
        name: What the report calls it.
        records: What was logged, in order; each has its `step`.
        step: The last one.
        max_steps: Of the whole run.
        resumed_at: The steps from which it went on.
        verdicts: On its evaluation data, as far as they are beside the model, by the run's name and the dataset's.
    """

    name: str
    records: Sequence[dict[str, Any]]
    step: int
    max_steps: int
    resumed_at: Sequence[int]
    verdicts: dict[str, Verdict | BestOfN]

    def series(self, key: str) -> Series:
        """Return the steps and the values of what was logged under a name."""
        found = [(each["step"], each[key]) for each in self.records if isinstance(each.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]

    def evaluated(self, metric: str) -> dict[str, Series]:
        """Return a metric of evaluations, by the name of the dataset, which a single one has not."""
        # every evaluation logs its runtime
        prefixes = [key.removesuffix("_runtime") for key in self._keys if re.fullmatch("eval_(.+_)?runtime", key)]
        named = {each.removeprefix("eval").removeprefix("_"): self.series(f"{each}_{metric}") for each in prefixes}
        return {dataset: series for dataset, series in named.items() if series[0]}

    @property
    def curves(self) -> list[str]:
        """The names under which training has logged numbers again and again."""
        names = (key for key in self._keys if not key.startswith("eval_") and key not in ("step", "epoch"))
        return [name for name in names if len(self.series(name)[0]) > 1]

    @cached_property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for record in self.records for key in record))


def read_run(folder: Path, name: str) -> RunHistory:
    """Read the logs of a run: of its last checkpoint, or of the folder itself where that goes further.

    Raises:
        UserError: There are none, or a file is broken.
    """
    steps = {path: path.parent.name[11:] for path in folder.glob(f"checkpoint-*/{_STATE}")}
    checkpoints = sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))
    paths = [path for path in (*checkpoints[-1:], folder / _STATE) if path.is_file()]
    if not paths:
        raise UserError(
            f"{folder} has no {_STATE}, nor has a checkpoint in it. Name the `output_dir` of a run that has saved, or "
            "a file of rows that `trl-tpu score --output` wrote."
        )
    verdicts = {}
    for path in sorted(folder.glob("verdict*.json")):
        dataset = unquote(path.stem.removeprefix("verdict").removeprefix("-"))
        verdicts[f"{name}: {dataset}" if dataset else name] = read_verdict(path)
    try:
        state, *later = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for other in later:  # of an earlier run in the same folder, unless it goes on where the checkpoint ended
            history = state["log_history"]
            state = other if other["log_history"][: len(history)] == history else state
        run = folder / "_run.json"
        return RunHistory(
            name=name,
            records=[record for record in state["log_history"] if "step" in record],
            step=state["global_step"],
            max_steps=state["max_steps"],
            resumed_at=json.loads(run.read_text(encoding="utf-8")).get("resumed_at", []) if run.is_file() else [],
            verdicts=verdicts,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The logs of {folder} cannot be read: {type(error).__name__}: {error}.") from error


_NO_MATPLOTLIB = "There are no pictures, since matplotlib is not installed: `pip install matplotlib` brings them."
#: Curves of training, in this order; then what else was logged.
_CURVES = ("loss", "accuracy", "margin", "learning_rate", "grad_norm")


@dataclass(frozen=True)
class Picture:
    """A picture as the bytes of a PNG file."""

    title: str
    png: bytes

    @property
    def name(self) -> str:
        """The name of its file, less the ending."""
        return self.title.lower().replace(" ", "_")


def why_none() -> str:
    """Return why there are no pictures, and how to get them; nothing where matplotlib is installed."""
    return "" if find_spec("matplotlib") is not None else _NO_MATPLOTLIB


def pictures_of(verdicts: Mapping[str, Verdict | BestOfN], runs: Sequence[RunHistory] = ()) -> list[Picture]:
    """Return the pictures that can be drawn of verdicts, by name, and of training; none without matplotlib."""
    if reason := why_none():
        logger.warning(reason)
        return []
    of_pairs = {name: each for name, each in verdicts.items() if isinstance(each, Verdict)}
    lengths = {name: each.length for name, each in of_pairs.items() if each.length and each.length.says_something}
    groups = {name: each.groups for name, each in verdicts.items() if each.groups}
    height = 3.0 + 0.2 * max(map(len, groups.values()), default=0)
    drawn: list[tuple[str, Mapping[str, Any], Callable[[Any, str, str, Any], None], float]] = [
        ("Margins", of_pairs, _margins, 4.0),
        ("Reliability", of_pairs, _reliability, 4.0),
        ("Accuracy by length", lengths, _accuracy_by_length, 4.0),
        ("Accuracy by group", groups, _accuracy_by_group, height),
    ]
    made = [_picture(title, partial(_beside, named, draw), height) for title, named, draw, height in drawn if named]
    curves = _curves(runs)
    return [*made, *([_training(runs, curves)] if curves else [])]


def _picture(title: str, draw: Callable[[Any], None], height: float) -> Picture:
    from matplotlib import rc_context  # takes a second
    from matplotlib.figure import Figure

    written = io.BytesIO()
    with rc_context({"text.parse_math": False}):  # names come from the data
        figure = Figure(figsize=(7.0, height), layout="constrained")
        draw(figure)
        figure.savefig(written, format="png", dpi=150)
    return Picture(title, written.getvalue())


def _beside(named: Mapping[str, Any], draw: Callable[[Any, str, str, Any], None], figure: Any) -> None:
    """Draw several things into the same axes, each in a color of its own."""
    axes = figure.subplots()
    for index, (name, each) in enumerate(named.items()):
        draw(axes, f"C{index}", _short(name), each)
    figure.legend(loc="outside lower center")


def _short(name: str) -> str:
    return printable(name)[-28:]


def _margins(axes: Any, color: str, label: str, verdict: Verdict) -> None:
    edges = np.array(verdict.margins.edges)
    density = np.array(verdict.margins.counts) / sum(verdict.margins.counts) / np.diff(edges)
    axes.stairs(density, edges, color=color, label=label)
    axes.axvline(0, color="gray")
    axes.set(xlabel="chosen less rejected reward", ylabel="share of pairs per unit")


def _reliability(axes: Any, color: str, label: str, verdict: Verdict) -> None:
    bins = verdict.calibration.bins
    confidence, right = [each.confidence for each in bins], [each.accuracy for each in bins]
    axes.plot([0.5, 1], [0.5, 1], ":", color="gray")
    axes.plot(confidence, right, color=color, label=f"{label}: ECE {verdict.calibration.ece:.3f}")
    axes.scatter(
        confidence, right, s=[200 * each.count / sum(one.count for one in bins) for each in bins], color=color
    )
    axes.set(xlabel="confidence, sigmoid(|margin|)", ylabel="right")


def _accuracy_by_length(axes: Any, color: str, label: str, length: LengthBias) -> None:
    middles, shares = [each.middle for each in length.bins], [each.accuracy for each in length.bins]
    axes.errorbar(middles, [each.value for each in shares], yerr=_errors(shares), fmt="o", color=color, label=label)
    axes.axhline(length.length_only, linestyle=":", color=color)
    axes.set(xlabel="chosen less rejected tokens", ylabel="accuracy")


def _accuracy_by_group(axes: Any, color: str, label: str, groups: Mapping[str, Proportion]) -> None:
    names, shares = [_short(name) for name in groups], list(groups.values())
    values = [each.value for each in shares]
    axes.errorbar(values, names, xerr=_errors(shares), fmt="o", capsize=4, alpha=0.6, color=color, label=label)
    axes.set(xlabel="accuracy")


def _errors(shares: Sequence[Proportion]) -> np.ndarray:
    """Return how far below and above each share chance may have it [2, N]; 0 where that is not known."""
    return np.nan_to_num([[each.value - each.low, each.high - each.value] for each in shares]).T


def _curves(runs: Sequence[RunHistory]) -> list[str]:
    """Return the names of what any run has logged over the steps, in the order in which they are drawn."""
    names = [*_CURVES, *sorted({name for run in runs for name in run.curves} - {*_CURVES})]
    return [name for name in names if any(run.series(name)[0] or run.evaluated(name) for run in runs)]


def _training(runs: Sequence[RunHistory], shown: Sequence[str]) -> Picture:
    """Draw each number that training has logged over the steps, with those of evaluations and the resumes."""
    rows = -(-len(shown) // 2)

    def draw(figure: Any) -> None:
        several = figure.subplots(rows, 2, squeeze=False).ravel()
        for axes, metric in zip(several, shown, strict=False):
            axes.set(title=metric, xlabel="step")
            for index, run in enumerate(runs):
                name = _short(run.name)
                axes.plot(*run.series(metric), ".-", color=f"C{index}", label=name)
                for number, (dataset, series) in enumerate(run.evaluated(metric).items(), start=1):
                    label = f"{name}: evaluation {_short(dataset)}"
                    axes.plot(*series, "s--", color=f"C{index + number * len(runs)}", label=label)
                for step in run.resumed_at:
                    axes.axvline(step, linestyle=":", color=f"C{index}", label=f"{name}: resumed")
        for axes in several[len(shown) :]:  # a last one by itself has no neighbor
            axes.set_axis_off()
        named = {
            label: line for axes in several for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2)

    return _picture("Training", draw, 1.0 + 2.0 * rows)


def write_verdicts(verdicts: Mapping[str, Verdict], folder: Path, draws: bool) -> str:
    """Write the verdicts of evaluations into a model's folder, and return the section of its card.

    Args:
        verdicts: By the prefix of their metrics: ``eval``, or ``eval_NAME`` for each of several datasets.
        folder: The model's.
        draws: Whether to draw pictures, too, which takes some tenths of a second.
    """
    named = {
        prefix.removeprefix("eval").removeprefix("_"): verdict
        for prefix, verdict in verdicts.items()
        if re.match("eval(_|$)", prefix)
    }
    if not named:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    parts = ["## Evaluation"]
    for name, verdict in named.items():
        write_verdict(verdict, folder / verdict_name(name))
        parts += [f"### {markdown_text(name)}"] if name else []
        parts.append("\n".join(f"- {markdown_text(sentence)}" for sentence in sentences_of(verdict)))
    titled = {name or "value": verdict for name, verdict in named.items()}
    parts.append(as_markdown(tables_of(titled), markdown_text))
    for picture in pictures_of(titled) if draws else []:
        (folder / f"verdict_{picture.name}.png").write_bytes(picture.png)
        parts.append(f"![{picture.title}](verdict_{picture.name}.png)")
    return "\n\n".join(parts)


PAGE = "index.html"
_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_GENERATOR = "trl-tpu report"
_MOST_LETTERS = 700  # of a text of the data


def verdicts_of(runs: Sequence[RunHistory], scored: Mapping[str, ScoredRows]) -> dict[str, Verdict | BestOfN]:
    """Return the verdicts of runs' evaluations and on scored files, by name."""
    of_runs = {name: verdict for run in runs for name, verdict in run.verdicts.items()}
    return of_runs | {name: each.verdict for name, each in scored.items()}


def write_page(runs: Sequence[RunHistory], scored: Mapping[str, ScoredRows], folder: Path) -> Path:
    """Write the page, its pictures as PNG files beside it, and each verdict as JSON; return the page's path.

    Args:
        scored: Files of rows with rewards, by name.

    Raises:
        UserError: The folder has a file of such a name that no report wrote.
    """
    page = folder / PAGE
    earlier = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else None
    if earlier is not None and _GENERATOR not in earlier:
        raise UserError(f"{page} is no report, so it stays. Name another folder: --output.")
    verdicts = verdicts_of(runs, scored)
    pictures = pictures_of(verdicts, runs)
    files = {f"{picture.name}.png": picture.png for picture in pictures}
    for number, verdict in enumerate(verdicts.values(), start=1):
        name = VERDICT_FILE if len(verdicts) == 1 else f"verdict-{number}.json"
        files[name] = verdict_text(verdict).encode()
    for path in map(folder.joinpath, files):
        if path.exists() and _entry(path.name, path.read_bytes()) not in (earlier or ""):
            raise UserError(f"{path} was not written by a report, so it stays. Name another folder: --output.")
    environment = Environment(autoescape=True)
    environment.filters |= {"sentences": sentences_of, "base64": _base64, "excerpt": _excerpt}
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        generator=_GENERATOR,
        files=" ".join(_entry(name, content) for name, content in files.items()),
        verdicts=verdicts,
        tables=tables_of(verdicts),
        pictures=pictures,
        why_no_pictures=why_none(),
        runs=runs,
        scored=scored,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    page.write_text(text, encoding="utf-8", errors="replace")
    return page


def _entry(name: str, content: bytes) -> str:
    """Return what a page says of a file next to it, by which a later report knows the file as a report's."""
    return f"{name}={crc32(content):08x}"


def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _excerpt(dialogue: Any) -> str:
    """Return the beginning and the end of a text of the data: pairs often differ at the end."""
    text = text_of(dialogue)
    if len(text) <= _MOST_LETTERS:
        return text
    half = _MOST_LETTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
