"""What is logged about rewards: sums and counts on the device, read once per log and divided on the host."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config.metric_names import REWARD_METRICS
from ..data.comparisons import Comparisons
from ..evaluation.reward_sums import COUNTS, SUMS, RewardSums, between, sums_of
from ..evaluation.verdict import Verdict
from ..modeling.engines import RewardScale, saved_scale, set_scale
from ..parallel.chips import peak_flops_of
from ..runtime import Runtime
from .throughput import Throughput

_SAMPLE = 512  # pairs, of which the last ones are the sample that rewards are measured on
_CARRY = 2**30  # tokens, of which a run may have more between two logs than int32 holds, and TPUs have no int64


def scale_of(sums: RewardSums, of: str) -> RewardScale | None:
    """Return the mean and the standard deviation of rewards; None where there are none, or all are alike.

    Args:
        sums: Over them.
        of: What they are rewards of, for the model card.
    """
    if not sums.answers:
        return None
    mean, variance = sums.reward / sums.answers, sums.deviations / sums.answers
    return RewardScale(mean, variance**0.5, sums.answers, of) if variance > 0 and sums.lowest < sums.highest else None


class AddedMetrics(defaultdict[str, list[float]]):
    """What a subclass adds up of its steps, by name; of names that are logged anyway it finds the last step's value.

    Args:
        read_last: Returns what is logged anyway of the last step alone, for which it stops the device.
    """

    def __init__(self, read_last: Callable[[], Mapping[str, float]]) -> None:
        super().__init__(list)
        self._read_last = read_last

    def __missing__(self, name: str) -> list[float]:
        last = self._read_last() if name in ("num_tokens", *REWARD_METRICS) else {}
        return [last[name]] if name in last else super().__missing__(name)


class RewardMetrics:
    """Adds up a training run's rewards on the device without stopping it.

    `update` only records operations, and reads nothing. The sums are vectors, since XLA would bake a scalar 0 into the
    program and compile the step anew after every log.

    Args:
        skips_nonfinite: Whether rewards that are not finite are left out, as the steps that have them are.
    """

    device_sums: list[torch.Tensor]
    """The open sums; fetched, they are what `on_host` reads."""

    def __init__(self, runtime: Runtime, device: torch.device, skips_nonfinite: bool = False) -> None:
        self._runtime, self._device, self._skips_nonfinite = runtime, device, skips_nonfinite
        self.attribute_weights: tuple[float, ...] = ()
        """Of several attributes, how their rewards make the one that is measured."""
        self.work_of_a_pair: float | None = None
        """Operations that an average pair of the training data needs, where that is known."""
        self.throughput = Throughput()
        self.num_tokens = 0  # in all batches up to the last read, over resumes
        self.evaluated: RewardScale | None = None
        """How large rewards were in the last evaluation."""
        self.verdicts: dict[str, Verdict] = {}
        """The verdict of the last evaluation, by the prefix of its metrics."""
        self._windows: deque[RewardSums] = deque()  # between two logs each
        self._load(RewardSums())

    def _load(self, sums: RewardSums) -> None:
        def to_device(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return self._runtime.to_device(torch.tensor(values, dtype=dtype), self._device)

        self.device_sums = [
            to_device([getattr(sums, name) for name in COUNTS], torch.int32),
            to_device(list(divmod(sums.tokens, _CARRY)), torch.int32),
            to_device([getattr(sums, name) for name in SUMS], torch.float32),
            to_device([sums.lowest], torch.float32),
            to_device([sums.highest], torch.float32),
        ]

    @torch.no_grad()
    def update(self, rewards_SA: torch.Tensor, tokens_S: torch.Tensor, table: Comparisons[torch.Tensor]) -> None:
        """Add the rewards of a batch, with at most 2**30 tokens."""
        if not self._runtime.counts_pairs:
            return
        add = self._runtime.compiled(_added)
        rewards_SA = rewards_SA.detach().float()
        settings = self._skips_nonfinite, self.attribute_weights
        self.device_sums = add(self.device_sums, rewards_SA, tokens_S, table, *settings)

    def start(self, step: int, parts: Sequence[Mapping[str, Any]], index: int, count: int) -> None:
        """Begin a run, or go on after ``step`` from ``parts``: the state that each process had saved.

        Args:
            index: Of this process, of which there may be another ``count`` now: then the first takes all sums.
        """
        everyone = [RewardSums(**_renamed(part["open"])) for part in parts]
        before, peak = sum(everyone, RewardSums()), peak_flops_of(self._runtime.chip())
        peak = None if peak is None else peak * self._runtime.topology().devices
        self.throughput.start(self.work_of_a_pair, peak, before, step)
        self.evaluated = None
        self._windows.clear()
        if parts:
            self.num_tokens = parts[0]["num_tokens"]
            self._load(everyone[index] if len(parts) == count else before if index == 0 else RewardSums())

    def tokens_so_far(self, fetched: Sequence[list[torch.Tensor]]) -> int:
        """Return how many tokens training has seen, those since the last log in ``fetched``, of each process."""
        return self.num_tokens + sum(on_host(sums).tokens for sums in fetched)

    def close(self, fetched: Sequence[list[torch.Tensor]], step: int) -> dict[str, float]:
        """Return what is logged of the open sums of each process, and start anew."""
        sums = sum(map(on_host, fetched), RewardSums())
        self.num_tokens += sums.tokens
        self._windows.append(sums)
        while sum(each.pairs for each in self._windows) - self._windows[0].pairs >= _SAMPLE:
            self._windows.popleft()
        self._load(RewardSums())
        counted = {"num_tokens": self.num_tokens} if self.num_tokens else {}  # a loss of the user's counts none
        return {**counted, **sums.metrics(), **self.throughput.close(sums, step)}

    @property
    def scale(self) -> RewardScale | None:
        """How large rewards were: of the last evaluation, else of the last logs that have `_SAMPLE` pairs together."""
        return self.evaluated or scale_of(sum(self._windows, RewardSums()), "the last pairs of training")

    def note_best(self, model: Any, folder: str) -> None:
        """Take the rewards' mean and deviation of the best ``model``, as saved in ``folder``, into its config."""
        self.evaluated = saved_scale(folder)
        set_scale(model.config, self.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to log the same numbers: the open sums and the tokens so far."""
        return {"num_tokens": self.num_tokens, "open": vars(on_host(self._runtime.fetch(self.device_sums)))}


def _renamed(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved sums by today's names: older checkpoints knew only pairs, and squares about 0."""
    found = {"comparisons": sums["pairs"], "answers": 2 * sums["pairs"], **sums}
    if "squares" in found:
        found["deviations"] = max(found.pop("squares") - sums["reward"] ** 2 / max(found["answers"], 1), 0.0)
    return found


def _added(
    sums: list[torch.Tensor],
    rewards_SA: torch.Tensor,
    tokens_S: torch.Tensor,
    table: Comparisons[torch.Tensor],
    finite_only: bool,
    attribute_weights: Sequence[float],
) -> list[torch.Tensor]:
    """Return `RewardMetrics.device_sums` with those of a batch."""
    counts, (high, low), totals, lowest, highest = sums[0], sums[1].unbind(), *sums[2:]
    is_there_S = tokens_S > 0
    if finite_only:  # all rewards of a row, or none
        are_finite_S = torch.isfinite(rewards_SA).all(-1) | ~is_there_S
        are_finite_P1 = are_finite_S.unflatten(0, (-1, table.answers)).all(-1, keepdim=True)
        is_there_S = is_there_S & are_finite_P1.expand(-1, table.answers).flatten()
    added = sums_of(rewards_SA, is_there_S, table, attribute_weights)
    answers, reward = COUNTS.index("answers"), SUMS.index("reward")
    apart = between(counts[answers].float(), totals[reward], added[0][answers].float(), added[1][reward])
    totals = totals + added[1]
    totals = torch.cat([totals[:-1], totals[-1:] + apart])  # deviations are last
    low = low + tokens_S.sum(dtype=torch.int32)
    carry = (low >= _CARRY).int()
    tokens_2 = torch.stack([high + carry, low - carry * _CARRY])
    return [counts + added[0], tokens_2, totals, torch.minimum(lowest, added[2]), torch.maximum(highest, added[3])]


def on_host(fetched: list[torch.Tensor]) -> RewardSums:
    """Read fetched `RewardMetrics.device_sums`."""
    counts, (high, low), *others = fetched
    sums = RewardSums.read(counts, *others)
    sums.tokens = int(high) * _CARRY + int(low)
    return sums
