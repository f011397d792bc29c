"""RewardConfig, at the path that it has in TRL."""

from ..config.reward_config import RewardConfig

__all__ = ["RewardConfig"]
