"""These tests need libtpu and jax, which can compile for a TPU without a TPU."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("torch_xla", "jax", "libtpu") if importlib.util.find_spec(name) is None]
    for item in items if missing else ():
        if "tests/tpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)}: not installed"))
