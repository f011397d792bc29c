"""Models customized by users. `python customized_models.py NAME` trains one with TRL and prints its losses.

The computation of rewards is changed in the class, on the instance, or by hooks, heads or learned prompts.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import tiny
import torch
import training
from torch import nn
from transformers import LlamaForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

ROPE = {"rope_theta": 1e4}
PAIRS = tiny.made_up_pairs(40)
TOKENIZER = tiny.tiny_tokenizer(PAIRS, vocab_size=300)


def plain() -> LlamaForSequenceClassification:
    return tiny.tiny_model(TOKENIZER)


class Averaging(LlamaForSequenceClassification):
    """Averages the scores of all tokens."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        kwargs.pop("use_cache", None)
        states_RLH = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        scores_RL = self.score(states_RLH).squeeze(-1) * attention_mask
        means_R = scores_RL.sum(1) / attention_mask.sum(1)
        return SequenceClassifierOutput(logits=means_R[:, None])  # type: ignore[arg-type]


def averaging() -> PreTrainedModel:
    stock = plain()
    model = Averaging(stock.config)
    model.load_state_dict(stock.state_dict())
    return model


def deep_head() -> PreTrainedModel:
    model = plain()
    torch.manual_seed(1)
    model.score = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))  # type: ignore[assignment]
    return model


def normalized_head() -> PreTrainedModel:
    """Return a model with a head that normalizes over the hidden states of a row."""

    class Head(nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states / states.std(dim=1, keepdim=True).clamp(min=1e-3))

    model = plain()
    head = Head(32, 1, bias=False)
    head.load_state_dict(model.score.state_dict())
    model.score = head
    return model


def prompt_tuning() -> Any:
    return adapted(peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4))


def prefix_tuning() -> Any:
    return adapted(peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4))


def adapted(config: Any) -> Any:
    model = plain()
    torch.manual_seed(2)
    return peft.get_peft_model(model, config)


def longrope() -> PreTrainedModel:
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 9.0]}
    return tiny.tiny_model(TOKENIZER, rope_parameters=long | ROPE | {"original_max_position_embeddings": 16})


def dynamic_rope() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 8.0} | ROPE
    return tiny.tiny_model(TOKENIZER, rope_parameters=rope, max_position_embeddings=16)


#: Models whose rewards depend on the padding of a row.
READ_PADDING = (normalized_head, prompt_tuning)
#: Models that are not padded to planned lengths. In the last two, the longest sequence changes all positions.
KEEP_LENGTHS = (*READ_PADDING, longrope, dynamic_rope)
SETTINGS: dict[str, Any] = training.QUIET | {"save_strategy": "no", "logging_steps": 1, "max_steps": 3}
SETTINGS |= {"learning_rate": 1e-3, "gradient_checkpointing": False}


def losses(package: Any, model: Any, folder: Path, prepare: Any = lambda _: None, **more: Any) -> Any:
    own = {"use_cpu": True, "optim": "adamw_torch"} if package.__name__ == "trl" else {}
    args = package.RewardConfig(str(folder), **SETTINGS | own | more)
    trainer = package.RewardTrainer(model, args, train_dataset=PAIRS, processing_class=TOKENIZER)
    prepare(trainer)
    trainer.train()
    return trainer, training.losses(trainer)


if __name__ == "__main__":
    import trl

    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(losses(trl, globals()[sys.argv[1]](), Path(place))[1]))
