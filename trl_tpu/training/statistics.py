"""Statistics of training steps: summed on the device, read once per log."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from accelerate import Accelerator

from ..evaluation.evaluate import COUNTS, SUMS, RewardSums, sums_of
from ..evaluation.verdict import Verdict
from ..modeling.head_spec import RewardScale
from ..packing.batch import Comparisons
from ..parallel.mesh import GiB, peak_flops_of
from ..runtime import Runtime
from .optimizer import bare
from .stopping import over_processes

_SAMPLE = 512  # pairs; the scale of rewards is measured on the last ones
_CARRY = 2**30  # tokens: int32 holds too few for long log intervals, and TPUs have no int64
_PARTS_OF_COUNTS = (len(COUNTS), 2, 4)  # tokens are two digits of base `_CARRY`; the steps are `StepCounts`
_PARTS_OF_SUMS = (len(SUMS), 1, 1, 1)  # the lowest reward, the highest one, the loss


@dataclass(frozen=True)
class StepCounts:
    """Steps since the last log."""

    taken: int = 0
    nonfinite: int = 0
    in_a_row: int = 0  # nonfinite steps up to the last one, also those before the last log
    reached_at: int = 0  # the step, the first being 1, at which `in_a_row` reached the limit; 0 if it did not


class StepStatistics:
    """Sums over training steps: loss, rewards, tokens, nonfinite steps and time.

    They are one int32 and one float32 vector on the device. Steps add to them without reading anything; a log fetches
    and resets them. They are never scalars, since XLA would bake a scalar 0 into the program and compile the step anew
    after every log.

    Steps with a nonfinite loss or gradient are counted, and their updates skipped. Such a step counts as one for the
    learning rate's schedule, logs and saves; its loss and rewards are left out.

    Args:
        runtime: Of the device.
        device: Holds the sums.
        accelerator: Of the processes that train together; None for this process alone.
        nonfinite_limit: Number of consecutive nonfinite steps that is too many; 0 turns counting and skipping off.
        attribute_weights: Weights of several attributes in the reward that is measured.
        work_of_a_pair: Operations of an average training pair: tokens that its answers share count once, padding
            never. See `trl_tpu.modeling.model_shape`. None if unknown.
    """

    device_counts: torch.Tensor
    """int32: `COUNTS`, tokens, `StepCounts`."""
    device_sums: torch.Tensor
    """float32: `SUMS`, the lowest and highest reward, the loss up to the last finite step."""

    def __init__(
        self,
        runtime: Runtime,
        device: torch.device,
        accelerator: Accelerator | None = None,
        *,
        nonfinite_limit: int = 0,
        attribute_weights: Sequence[float] = (),
        work_of_a_pair: float | None = None,
    ) -> None:
        self._runtime, self._device, self._accelerator = runtime, device, accelerator
        self.limit, self.attribute_weights = nonfinite_limit, attribute_weights
        self._work = work_of_a_pair
        self.judges_steps = True
        """Whether nonfinite steps are faults: a float16 loss scale finds its size by them."""
        self.num_tokens = 0  # in all batches up to the last read, over resumes
        self.evaluated: RewardScale | None = None
        """Mean and deviation of rewards in the last evaluation."""
        self.verdicts: dict[str, Verdict] = {}
        """The verdict of the last evaluation, by the prefix of its metrics."""
        self._windows: deque[RewardSums] = deque()  # between two logs each
        self._load(RewardSums(), StepCounts())
        self.start(0, [])

    @property
    def skips_nonfinite(self) -> bool:
        """Whether nonfinite steps are counted and skipped."""
        return self.judges_steps and self.limit > 0

    def _to_device(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return self._runtime.to_device(torch.tensor(values, dtype=dtype), self._device)

    def _load(self, rewards: RewardSums, steps: StepCounts, loss: float = 0.0) -> None:
        counts = [*(getattr(rewards, name) for name in COUNTS), *divmod(rewards.tokens, _CARRY), *astuple(steps)]
        sums = [*(getattr(rewards, name) for name in SUMS), rewards.lowest, rewards.highest, loss]
        self.device_counts = self._to_device(counts, torch.int32)
        self.device_sums = self._to_device(sums, torch.float32)

    def loss_sum(self, value: float = 0.0) -> torch.Tensor:
        """Return a sum of losses to begin with, [1]."""
        return self._to_device([value], torch.float32)

    def read(self) -> RewardSums:
        """Read the open sums of this process."""
        return _rewards_in(*self._runtime.fetch([self.device_counts, self.device_sums]))

    def tokens_so_far(self) -> int:
        """Return how many tokens training has seen. All processes take part."""
        return self.num_tokens + sum(over_processes(self._accelerator, self.read().tokens))

    # ---- a run

    def start(self, step: int, parts: Sequence[Mapping[str, Any]]) -> float:
        """Begin a run, or go on after ``step`` from ``parts``: the `state` of each process that saved.

        Returns:
            The open sum of losses.
        """
        index, count = (0, 1) if (of := self._accelerator) is None else (of.process_index, of.num_processes)
        saved = [RewardSums.of_saved(part["metrics"]["open"]) for part in parts]
        self._before, self._step = sum(saved, RewardSums()), step  # the next log counts them, its rates do not
        self._seconds, self._since = 0.0, time.monotonic()
        self.evaluated = None
        self._windows.clear()
        self._losses_1 = self.loss_sum()  # the step's, finite only if all its losses are
        self.is_finite_1 = self._to_device([True], torch.bool)
        """Whether the last step was finite."""
        self.nonfinite = 0
        """Nonfinite steps of this run up to the last log."""
        if not parts:
            self._load(self.read(), StepCounts())
            return 0.0
        same_count = len(parts) == count
        own = [parts[index]] if same_count else parts
        rewards = saved[index] if same_count else self._before if index == 0 else RewardSums()
        steps, loss = StepCounts(**own[0]["nonfinite"]), sum(part["open_loss"] for part in own) / len(own)
        self.num_tokens, self.nonfinite = parts[0]["metrics"]["num_tokens"], -steps.nonfinite
        self._load(rewards, steps, loss)
        return loss

    def state(self, loss_sum_1: torch.Tensor) -> list[dict[str, Any]]:
        """Return what each process has added up since the last log: the parts for `start`."""
        loss, counts, sums = self._runtime.fetch([loss_sum_1, self.device_counts, self.device_sums])
        own = {
            "metrics": {"num_tokens": self.num_tokens, "open": vars(_rewards_in(counts, sums))},
            "open_loss": loss.item(),
            "nonfinite": vars(_steps_in(counts)),
        }
        return over_processes(self._accelerator, own)

    # ---- a step

    @torch.no_grad()
    def update(self, rewards_SA: torch.Tensor, tokens_S: torch.Tensor, table: Comparisons[torch.Tensor]) -> None:
        """Add the rewards of a batch, with at most 2**30 tokens."""
        if self._accelerator is None or self._runtime.counts_pairs():
            add, vectors = self._runtime.compiled(_added), (self.device_counts, self.device_sums)
            settings = self.limit > 0, self.attribute_weights
            self.device_counts, self.device_sums = add(
                *vectors, rewards_SA.detach().float(), tokens_S, table, *settings
            )

    def means(self) -> dict[str, torch.Tensor]:
        """Return the means and extremes of the open sums as scalars on the device, by the names of `RewardSums`."""
        (_, comparisons, answers), *_ = self.device_counts.split(_PARTS_OF_COUNTS)
        (correct, ties, margin, reward, _), (lowest,), (highest,), _ = self.device_sums.split(_PARTS_OF_SUMS)
        means = {"accuracy": correct / comparisons, "margin": margin / comparisons, "tie_rate": ties / comparisons}
        return means | {"min_reward": lowest, "mean_reward": reward / answers, "max_reward": highest}

    @torch.no_grad()
    def see_loss(self, loss: torch.Tensor) -> None:
        """Note the loss, a scalar, of one of the step's micro-batches."""
        if self.skips_nonfinite:
            self._losses_1 = self._losses_1 + loss

    @torch.no_grad()
    def end_step(self, gradient_norm: torch.Tensor | float, loss_sum_1: torch.Tensor, optimizer: Any) -> torch.Tensor:
        """Find out whether the step, whose update comes next, is finite: by its losses and its gradient's norm.

        Returns:
            The sum of losses, without this step's if it is not finite.
        """
        if not self.skips_nonfinite:
            return loss_sum_1
        finite_1 = torch.isfinite(self._losses_1 + torch.as_tensor(gradient_norm, device=self._device))
        self._losses_1 = torch.zeros_like(self._losses_1)
        if self._accelerator is not None and self._accelerator.num_processes > 1:  # each has a loss of its own
            finite_1 = self._accelerator.reduce((~finite_1).int()) == 0
        *counts, steps_4 = self.device_counts.split(_PARTS_OF_COUNTS)
        *sums, loss_1 = self.device_sums.split(_PARTS_OF_SUMS)
        loss_1 = torch.where(finite_1, loss_sum_1, loss_1)
        self.device_counts = torch.cat([*counts, _counted(steps_4, finite_1, self.limit)])
        self.device_sums = torch.cat([*sums, loss_1])
        self.is_finite_1 = finite_1
        self._runtime.skip_update_unless(finite_1[0], bare(optimizer))
        return loss_1

    def pause(self) -> None:
        """Stop the clock: evaluations and saves are no training time, compilations are."""
        self._seconds += time.monotonic() - self._since

    def resume(self) -> None:
        """Let the clock run again."""
        self._since = time.monotonic()

    # ---- a log

    def close(
        self,
        loss_sum_1: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        learning_rate: float,
        step: int,
        steps: int,
    ) -> tuple[dict[str, float], float, StepCounts]:
        """Read the sums since the last log, ``steps`` before ``step``, and reset them.

        Args:
            grad_norm: Of the last step; None after an epoch without a step.

        Returns:
            What is logged, the sum of the interval's losses, and its steps.
        """
        norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
        loss, norm, *vectors = self._runtime.fetch([loss_sum_1, norm, self.device_counts, self.device_sums])
        everyone = over_processes(self._accelerator, (loss.item(), _rewards_in(*vectors)))
        loss_sum = sum(loss for loss, _ in everyone) / len(everyone)
        rewards = sum((each for _, each in everyone), RewardSums())
        counted = self._reset(vectors[0], RewardSums())
        finite = steps - counted.nonfinite
        logs = {"loss": loss_sum / finite} if finite else {}
        if grad_norm is not None and not counted.in_a_row:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = learning_rate
        self.num_tokens += rewards.tokens
        if self.num_tokens:  # a loss of the user's counts none
            logs["num_tokens"] = self.num_tokens
        logs |= rewards.metrics() | self._rates(rewards, step)
        self._windows.append(rewards)
        while sum(each.pairs for each in self._windows) - self._windows[0].pairs >= _SAMPLE:
            self._windows.popleft()
        if (programs := self._runtime.compile_count()) is not None:
            logs["compiled_programs"] = programs
        if (memory := self._runtime.most_memory(self._device)) is not None:
            logs["memory_gib"] = memory / GiB
        if self.skips_nonfinite:
            logs["nonfinite"] = counted.nonfinite
        return logs, loss_sum, counted

    def close_steps(self, loss_sum_1: torch.Tensor) -> tuple[float, StepCounts]:
        """Read the sum of losses and the steps since the last log, when no step is left. Rewards stay for later."""
        loss, *vectors = self._runtime.fetch([loss_sum_1, self.device_counts, self.device_sums])
        return loss.item(), self._reset(vectors[0], _rewards_in(*vectors))

    def _reset(self, counts: torch.Tensor, rewards: RewardSums) -> StepCounts:
        """Count steps anew, and go on from the sums ``rewards``."""
        counted = _steps_in(counts)
        self.nonfinite += counted.nonfinite
        # after a stop a resumed run begins a row of its own
        self._load(rewards, StepCounts(in_a_row=0 if counted.reached_at else counted.in_a_row))
        return counted

    def _rates(self, sums: RewardSums, step: int) -> dict[str, float]:
        """Return the rates of the steps since the last log, up to ``step``."""
        self.pause()
        self.resume()
        seconds, self._seconds = self._seconds, 0.0
        pairs, tokens, steps = sums.pairs - self._before.pairs, sums.tokens - self._before.tokens, step - self._step
        self._before, self._step = RewardSums(), step
        if pairs <= 0 or seconds <= 0:
            return {}
        rates = {"pairs_per_second": pairs / seconds, "tokens_per_second": tokens / seconds}
        if steps > 0:
            rates["seconds_per_step"] = seconds / steps
        if self._work is not None:
            flops, peak = self._work * pairs / seconds, peak_flops_of(self._runtime.chip())
            rates["model_tflops_per_second"] = flops / 1e12
            if peak is not None:
                rates["mfu"] = flops / (peak * self._runtime.topology().devices)
        return rates

    def explain_stop(self, first: int, last: int, rows: Sequence[int] | None, weights: str) -> str:
        """Return the message of a stop after too many nonfinite steps, ``first`` to ``last``.

        Args:
            rows: Rows of the training dataset with the pairs of step ``first``; None if unknown.
            weights: Where the weights are, in a few words.
        """
        named = "not known by their rows" if rows is None else f"rows {rows[:16]} of the trainer's train_dataset"
        return (
            f"The loss or the gradient of {self.limit} steps in a row, {first} to {last}, was NaN or infinite "
            f"(nonfinite_limit={self.limit}). No update was taken from them: the weights are those after step "
            f"{first - 1} ({weights}). The pairs of step {first} are {named}. Look for faults in them and in the "
            "model's own weights, or lower learning_rate; nonfinite_limit=0 trains on without these checks."
        )

    # ---- the scale of rewards

    @property
    def scale(self) -> RewardScale | None:
        """Mean and deviation of rewards: in the last evaluation, else in the last logs with `_SAMPLE` pairs."""
        return self.evaluated or scale_of(sum(self._windows, RewardSums()), "the last pairs of training")


