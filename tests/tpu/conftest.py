"""These tests need libtpu and jax, which can compile for a TPU without a TPU."""

import pytest

from trl_tpu.plan.compile import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (reason := missing()) is not None:
        for item in items:
            if "tests/tpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
