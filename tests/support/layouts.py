"""Train tiny models of several families in this process and write the results: one process per set of devices.

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

from environment import QUICK_XLA_FLAGS

DUMPS = Path(tempfile.mkdtemp())
if os.environ.get("USE_TORCH_XLA") != "0":  # must be set before any computation
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMPS} --xla_dump_hlo_as_text {QUICK_XLA_FLAGS}"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from label_formats import LABEL_FORMATS, format_in  # noqa: E402
from tiny import made_up_pairs, tiny_family, tiny_tokenizer  # noqa: E402
from training import QUIET, At, untimed  # noqa: E402

from trl_tpu import RewardTrainer, runtime  # noqa: E402
from trl_tpu.packing.batch import micro_batches_of, tensors_in  # noqa: E402

STEPS = 6
PAIRS = 16  # per step
LENGTH = 64  # row length; lengths planned from the data might be multiples of 7
#: Settings for each word of a variant's name. Other words are label formats and optimizers.
WORDS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False, "pad_to_multiple_of": LENGTH},
    "packed": {"packing": True, "row_length": LENGTH},
    "expanded": {"packed_attention": "expanded"},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    "scanned": {"scan_layers": True, "gradient_checkpointing": True},
    "dots": {"remat": "dots", "gradient_checkpointing": True},
}


class Lion(torch.optim.Optimizer):
    """A user-defined optimizer (https://arxiv.org/abs/2302.06675) that the trainer does not know."""

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
        """Allow packing: the override only observes."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        parts = list(micro_batches_of(inputs))
        for part in parts:
            sizes = ((name, tuple(tensor.shape)) for name, tensor in tensors_in(part).items())
            self.shapes.add((part is parts[-1], tuple(sizes)))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.detach())
        return loss


def train(name: str, mesh: str, variant: str, folder: str) -> dict[str, Any]:
    tokenizer, form = tiny_tokenizer(made_up_pairs(200)["chosen"], vocab_size=320), format_in(variant)
    settings, words = {"gradient_checkpointing": False} | form.settings, variant.split("+")
    for word in words:
        settings |= WORDS.get(word, {})
    if "packed" in words and {*LABEL_FORMATS} & {*words}:  # rows must hold several answers
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
    rows, tensors = form.rows(256 + 24), list[dict[str, Any]]()
    callbacks: list[Any] = []
    if runtime.current().is_spmd:
        from counters import CountAtSteps

        # layers of a loop are stacked at the end of the last step
        callbacks = [CountAtSteps(), At("on_step_end", STEPS, lambda: tensors.extend(tensors_of(trainer)))]
    given = {"train_dataset": rows.select(range(256)), "processing_class": tokenizer, "peft_config": peft_config}
    given["optimizer_cls_and_kwargs"] = (Lion, {"lr": 1e-4}) if variant.endswith("lion") else None
    model, kind = tiny_family(name, tokenizer, form.outputs, form.auto), type("Own", (Watched, form.trainer), {})
    trainer = kind(model, args, **given, callbacks=callbacks)
    # a batch and a half, before training: training changes the mean reward, which no loss depends on
    has_format = variant.endswith((*LABEL_FORMATS,))
    evaluated = untimed(trainer.evaluate(rows.select(range(256, 256 + 24)))) if has_format else {}
    started = time.perf_counter()
    trainer.train()
    micro = torch.stack(trainer.trl_tpu.runtime.fetch(trainer.losses)).view(STEPS, -1)
    scale = args.gradient_accumulation_steps  # the trainer divides the loss of each micro-batch by it
    return {
        "seconds": time.perf_counter() - started,
        "losses": (micro.sum(1) if scale == micro.shape[1] else micro.mean(1)).tolist(),
        "shapes": len(trainer.shapes),
        "sizes": sorted({size for _, shapes in trainer.shapes for _, shape in shapes for size in shape}),
        "tokens": max(prod(shape) for _, shapes in trainer.shapes for _, shape in shapes),
        "counts": [[each.compiles, each.device_to_host] for counter in callbacks[:1] for each in counter.at.values()],
        "tensors": tensors,
        "collectives": collectives(args.mesh_shape.sizes),
        "evaluated": evaluated,
    }


def tensors_of(trainer: RewardTrainer) -> list[dict[str, Any]]:
    """Return the bytes of every tensor of model, gradients and optimizer: unsharded, of its shards, and planned."""
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
            specs = map(torch_xla._XLAC._get_xla_sharding_spec, (tensor, parameter.detach()))
            sizes = {"whole": whole, "shards": shards, "planned": whole // report.placements[name].parts(report.mesh)}
            sizes |= dict(zip(("spec", "spec of the weight"), specs, strict=True))
            found.append({"name": f"{kind} of {name}", "kind": kind, "trained": parameter.requires_grad, **sizes})
    return found


# ---- collectives of a compiled program, and the mesh axes they span

_OPERATION = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+)\[([\d,]*)\]")


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the collectives in the text of an optimized HLO module, for devices numbered along ``mesh``.

    Each has the shapes of its results per device and the mesh axes that its groups span.
    """
    for line in hlo.splitlines():
        if found := _OPERATION.search(line):
            sizes = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", found["type"]))
            shapes = [[int(size) for size in each.split(",") if size] for each in sizes]
            axes = axes_of(groups_of(line, prod(mesh.values())), mesh)
            yield {"kind": found["kind"], "shapes": shapes, "axes": axes}


def groups_of(line: str, devices: int) -> np.ndarray:
    """Return the groups of devices as rows of an array; for a permutation, pairs of source and target."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{(.*?)\}\}", line):
        return np.array([group.split(",") for group in listed[1].split("},{")], int)
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if tiled is None:
        return np.arange(devices)[None]
    shape, sizes, order = ([int(each) for each in part.split(",")] if part else None for part in tiled.groups())
    return np.arange(devices).reshape(sizes).transpose(order).reshape(shape)


def axes_of(groups_GN: np.ndarray, mesh: Mapping[str, int]) -> list[str]:
    """Return the mesh axes along which the devices of a group differ."""
    places = np.unravel_index(groups_GN, tuple(mesh.values()))
    crossed = [(place_GN != place_GN[:, :1]).any() for place_GN in places]
    return [axis for axis, is_crossed in zip(mesh, crossed, strict=True) if is_crossed]


def collectives(mesh: dict[str, int]) -> list[dict[str, Any]]:
    """Return the collectives of the gradient program: the program with most of them since the last call."""
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
        except Exception:  # only the test of this run fails
            results[run] = {"error": re.sub(r"(?s)^.{20000,}(?=.{4000}$)", "", traceback.format_exc())}
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
