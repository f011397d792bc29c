"""The model card that is saved and pushed beside a reward model."""

from collections.abc import Iterable

from huggingface_hub import ModelCard, ModelCardData

from .. import __version__

_TAG = "generated_from_trainer"
_CARD = """---
{metadata}
---

# {name}

This is a reward model{base}{data}: it gives a dialogue a scalar reward, higher for the better answer. It was trained
with [trl_tpu](https://pypi.org/project/trl-tpu/), which mirrors [TRL](https://github.com/huggingface/trl).

## Quick start

```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

name = "{location}"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
ids = tokenizer("What is the capital of France? Paris.", return_tensors="pt")
with torch.no_grad():
    print(model(**ids).logits.item())
```

{evaluation}## Training procedure

The pairwise loss of Bradley and Terry, `-logsigmoid(chosen - rejected)`, on pairs of dialogues.

Framework versions: {versions}
"""


def make_model_card(
    name: str,
    location: str,
    base_model: str | None,
    dataset_name: str | None,
    tags: Iterable[str],
    versions: dict[str, str],
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
        evaluation: A section of its own, in Markdown.
    """
    metadata = ModelCardData(
        base_model=base_model,
        datasets=[dataset_name] if dataset_name else None,
        library_name="transformers",
        model_name=name,
        pipeline_tag="text-classification",
        tags=sorted({_TAG, *tags}),
        licence="license",
    )
    return ModelCard(
        _CARD.format(
            metadata=metadata.to_yaml(),
            name=name,
            location=location,
            evaluation=f"{evaluation}\n\n" if evaluation else "",
            base=f", trained from [{base_model}](https://huggingface.co/{base_model})" if base_model else "",
            data=f" on [{dataset_name}](https://huggingface.co/datasets/{dataset_name})" if dataset_name else "",
            versions=", ".join(
                f"{library} {version}" for library, version in ({"trl_tpu": __version__} | versions).items()
            ),
        )
    )


def is_generated(card: str) -> bool:
    """Tell whether a trainer wrote a model card, here or in TRL, and not its owner."""
    return _TAG in card
