"""Checkpoints for tests: sharded states written without a trainer, and a trainer that overrides each save method."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel, set_seed

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.folders import MANIFEST_FILE, describe_files, files_in, find_faults, publish
from trl_tpu.checkpoint.state_dict import unique_tensors

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_labels": 1, "pad_token_id": 0}


def llama(**config: Any) -> PreTrainedModel:
    return _random(LlamaForSequenceClassification(LlamaConfig(**(SIZES | config))))


def experts() -> PreTrainedModel:
    """Return a model whose experts transformers holds in one tensor and saves separately."""
    config = transformers.Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **SIZES)
    return _random(transformers.Qwen3MoeForSequenceClassification(config))


def tied() -> PreTrainedModel:
    """Return a model with one embedding under three names."""
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = transformers.BartConfig(vocab_size=64, d_model=16, num_labels=1, eos_token_id=2, **heads, **layers)
    return _random(transformers.BartForSequenceClassification(config))


def _random(model: PreTrainedModel) -> PreTrainedModel:
    set_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def write_state(folder: Path, tensors: Mapping[str, torch.Tensor], parts: int = 2) -> None:
    """Write ``model.{name}`` and optimizer state, sharded along the first dimension, one file per shard."""
    folder.mkdir(parents=True)
    for part in range(parts):
        held, places = {}, {}
        for name, tensor in tensors.items():
            if tensor.dim() == 0 or tensor.shape[0] < parts:  # unsharded, on the first device
                if part:
                    continue
                start, piece = 0, tensor
            else:
                size = -(-tensor.shape[0] // parts)
                start, piece = part * size, tensor[part * size : (part + 1) * size]
            held[f"model.{name}"] = held[f"optimizer.{name}.exp_avg"] = piece.detach().contiguous().clone()
            held[f"optimizer.{name}.exp_avg"] = torch.zeros_like(piece)
            offsets = [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            places[f"model.{name}"] = places[f"optimizer.{name}.exp_avg"] = {"saved_offsets": offsets}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        save_file(held, folder / f"host-{part:05d}-device-000.safetensors", metadata)


def checkpoint_of(model: PreTrainedModel, folder: Path) -> Path:
    """Write a checkpoint of several hosts: weights are in the state only, tied ones once, under their first name."""
    model.save_pretrained(folder, state_dict={})
    write_state(folder / "state", unique_tensors(model.state_dict(keep_vars=True)))
    (folder / "trainer_state.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    return folder


def same_weights(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Tell if both have the same names, dtypes and bits."""

    def same(one: torch.Tensor, two: torch.Tensor) -> bool:
        return one.dtype == two.dtype and one.equal(two)

    return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)


ADDED_FILES = ("saved.txt", "later.txt")


class OverriddenSaves(RewardTrainer):
    """Overrides each method that saves: halves saved weights, and adds files."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        file = Path(output_dir or self.args.output_dir, "model.safetensors")
        save_file({name: weight.half() for name, weight in load_file(file).items()}, file, {"format": "pt"})

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        Path(str(output_dir), ADDED_FILES[0]).touch()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", ADDED_FILES[1]).touch()


def write_checkpoint(output_dir: Path, step: int) -> Path:
    """Write a complete checkpoint of two files."""
    staging = output_dir / "_unfinished" / f"checkpoint-{step}"
    (staging / "inner").mkdir(parents=True)
    (staging / "weights").write_bytes(bytes(range(100)))
    (staging / "inner" / "state.json").write_text("{}")
    publish(staging, output_dir / staging.name, describe_files(staging, files_in(staging)))
    staging.parent.rmdir()
    return output_dir / staging.name


def reseal(folder: Path) -> None:
    """Rewrite the manifest to match the current files."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    staging = folder.rename(folder.with_name("staging"))
    publish(staging, folder, describe_files(staging, files_in(staging)))


def check_overridden_saves(folder: Path, checkpoint: str) -> None:
    """Check a checkpoint of `OverriddenSaves` for faults and added files, and the run's folder for halved weights."""
    assert all((folder / checkpoint / name).is_file() for name in ADDED_FILES)
    assert find_faults(folder / checkpoint) == []
    for place in (folder, folder / checkpoint):
        assert load_file(place / "model.safetensors")["score.weight"].dtype == torch.float16
