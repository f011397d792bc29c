"""Train with several optimizers in this process and write what happened: run by a test, one process for each runtime.

python tests/support/optimizers.py OUT NAME ...
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny import made_up_pairs, tiny_model, tiny_tokenizer
from torch.optim import Optimizer

from trl_tpu import RewardConfig, RewardTrainer, runtime

STEPS = 8
PAIRS = 8


class Lion(Optimizer):
    """A user's own optimizer (https://arxiv.org/abs/2302.06675), of which the trainer knows nothing."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"] * first + gradient * (1 - first)
                parameter.add_(update.sign(), alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(gradient, alpha=1 - second)


OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "lion": (Lion, {"lr": 1e-4}),
}


class Watched(RewardTrainer):
    """Notes when each step begins: programs and reads so far, and what a device holds of each state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[torch.Tensor] = []
        self.counts: list[tuple[int, int]] = []
        self.held: list[list[dict[str, Any]]] = []
        super().__init__(*args, **kwargs)

    def reads_padded_rows(self) -> None:
        """What is overridden only looks on."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if runtime.current().compiles:
            self.counts.append(counted())
            if len(self.counts) in (1, 3):
                self.held.append(state_of(self))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.detach())
        return loss


def counted() -> tuple[int, int]:
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    xm.wait_device_ops()
    compiles, reads = ((met.metric_data(name) or [0])[0] for name in ("CompileTime", "TransferFromDeviceTime"))
    return compiles, reads


def state_of(trainer: RewardTrainer) -> list[dict[str, Any]]:
    """Of every tensor of the optimizer's state: its shape, its parameter's, and what one device holds."""
    import torch_xla.distributed.spmd as xs

    optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert trainer.shard_report is not None
    found = []
    for name, parameter in trainer.model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0:
                shards = [shard.data.numel() for shard in xs.wrap_if_sharded(tensor).local_shards]
                found.append(
                    {
                        "name": f"{kind} of {name}",
                        "kind": kind,
                        "shape": list(tensor.shape),
                        "of": list(parameter.shape),
                        "axes": trainer.shard_report.placements[name].axes,
                        "held": sorted(set(shards)) or [tensor.numel()],
                    }
                )
    return found


def train(name: str, folder: str) -> dict[str, Any]:
    pairs = made_up_pairs(PAIRS * (STEPS + 1))
    texts = [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]]
    tokenizer = tiny_tokenizer(texts)
    mesh = "fsdp=4,tensor=2" if runtime.current().shares_mesh else "fsdp=-1"
    args = RewardConfig(
        folder,
        mesh=mesh,
        bf16=False,
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        warmup_steps=2,
        weight_decay=0.01,
        packing=False,
        pad_to_multiple_of=64,
        logging_steps=STEPS,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    args.per_device_train_batch_size = PAIRS // args.mesh_shape.batch_shards
    trainer = Watched(
        tiny_model(tokenizer, attn_implementation="sdpa"),
        args,
        train_dataset=pairs,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=OPTIMIZERS[name],
    )
    trainer.train()
    return {
        "losses": [loss.item() for loss in trainer.runtime.fetch(trainer.losses)],
        "counts": trainer.counts,
        "state": trainer.held,
    }


def main(out: str, *names: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = train(name, folder)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
