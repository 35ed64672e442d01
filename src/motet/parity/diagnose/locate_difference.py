"""Where a tensor differs: on which ranks, in which elements, and in what numbers that could be told."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from motet.parity.compare.align_with_reference import AlignedTensorPair, ReferenceTensor, join_numbers
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    elementwise_difference,
    group_by_key,
    relative_distance,
    size_floor,
)
from motet.parity.diagnose.linear_fit import TARGET_TOKENS
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.layout_verdict import DifferenceAtStep
from motet.parity.record.random_sign_sketch import sketch_shard
from motet.parity.record.tensor_recorder import RecordedTensor

ShardSelector = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DifferenceLocator:
    """One difference."""

    recompute: SingleDeviceRecompute
    records_by_rank: Sequence[Sequence[RecordedTensor]]
    step_difference: DifferenceAtStep
    reference: ReferenceStep
    reference_tensor: ReferenceTensor
    pairs: Sequence[AlignedTensorPair]

    def _relative_error(self, pair: AlignedTensorPair) -> float:
        return relative_distance(pair.value, pair.expected, size_floor(self.reference, self.reference_tensor.key, pair))

    @cached_property
    def _worst_pair(self) -> AlignedTensorPair:
        return max(self.pairs, key=self._relative_error)

    @cached_property
    def _wrong_pairs(self) -> list[AlignedTensorPair]:
        return [part for part in self.pairs if self._relative_error(part) > self.step_difference.difference.bound]

    def _location_text(self) -> str:
        """On which ranks, and where in the tensor, if not on all and everywhere."""
        ranks = sorted({part.rank for part in self._wrong_pairs if part.rank is not None})
        all_ranks = {part.rank for part in self.pairs if part.value.numel()}
        text = (
            f", on rank{'s' * (len(ranks) > 1)} {join_numbers(ranks)} alone" if 0 < len(ranks) < len(all_ranks) else ""
        )
        differing_slice = self._differing_slice
        if differing_slice is not None and self._worst_pair.record is not None:
            shard_start = self._worst_pair.record.start
            first, last = shard_start + differing_slice.start, shard_start + differing_slice.stop - 1
            element_text = f"element {first}" if first == last else f"elements {first} to {last}"
            text += f", in {element_text} of {self.reference_tensor.value.numel()}{self._owner_text(first, last)}"
        return text

    @cached_property
    def _differing_slice(self) -> slice | None:
        """Where it differs, if that is a part of what the rank has."""
        value, expected, record = self._worst_pair.value, self._worst_pair.expected, self._worst_pair.record
        if record is None or record.unsharded_shape is None or record.is_sketched or value.numel() < 2:
            return None
        difference = elementwise_difference(value, expected).abs().nan_to_num(math.inf)
        wrong_indices = (
            difference > 1e-3 * self.step_difference.difference.bound * float(expected.double().abs().max())
        ).nonzero()
        if not len(wrong_indices):
            return None
        first, last = int(wrong_indices[0]), int(wrong_indices[-1])
        return slice(first, last + 1) if last + 1 - first < 0.95 * value.numel() else None

    def _owner_text(self, first: int, last: int) -> str:
        """Whose shard that is."""
        master_records = group_by_key(self.records_by_rank).get(
            ("state", f"master/{self.reference_tensor.key[1].rpartition('/')[2]}"), []
        )
        for rank, record in master_records:
            if (
                0 < record.numel < self.reference_tensor.value.numel()
                and record.start <= first
                and last < record.start + record.numel
            ):
                return f", which rank {rank} updates"
        return ""

    @cached_property
    def _select_worst_shard(self) -> ShardSelector:
        """What of a whole tensor the worst part is about."""
        record, differing_slice = self._worst_pair.record, self._differing_slice
        if record is None or record.unsharded_shape is None:
            return lambda tensor: tensor

        def select(tensor: Tensor) -> Tensor:
            shard = sketch_shard(tensor.reshape(-1)[record.start : record.start + record.numel], record.start)
            return shard if differing_slice is None else shard[differing_slice]

        return select

    @cached_property
    def known_factors(self) -> dict[str, float]:
        """What factors may come from."""
        layout = self.recompute.layout
        targets_by_rank = {result.rank: 0.0 for result in self.recompute.microbatch_results}
        for c in self.recompute.microbatch_results:
            targets_by_rank[c.rank] += c.target_count
        rows = self.recompute.subject.batch_rows
        microbatches = layout.reproducible_batch_size or layout.dp * layout.microbatches
        return {
            "dp": float(layout.dp),
            "micro-batches of a rank": float(layout.microbatches),
            "all micro-batches": float(microbatches),
            "ranks that share a copy": float(layout.shards),
            "replicas": layout.dp / layout.shards,
            "rows of the batch": float(rows),
            "rows of a rank": rows / layout.dp,
            "rows of a micro-batch": rows / microbatches,
            TARGET_TOKENS: sum(targets_by_rank.values()),
            **{f"{TARGET_TOKENS} of rank {rank}": count for rank, count in targets_by_rank.items()},
            **{
                f"{TARGET_TOKENS} of micro-batch {c.microbatch} of rank {c.rank}": c.target_count
                for c in self.recompute.microbatch_results
            },
            "what gradients are scaled by": self._gradient_scale,
            "the square of dp": float(layout.dp) ** 2,
        }

    @property
    def _gradient_scale(self) -> float:
        """What sums of gradients are multiplied by, before an update."""
        engine = self.recompute.rank_subject.engine
        norm, count = (self.reference.value_of(site) for site in (("norm", "gradient norm"), ("sum", "target tokens")))
        return 1.0 if norm is None or count is None else engine.gradient_scale(float(norm), float(count))
