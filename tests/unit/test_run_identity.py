"""A decision for every setting: does it change the run, so that `resume_from_checkpoint="auto"` stops?"""

from dataclasses import dataclass, fields

from trl_tpu import RewardConfig
from trl_tpu.config.resume import MAY_CHANGE_ON_RESUME
from trl_tpu.experimental.prm import PRMConfig


def _names(text: str) -> set[str]:
    return set(text.split())


#: Settings that change a run. Put a new field here, or into `MAY_CHANGE_ON_RESUME`.
CHANGES = _names("""
    accelerator_config adam_beta1 adam_beta2 adam_epsilon attribute_loss_weights attribute_weights attributes
    auto_find_batch_size average_over bf16 center_rewards_coefficient data_seed dataloader_drop_last
    dataloader_in_order deepspeed disable_dropout eos_token fp16 frozen_parameters full_determinism
    gradient_accumulation_steps group_by_prompt ignore_data_skip label_smoothing label_smoothing_factor
    learning_rate learning_rate_end length_column_name liger_kernel_config loss_type lr_scheduler_kwargs
    lr_scheduler_type margin_scale max_grad_norm max_length max_steps model_init_kwargs neftune_noise_alpha
    nonfinite_limit num_train_epochs optim optim_args optim_state_dtype optim_target_modules own_pad_token
    ranking_top_k remove_unused_columns restore_callback_states_from_checkpoint seed tf32 tie_threshold ties
    torch_compile torch_compile_backend torch_compile_mode train_sampling_strategy truncation_mode
    use_liger_kernel warmup_steps weight_decay
""")
OF_SOLUTIONS = _names("max_completion_length neutral_steps step_separator train_on_last_step_only")


def test_every_setting_has_a_decision() -> None:
    settings = {item.name for item in fields(PRMConfig)}
    assert settings - MAY_CHANGE_ON_RESUME == CHANGES | OF_SOLUTIONS
    assert settings >= MAY_CHANGE_ON_RESUME, "names of the table that no config has"


def test_settings_of_a_subclass_belong_to_the_run_unless_it_says_otherwise(tmp_path: object) -> None:
    @dataclass
    class Own(RewardConfig):
        temperature: float = 1.0
        note: str = ""
        may_change_on_resume = RewardConfig.may_change_on_resume | {"note"}

    settings = Own(str(tmp_path), temperature=2.0, model_init_kwargs={"token": "hf_secret"}).identifying_settings()
    assert settings["temperature"] == 2.0 and "note" not in settings and "hf_secret" not in str(settings)
