"""Train tiny models of several families in this process and write what happened: one process for each set of devices.

python tests/support/layouts.py OUT [MODEL:MESH:VARIANT ...]
"""

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import places

DUMPS = Path(tempfile.mkdtemp())
if os.environ.get("USE_TORCH_XLA") != "0":  # before anything is computed
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMPS} --xla_dump_hlo_as_text {places.QUICK}"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from families import family  # noqa: E402
from judgements import FORMS, form_in  # noqa: E402
from tiny import made_up_pairs, tiny_tokenizer  # noqa: E402
from training import QUIET, untimed  # noqa: E402
from transformers import TrainerCallback, TrainerState  # noqa: E402

from trl_tpu import RewardTrainer, runtime  # noqa: E402
from trl_tpu.packing.batch import micro_batches_of, tensors_in  # noqa: E402

STEPS = 6
PAIRS = 16  # in a step
LENGTH = 64  # of rows; lengths that fit the data might be multiples of 7
#: What each word of a variant's name asks for; others are forms of judgement and optimizers.
WORDS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False, "pad_to_multiple_of": LENGTH},
    "packed": {"packing": True, "row_length": LENGTH},
    "expanded": {"packed_attention": "expanded"},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "scanned": {"scan_layers": True, "gradient_checkpointing": True},
    "dots": {"remat": "dots", "gradient_checkpointing": True},
}


class Lion(torch.optim.Optimizer):
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


class Watched(RewardTrainer):
    """Keeps each step's loss on the device, and the shapes of the micro-batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[torch.Tensor] = []
        self.shapes: set[Any] = set()
        super().__init__(*args, **kwargs)

    def reads_padded_rows(self) -> None:
        """What is overridden only looks on."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        parts = list(micro_batches_of(inputs))
        for part in parts:
            sizes = ((name, tuple(tensor.shape)) for name, tensor in tensors_in(part).items())
            self.shapes.add((part is parts[-1], tuple(sizes)))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.detach())
        return loss


