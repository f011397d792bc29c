"""Train a reward model from the command line: TRL's example script with the import line changed.

    python examples/reward_modeling.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name trl-lib/ultrafeedback_binarized \
        --output_dir runs/Qwen2.5-0.5B-Reward \
        --per_device_train_batch_size 8 \
        --learning_rate 1.0e-5 \
        --eval_strategy steps \
        --eval_steps 50

For LoRA add `--use_peft --learning_rate 1.0e-4`; to upload the result, `--push_to_hub`.
"""

from transformers import AutoModelForSequenceClassification, HfArgumentParser

from trl_tpu import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, get_peft_config, get_quantization_config
from trl_tpu.scripts.utils import load_named_dataset


def main(script_args: ScriptArguments, training_args: RewardConfig, model_args: ModelConfig) -> None:
    """Train, save, evaluate on the test split if asked to, and push if asked to."""
    evaluates = training_args.eval_strategy != "no"
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path,
        num_labels=1,  # a reward is one number
        revision=model_args.model_revision,
        dtype=model_args.dtype,
        attn_implementation=model_args.attn_implementation,
        quantization_config=get_quantization_config(model_args),
        trust_remote_code=training_args.trust_remote_code,
    )
    dataset = load_named_dataset(script_args)  # a hub id, a folder, or a .jsonl, .parquet or .csv file

    trainer = RewardTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)

    if evaluates:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, RewardConfig, ModelConfig))
    main(*parser.parse_args_into_dataclasses())
