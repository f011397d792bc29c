"""Process rewards: models that judge each step of a solution."""

from .prm_config import PRMConfig
from .prm_trainer import PRMTrainer

__all__ = ["PRMConfig", "PRMTrainer"]
