"""Write reports: pictures, the page, the model card, and the verdict files in a model's folder."""

import io
import json
import logging
import re
import shutil
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from zlib import crc32

import numpy as np
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from .. import __version__
from ..errors import UserError, explaining
from ..evaluation.verdict import AnyVerdict, LengthBias, Proportion, ScoreFit, Verdict, read_verdict, verdict_json
from .verdicts import TEMPLATES, ScoredRows, as_markdown, markdown_text, printable, sentences_of, tables_of

logger = logging.getLogger(__name__)

VERDICT_FILE = "verdict.json"
CURVE_FILE = "training.png"
_GENERATOR = "trl-tpu report"
_MAX_CHARACTERS = 700  # of a text from the data
_NO_MATPLOTLIB = "Pictures are missing because matplotlib is not installed. Run `pip install matplotlib`."
#: Training curves that are drawn first, in this order.
_CURVES = ("loss", "accuracy", "margin", "learning_rate", "grad_norm")

Series = tuple[list[int], list[float]]
Verdicts = Mapping[str, AnyVerdict]


@dataclass(frozen=True)
class RunHistory:
    """The logs and verdicts of a run.

    Attributes:
        name: Name of the run in the report.
        state: The trainer's state, with the logged numbers.
        resumed_at: Steps from which the run was resumed.
        verdicts: Verdicts on the evaluation data that were saved with the model, by run name and dataset name.
    """

    name: str
    state: TrainerState
    resumed_at: Sequence[int]
    verdicts: Verdicts

    def series(self, key: str) -> Series:
        """Return the steps and the values of the numbers that were logged as ``key``."""
        records = [record for record in self.state.log_history if isinstance(record.get(key), int | float)]
        return [int(record["step"]) for record in records], [float(record[key]) for record in records]

    def evaluated(self, metric: str) -> dict[str, Series]:
        """Return a metric of the evaluations by dataset name. The name of an only dataset is empty."""
        # every evaluation logs its runtime
        keys = [key.removesuffix("_runtime") for key in self.keys if re.fullmatch("eval_(.+_)?runtime", key)]
        by_dataset = {key.removeprefix("eval").removeprefix("_"): self.series(f"{key}_{metric}") for key in keys}
        return {dataset: series for dataset, series in by_dataset.items() if series[0]}

    @property
    def keys(self) -> list[str]:
        """The names of all logged numbers."""
        return list(dict.fromkeys(key for record in self.state.log_history for key in record))


def read_run(folder: Path, name: str) -> RunHistory:
    """Read the logs of a run from its last checkpoint, or from the folder itself if its logs continue further.

    Raises:
        UserError: The folder has no logs, or a file is broken.
    """
    verdicts = {}
    for path in sorted(folder.glob("verdict*.json")):
        dataset = unquote(path.stem.removeprefix("verdict").removeprefix("-"))
        verdicts[f"{name}: {dataset}" if dataset else name] = read_verdict(path)
    own, run = folder / TRAINER_STATE_NAME, folder / "_run.json"
    with explaining(f"The logs of {folder} cannot be read", "Pass the `output_dir` of a run that has saved."):
        state = TrainerState.load_from_json(str(Path(get_last_checkpoint(folder) or folder, TRAINER_STATE_NAME)))
        if own.is_file():  # may be from an earlier run in this folder: use it only if it continues the logs
            later, count = TrainerState.load_from_json(str(own)), len(state.log_history)
            state = later if later.log_history[:count] == state.log_history else state
        resumed_at = json.loads(run.read_text(encoding="utf-8")).get("resumed_at", []) if run.is_file() else []
    return RunHistory(name, state, resumed_at, verdicts)


