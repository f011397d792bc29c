"""The model card that is saved and pushed beside a reward model."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..modeling.outputs import Outputs

_TAG = "generated_from_trainer"
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


def make_model_card(
    name: str,
    base_model: str | None,
    dataset_name: str | None,
    tags: Iterable[str],
    versions: dict[str, str],
    tokenizer: PreTrainedTokenizerBase | None,
    outputs: Outputs,
    **shown: Any,
) -> ModelCard:
    """Make a model card with the metadata that the Hub reads.

    Args:
        name: The model's own name.
        base_model: The hub id of the model that was trained further.
        dataset_name: The dataset, if known.
        tags: Tags beside that of a trainer's card.
        versions: Versions of the libraries, by name.
        tokenizer: The tokenizer of the training; None if unknown.
        outputs: The model's outputs.
        **shown: Other values of the template: `location`, a Hub id or a folder; `args`, the settings of the training;
            `scale`, the measured mean and std of rewards; `date`, the date that the chat template wrote into
            dialogues; `columns` of the prepared data; `own_loss`, whether the script computed the loss; `evaluation`,
            a section in Markdown.
    """
    metadata = ModelCardData(  # which the template has by these names, too
        base_model=base_model,
        datasets=[dataset_name] if dataset_name else None,
        library_name="transformers",
        model_name=name,
        pipeline_tag="text-classification" if outputs.step_separator is None else "token-classification",
        tags=sorted({_TAG, *tags}),
        licence="license",
    )
    adds_bos = tokenizer is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        tokenizer=tokenizer,
        bos=tokenizer.bos_token if tokenizer is not None and adds_bos else None,
        outputs=outputs,
        versions=", ".join(f"{library} {each}" for library, each in ({"trl_tpu": __version__} | versions).items()),
        **shown,
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
