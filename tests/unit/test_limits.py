"""Settings that are not honored, anywhere or on XLA, are refused with the way out; a default config has none."""

from pathlib import Path

import pytest
from every_setting import ASKED

from trl_tpu import RewardConfig
from trl_tpu.config.checks import LIMITS, XLA_LIMITS, check_limits

ALL = LIMITS | XLA_LIMITS


@pytest.fixture
def args(tmp_path: Path) -> RewardConfig:
    """Asks for nothing special, until a test sets more."""
    return RewardConfig(str(tmp_path))


def test_the_default_config_is_within_the_limits(args: RewardConfig) -> None:
    check_limits(args, ALL, "refused")


@pytest.mark.parametrize("key", ALL)
def test_a_setting_that_cannot_be_honored_is_refused_with_the_way_out(key: str, args: RewardConfig) -> None:
    setting = key.partition("=")[0]
    setattr(args, setting, ASKED[key])
    with pytest.raises(ValueError) as caught:
        check_limits(args, ALL, "refused")
    assert str(caught.value) == f"{setting}={ASKED[key]!r} is refused: {ALL[key]}."
