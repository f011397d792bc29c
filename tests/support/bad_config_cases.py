"""Flags and YAML files that must be refused, and the words that each error must hold."""

from bad_input import Case, both, config, flags, without

CONFIGURATION = {
    "an unknown axis": Case(flags(mesh="fdsp=1"), ["'fdsp=1' is not AXIS=SIZE", "the axes are data, fsdp, tensor"]),
    "a mesh that does not divide": Case(flags(mesh="data=3,fsdp=-1"), ["data=3,fsdp=-1", "number of devices"]),
    "batches of no pair": Case(
        flags(per_device_train_batch_size=0), ["per_device_train_batch_size must be at least 1", "got 0"]
    ),
    "a length that no pair has": Case(flags(max_length=1), ["all 4 pairs were dropped", "max_length=1", "shortest"]),
    "the best by an unknown metric": Case(
        both(flags(eval_strategy="steps", metric_for_best_model="f1"), flags(dataset_test_split="train")),
        ["metric_for_best_model='f1'", "loss, num_tokens, min_reward", "compute_metrics"],
    ),
    "a misspelled flag": Case(flags(lerning_rate=1), ["on the command line: --lerning_rate 1"]),
    "a tab in YAML": Case(config("seed:\n\t- 1"), ["DIR/c.yaml is not YAML", "line 2, column 1"]),
    "a mixture without a path": Case(
        config("datasets: [{pth: x}]"), ["`datasets` must be a list of mappings", "'pth'"]
    ),
    "evaluation without a split": Case(flags(do_eval="true"), ["no split 'test'; its splits are: 'train'"]),
    "remat and no checkpointing": Case(flags(remat="full"), ["contradicts gradient_checkpointing=False", "leave"]),
    "an unknown truncation": Case(
        flags(truncation_mode="keep_middle"), ["truncation_mode must be one of", "'keep_middle'"]
    ),
    "an unknown packing": Case(flags(packing="maybe"), ["packing must be one of", "got 'maybe'"]),
    "a dictionary of Python": Case(flags(model_init_kwargs="{'a': 1}"), ["model_init_kwargs must be a JSON object"]),
    "no such sharding plan": Case(flags(sharding_plan="{folder}/p.yaml"), ["no sharding plan 'DIR/p.yaml'", "name a"]),
    "no model": Case(without("model_name_or_path"), ["Name a model with `--model_name_or_path`"]),
    "no dataset": Case(without("dataset_name"), ["Either `datasets`", "or `dataset_name` must be provided"]),
    "a stream without an end": Case(
        flags(dataset_streaming="true", max_steps=-1), ["a stream", "max_steps", "it is -1", "1 or more"]
    ),
    "adapters for nothing": Case(
        flags(use_peft="true", lora_target_modules="x"), ["No modules were targeted", "--lo"]
    ),
}
