"""TRL's path for the class that its trainers share, which here is the reward trainer itself."""

from .reward_trainer import RewardTrainer

_BaseTrainer = RewardTrainer