def pictures_of(verdicts: Verdicts, runs: Sequence[RunHistory] = ()) -> dict[str, bytes]:
    """Draw verdicts and training logs; return PNG files by title.

    Without matplotlib, the result is empty.
    """
    if find_spec("matplotlib") is None:
        logger.warning(_NO_MATPLOTLIB)
        return {}
    pairs = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, Verdict)}
    lengths = {name: each.length for name, each in pairs.items() if each.length and each.length.has_length_differences}
    groups = {name: each.groups for name, each in verdicts.items() if each.groups and not isinstance(each, ScoreFit)}
    height = 3.0 + 0.2 * max(map(len, groups.values()), default=0)
    charts: list[tuple[str, Mapping[str, Any], Callable[..., None], float]] = [
        ("Margins", pairs, _draw_margins, 4.0),
        ("Reliability", pairs, _draw_reliability, 4.0),
        ("Accuracy by length", lengths, _draw_accuracy_by_length, 4.0),
        ("Accuracy by group", groups, _draw_accuracy_by_group, height),
    ]

    def overlay(figure: Any, values: Mapping[str, Any], draw: Callable[..., None]) -> None:
        axes = figure.subplots()
        for index, (name, value) in enumerate(values.items()):
            draw(axes, value, color=f"C{index}", label=_short(name))
        figure.legend(loc="outside lower center")

    pictures = {title: _picture(height, overlay, values, draw) for title, values, draw, height in charts if values}
    # training numbers that a run has logged repeatedly, without the gradient norm of each parameter
    keys = [key for run in runs for key in run.keys if len(run.series(key)[0]) > 1]
    logged = {key for key in keys if not key.startswith(("eval_", "grad_norm/"))}
    names = [*_CURVES, *sorted(logged - {*_CURVES, "step", "epoch"})]
    shown = [name for name in names if any(run.series(name)[0] or run.evaluated(name) for run in runs)]
    if shown:
        pictures["Training"] = _picture(1.0 + 2.0 * -(-len(shown) // 2), draw_training, runs, shown)
    return pictures


def _file_of(title: str) -> str:
    return f"{title.lower().replace(' ', '_')}.png"


def _picture(height: float, draw: Callable[..., None], *data: Any) -> bytes:
    from matplotlib import rc_context  # this import takes a second
    from matplotlib.figure import Figure

    png = io.BytesIO()
    with rc_context({"text.parse_math": False}):  # names come from the data and may contain $
        figure = Figure(figsize=(7.0, height), layout="constrained")
        draw(figure, *data)
        figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def _short(name: str) -> str:
    return printable(name)[-28:]


def _draw_margins(axes: Any, verdict: Verdict, **style: str) -> None:
    edges = np.array(verdict.margins.edges)
    density = np.array(verdict.margins.counts) / sum(verdict.margins.counts) / np.diff(edges)
    axes.stairs(density, edges, **style)
    axes.axvline(0, color="gray")
    axes.set(xlabel="chosen minus rejected reward", ylabel="share of pairs per unit")


def _draw_reliability(axes: Any, verdict: Verdict, color: str, label: str) -> None:
    bins = verdict.calibration.bins
    confidence, right = [bin_.confidence for bin_ in bins], [bin_.accuracy for bin_ in bins]
    counts = np.array([bin_.count for bin_ in bins])
    axes.plot([0.5, 1], [0.5, 1], ":", color="gray")
    axes.plot(confidence, right, color=color, label=f"{label}: ECE {verdict.calibration.ece:.3f}")
    axes.scatter(confidence, right, s=200 * counts / counts.sum(), color=color)
    axes.set(xlabel="confidence, sigmoid(|margin|)", ylabel="accuracy")


def _draw_accuracy_by_length(axes: Any, length: LengthBias, color: str, label: str) -> None:
    values, errors = _with_errors([bin_.accuracy for bin_ in length.bins])
    axes.errorbar([bin_.middle for bin_ in length.bins], values, yerr=errors, fmt="o", color=color, label=label)
    axes.axhline(length.length_only, linestyle=":", color=color)
    axes.set(xlabel="chosen minus rejected tokens", ylabel="accuracy")


def _draw_accuracy_by_group(axes: Any, groups: Mapping[str, Proportion], **style: str) -> None:
    values, errors = _with_errors(list(groups.values()))
    axes.errorbar(values, list(map(_short, groups)), xerr=errors, fmt="o", capsize=4, alpha=0.6, **style)
    axes.set(xlabel="accuracy")


def _with_errors(shares: Sequence[Proportion]) -> tuple[list[float], np.ndarray]:
    """Return the values, and how far their intervals reach below and above, [2, N]; 0 for unknown intervals."""
    errors = [[share.value - share.low, share.high - share.value] for share in shares]
    return [share.value for share in shares], np.nan_to_num(errors).T


def draw_training(figure: Any, runs: Sequence[RunHistory], shown: Sequence[str]) -> None:
    """Draw each logged number over the training steps, with its evaluations and with marks where runs resumed."""
    grid = figure.subplots(-(-len(shown) // 2), 2, squeeze=False).ravel()
    for axes, metric in zip(grid, shown, strict=False):
        axes.set(title=metric, xlabel="step")
        for index, run in enumerate(runs):
            name = _short(run.name)
            axes.plot(*run.series(metric), ".-", color=f"C{index}", label=name)
            for number, (dataset, series) in enumerate(run.evaluated(metric).items(), start=1):
                label = f"{name}: evaluation {_short(dataset)}"
                axes.plot(*series, "s--", color=f"C{index + number * len(runs)}", label=label)
            for step in run.resumed_at:
                axes.axvline(step, linestyle=":", color=f"C{index}", label=f"{name}: resumed")
    for axes in grid[len(shown) :]:  # hide the empty last place of an odd number of plots
        axes.set_axis_off()
    lines = {label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2)


def verdict_file_name(dataset: str) -> str:
    """Return the file name of a verdict on a dataset. The name of an only dataset is empty.

    `urllib.parse.unquote` recovers the dataset's name.
    """
    return f"verdict-{quote(dataset, safe='')}.json" if dataset else VERDICT_FILE


def write_verdicts(verdicts: Mapping[str, AnyVerdict], folder: Path, draws: bool) -> str:
    """Write the verdicts of evaluations into a model's folder, and return a Markdown section for its card.

    Args:
        verdicts: Verdicts by the prefix of their metrics: ``eval``, or ``eval_NAME`` for each of several datasets.
        folder: The model's folder.
        draws: Whether to draw pictures, too. This takes some tenths of a second.
    """
    by_dataset = {
        prefix.removeprefix("eval").removeprefix("_"): verdict
        for prefix, verdict in verdicts.items()
        if re.match("eval(_|$)", prefix)
    }
    if not by_dataset:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    for name, verdict in by_dataset.items():
        (folder / verdict_file_name(name)).write_text(verdict_json(verdict), encoding="utf-8")
    parts = ["## Evaluation", as_markdown(by_dataset, markdown_text)]
    pictures = pictures_of({name or "value": verdict for name, verdict in by_dataset.items()}) if draws else {}
    for title, png in pictures.items():
        (folder / f"verdict_{_file_of(title)}").write_bytes(png)
        parts.append(f"![{title}](verdict_{_file_of(title)})")
    return "\n\n".join(parts)


def write_training_curve(state: TrainerState, folder: Path) -> str:
    """Draw loss and accuracy of a training into a model's folder; return Markdown. Empty without curves to draw."""
    run = RunHistory("training", state, (), {})
    shown = [name for name in _CURVES[:2] if len(run.series(name)[0]) > 1]
    if not shown or find_spec("matplotlib") is None:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CURVE_FILE).write_bytes(_picture(3.0, draw_training, [run], shown))
    return f"![Loss and accuracy over the steps of the training]({CURVE_FILE})"


def write_page(runs: Sequence[RunHistory], scored: Mapping[str, ScoredRows], folder: Path) -> tuple[Path, Verdicts]:
    """Write the page, its pictures as PNG files and each verdict as JSON; return the page's path and the verdicts.

    Args:
        runs: The runs to report on.
        scored: Rows with rewards, by the name of their file.
        folder: The folder to write to.

    Raises:
        UserError: A file with one of these names exists, and no report wrote it.
    """
    page = folder / "index.html"
    earlier = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    if page.is_file() and _GENERATOR not in earlier:
        raise UserError(f"{page} is not a report and is not overwritten. Pass another folder as --output.")
    verdicts = {name: verdict for run in runs for name, verdict in run.verdicts.items()}
    verdicts |= {name: rows.verdict for name, rows in scored.items()}
    pictures = pictures_of(verdicts, runs)
    files = {_file_of(title): png for title, png in pictures.items()}
    for number, verdict in enumerate(verdicts.values(), start=1):
        name = VERDICT_FILE if len(verdicts) == 1 else f"verdict-{number}.json"
        files[name] = verdict_json(verdict).encode()
    for path in map(folder.joinpath, files):
        if path.exists() and _entry(path.name, path.read_bytes()) not in earlier:
            raise UserError(f"{path} was not written by a report and is not overwritten. Pass another --output.")
    environment = Environment(loader=TEMPLATES, autoescape=True)
    environment.filters |= {"sentences": sentences_of, "excerpt": _excerpt}
    text = environment.get_template("page.html.jinja").render(
        generator=_GENERATOR,
        files=" ".join(_entry(name, content) for name, content in files.items()),
        verdicts=verdicts,
        tables=tables_of(verdicts),
        pictures={title: b64encode(png).decode() for title, png in pictures.items()},
        why_no_pictures=_NO_MATPLOTLIB if find_spec("matplotlib") is None else "",
        runs=runs,
        scored=scored,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    page.write_text(text, encoding="utf-8", errors="replace")
    return page, verdicts


def _entry(name: str, content: bytes) -> str:
    """Return the page's record of a file. A later report may overwrite the file only if it matches this record."""
    return f"{name}={crc32(content):08x}"


def text_of(dialogue: Any) -> str:
    """Return a text unchanged, or the contents of a conversation's messages, one after another on new lines."""
    if isinstance(dialogue, dict):
        return text_of(dialogue.get("content") or dialogue.get("text"))
    return "\n".join(map(text_of, dialogue)) if isinstance(dialogue, list) else str(dialogue or "")


def _excerpt(content: Any) -> str:
    """Shorten a text from the data in the middle: the answers of a pair often differ only at the end."""
    text = text_of(content)
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


#: Tag of model cards that a trainer writes, as in transformers.
TRAINER_TAG = "generated_from_trainer"
_LIBRARIES = ("torch", "transformers", "datasets", "tokenizers")


def make_model_card(metadata: ModelCardData, tokenizer: PreTrainedTokenizerBase, **shown: Any) -> ModelCard:
    """Make a model card.

    Args:
        metadata: What the Hub reads. The template also reads its names of the model, of the model that training
            started from, and of the training data.
        tokenizer: The tokenizer of the training.
        **shown: Other values for the template: `outputs`, the model's `HeadSpec`; `location`, a Hub id or a folder;
            `args`, the training arguments; `components`, the trainer's `Components`; `kind`, the kind of the training
            rows; `columns`, the columns of the prepared data; `own_loss`, whether the training script computed the
            loss; `evaluation`, a section in Markdown; `curve`, a picture in Markdown; `rows`, the number of training
            rows; `batch`, the rows of a step; `state`, the trainer's state; `first_step` since the last resume;
            `adapters`, their configs; `is_adapters`; `head_class`, the model's own class if it has one; `data`, a name
            of the training data; `precision`.
    """
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        tokenizer=tokenizer,
        bos=tokenizer.bos_token if adds_bos else None,
        versions=", ".join([f"trl_tpu {__version__}", *(f"{name} {version(name)}" for name in _LIBRARIES)]),
        **shown,
    )


def is_generated(card: str) -> bool:
    """Return whether a model card may be replaced: a trainer wrote it, or it is peft's unedited stub."""
    stub = ModelCard.from_template(ModelCardData()).text
    text = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    return TRAINER_TAG in card or text.partition("### Framework versions")[0].strip() == stub.strip()


def add_card(staging: Path, folder: Path, run: Path) -> None:
    """Copy a model card to ``staging``, unless it has one.

    Args:
        staging: The staging folder of a saved model.
        folder: The folder that the model is saved to. A card that the user wrote there is preferred.
        run: The run's output_dir. A card that the user wrote there is the second choice, then a generated card.
    """
    cards = [path for path in (folder / "README.md", run / "README.md") if path.is_file()]
    preferred = [path for path in cards if not is_generated(path.read_text(errors="replace"))] or cards[-1:]
    if preferred and not (staging / "README.md").exists():
        shutil.copyfile(preferred[0], staging / "README.md")
