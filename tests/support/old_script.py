"""A script for TRL 0.12 to 0.23: raw messages, the old collator, and a loss that reads its columns."""

from datasets import load_dataset
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from trl_tpu import (
    ModelConfig,
    RewardConfig,
    RewardDataCollatorWithPadding,
    RewardTrainer,
    ScriptArguments,
    get_peft_config,
    setup_chat_format,
)


class OwnTrainer(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen = model(input_ids=inputs["input_ids_chosen"], attention_mask=inputs["attention_mask_chosen"])
        rejected = model(input_ids=inputs["input_ids_rejected"], attention_mask=inputs["attention_mask_rejected"])
        rewards = chosen["logits"], rejected["logits"]
        loss = -nn.functional.logsigmoid(rewards[0] - rewards[1]).mean()
        return (loss, {"rewards_chosen": rewards[0], "rewards_rejected": rewards[1]}) if return_outputs else loss


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, RewardConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, use_fast=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path,
        num_labels=1,
        use_cache=not training_args.gradient_checkpointing,
        torch_dtype=model_args.torch_dtype,
    )
    if tokenizer.chat_template is None:
        model, tokenizer = setup_chat_format(model, tokenizer)
    pairs = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = OwnTrainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        data_collator=RewardDataCollatorWithPadding(tokenizer),
        train_dataset=pairs[script_args.dataset_train_split],
        eval_dataset=pairs[script_args.dataset_train_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    assert trainer.tokenizer.eos_token == "<|im_end|>"
    assert trainer.use_reward_data_collator
    trainer.train()
    trainer.save_state()
