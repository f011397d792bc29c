"""The pairwise loss and its gradients equal a float64 computation of the formula; a margin is its own pair's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_tpu.modeling.losses import pairwise_losses
from trl_tpu.modeling.rewards import PairBatch

rewards = st.floats(-30, 30, width=32)
pairs = st.lists(st.tuples(rewards, rewards, st.floats(-5, 5, width=32)), min_size=1, max_size=9)
coefficients = st.sampled_from([None, 0.0, 0.01, 0.5])


def formula(rewards_P2: np.ndarray, margin_P: np.ndarray, coefficient: float | None) -> np.ndarray:
    """-log sigmoid(chosen - rejected - margin) + c (chosen + rejected)^2, in float64."""
    chosen, rejected = rewards_P2.T
    return np.logaddexp(0.0, rejected + margin_P - chosen) + (coefficient or 0.0) * (chosen + rejected) ** 2


@given(pairs, coefficients)
def test_losses_are_the_formula(values: list[tuple[float, float, float]], coefficient: float | None) -> None:
    table = np.array(values, dtype=np.float64)
    table_t = torch.tensor(values, dtype=torch.float32)
    with_margin = pairwise_losses(table_t[:, :2], table_t[:, 2], coefficient)
    assert with_margin.shape == (len(values),)
    np.testing.assert_allclose(with_margin, formula(table[:, :2], table[:, 2], coefficient), rtol=1e-5, atol=1e-5)
    without = pairwise_losses(table_t[:, :2], None, coefficient)
    np.testing.assert_allclose(without, formula(table[:, :2], np.zeros(len(table)), coefficient), rtol=1e-5, atol=1e-5)


@given(pairs, coefficients)
def test_gradients_are_the_formulas(values: list[tuple[float, float, float]], coefficient: float | None) -> None:
    table = torch.tensor(values, dtype=torch.float32)
    rewards_P2 = table[:, :2].clone().requires_grad_()
    pairwise_losses(rewards_P2, table[:, 2], coefficient).sum().backward()
    chosen, rejected, margin = table.double().numpy().T
    wrong = 1 / (1 + np.exp(chosen - rejected - margin))  # the probability given to the wrong order
    centering = 2 * (coefficient or 0.0) * (chosen + rejected)
    expected = np.stack([centering - wrong, centering + wrong], axis=1)
    assert rewards_P2.grad is not None
    np.testing.assert_allclose(rewards_P2.grad, expected, rtol=1e-5, atol=1e-5)


def test_large_differences_neither_overflow_nor_vanish() -> None:
    losses = pairwise_losses(torch.tensor([[1000.0, -1000.0], [-1000.0, 1000.0]]))
    assert losses.tolist() == [0.0, 2000.0]


def test_each_margin_counts_for_its_own_pair_only() -> None:
    rewards_P2 = torch.tensor([[1.0, 0.0], [2.0, 5.0], [0.5, 0.5]])
    plain = pairwise_losses(rewards_P2)
    for pair in range(3):
        margin_P = torch.zeros(3)
        margin_P[pair] = 2.0
        losses = pairwise_losses(rewards_P2, margin_P)
        assert losses.shape == (3,)
        assert (losses != plain).tolist() == [index == pair for index in range(3)]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    ids = torch.ones(2 * len(values), 1, dtype=torch.long)
    return PairBatch(ids, ids, {}, mask, 2, True).mean(values)


def test_the_mean_is_over_the_pairs_that_the_mask_keeps() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 100.0], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    assert masked_mean(values, mask | True).item() == pytest.approx(107 / 4)
    mean = masked_mean(values, mask)
    assert mean.item() == pytest.approx(2.5)
    mean.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_a_pair_that_is_masked_out_cannot_spoil_the_mean_or_another_pairs_gradient() -> None:
    rewards_P2 = torch.tensor([[1.0, 0.0], [float("nan"), 0.0], [float("inf"), 0.0]], requires_grad=True)
    mask = torch.tensor([True, False, False])
    loss = masked_mean(pairwise_losses(rewards_P2), mask)
    assert loss.item() == pytest.approx(np.log1p(np.exp(-1)))
    loss.backward()
    assert rewards_P2.grad is not None
    assert torch.isfinite(rewards_P2.grad[0]).all()


def test_no_pair_at_all_gives_zero() -> None:
    assert masked_mean(torch.tensor([3.0]), torch.tensor([False])).item() == 0.0
