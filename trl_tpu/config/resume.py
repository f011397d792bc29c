"""Settings that may change when a run is resumed. Every other setting is part of the run's identity."""

from .checks import REMOVED

_NAMES = (
    # names and places
    "output_dir output_url run_name report_to project trackio_space_id trackio_bucket_id trackio_static_space_id "
    "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
    # logs
    "disable_tqdm progress log_level log_level_replica log_on_each_node log_grad_norms logging_first_step "
    "logging_nan_inf_filter logging_steps logging_strategy include_num_input_tokens_seen skip_memory_metrics debug",
    # saves
    "save_strategy save_steps save_interval_minutes save_total_limit save_only_model save_on_each_node "
    "enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better",
    # evaluation
    "do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start eval_by max_eval_steps "
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object per_device_eval_batch_size bf16_full_eval "
    "fp16_full_eval prediction_loss_only batch_eval_metrics include_for_metrics label_names",
    # start and stop
    "resume_from_checkpoint training_time_limit",
    # workers
    "dataset_num_proc dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory "
    "dataloader_prefetch_factor dataloader_multiprocessing_context",
    # devices and memory, with equal math
    "use_cpu local_rank mesh sharding_plan fsdp fsdp_config parallelism_config ddp_backend ddp_broadcast_buffers "
    "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout gradient_checkpointing "
    "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs activation_offloading "
    "average_tokens_across_devices remat scan_layers torch_empty_cache_steps use_cache",
    # shapes of batches; a checkpoint also records whether they are packed
    "packing row_length packed_attention max_shapes pad_to_multiple_of",
    # recorded as the size of the global batch, and as the tokenizer with its template and pad token
    "per_device_train_batch_size total_batch_size chat_template_path pad_token trust_remote_code",
)
MAY_CHANGE_ON_RESUME = frozenset(" ".join(_NAMES).split()) | REMOVED.keys()
