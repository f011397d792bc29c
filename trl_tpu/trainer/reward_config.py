"""`RewardConfig` at TRL's module path."""

from ..config.reward_config import RewardConfig

__all__ = ["RewardConfig"]
