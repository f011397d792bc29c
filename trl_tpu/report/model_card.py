"""The model card that is saved and pushed beside a reward model."""

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..modeling.outputs import ONE_REWARD, Outputs, RewardScale

_TAG = "generated_from_trainer"
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


@dataclass(frozen=True)
class Reading:
    """How a reward model reads a dialogue, by what is saved with it.

    Args:
        tokenizer: As it was trained with; None where it is not known.
        max_length: Most tokens of a dialogue that it was trained on; None for any.
        scale: How large its rewards are, if that was measured.
        date: What the chat template wrote into dialogues when training began, if it writes the day's date.
        outputs: What it gives.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    scale: RewardScale | None = None
    date: str | None = None
    outputs: Outputs = ONE_REWARD

    @property
    def bos(self) -> str | None:
        """The BOS token, if the tokenizer begins every text with it."""
        if self.tokenizer is None:
            return None
        ids = self.tokenizer("a")["input_ids"]
        return self.tokenizer.bos_token if ids and ids[0] == self.tokenizer.bos_token_id else None  # type: ignore[return-value]


def make_model_card(
    name: str,
    location: str,
    base_model: str | None,
    dataset_name: str | None,
    tags: Iterable[str],
    versions: dict[str, str],
    reading: Reading,
    args: Any,
    columns: Collection[str],
    own_loss: bool,
    evaluation: str = "",
) -> ModelCard:
    """Make a model card with the metadata that the Hub reads.

    Args:
        name: The model's own name.
        location: Where it can be loaded from: a hub id or a folder.
        base_model: The hub id of the model that was trained further.
        dataset_name: The dataset, if known.
        tags: Tags beside that of a trainer's card.
        versions: Versions of the libraries, by name.
        reading: How it reads a dialogue.
        args: The settings that it was trained with.
        columns: The columns of the prepared training data.
        own_loss: Whether the training script computed the loss.
        evaluation: A section of its own, in Markdown.
    """
    metadata = ModelCardData(  # which the template has by these names, too
        base_model=base_model,
        datasets=[dataset_name] if dataset_name else None,
        library_name="transformers",
        model_name=name,
        pipeline_tag="text-classification" if reading.outputs.step_separator is None else "token-classification",
        tags=sorted({_TAG, *tags}),
        licence="license",
    )
    return ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        location=location,
        reading=reading,
        args=args,
        columns=columns,
        own_loss=own_loss,
        evaluation=evaluation,
        versions=", ".join(f"{library} {each}" for library, each in ({"trl_tpu": __version__} | versions).items()),
    )


def is_generated(card: str) -> bool:
    """Return whether a model card was written by a trainer, or is peft's unedited stub, and so may be replaced."""
    stub = ModelCard.from_template(ModelCardData()).text
    text = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    return _TAG in card or text.partition("### Framework versions")[0].strip() == stub.strip()


def add_card(staging: Path, folder: Path, run: Path) -> None:
    """Copy a model card to ``staging``, unless one is there.

    Args:
        staging: The staging folder of a saved model.
        folder: The folder that the model is saved to. A card that the user wrote there is kept.
        run: The run's output_dir. Its card is copied otherwise.
    """
    cards = [path for path in (folder / "README.md", run / "README.md") if path.is_file()]
    kept = [path for path in cards if not is_generated(path.read_text(errors="replace"))] or cards[-1:]
    if kept and not (staging / "README.md").exists():
        shutil.copyfile(kept[0], staging / "README.md")
