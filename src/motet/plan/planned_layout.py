"""A layout as the planner reads it: all dimensions, also the ones that motet cannot run yet."""

from dataclasses import dataclass, fields
from typing import Literal

from motet.core.errors import check_input
from motet.models.spec.layer_specs import BlockPolicy

# What backward computes again. `selective` keeps the results of products with weights. The other parts are those of
# vendors: `attention` is the core attention alone, `activations` norms and activation functions, `up-projections` the
# products of latent attention that widen its short vectors.
Recompute = Literal[
    "none", "selective", "full", "attention", "activations", "up-projections", "activations and up-projections"
]

POLICY_OF_BLOCKS: dict[Recompute, BlockPolicy] = {"none": "none", "selective": "selective", "full": "full"}


@dataclass(frozen=True)
class PlannedLayout:
    """The sizes of all dimensions, and what each of them does."""

    dp: int = 1
    zero: int = 0
    shard_group: int | None = None  # Ranks of dp that hold one copy of what is sharded; all if None
    reshard_after_forward: bool = True  # Stage 3
    reduce_gradients: Literal["microbatch", "step"] = "microbatch"  # When stages 2 and 3 reduce them
    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: Literal["ring", "all-to-all", "all-gather"] = "ring"
    pp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    stages: str | None = None  # Blocks of each stage, such as "0-3,4-7"
    ep: int = 1  # Ranks of dp and cp
    expert_tp: int = 1  # Ranks of tp that split each expert
    microbatches: int = 1  # Of a rank of dp in a step
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "chunks", "ep", "expert_tp", "microbatches"):
            value = getattr(self, name)
            check_input(value >= 1, f"{name} = {value} in a layout: give 1 or more")
        experts = self.dp * self.cp * self.tp // self.expert_tp
        message = f"ep = {self.ep} does not divide the {experts} ranks of data, context and tensor parallelism"
        check_input(experts % self.ep == 0, f"{message}; choose a divisor of it")

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of what is sharded: of data and context parallelism."""
        return (self.shard_group or self.dp) * self.cp

    def __str__(self) -> str:
        """Its settings that differ from the defaults, in the grammar of `[layout]`."""
        always = ("dp", "zero", "microbatches")  # A job's layout without them has other values
        values = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        words = (f"{name}={str(v).lower()}" for name, v, default in values if v != default or name in always)
        return " ".join(words)
