"""Take one step of plain gradient descent for each of several settings, in this process, and write the results.

python tests/support/remat_programs.py OUT FAMILY:VARIANT:SETTINGS ...     SETTINGS is JSON, of RewardConfig
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from layouts import DUMPS
from tiny import made_up_pairs, tiny_family, tiny_tokenizer
from training import QUIET

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host

VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {"pad_to_multiple_of": 64, "packing": False},
    "packed": {"packing": True},
}


def step(name: str, variant: str, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the loss, the gradients (the change by a step at rate 1), and counts in the optimized program."""
    tokenizer = tiny_tokenizer(made_up_pairs(200)["chosen"], vocab_size=320)
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 1.0, "max_grad_norm": 0.0}
    plain |= {"max_steps": 1, "logging_steps": 1, "save_strategy": "no"}
    args = RewardConfig(folder, **QUIET | VARIANTS[variant] | plain | settings)
    args.per_device_train_batch_size = 16 // args.mesh_shape.batch_shards
    peft_config = None
    if name.endswith("_lora"):
        from peft import LoraConfig

        peft_config = LoraConfig(task_type="SEQ_CLS", r=14, target_modules="all-linear", init_lora_weights=False)
    data = {"train_dataset": made_up_pairs(64), "processing_class": tokenizer}
    trainer = RewardTrainer(tiny_family(name, tokenizer), args, **data, peft_config=peft_config)
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    before = to_host(trained, trainer.trl_tpu.runtime)
    for path in DUMPS.iterdir():
        path.unlink()
    trainer.train()
    after = to_host({name: weight.detach() for name, weight in trained.items()}, trainer.trl_tpu.runtime)
    programs = sorted(DUMPS.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    program = programs[-1].read_text()
    counts = {"dots": program.count(" dot("), "loops": program.count(" while("), "program": len(program)}
    gradients = {name: (before[name] - after[name]).tolist() for name in trained}
    return counts | {"loss": trainer.state.log_history[0]["loss"], "gradients": gradients}


def main(out: str, *runs: str) -> None:
    results = {}
    for run in runs:
        name, variant, settings = run.split(":", 2)
        with tempfile.TemporaryDirectory() as folder:
            results[run] = step(name, variant, json.loads(settings), folder)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