class Counting(TrainerCallback):
    """How often the device compiled, and how often something was read from it, when each step begins."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if runtime.current().is_spmd:
            from counters import count

            counts = count()
            self.at.append((counts.compiles, counts.device_to_host))


class Walking(TrainerCallback):
    """Looks at every tensor at the end of the last step, where layers that run as a loop are held as one."""

    trainer: RewardTrainer

    def __init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []

    def on_step_end(self, _args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if runtime.current().is_spmd and state.global_step == STEPS:
            self.tensors = tensors_of(self.trainer)


def train(name: str, mesh: str, variant: str, folder: str) -> dict[str, Any]:
    tokenizer, form = tiny_tokenizer(made_up_pairs(200)["chosen"], vocab_size=320), form_in(variant)
    settings, words = {"gradient_checkpointing": False} | form.settings, variant.split("+")
    for word in words:
        settings |= WORDS.get(word, {})
    if "packed" in words and {*FORMS} & {*words}:  # rows have room for several answers
        settings["row_length"] = 256
    settings |= QUIET | {"mesh": mesh, "max_steps": STEPS, "logging_steps": STEPS // 2, "save_strategy": "no"}
    args = form.config(folder, learning_rate=1e-3, **settings)
    args.per_device_train_batch_size = PAIRS // settings.get("gradient_accumulation_steps", 1)
    args.per_device_train_batch_size //= args.mesh_shape.batch_shards
    args.per_device_eval_batch_size = PAIRS // args.mesh_shape.batch_shards
    peft_config = None
    if name.endswith("_lora"):
        from peft import LoraConfig

        peft_config = LoraConfig(task_type="SEQ_CLS", r=14, target_modules="all-linear")
    counting, walking = Counting(), Walking()
    rows = form.rows(256 + 24)
    trainer = type("WatchedForm", (Watched, form.trainer), {})(
        family(name, tokenizer, form.outputs, form.auto),
        args,
        train_dataset=rows.select(range(256)),
        processing_class=tokenizer,
        peft_config=peft_config,
        optimizer_cls_and_kwargs=(Lion, {"lr": 1e-4}) if variant.endswith("lion") else None,
        callbacks=[counting, walking],
    )
    walking.trainer = trainer
    # a batch and a half; before training, which lets what no loss sees drift: by how much all rewards are higher
    evaluated = untimed(trainer.evaluate(rows.select(range(256, 256 + 24)))) if variant.endswith((*FORMS,)) else {}
    started = time.perf_counter()
    trainer.train()
    micro = torch.stack(trainer.trl_tpu.runtime.fetch(trainer.losses)).view(STEPS, -1)
    scale = args.gradient_accumulation_steps  # the loop divides each micro-batch's loss by it
    return {
        "seconds": time.perf_counter() - started,
        "losses": (micro.sum(1) if scale == micro.shape[1] else micro.mean(1)).tolist(),
        "shapes": len(trainer.shapes),
        "sizes": sorted({size for _, shapes in trainer.shapes for _, shape in shapes for size in shape}),
        "tokens": max(prod(shape) for _, shapes in trainer.shapes for _, shape in shapes),
        "counts": counting.at,
        "tensors": walking.tensors,
        "collectives": collectives(args.mesh_shape.sizes),
        "evaluated": evaluated,
    }


def tensors_of(trainer: RewardTrainer) -> list[dict[str, Any]]:
    """Every tensor of model, gradients and optimizer: its bytes, those of its shards, and those that were planned."""
    import torch_xla
    import torch_xla.distributed.spmd as xs

    torch_xla.sync(wait=True)
    report = trainer.shard_report
    assert report is not None
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    found = []
    for name, parameter in trainer.model.named_parameters():
        buffers = trainer.trl_tpu.step_state.gradient_buffers
        kinds = {"weight": parameter.detach(), "gradient": buffers.get(parameter)}
        kinds |= {kind: value for kind, value in optimizer.state.get(parameter, {}).items() if kind != "step"}
        for kind, tensor in kinds.items():
            if tensor is None:
                continue
            whole = tensor.numel() * tensor.element_size()
            shards = [shard.data.numel() * tensor.element_size() for shard in xs.wrap_if_sharded(tensor).local_shards]
            found.append(
                {
                    "name": f"{kind} of {name}",
                    "kind": kind,
                    "trained": parameter.requires_grad,
                    "spec": torch_xla._XLAC._get_xla_sharding_spec(tensor),
                    "spec of the weight": torch_xla._XLAC._get_xla_sharding_spec(parameter.detach()),
                    "whole": whole,
                    "shards": shards,
                    "planned": whole // report.placements[name].parts(report.mesh),
                }
            )
    return found


# ---- the collectives of a compiled program, and over which mesh axes each one goes

_OPERATION = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+)\[([\d,]*)\]")


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield every collective in the text of an optimized HLO module for devices that are numbered along ``mesh``.

    Of each: the arrays that it gives each device, and the axes along which its groups reach.
    """
    for line in hlo.splitlines():
        if found := _OPERATION.search(line):
            sizes = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", found["type"]))
            shapes = [[int(size) for size in each.split(",") if size] for each in sizes]
            axes = axes_of(groups_of(line, prod(mesh.values())), mesh)
            yield {"kind": found["kind"], "shapes": shapes, "axes": axes}


def groups_of(line: str, devices: int) -> np.ndarray:
    """The devices that take part together, as the rows of an array; of a permutation, who sends to whom."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{(.*?)\}\}", line):
        return np.array([group.split(",") for group in listed[1].split("},{")], int)
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if tiled is None:
        return np.arange(devices)[None]
    shape, sizes, order = ([int(each) for each in part.split(",")] if part else None for part in tiled.groups())
    return np.arange(devices).reshape(sizes).transpose(order).reshape(shape)


def axes_of(groups_GN: np.ndarray, mesh: Mapping[str, int]) -> list[str]:
    """The mesh axes along which devices of one group differ."""
    places = np.unravel_index(groups_GN, tuple(mesh.values()))
    crossed = [(place_GN != place_GN[:, :1]).any() for place_GN in places]
    return [axis for axis, is_crossed in zip(mesh, crossed, strict=True) if is_crossed]


def collectives(mesh: dict[str, int]) -> list[dict[str, Any]]:
    """Those of the program, of all compiled since the last call, that has most: the one that computes gradients."""
    programs = DUMPS.glob("*after_optimizations.txt")
    found = max((list(read_collectives(path.read_text(), mesh)) for path in programs), key=len, default=[])
    for path in DUMPS.iterdir():
        path.unlink()
    return found


def main(out: str, *runs: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for run in runs:
        name, mesh, variant = run.split(":")
        try:
            with tempfile.TemporaryDirectory() as folder:
                results[run] = train(name, mesh, variant, folder)
        except Exception:  # the test of this run fails with it, and the others go on
            results[run] = {"error": re.sub(r"(?s)^.{20000,}(?=.{4000}$)", "", traceback.format_exc())}
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
