"""The location of a difference: ranks and elements, and the factors that may have caused it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from motet.parity.compare.align_with_reference import AlignedTensorPair, ReferenceTensor, join_numbers
from motet.parity.compare.first_difference import DifferenceAtStep
from motet.parity.compare.tensor_differences import (
    ReferenceStep,
    TensorDifference,
    compare_with_reference,
    elementwise_difference,
    pair_distance,
)
from motet.parity.diagnose.linear_fit import TARGET_TOKENS
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.record.random_sign_sketch import sketch_shard
from motet.parity.record.tensor_recorder import MASTER_PREFIX, RecordsByRank, TensorKey, group_by_key


@dataclass(frozen=True)
class LocatedDifference:
    """One tensor that differs, as the ranks recorded it and as one device has it."""

    recompute: SingleDeviceRecompute
    records_by_rank: RecordsByRank
    difference: DifferenceAtStep
    reference: ReferenceStep
    tensor: ReferenceTensor
    pairs: Sequence[AlignedTensorPair]

    @property
    def key(self) -> TensorKey:
        return self.tensor.key

    @property
    def step(self) -> int:
        return self.difference.at.step

    @property
    def bound(self) -> float:
        return self.difference.difference.bound

    def _distance(self, pair: AlignedTensorPair) -> float:
        return pair_distance(self.reference, self.key, pair)

    @cached_property
    def worst_pair(self) -> AlignedTensorPair:
        return max(self.pairs, key=self._distance)

    @cached_property
    def all_differences(self) -> list[TensorDifference]:
        return compare_with_reference(self.reference, self.records_by_rank)

    def location_text(self) -> str:
        """The ranks and elements that differ, if others do not."""
        ranks = sorted({p.rank for p in self.pairs if p.rank is not None and self._distance(p) > self.bound})
        all_ranks = {p.rank for p in self.pairs if p.value.numel()}
        is_part = 0 < len(ranks) < len(all_ranks)
        text = f", on rank{'s' * (len(ranks) > 1)} {join_numbers(ranks)} alone" if is_part else ""
        elements, record = self.differing_slice, self.worst_pair.record
        if elements is None or record is None:
            return text
        first, last = record.start + elements.start, record.start + elements.stop - 1
        element_text = f"element {first}" if first == last else f"elements {first} to {last}"
        return f"{text}, in {element_text} of {self.tensor.value.numel()}{self._owner_text(first, last)}"

    @cached_property
    def differing_slice(self) -> slice | None:
        """The elements of the worst shard that differ; None if nearly all do."""
        value, expected, record = self.worst_pair.value, self.worst_pair.expected, self.worst_pair.record
        if record is None or not record.is_shard or record.is_sketched or value.numel() < 2:
            return None
        error = elementwise_difference(value, expected).abs().nan_to_num(math.inf)
        wrong_indices = (error > 1e-3 * self.bound * float(expected.double().abs().max())).nonzero()
        if not len(wrong_indices):
            return None
        first, last = int(wrong_indices[0]), int(wrong_indices[-1])
        return slice(first, last + 1) if last + 1 - first < 0.95 * value.numel() else None

    def _owner_text(self, first: int, last: int) -> str:
        master_key = TensorKey("state", f"{MASTER_PREFIX}{self.key.name.rpartition('/')[2]}")
        for rank, record in group_by_key(self.records_by_rank).get(master_key, []):
            is_inside = record.start <= first and last < record.start + record.numel
            if is_inside and 0 < record.numel < self.tensor.value.numel():
                return f", which rank {rank} updates"
        return ""

    def select(self, tensor: Tensor) -> Tensor:
        """The part of an unsharded tensor that the worst pair is about."""
        record = self.worst_pair.record
        if record is None or not record.is_shard:
            return tensor
        shard = sketch_shard(tensor.reshape(-1)[record.start : record.start + record.numel], record.start)
        return shard if self.differing_slice is None else shard[self.differing_slice]

    @cached_property
    def known_factors(self) -> dict[str, float]:
        """Description -> number by which something may have been multiplied or divided."""
        layout, results = self.recompute.layout, self.recompute.microbatch_results
        targets_by_rank = {r.rank: 0.0 for r in results}
        for r in results:
            targets_by_rank[r.rank] += r.target_count
        rows, microbatches = self.recompute.subject.batch_rows, self.recompute.all_microbatches
        return {
            "dp": float(layout.dp),
            "micro-batches of a rank": float(layout.microbatches),
            "all micro-batches": float(microbatches),
            "ranks of a shard group": float(layout.shards),
            "replicas": layout.dp / layout.shards,
            "rows of the batch": float(rows),
            "rows of a rank": rows / layout.dp,
            "rows of a micro-batch": rows / microbatches,
            TARGET_TOKENS: sum(targets_by_rank.values()),
            **{f"{TARGET_TOKENS} of rank {rank}": count for rank, count in targets_by_rank.items()},
            **{f"{TARGET_TOKENS} of micro-batch {r.microbatch} of rank {r.rank}": r.target_count for r in results},
            "what gradients are scaled by": self.gradient_scale,
            "the square of dp": float(layout.dp) ** 2,
        }

    @cached_property
    def gradient_scale(self) -> float:
        """The factor by which sums of gradients are divided and clipped."""
        norm, count = self.reference.scalar("norm", "gradient norm"), self.reference.scalar("sum", TARGET_TOKENS)
        engine = self.recompute.rank_subject.engine
        return 1.0 if norm is None or count is None else engine.gradient_scale(norm, count)

    @property
    def target_count(self) -> float:
        return self.reference.scalar("sum", TARGET_TOKENS) or 1.0

    @property
    def other_steps(self) -> dict[str, ReferenceStep]:
        """Description -> another step of one device, the nearest first."""
        steps = self.recompute.reference_runs.step_references
        words = {self.step - 1: "the step before", self.step + 1: "the step after"}
        others = sorted((n for n in range(len(steps)) if n != self.step), key=lambda n: abs(n - self.step + 0.1))
        return {words.get(n, f"step {n + 1}"): steps[n] for n in others}