def _rewards_in(counts: torch.Tensor, sums: torch.Tensor) -> RewardSums:
    """Read the fetched vectors of `StepStatistics`."""
    pairs, (high, low), _ = counts.split(_PARTS_OF_COUNTS)
    totals, lowest, highest, _ = sums.split(_PARTS_OF_SUMS)
    rewards = RewardSums.read(pairs, totals, lowest, highest)
    rewards.tokens = int(high) * _CARRY + int(low)
    return rewards


def _steps_in(counts: torch.Tensor) -> StepCounts:
    return StepCounts(*counts.split(_PARTS_OF_COUNTS)[-1].tolist())


def _added(
    counts: torch.Tensor,
    sums: torch.Tensor,
    rewards_SA: torch.Tensor,
    tokens_S: torch.Tensor,
    table: Comparisons[torch.Tensor],
    finite_only: bool,
    attribute_weights: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the vectors of `StepStatistics` with the rewards of a batch added."""
    pairs, (high, low), steps_4 = counts.split(_PARTS_OF_COUNTS)
    totals, lowest_1, highest_1, loss_1 = sums.split(_PARTS_OF_SUMS)
    present_PK = (tokens_S > 0).unflatten(0, (-1, table.answers))
    if finite_only:  # all rewards of a row, or none
        are_finite_PK = torch.isfinite(rewards_SA).all(-1).view(present_PK.shape)
        present_PK = present_PK & (are_finite_PK | ~present_PK).all(-1, keepdim=True)
    before = pairs[COUNTS.index("answers")], totals[SUMS.index("reward")]
    added = sums_of(rewards_SA, present_PK.flatten(), table, attribute_weights, *before)
    low = low + tokens_S.sum(dtype=torch.int32)
    carry = (low >= _CARRY).int()
    tokens_2 = torch.stack([high + carry, low - carry * _CARRY])
    extremes = torch.minimum(lowest_1, added[2]), torch.maximum(highest_1, added[3])
    return torch.cat([pairs + added[0], tokens_2, steps_4]), torch.cat([totals + added[1], *extremes, loss_1])


def _counted(steps_4: torch.Tensor, finite_1: torch.Tensor, limit: int) -> torch.Tensor:
    """Return `StepCounts` with one more step."""
    failed = (~finite_1).int()
    taken, nonfinite, in_a_row, reached_at = steps_4.split(1)
    taken, nonfinite, in_a_row = taken + 1, nonfinite + failed, (in_a_row + 1) * failed
    reached_at = torch.where((reached_at == 0) & (in_a_row >= limit), taken, reached_at)
    return torch.cat([taken, nonfinite, in_a_row, reached_at])


def scale_of(sums: RewardSums, of: str) -> RewardScale | None:
    """Return the mean and the standard deviation of rewards; None where there are none, or all are alike.

    Args:
        sums: Sums over the rewards.
        of: What was rewarded, for the model card.
    """
    if not sums.answers:
        return None
    mean, variance = sums.reward / sums.answers, sums.deviations / sums.answers
    return RewardScale(mean, variance**0.5, sums.answers, of) if variance > 0 and sums.lowest < sums.highest else None
