"""As for TRL 0.10 to 0.11: a chat format that is set up, messages rendered by a function of `trl_tpu.extras`."""

from accelerate import PartialState
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from trl_tpu import ModelConfig, RewardConfig, RewardTrainer, get_peft_config, setup_chat_format
from trl_tpu.commands.cli_utils import RewardScriptArguments
from trl_tpu.extras.dataset_formatting import conversations_formatting_function

if __name__ == "__main__":
    parser = HfArgumentParser((RewardScriptArguments, RewardConfig, ModelConfig))
    args, config, model_config = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(
        model_config.model_name_or_path, trust_remote_code=model_config.trust_remote_code, use_fast=True
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        model_config.model_name_or_path, num_labels=1, trust_remote_code=model_config.trust_remote_code
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    if tokenizer.chat_template is None:
        model, tokenizer = setup_chat_format(model, tokenizer)
    pairs = load_dataset(args.dataset_name)

    def preprocess(rows):
        tokens = {half: tokenizer(rows[half]) for half in ("chosen", "rejected")}
        return {f"{key}_{half}": tokens[half][key] for half in tokens for key in ("input_ids", "attention_mask")}

    with PartialState().local_main_process_first():
        render = {half: conversations_formatting_function(tokenizer, half) for half in ("chosen", "rejected")}
        pairs = pairs.map(lambda row: {half: render[half](row) for half in render})
        pairs = pairs.map(preprocess, batched=True, num_proc=config.dataset_num_proc)
    trainer = RewardTrainer(
        model=model,
        tokenizer=tokenizer,
        args=config,
        train_dataset=pairs[args.dataset_train_split],
        peft_config=get_peft_config(model_config),
    )
    trainer.train()
    trainer.save_state()
