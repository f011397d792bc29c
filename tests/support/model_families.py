"""Try every type of causal language model in transformers, and write `examples/guides/model_families.md`.

USE_TORCH_XLA=0 PYTHONPATH=tests/support python tests/support/model_families.py
"""

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from environment import EXAMPLES
from recent_families import BASE, EXPERTS, LATENT, MULTIMODAL, SETTINGS, VISION
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from trl_tpu.errors import UserError
from trl_tpu.modeling.forward import PackingImpossible
from trl_tpu.modeling.head_spec import ONE_REWARD
from trl_tpu.modeling.heads import auto_class_of
from trl_tpu.modeling.packability import make_packable

PAGE = EXAMPLES / "guides" / "model_families.md"
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("d_model", "n_embd", "dim", "word_embed_proj_dim", "embed_dim"), 32),
    **dict.fromkeys(("d_ff", "ffn_dim", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
}
_LARGEST = 30_000_000  # parameters of a tiny model, at most
_OF_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim")


def configs_of(kind: str) -> Iterator[dict[str, Any]]:
    """Yield alternative settings for a tiny model of a type."""
    if kind in MULTIMODAL:
        text, settings = MULTIMODAL[kind], {"vision_config": VISION, "pad_token_id": 0}
        yield settings | {"text_config": BASE | SETTINGS[text] | {"model_type": text}}
    if kind in SETTINGS:
        yield BASE | SETTINGS[kind]
    base = BASE | {"num_hidden_layers": 2}
    yield from (base, base | EXPERTS, base | EXPERTS | LATENT | {"head_dim": None}, base | _SMALL)
    yield base | _SMALL | dict.fromkeys(_OF_ATTENTION[1:])
    yield {"vocab_size": 128, "pad_token_id": 0, "eos_token_id": 2, "num_labels": 1, **_SMALL}


def try_out(kind: str) -> tuple[str, str]:
    """Return "packed", "padded", "rejected" or "not tried" for a type, and the reason."""
    ids, reason = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0)), ""
    try:
        plain = CONFIG_MAPPING[kind]()  # without attributes that the type lacks
        auto_class_of(plain, ONE_REWARD)
    except UserError as error:
        return "rejected", str(error).partition(", since ")[2].partition(". ")[0]
    except Exception:  # the type has no default config
        pass
    for settings in configs_of(kind):
        try:
            config: Any = CONFIG_MAPPING[kind](**{key: value for key, value in settings.items() if value is not None})
            config._experts_implementation, auto = "eager", auto_class_of(config, ONE_REWARD)
            with torch.device("meta"):
                if sum(parameter.numel() for parameter in auto.from_config(config).parameters()) > _LARGEST:
                    continue
            torch.manual_seed(0)
            model = auto.from_config(config, dtype=torch.float32)
            model(ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
        except Exception as error:  # any error of a config or a model with foreign settings
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        try:
            make_packable(model, 0)
        except PackingImpossible as obstacle:
            return "padded", str(obstacle)
        return "packed", ""
    return "not tried", reason


def reason_in_short(reason: str) -> str:
    """Return a short form of the reason, without names and numbers of the model."""
    for pattern, short in {
        "has no `score` head": "no score head",
        "transformers' attention interface": "attention is the model's own code",
        "has no attribute|must match|TreeByTree": "the model builds its own masks",
        "window": "the mask does not show the window",
        "go on from the state": "the scan accepts no initial state",
        "differ by": "packed rewards differ",
        "encoder-decoder": "decoder of an encoder-decoder model",
        "has no attention heads": "no attention heads",
    }.items():
        if re.search(pattern, reason):
            return short
    return reason


def write(page: Path = PAGE) -> None:
    """Write the page. Its hand-written part is kept."""
    found = {kind: try_out(kind) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    new = {*found} - {*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}

    def names(verdict: str) -> str:
        return " ".join(f"`{kind}`{'*' * (kind in new)}" for kind, (each, _) in found.items() if each == verdict)

    def table(verdict: str) -> str:
        reasons = {kind: reason_in_short(why) for kind, (each, why) in found.items() if each == verdict}
        rows = {why: [kind for kind, each in reasons.items() if each == why] for why in reasons.values()}
        return "\n".join(
            f"| {why} | {' '.join(f'`{kind}`' + '*' * (kind in new) for kind in kinds)} |"
            for why, kinds in rows.items()
        )

    text = PAGE.read_text(encoding="utf-8").partition("<!-- written")[0]
    text += f"""<!-- written by tests/support/model_families.py -->
transformers {transformers.__version__}, {len(found)} types. A * marks types without a classifier in transformers.

## Types packed in plain torch, if the trial of the model passes

{names("packed")}

## Types with padded rows

| reason | types |
|---|---|
{table("padded")}

## Rejected types

| reason | types |
|---|---|
{table("rejected")}

## Types without a trial: no tiny model could be built

{names("not tried")}
"""
    page.write_text(text, encoding="utf-8")
    for kind, (verdict, why) in found.items():
        print(kind, verdict, why[:150], file=sys.stderr)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    write()
