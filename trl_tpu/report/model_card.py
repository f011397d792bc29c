"""The model card that is saved and pushed beside a reward model."""

from collections.abc import Iterable
from dataclasses import dataclass

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from .. import __version__
from ..modeling.readers import RewardScale

_TAG = "generated_from_trainer"
_OF_MESSAGES = """\
messages = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
]
ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")"""
_OF_TEXT = 'ids = tokenizer("What is the capital of France? Paris."{eos}, return_tensors="pt")'
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
{tokens}
with torch.no_grad():
    print(model(**ids).logits.item())
```

## How it scores

{reading}

{evaluation}## Training procedure

The pairwise loss of Bradley and Terry, `-logsigmoid(chosen - rejected)`, on pairs of dialogues.

Framework versions: {versions}
"""


@dataclass(frozen=True)
class Reading:
    """How a reward model reads a dialogue, by what is saved with it.

    Args:
        tokenizer: As it was trained with; None where it is not known.
        max_length: Most tokens of a dialogue that it was trained on; None for any.
        scale: How large its rewards are, if that was measured.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    scale: RewardScale | None = None

    def tokens(self) -> str:
        """Return the code that tokenizes a dialogue as training did."""
        if self.tokenizer is not None and self.tokenizer.chat_template:
            return _OF_MESSAGES
        ends = self.tokenizer is not None and self.tokenizer.eos_token is not None
        return _OF_TEXT.format(eos=" + tokenizer.eos_token" if ends else "")

    def describe(self) -> str:
        """Return a list in markdown: the scored token, the template, BOS and EOS, truncation, the rewards' scale."""
        return "\n".join(f"- {line}" for line in [*self._scored_token(), *self._text(), *self._lengths_and_scale()])

    def _scored_token(self) -> list[str]:
        lines = ["The reward is the only output, as it is: no sigmoid (`problem_type` is `regression`)."]
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.pad_token is None:
            return lines
        pad = f"the pad token `{tokenizer.pad_token}`"
        if tokenizer.pad_token_id != tokenizer.eos_token_id:
            return [*lines, f"It is read at the last token that is not {pad}."]
        return [
            *lines,
            f"It is read at the last token that is not {pad}, which is the EOS, too: where a dialogue ends in it, at "
            "the token before. Programs that read the very last token (vLLM, SGLang) give the same reward where that "
            "EOS is left off.",
        ]

    def _text(self) -> list[str]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        lines = []
        if tokenizer.chat_template:
            lines.append("Messages go through the tokenizer's chat template, without a generation prompt.")
        if tokenizer.eos_token is not None:
            lines.append(
                f"A plain text is read with `{tokenizer.eos_token}` at its end, which the tokenizer "
                "does not add by itself."
            )
        if begin := _added_at_the_start(tokenizer):
            lines.append(
                f"The tokenizer puts `{begin}` before a text by itself. A rendered template that begins with it is "
                "tokenized with `add_special_tokens=False`, or there would be two."
            )
        return lines

    def _lengths_and_scale(self) -> list[str]:
        lines = []
        if self.max_length is not None:
            lines.append(
                f"Nothing was truncated; pairs with a dialogue of more than {self.max_length} tokens were "
                "left out of its training."
            )
        if self.scale is not None:
            over = f" over {self.scale.rewards} dialogues of {self.scale.of}" if self.scale.rewards else ""
            lines.append(
                f"Rewards have a mean of {self.scale.mean:.4g} and a standard deviation of "
                f"{self.scale.std:.4g}{over}: `mean` and `std` in the config."
            )
        return lines


def _added_at_the_start(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the BOS token, if the tokenizer begins every text with it."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token if ids and ids[0] == tokenizer.bos_token_id else None  # type: ignore[return-value]


def make_model_card(
    name: str,
    location: str,
    base_model: str | None,
    dataset_name: str | None,
    tags: Iterable[str],
    versions: dict[str, str],
    reading: Reading,
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
            tokens=reading.tokens(),
            reading=reading.describe(),
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
