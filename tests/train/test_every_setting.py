"""Every setting is applied, rejected, or listed in a guide."""

from collections.abc import Callable
from pathlib import Path

import every_setting
import pytest


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", every_setting.CHECKS)
def test_every_setting_is_applied_rejected_or_listed(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)
