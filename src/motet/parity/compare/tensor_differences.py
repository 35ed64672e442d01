"""Distances of the ranks' tensors from the reference, one by one, and their bounds by rounding."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from motet.collectives.compression.compressed_collectives import codec_numerics
from motet.parity.compare import align_with_reference as alignment
from motet.parity.compare.align_with_reference import PlannedRecords
from motet.parity.record.tensor_recorder import (
    ACTIVATION_KINDS,
    ROW_KINDS,
    LaterKind,
    RankKind,
    RankRecords,
    RecordedTensor,
    RecordsByRank,
    TensorKey,
    TensorKind,
    group_by_key,
)

FLOAT64_EPSILON = 2.0**-53
ROUNDINGS_PER_SQRT_FLOP = 8.0  # Roundings by which an element may be off, per square root of the operations before it
NOISE_MARGIN = 64.0  # A tensor may be this many times as far from the reference as a perturbed reference
MIN_LOST_BITS = 8  # Fewer missing bits than these may be an accident
MIN_ROUNDED_BITS = 3  # Ones and zeros have fewer without being rounded
MASK_FILL_MAGNITUDE = 1e30  # Masks hold larger numbers; these do not count in norms
OUTLIER_RATIO = 1e6  # A tensor this many times as large as most of its kind does not count in their size


@dataclass(frozen=True)
class ReferenceStep:
    """A step on one device."""

    tensors: Mapping[TensorKey, alignment.ReferenceTensor]  # Tensors in the order of execution
    learning_rate: float
    noise: dict[TensorKey, float] = field(default_factory=dict)  # Relative error of perturbed references
    row_placements: dict[TensorKey, alignment.RowPlacement] = field(default_factory=dict)

    @cached_property
    def typical_sizes(self) -> dict[str, float]:
        """Root mean squares of the elements of similar tensors."""
        square_sums: dict[str, list[tuple[float, int]]] = {}
        for key, tensor in self.tensors.items():
            square_sums.setdefault(_size_family(key), []).append((finite_norm(tensor.value) ** 2, tensor.value.numel()))
        return {family: _typical_size(each) for family, each in square_sums.items()}

    @cached_property
    def activation_order(self) -> dict[str, int]:
        """The outputs of modules in the order in which they were computed."""
        names = [key.name for key in self.tensors if key.kind == "activation"]
        return {name: place for place, name in enumerate(names)}

    @cached_property
    def total_flops(self) -> float:
        return max(tensor.record.flops_so_far for tensor in self.tensors.values())

    def value_of(self, key: TensorKey) -> Tensor | None:
        return self.tensors[key].value if key in self.tensors else None

    @property
    def row_tokens(self) -> int:
        """The tokens of each row of the batch; 1 where a batch has no rows of tokens."""
        tokens = self.value_of(TensorKey("sample", "tokens"))
        return 1 if tokens is None or tokens.ndim < 2 else tokens.shape[1]

    def scalar(self, kind: TensorKind, name: str) -> float | None:
        value = self.value_of(TensorKey(kind, name))
        return None if value is None else float(value)

    @property
    def target_count(self) -> float:
        return self.scalar("sum", "target tokens") or 1.0

    def is_without_rows(self, key: TensorKey) -> bool:
        """Whether a tensor has rows, but the search for them failed."""
        is_unknown = self.row_placements.get(key, alignment.UNKNOWN_ROWS) == alignment.UNKNOWN_ROWS
        return bool(self.row_placements) and key.kind in ROW_KINDS and is_unknown

    def may_be_missing(self, tensor: alignment.ReferenceTensor, planned: PlannedRecords) -> bool:
        """Whether no stage needs a tensor: a mask outside of blocks, or the gradient of an output that is an input.

        An earlier stage has the whole gradient of the latter. Ranks that share rows have no matrix of all pairs of
        query and key, which plain attention returns after its output.
        """
        if planned.plan.context.ranks > 1 and tensor.key.kind in ACTIVATION_KINDS:
            module, bracket, index = tensor.key.name.partition(" (call")[0].partition("[")
            if bracket and not index.startswith("0]"):
                return any(call.module == module for call in planned.plan.model_sharding.attention)
        if tensor.key.kind == "random mask":
            return bool(planned.plan.model_sharding.stages) and not tensor.key.name.startswith("block ")
        if tensor.key.kind != "activation gradient" or not planned.stage_of(tensor.key):
            return False
        same = (each for each in self.tensors.values() if each.key.kind == "activation gradient")
        return any(
            each.record.digest == tensor.record.digest and planned.stage_of(each.key) != planned.stage_of(tensor.key)
            for each in same
        )

    def align(
        self, tensor: alignment.ReferenceTensor, records: RankRecords, planned: PlannedRecords | None
    ) -> list[alignment.AlignedTensorPair]:
        """Pairs of the values of a tensor that ranks have and should have."""
        placement = self.row_placements.get(tensor.key, alignment.UNKNOWN_ROWS)
        return alignment.align_tensor(tensor, records, placement=placement, planned=planned)

    def distance_of(self, key: TensorKey, pair: alignment.AlignedTensorPair) -> float:
        """The relative distance of a pair; a tensor is measured at least by the typical size of its kind."""
        count = pair.record.shard.numel if pair.record and pair.record.shard else pair.expected.numel()
        size = self.learning_rate if key.kind == "parameter" else self.typical_sizes[_size_family(key)]
        return relative_distance(pair.value, pair.expected, size * math.sqrt(count))


class TensorDifference(NamedTuple):
    """The distance of one tensor from the reference: the worst of its parts on ranks."""

    key: TensorKey
    relative_error: float
    bound: float
    rank: int | None = None  # None: the tensor is of all ranks together
    reason: str = ""  # Set where the difference is not one of size
    record: RecordedTensor | None = None  # The rank's record

    @property
    def is_rounding(self) -> bool:
        return not self.reason and self.relative_error <= self.bound


def build_reference_tensors(records: Iterable[RecordedTensor]) -> dict[TensorKey, alignment.ReferenceTensor]:
    later_kinds = get_args(LaterKind)
    ordered = sorted(records, key=lambda r: 1 + later_kinds.index(r.kind) if r.kind in later_kinds else 0)
    rows = next((record.rows for record in ordered if record.rows), ())
    values = [r.value.view(r.shard.spec.shape) if r.shard else r.value for r in ordered]
    return {r.key: alignment.ReferenceTensor(r.key, value, rows, r) for r, value in zip(ordered, values, strict=True)}


def _size_family(key: TensorKey) -> str:
    """Moments are smaller than masters, and a loss is smaller than a count."""
    return f"{key.kind} {key.name.partition('/')[0]}" if key.kind in ("state", "sum", "evaluation") else key.kind


def _typical_size(square_sums: Sequence[tuple[float, int]]) -> float:
    means = [squares / count for squares, count in square_sums if squares]
    limit = OUTLIER_RATIO**2 * median(means) if means else 0.0
    usual = [(squares, count) for squares, count in square_sums if count and squares / count <= limit]
    elements = sum(count for _, count in usual)
    return math.sqrt(sum(squares for squares, _ in usual) / elements) if elements else 0.0


@codec_numerics()
def compare_with_reference(
    reference: ReferenceStep, records_by_rank: RecordsByRank, planned: PlannedRecords | None = None
) -> list[TensorDifference]:
    """One difference per tensor of the reference, in its order, then per tensor that only ranks have."""
    by_key = group_by_key(records_by_rank)
    computed = {key.name for key in by_key if key.kind == "activation"}
    differences = [
        _compare_tensor(reference, tensor, by_key.pop(key, []), planned=planned)
        for key, tensor in reference.tensors.items()
        if key in by_key or not _is_of_skipped_block(key, computed)
    ]
    unknown = "one device has no such tensor"
    rest = {key: records[0][0] for key, records in by_key.items() if key.kind not in get_args(RankKind)}
    return differences + [TensorDifference(key, math.inf, 0.0, rank, unknown) for key, rank in rest.items()]


def _is_of_skipped_block(key: TensorKey, computed: Collection[str]) -> bool:
    """Whether a sample is the argument of a block that no rank computed: then its activations are missing too."""
    block, bracket, _ = key.name.partition("[")
    return key.kind == "sample" and bool(bracket) and not any(f"{name}.".startswith(f"{block}.") for name in computed)


def _compare_tensor(
    step: ReferenceStep, tensor: alignment.ReferenceTensor, records: RankRecords, *, planned: PlannedRecords | None
) -> TensorDifference:
    key, bound = tensor.key, error_bound(step, tensor)
    if bound == math.inf or step.is_without_rows(key):
        return TensorDifference(key, 0.0, bound)
    if not records and (key.kind == "used parameter" or (planned and step.may_be_missing(tensor, planned))):
        return TensorDifference(key, 0.0, bound)  # A rank may not need each module in its first micro-batch
    if not records:
        stage = planned.describe_stage(key) if planned else ""
        return TensorDifference(key, math.inf, bound, None, "no rank has it" + (stage and f": {stage}"))
    try:
        pairs = step.align(tensor, records, planned)
    except alignment.TensorAlignmentError as error:
        return TensorDifference(key, math.inf, bound, error.rank, str(error))
    worst = TensorDifference(key, 0.0, bound)
    for pair in pairs:
        if reason := _precision_mismatch(pair, tensor.record.dtype):
            return TensorDifference(key, math.inf, bound, pair.rank, reason)
        difference = TensorDifference(key, step.distance_of(key, pair), bound, pair.rank, record=pair.record)
        worst = max(worst, difference, key=lambda each: each.relative_error)  # The first of equals
    if worst.is_rounding and planned and (copies := planned.differing_copies(records)):
        return worst._replace(rank=copies[-1][0], reason=planned.describe_copies(copies))
    return worst


def _precision_mismatch(pair: alignment.AlignedTensorPair, expected_dtype: str) -> str:
    if pair.record is None:
        return ""
    dtype, bits = pair.record.dtype, pair.record.significant_bits
    if dtype != expected_dtype:
        return f"it is kept in {dtype} on rank {pair.rank}, and in {expected_dtype} on one device"
    is_coarser = MIN_ROUNDED_BITS <= bits <= pair.expected_bits - MIN_LOST_BITS
    if not is_coarser or not 0 < relative_distance(pair.value, pair.expected) < 2.0 ** (1 - bits):
        return ""
    name = {24: "float32", 11: "float16", 8: "bfloat16"}.get(bits, f"{bits} bits")
    return f"its numbers were rounded to {name}: they have {bits} bits, on one device {pair.expected_bits}"


def error_bound(reference: ReferenceStep, tensor: alignment.ReferenceTensor) -> float:
    if tensor.key.kind in ("sample", "random mask"):
        return 0.0
    roundings = ROUNDINGS_PER_SQRT_FLOP * math.sqrt(max(1.0, tensor.record.flops_so_far))
    return max(FLOAT64_EPSILON * roundings, NOISE_MARGIN * reference.noise.get(tensor.key, 0.0))


def relative_distance(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference over the norm of the expected tensor, or over the floor if that is larger."""
    a, b = value.double(), expected.double()
    error_norm = float(torch.linalg.vector_norm(torch.where(a == b, 0.0, a - b)))  # Both may be the same infinity
    if error_norm == 0:
        return 0.0
    size = max(finite_norm(expected), floor)
    return error_norm / size if size and not math.isnan(error_norm) else math.inf


def finite_norm(tensor: Tensor) -> float:
    """The norm without infinities and mask values."""
    values = tensor.double()
    return float(torch.linalg.vector_norm(torch.where(values.abs() < MASK_FILL_MAGNITUDE, values, 0.0)))
