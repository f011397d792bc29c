"""Names that programs with transformers 4 read in the configs of saved models."""

import json
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

_PHI3_ROPE_FIELDS = {"rope_type", "type", "short_factor", "long_factor", "original_max_position_embeddings"}


def add_transformers4_names(folder: str | Path) -> None:
    """Rewrite a saved model's and tokenizer's configs for transformers before 5. transformers 5 reads both names."""
    for name, change in ((CONFIG_NAME, _add_rope_names), ("tokenizer_config.json", _rename_in_tokenizer)):
        path = Path(folder, name)
        if path.is_file():
            change(config := json.loads(path.read_text(encoding="utf-8")))
            path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _rename_in_tokenizer(config: dict[str, Any]) -> None:
    """Replace names in a tokenizer's config that only transformers 5 reads."""
    if config.get("tokenizer_class") == "TokenizersBackend":
        # by default, the old class also makes token_type_ids, and most models reject them
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")


def _add_rope_names(config: dict[str, Any]) -> None:
    """Add the rotary settings of transformers before 5 to a model's config, in addition to ``rope_parameters``.

    Older versions (rewardbench pins one) silently use a base of 10,000 if they do not find their setting, and compute
    other rewards. Bases that depend on the kind of layer had no common name, and are left out.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or "rope_theta" in config:
        return
    config["rope_theta"] = rope["rope_theta"]
    if config.get("model_type") == "gpt_neox":  # its old config has other names
        config |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    elif "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
        if config.get("model_type") == "phi3" and scaling.keys() <= _PHI3_ROPE_FIELDS:
            # Its old config accepts exactly these three fields. Other fields, such as a factor, are kept: old versions
            # then raise an error instead of computing other rewards.
            scaling = {"type": rope["rope_type"]} | {name: rope[name] for name in ("short_factor", "long_factor")}
        config["rope_scaling"] = scaling
