"""Settings that PyTorch/XLA cannot honor are refused, each with the way out; a default config has none of them."""

from pathlib import Path
from typing import Any

import pytest

from trl_tpu import RewardConfig
from trl_tpu.config.checks import OPTIMIZER_LIMITS, XLA_LIMITS, check_xla_limits

LIMITED: dict[str, Any] = dict.fromkeys(XLA_LIMITS, True) | {
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": {"dp_replicate_size": 2},
    "include_num_input_tokens_seen": "all",
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 10,
}


@pytest.fixture
def args(tmp_path: Path) -> RewardConfig:
    """Asks for nothing special, until a test sets more."""
    return RewardConfig(str(tmp_path))


def test_the_default_config_is_within_the_limits(args: RewardConfig) -> None:
    check_xla_limits(args)


@pytest.mark.parametrize("setting", LIMITED)
def test_a_setting_that_xla_cannot_honor_is_refused_with_the_way_out(setting: str, args: RewardConfig) -> None:
    setattr(args, setting, LIMITED[setting])
    with pytest.raises(ValueError) as caught:
        check_xla_limits(args)
    said = f"{setting}={LIMITED[setting]!r} is impossible on PyTorch/XLA: {XLA_LIMITS[setting]}."
    assert str(caught.value) == said


def test_so_are_optimizers_by_what_is_in_their_names(args: RewardConfig) -> None:
    for optimizer, instead in zip(
        ("adamw_torch_fused", "paged_adamw_8bit", "adalomo"), OPTIMIZER_LIMITS.values(), strict=True
    ):
        args.optim = optimizer
        with pytest.raises(ValueError) as caught:
            check_xla_limits(args)
        assert str(caught.value) == f"optim={optimizer!r} is impossible on PyTorch/XLA: {instead}."
