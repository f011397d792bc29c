"""Batches on eight devices. `test_layouts.py` checks the shards of weights, gradients and optimizer state."""

from typing import Any

import pytest
import tiny
import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from trl_tpu import RewardTrainer
from trl_tpu.data.loader import skip_batches
from trl_tpu.parallel.mesh import BATCH_AXES


def bytes_on_a_device(tensor: torch.Tensor) -> int:
    if not torch_xla._XLAC._get_xla_sharding_spec(tensor):
        return tensor.numel() * tensor.element_size()
    return max(shard.data.numel() * shard.data.element_size() for shard in xs.wrap_if_sharded(tensor).local_shards)


@pytest.mark.parametrize("packing", [True, False])
def test_batches_arrive_sharded_over_the_devices(config: Any, model_folder: str, packing: bool) -> None:
    """Also after skipped batches, as in a resumed run."""
    trainer = RewardTrainer(model_folder, config(packing=packing), train_dataset=tiny.made_up_pairs(40))
    loader = trainer.get_train_dataloader()
    skipped = trainer.trl_tpu.runtime.loader(skip_batches(loader.batches, 2), BATCH_AXES)
    for batches in (loader, skipped):
        for batch in batches:
            for part in batch.parts:
                for key, value in part.tensors().items():
                    whole = value.numel() * value.element_size()
                    assert bytes_on_a_device(value) == (whole if value.dim() == 1 else whole // 8), key
    assert len(skipped) == len(loader) - 2


def test_batch_indivisible_by_the_mesh_is_rejected(config: Any, model_folder: str) -> None:
    """With split_batches the batch size counts all devices together."""
    args = config(per_device_train_batch_size=12, accelerator_config={"split_batches": True})
    with pytest.raises(ValueError, match=r"12 / 8"):
        RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(40))
