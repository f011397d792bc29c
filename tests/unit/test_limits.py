"""Settings that PyTorch/XLA cannot honor are refused, each with the way out; a default config has none of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.training_args import OptimizerNames

from trl_tpu.config.checks import HOSTS_LIMITS, OPTIMIZER_LIMITS, XLA_LIMITS, check_xla_limits
from trl_tpu.trainer.reward_config import RewardConfig

LIMITED: list[tuple[str, Any, str]] = [
    ("fsdp", "full_shard", "mesh='fsdp=-1'"),
    ("deepspeed", {"zero_optimization": {"stage": 3}}, "mesh='fsdp=-1'"),
    ("parallelism_config", {"dp_replicate_size": 2}, "arrange the devices with mesh"),
    ("use_liger_kernel", True, "leave it out"),
    ("auto_find_batch_size", True, "set per_device_train_batch_size"),
    ("torch_compile", True, "leave it out"),
    ("fp16", True, "use bf16=True"),
    ("fp16_full_eval", True, "leave it out"),
    ("bf16_full_eval", True, "leave it out"),
    ("use_cpu", True, "PJRT_DEVICE=CPU"),
    ("optim", "adamw_torch_fused", "use optim='adamw_torch'"),
    ("optim", OptimizerNames.ADAMW_BNB, "use optim='adamw_torch'"),
    ("optim", "adalomo", "inside the backward pass"),
    ("include_num_input_tokens_seen", "all", "read num_tokens in the logs"),
    ("neftune_noise_alpha", 5.0, "USE_TORCH_XLA=0"),
    ("torch_empty_cache_steps", 10, "leave it out"),
]


@pytest.fixture
def defaults(tmp_path: Path) -> SimpleNamespace:
    """The values of a config that asks for nothing special."""
    return SimpleNamespace(**vars(RewardConfig(str(tmp_path))))


def test_every_limit_is_refused_in_a_test() -> None:
    assert {name for name, _, _ in LIMITED} == {*XLA_LIMITS, "optim"}
    optimizers = [getattr(value, "value", value) for name, value, _ in LIMITED if name == "optim"]
    hits = [[any(mark in name for mark in marks) for marks in OPTIMIZER_LIMITS] for name in optimizers]
    assert hits == [[row == column for column in range(3)] for row in range(3)]


@pytest.mark.parametrize(("setting", "value", "fix"), LIMITED)
def test_a_setting_that_xla_cannot_honor_is_refused_with_the_way_out(
    setting: str, value: Any, fix: str, defaults: SimpleNamespace
) -> None:
    setattr(defaults, setting, value)
    with pytest.raises(ValueError) as caught:
        check_xla_limits(defaults)
    message = str(caught.value)
    assert message.startswith(f"{setting}={getattr(value, 'value', value)!r} is impossible on PyTorch/XLA: ")
    assert fix in message


def test_the_default_config_is_within_the_limits(defaults: SimpleNamespace) -> None:
    check_xla_limits(defaults)


def test_what_one_host_can_do_alone_is_refused_on_several(defaults: SimpleNamespace) -> None:
    assert list(HOSTS_LIMITS) == ["enable_jit_checkpoint"]
    check_xla_limits(defaults, hosts=16)
    defaults.enable_jit_checkpoint = True
    check_xla_limits(defaults)
    with pytest.raises(ValueError, match="enable_jit_checkpoint=True is impossible on PyTorch/XLA on 16 hosts: "):
        check_xla_limits(defaults, hosts=16)
