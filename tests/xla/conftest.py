"""The fixtures of every test on PyTorch/XLA."""

from device_fixtures import config, model_folder

__all__ = ["config", "model_folder"]
