"""Train in bfloat16 while accelerate and transformers detect a TPU: tpu_branches.py FOLDER

They take other branches on a TPU than on XLA's CPU, so their check for a TPU is replaced. The run trains, saves,
resumes, evaluates and predicts, and prints the dtypes of its state as JSON. With bfloat16, accelerate's TPU branch
would store everything in it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import accelerate
import accelerate.accelerator
import accelerate.state
import accelerate.utils
import accelerate.utils.imports
import transformers.utils.import_utils

asked: list[str] = []


def believe_in_a_tpu(module: Any) -> None:
    original = module.is_torch_xla_available

    def available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
        if check_is_tpu:
            asked.append(module.__name__)
        return not check_is_gpu if check_is_tpu or check_is_gpu else original()

    module.is_torch_xla_available = available


for each in (accelerate.accelerator, accelerate.state, accelerate.utils, accelerate.utils.imports):
    believe_in_a_tpu(each)
believe_in_a_tpu(transformers.utils.import_utils)

import torch  # noqa: E402
import torch_xla  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import made_up_pairs, save_tiny  # noqa: E402
from torch.nn.modules.module import register_module_forward_hook  # noqa: E402

from trl_tpu import RewardConfig, RewardTrainer  # noqa: E402

FINE = 1 + 2**-20  # bfloat16 would round it to 1


def kinds(named: Any) -> list[str]:
    return sorted({str(tensor.dtype) for _, tensor in named if isinstance(tensor, torch.Tensor)})


def keeps_float32(tensor: torch.Tensor) -> bool:
    """Tell if the device stores a parameter in 32 bits, whatever dtype torch reports."""
    with torch.no_grad():
        tensor.fill_(FINE)
    torch_xla.sync(wait=True)
    return bool((tensor.detach().cpu() == FINE).all())


def types_inside(trainer: RewardTrainer) -> dict[str, str]:
    """Return a dict that each step fills with the dtypes of its computation."""
    found: dict[str, str] = {}
    leaves = {
        module: name.rpartition(".")[2]
        for name, module in trainer.model.named_modules()
        if name.endswith(("q_proj", "score")) and isinstance(module, torch.nn.Linear)
    }

    def note(module: Any, _inputs: Any, output: Any) -> None:
        if module in leaves:
            found[leaves[module]] = str(output.dtype)

    # a global hook: a hook on a module of the model would make batches padded
    register_module_forward_hook(note)

    see = trainer.trl_tpu.statistics.add_loss

    def note_and_see(loss: torch.Tensor) -> None:
        found["loss"] = str(loss.dtype)
        see(loss)

    trainer.trl_tpu.statistics.add_loss = note_and_see  # type: ignore[method-assign]
    return found


def train(folder: Path) -> dict[str, Any]:
    pairs = made_up_pairs(24)
    model = save_tiny(folder / "model", pairs)

    def trainer(steps: int) -> RewardTrainer:
        settings: dict[str, Any] = {"max_steps": steps, "save_steps": 2, "logging_steps": 1, "max_length": 32}
        settings |= {"per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True}
        args = RewardConfig(str(folder / "out"), **settings)
        return RewardTrainer(model, args, train_dataset=pairs, eval_dataset=pairs)

    trainer(2).train()
    resumed = trainer(4)
    inside = types_inside(resumed)
    resumed.train(resume_from_checkpoint=True)
    resumed.evaluate()
    rewards = resumed.predict(pairs).predictions
    checkpoint = folder / "out" / "checkpoint-4"
    (weights,) = checkpoint.glob("*.safetensors")
    optimizer: Any = getattr(resumed.optimizer, "optimizer", resumed.optimizer)
    saved = [part for file in (checkpoint / "state").iterdir() for part in load_file(file).items()]
    layer: Any = next(module for module in resumed.model.modules() if hasattr(module, "input_layernorm"))
    rotary: Any = next(module for module in resumed.model.modules() if hasattr(module, "inv_freq"))
    losses = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    return {
        "computes in bfloat16": resumed.args.bf16,
        "in packed rows": resumed.batch_plan.padding_reason is None,
        "inside": inside,
        "buffers": kinds(resumed.model.named_buffers()),
        "weights": kinds(resumed.model.named_parameters()),
        "optimizer": kinds(item for state in optimizer.state.values() for item in state.items()),
        "saved weights": kinds(load_file(weights).items()),
        "saved optimizer": kinds((name, part) for name, part in saved if name.startswith("optimizer.")),
        "rewards": str(rewards.dtype),
        "fine losses": any(float(torch.tensor(loss).bfloat16()) != loss for loss in losses),
        "fine rewards": bool((torch.tensor(rewards).bfloat16().float() != torch.tensor(rewards)).any()),
        "device keeps float32": [
            keeps_float32(tensor)
            for tensor in (
                next(iter(resumed.model.parameters())),
                layer.input_layernorm.weight,
                rotary.inv_freq,
                *(item for item in next(iter(optimizer.state.values())).values() if isinstance(item, torch.Tensor)),
            )
        ],
    }


if __name__ == "__main__":
    found = train(Path(sys.argv[1]))
    print(json.dumps(found | {"asked for a TPU": sorted(set(asked))}))
