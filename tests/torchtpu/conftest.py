"""These tests need TorchTPU on XLA's CPU plugin, in the environment created by `make torchtpu-check`."""

import os
from importlib.util import find_spec

import pytest

IS_THERE = find_spec("torch_tpu") is not None and "PJRT_CPU_PLUGIN" in os.environ
if IS_THERE:
    import torchtpu_device  # noqa: F401  # before trl_tpu looks for a device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_THERE:
        for item in items:
            if "tests/torchtpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="TorchTPU is not set up: make torchtpu-check"))
