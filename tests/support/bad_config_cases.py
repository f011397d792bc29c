"""Flags and YAML files that must be refused, and the words that each error must hold."""

from bad_input import Case, both, config, flags, without

CONFIGURATION = {
    "a mesh without sizes": Case(flags(mesh="fsdp"), ["mesh 'fsdp'", "axis=size", "write e.g. 'fsdp=-1'"]),
    "an axis of size 0": Case(flags(mesh="fsdp=0"), ["mesh 'fsdp=0'", "positive integer, or -1"]),
    "an axis twice": Case(flags(mesh="fsdp=1,fsdp=1"), ["axis 'fsdp' is given twice"]),
    "an unknown axis": Case(flags(mesh="fdsp=1"), ["unknown axis 'fdsp'", "Did you mean 'fsdp'?"]),
    "a mesh that does not divide": Case(flags(mesh="data=3,fsdp=-1"), ["for fsdp", "Meshes that work"]),
    "batches of no pair": Case(
        flags(per_device_train_batch_size=0), ["per_device_train_batch_size must be at least 1, got 0", "pairs of a"]
    ),
    "batches of fewer": Case(
        flags(per_device_eval_batch_size=-2), ["per_device_eval_batch_size", "got -2", "set eval"]
    ),
    "batches of a word": Case(flags(per_device_train_batch_size="many"), ["invalid int value: 'many'"]),
    "no step between updates": Case(flags(gradient_accumulation_steps=0), ["gradient_accumulation_steps", "got 0"]),
    "a length of 0": Case(flags(max_length=0), ["max_length must be at least 1, got 0", "None to keep"]),
    "a length that no pair has": Case(flags(max_length=1), ["all 4 pairs were dropped", "max_length=1", "shortest"]),
    "multiples of 0": Case(flags(pad_to_multiple_of=0), ["pad_to_multiple_of must be at least 1", "Leave it out"]),
    "multiples of a word": Case(flags(pad_to_multiple_of="many"), ["pad_to_multiple_of", "'auto'", "got 'many'"]),
    "a negative rate": Case(flags(learning_rate=-1), ["learning_rate", "finite number, 0 or more, got -1.0"]),
    "a rate of nan": Case(flags(learning_rate="nan"), ["learning_rate must be a finite number", "got nan"]),
    "a coefficient of nan": Case(flags(center_rewards_coefficient="nan"), ["center_rewards_coefficient", "0.01"]),
    "negative epochs": Case(
        flags(max_steps=-1, num_train_epochs=-1), ["num_train_epochs must be a finite number, 0 or more", "max_st"]
    ),
    "epochs without end": Case(flags(max_steps=-1, num_train_epochs="inf"), ["num_train_epochs must be", "got inf"]),
    "a moment that grows": Case(flags(adam_beta1=2), ["adam_beta1 must be 0 or more and below 1, got 2.0", "default"]),
    "an epsilon of nan": Case(flags(adam_epsilon="nan"), ["adam_epsilon must be a finite number", "got nan"]),
    "logs every nan steps": Case(flags(logging_steps="nan"), ["logging_steps must be a whole number", "got nan"]),
    "logs every 2.5 steps": Case(flags(logging_steps=2.5), ["logging_steps must be a whole number", "got 2.5"]),
    "saves every 0 steps": Case(flags(save_steps=0), ["save_steps must be", "above 0", "set save_strategy='no'"]),
    "saves every -1 steps": Case(flags(save_steps=-1), ["save_steps must be", "got -1", "set save_strategy='no'"]),
    "evaluations every 0 steps": Case(flags(eval_strategy="steps", eval_steps=0), ["eval_steps must be", "got 0"]),
    "evaluations after nan": Case(flags(eval_delay="nan"), ["eval_delay must be a finite number"]),
    "workers that stay, and none": Case(
        flags(dataloader_persistent_workers="true"), ["dataloader_persistent_workers=True", "dataloader_num_workers"]
    ),
    "a start method for no workers": Case(
        flags(dataloader_multiprocessing_context="spawn"), ["dataloader_multiprocessing_context='spawn'", "1 or more"]
    ),
    "workers that fetch nothing": Case(
        flags(dataloader_num_workers=1, dataloader_prefetch_factor=0), ["dataloader_prefetch_factor must be at least"]
    ),
    "negative noise": Case(flags(neftune_noise_alpha=-1), ["neftune_noise_alpha must be", "got -1.0", "Leave it out"]),
    "options of a schedule that it lacks": Case(
        flags(lr_scheduler_type="cosine", lr_scheduler_kwargs='{"cycles": 1}'),
        ["lr_scheduler_type='cosine' with lr_scheduler_kwargs={'cycles': 1}", "unexpected keyword", "Correct lr_"],
    ),
    "an option of a schedule that is a word": Case(
        flags(lr_scheduler_type="cosine", lr_scheduler_kwargs='{"num_cycles": "many"}'), ["cannot be used", "'many'"]
    ),
    "a schedule to nan": Case(
        flags(lr_scheduler_type="polynomial", lr_scheduler_kwargs='{"power": NaN}'), ["learning rate becomes nan"]
    ),
    "a schedule without what it needs": Case(flags(lr_scheduler_type="warmup_stable_decay"), ["num_decay_steps"]),
    "options of an optimizer in words": Case(flags(optim_args="foo"), ["optim_args must be name=value", "got 'foo'"]),
    "an option of an optimizer that is a word": Case(
        flags(optim="sgd", optim_args="momentum=much"), ["optim='sgd' with optim_args='momentum=much'", "could not"]
    ),
    "an optimizer that is not installed": Case(flags(optim="grokadamw"), ["optim='grokadamw'", "pip install grok"]),
    "pairs by lengths that nobody has": Case(
        flags(train_sampling_strategy="group_by_length"), ["='group_by_length' reads lengths", "'length'", "Leave it"]
    ),
    "the best by an unknown metric": Case(
        both(flags(eval_strategy="steps", metric_for_best_model="f1"), flags(dataset_test_split="train")),
        ["metric_for_best_model='f1'", "loss, num_tokens, min_reward", "compute_metrics"],
    ),
    "an unknown tracker": Case(flags(report_to="wandbb"), ["report_to names 'wandbb'", "wandb, ", "or write 'none'"]),
    "a tracker that is not installed": Case(flags(report_to="dvclive"), ["report_to='dvclive'", "install dvclive"]),
    "an output folder without a name": Case(flags(output_dir=""), ["output_dir must be a name, not empty, got ''"]),
    "a checkpoint without a name": Case(
        flags(resume_from_checkpoint=""), ["resume_from_checkpoint must be a name", "leave it out to start anew"]
    ),
    "negative workers": Case(flags(dataloader_num_workers=-1), ["dataloader_num_workers must be 0 or more, got -1"]),
    "negative processes": Case(flags(dataset_num_proc=-1), ["dataset_num_proc must be 0 or more", "0 does the work"]),
    "a negative seed": Case(flags(seed=-1), ["seed must be from 0 to 4294967295, got -1"]),
    "negative warm-up": Case(flags(warmup_steps=-1), ["warmup_steps must be a finite number, 0 or more, got -1.0"]),
    "warm-up without end": Case(flags(warmup_steps="inf"), ["warmup_steps must be a finite number", "got inf"]),
    "more warm-up than training": Case(flags(warmup_ratio=2), ["warmup_ratio must be 0 or more and below 1, got 2.0"]),
    "a misspelled flag": Case(flags(lerning_rate=1), ["`--lerning_rate`", "did you mean `learning_rate`?"]),
    "a misspelled key": Case(config("lerning_rate: 1"), ["in the config file", "did you mean `learning_rate`?"]),
    "a misspelled optimizer": Case(flags(optim="adamw_trch"), ["adamw_trch is not a valid", "'adamw_torch'"]),
    "a misspelled scheduler": Case(flags(lr_scheduler_type="cosin"), ["invalid choice: 'cosin'", "'cosine'"]),
    "a key twice": Case(
        config("seed: 1\nmax_steps: 1\nseed: 2"), ["DIR/c.yaml", "the key 'seed' is there twice", "line 3, column 1"]
    ),
    "YAML that is no UTF-8": Case(
        config(b"seed: 1\nmesh: \xff"), ["DIR/c.yaml is not a YAML mapping in UTF-8", "0xff", "Correct"]
    ),
    "YAML that is not there": Case(
        flags(config="{folder}/no.yaml"), ["Config file DIR/no.yaml cannot be read: No such file"]
    ),
    "a mixture of a name": Case(config("datasets: pairs"), ["`datasets` must be a list", "- path: NAME", "'pairs'"]),
    "a mixture without a path": Case(
        config("datasets: [{pth: x}]"), ["`datasets` must be a list", "a `path`", "'pth'"]
    ),
    "a mixture with an unknown key": Case(
        config("datasets: [{path: x, splt: y}]"), ["`datasets` must be a list", "'splt'", "Correct"]
    ),
    "evaluation without a split": Case(flags(do_eval="true"), ["no split 'test'; its splits are: 'train'"]),
    "the best without evaluation": Case(flags(load_best_model_at_end="true"), ["requires the save and eval strategy"]),
    "an unknown remat": Case(flags(remat="some"), ["remat must be 'full', 'dots' or 'none', got 'some'"]),
    "remat and no checkpointing": Case(flags(remat="full"), ["contradicts gradient_checkpointing=False", "leave"]),
    "an unknown packing": Case(flags(packing="maybe"), ["packing must be 'auto', true or false, got 'maybe'"]),
    "rows of negative length": Case(flags(row_length=-1), ["row_length must be at least 1, got -1"]),
    "4 and 8 bits": Case(flags(load_in_4bit="true", load_in_8bit="true"), ["8 bit and 4 bit", "set one of the two"]),
    "a dictionary of Python": Case(flags(model_init_kwargs="{'a': 1}"), ["model_init_kwargs", "(column 2)", "double"]),
    "a list for a dictionary": Case(
        flags(model_init_kwargs="[1]"), ["model_init_kwargs must be a JSON object", "[1]"]
    ),
    "an argument that no model has": Case(flags(model_init_kwargs='{"nope": 1}'), ["'nope'", "`model_init_kwargs`"]),
    "an output folder that is a file": Case(flags(output_dir="{folder}/pairs.jsonl"), ["DIR/pairs.jsonl is a file"]),
    "no such sharding plan": Case(flags(sharding_plan="{folder}/p.yaml"), ["no sharding plan 'DIR/p.yaml'", "name a"]),
    "no model": Case(without("model_name_or_path"), ["Name a model with `--model_name_or_path`"]),
    "no dataset": Case(without("dataset_name"), ["Either `datasets`", "or `dataset_name` must be provided"]),
    "a stream without an end": Case(
        flags(dataset_streaming="true", max_steps=-1), ["a stream", "max_steps", "it is -1", "1 or more"]
    ),
    "adapters of rank 0": Case(flags(use_peft="true", lora_r=0), ["peft_config", "positive integer", "--lora_"]),
    "adapters for nothing": Case(
        flags(use_peft="true", lora_target_modules="x"), ["No modules were targeted", "--lo"]
    ),
    "adapters for another task": Case(flags(use_peft="true", lora_task_type="CAUSAL_LM"), ["is 'SEQ_CLS'", "--lora_"]),
}
