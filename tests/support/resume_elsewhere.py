"""Resume a checkpoint on the devices chosen by the environment.

    python tests/support/resume_elsewhere.py MODEL CHECKPOINT FOLDER SETTINGS

Prints the logs and the sums of the final weights as JSON.
"""

import json
import sys
from pathlib import Path

import tiny
import torch
from training import logged, trained

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, checkpoint, folder, settings = sys.argv[1:]
    args = RewardConfig(folder, report_to="none", disable_tqdm=True, **json.loads(settings))
    trainer = trained(RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(64)), resume=checkpoint)
    weights = to_host(dict(trainer.model.named_parameters()), trainer.trl_tpu.runtime)
    sums = {name: weight.double().abs().sum().item() for name, weight in weights.items()}
    print(json.dumps({"logs": logged(trainer), "sums": sums, "folder": Path(checkpoint).name}))
