"""What is planned: a model, a slice, how it is used, and the batches of a step."""

from dataclasses import dataclass

from ..parallel.mesh import MeshShape
from ..parallel.sharding_plan import Placement
from .analytic import ModelShape
from .chips import Topology
from .lengths import PairLengths


@dataclass(frozen=True)
class Case:
    """One way to train, on one slice.

    Args:
        placements: Where each of the model's weights goes on ``mesh``, by name.
        pairs: In one pass, of all chips together.
        rows: Packed rows of a pass, of all chips together.
        length: Columns of a row.
        lengths: The pairs of one pass, as far as they are known.
        compute_bytes: Of a number in matrix products: 2 for bfloat16.
        optim: The optimizer, by transformers' name.
        accumulation: Passes a step.
        masks: Whether attention keeps a score for each query and key.
    """

    topology: Topology
    mesh: MeshShape
    model: ModelShape
    placements: dict[str, Placement]
    pairs: int
    rows: int
    length: int
    lengths: PairLengths
    remat: str = "full"
    compute_bytes: int = 2
    optim: str = "adamw_torch"
    accumulation: int = 1
    masks: bool = False

    @property
    def columns_per_part(self) -> int:
        """Tokens, padding among them, of each part of the batch, which the chips of a `tensor` axis share."""
        return -(-self.rows // self.mesh.batch_shards) * self.length

    def __str__(self) -> str:
        return f"mesh {self.mesh}, remat {self.remat}, {self.pairs} pairs in {self.rows} rows of {self.length}"


__all__ = ["Case"]
