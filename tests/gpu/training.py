"""Run the tests of training that also hold on a GPU, with one process or with two on the same GPU.

They compare losses, metrics and rewards with TRL, transformers, padded rows, one process and formulas, up to rounding
of float32. Other tests assume a CPU: they compare bits, which sums on a GPU change from run to run, or say nothing
about a device.
"""

import sys
from typing import Any

import pytest

from . import IS_DRY, row

MESH = "train/test_ranks.py::test_mesh_over_processes_equals_one_process"
EQUALS_TRL = "unit/test_numbers_equal_trl.py::test_every_logged_value_equals_trls"
TESTS = [
    *(f"{MESH}[{way}]" for way in ("fsdp=2", "padded", "bf16", "adapters")),
    *(f"{EQUALS_TRL}[plain torch, {pairs} pairs, packed]" for pairs in ("made up", "margins", "settings")),
    "train/test_evaluation.py::test_evaluation_card_score_and_report_agree",
    "train/test_nonfinite.py::test_log_without_a_finite_step_has_no_loss",
    "train/test_nonfinite.py::test_nonfinite_steps_stop_the_run_in_every_dtype",
    "train/test_nonfinite.py::test_three_nonfinite_steps_in_a_row_stop_the_run",
    "train/test_other_models.py::test_other_models_never_run_ours",
    "train/test_own_loop.py::test_steps_return_the_metrics_of_their_batches",
    "train/test_process_rewards.py::test_packed_and_padded_training_equal_transformers",
    "train/test_rankings.py::test_labeled_answers_are_evaluated_and_scored",
    "train/test_rankings.py::test_losses_equal_the_formula",
    "train/test_rankings.py::test_packed_training_equals_padded",
    "train/test_saves_and_resumes.py::test_best_models_config_has_its_own_reward_scale",
    "train/test_settings.py::test_frozen_parameters_stay_fixed_and_are_saved_and_resumed",
]


class Rows:
    """Prints a row for each test."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            result = f"{report.longrepr or f'{report.duration:.1f} s'}".splitlines()[-1][:200]
            row(report.nodeid.rpartition("/")[2], result, None if report.skipped else report.passed)


if __name__ == "__main__":
    words = ["-k", "equal_the_formula"] if IS_DRY else ["-n", "8", "--dist", "loadfile"]
    sys.exit(pytest.main(["-q", *words, *(f"tests/{test}" for test in TESTS)], plugins=[Rows()]))
