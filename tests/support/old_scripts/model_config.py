"""As for TRL 0.7 to 0.9: a config and a model config from flags, columns of tokens made by hand."""

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, RewardConfig, RewardTrainer, get_kbit_device_map, get_peft_config, get_quantization_config

if __name__ == "__main__":
    parser = HfArgumentParser((RewardConfig, ModelConfig))
    config, model_config = parser.parse_args_into_dataclasses()
    config.gradient_checkpointing_kwargs = {"use_reentrant": False}
    dtype = model_config.torch_dtype
    dtype = dtype if dtype in ["auto", None] else getattr(torch, dtype)
    quantization_config = get_quantization_config(model_config)
    tokenizer = AutoTokenizer.from_pretrained(model_config.model_name_or_path, use_fast=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_config.model_name_or_path,
        num_labels=1,
        revision=model_config.model_revision,
        trust_remote_code=model_config.trust_remote_code,
        device_map=get_kbit_device_map() if quantization_config is not None else None,
        quantization_config=quantization_config,
        torch_dtype=dtype,
    )
    pairs = load_dataset("lab/texts")

    def preprocess(rows):
        columns = {}
        for half in ("chosen", "rejected"):
            tokens = [tokenizer(text) for text in rows[half]]
            columns[f"input_ids_{half}"] = [each["input_ids"] for each in tokens]
            columns[f"attention_mask_{half}"] = [each["attention_mask"] for each in tokens]
        return columns

    pairs = pairs.map(preprocess, batched=True).filter(
        lambda row: (
            len(row["input_ids_chosen"]) <= config.max_length and len(row["input_ids_rejected"]) <= config.max_length
        )
    )
    trainer = RewardTrainer(
        model=model,
        tokenizer=tokenizer,
        args=config,
        train_dataset=pairs["train"],
        eval_dataset=pairs["train"],
        peft_config=get_peft_config(model_config),
    )
    trainer.train()
    trainer.save_model(config.output_dir)
    trainer.save_state()
    trainer.visualize_samples(2)
    trainer.log_metrics("eval", trainer.evaluate())
