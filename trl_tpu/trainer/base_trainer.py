"""`_BaseTrainer` at TRL's module path: an alias of `RewardTrainer`."""

from .reward_trainer import RewardTrainer as _BaseTrainer  # noqa: F401
