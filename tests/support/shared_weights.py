"""One of two processes: shared_weights.py RANK FOLDER FAMILY...

Process 0 writes a tiny language model of each family. Both load it by name on meshes, and process 0 compares all
weights and buffers with a load in one process.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from datasets import Dataset
from subprocesses import become_rank
from training import QUIET

MESHES = ("fsdp=2", "data=2", "tensor=2")


def language_model(family: str, **changes: Any) -> Any:
    """Return a random causal model, with weights that differ from those of a new model."""
    from recent_families import tiny_config
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(family, **changes)
    vars(config).pop("num_labels", None)
    torch.manual_seed(1)
    has_tower = config.get_text_config() is not config
    model = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for name, each in named}


def different(path: Path, mesh: str, tokenizer: Any) -> list[str] | str:
    """Return the names of tensors that differ from those of one process, or the error."""
    from transformers import set_seed

    from trl_tpu import RewardConfig, RewardTrainer
    from trl_tpu.errors import UserError
    from trl_tpu.modeling.load import load_model

    ids = {"chosen_ids": [[3, 4, 5]] * 4, "rejected_ids": [[3, 4, 6]] * 4}
    args = RewardConfig(str(path / "run"), **QUIET, max_steps=1, mesh=mesh, use_cpu=True, packing=False)
    set_seed(args.seed)
    expected = tensors_of(load_model(str(path)))
    try:
        trainer = RewardTrainer(str(path), args, train_dataset=Dataset.from_dict(ids), processing_class=tokenizer)
    except UserError as error:
        return str(error)
    found = tensors_of(trainer.model)
    assert len(found) > 10
    return [name for name in {**expected, **found} if not torch.equal(expected[name], found[name])]


def main(rank: str, folder: Path, families: list[str]) -> None:
    from accelerate import PartialState
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from trl_tpu.parallel import shard

    PartialState(cpu=True)
    results = dict[str, Any]()
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # nothing is tokenized
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    for family in families:
        if rank == "0":
            language_model(family).save_pretrained(folder / family)
        dist.barrier()
        results[family] = {mesh: different(folder / family, mesh, tokenizer) for mesh in MESHES}
    split = shard.distribute

    def split_wrongly(model: Any, mesh: Any) -> None:
        split(model, mesh)
        model.score.weight.data.mul_(2)

    # no family: a model that computes other rewards than before it was split
    with patch.object(shard, "distribute", split_wrongly):
        results["computed wrongly"] = {"tensor=2": different(folder / "olmo3", "tensor=2", tokenizer)}
    (folder / f"weights of {rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    become_rank(sys.argv[1], "2")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
