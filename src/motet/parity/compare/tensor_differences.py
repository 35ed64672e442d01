"""How far what ranks computed is from the reference, tensor by tensor; put together from the parts that they have."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import (
    AlignedTensorPair,
    RankRecords,
    ReferenceTensor,
    TensorAlignmentError,
    TensorKey,
    align_tensor,
    has_no_row_dimension,
)
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKind

FLOAT64_EPSILON = 2.0**-53
# How many roundings of its size a number may be off for each square root of the operations behind it.
ROUNDINGS_PER_SQRT_FLOP = 8.0
NOISE_MARGIN = 64.0  # How many times as far from the reference as a perturbed reference is
MIN_LOST_BITS = 8  # So many bits fewer than the reference's numbers have are no accident
MIN_ROUNDED_BITS = 3  # Of a number that was rounded; ones and zeros were not
MASK_FILL_MAGNITUDE = 1e30  # What masks places, as infinity does; nothing is measured by it
OUTLIER_RATIO = 1e6  # So many times as large as most of its kind is no measure for them


@dataclass(frozen=True)
class ReferenceStep:
    """A step on one device."""

    tensors: Mapping[TensorKey, ReferenceTensor]  # In the order of execution
    learning_rate: float
    # How far a perturbed reference is from it, by the same measure.
    noise: dict[TensorKey, float] = field(default_factory=dict)
    # Of no rows, and another for other micro-batches: nothing to compare it with.
    microbatch_dependent: set[TensorKey] = field(default_factory=set)

    @cached_property
    def typical_sizes(self) -> dict[str, float]:
        """Of elements of tensors that are alike, in the mean of squares; what is far larger than most is left out."""
        square_sums: dict[str, list[tuple[float, int]]] = {}
        for key, reference_tensor in self.tensors.items():
            square_sums.setdefault(_size_family(key), []).append(
                (finite_norm(reference_tensor.value) ** 2, reference_tensor.value.numel())
            )
        return {family: _typical_size(each) for family, each in square_sums.items()}

    def value_of(self, key: TensorKey) -> Tensor | None:
        reference_tensor = self.tensors.get(key)
        return None if reference_tensor is None else reference_tensor.value


class TensorDifference(NamedTuple):
    """Of one tensor, by the worst of the parts that it came in."""

    key: TensorKey
    relative_error: float
    bound: float
    rank: int | None  # Whose part it is; None: of all together
    reason: str = ""  # Where it is not by how much

    @property
    def is_rounding(self) -> bool:
        return not self.reason and self.relative_error <= self.bound


def build_reference_tensors(records: Iterable[RecordedTensor]) -> dict[TensorKey, ReferenceTensor]:
    records = list(records)
    rows = next((record.rows for record in records if record.rows), ())
    tensors: dict[TensorKey, ReferenceTensor] = {}
    kind_order = {kind: number for number, kind in enumerate(get_args(TensorKind))}
    forward_kinds = ("starting parameter", "sample", "random mask", "activation", "loss", "activation gradient")
    for each in sorted(records, key=lambda each: 0 if each.kind in forward_kinds else kind_order[each.kind]):
        value = each.value if each.unsharded_shape is None else each.value.view(each.unsharded_shape)
        tensors[each.kind, each.name] = ReferenceTensor((each.kind, each.name), value, rows, each)
    return tensors


def _size_family(key: TensorKey) -> str:
    """Moments are not as large as masters, and a loss not as a count."""
    kind, name = key
    return f"{kind} {name.partition('/')[0]}" if kind in ("state", "sum", "evaluation") else kind


def _typical_size(square_sums: Sequence[tuple[float, int]]) -> float:
    """`each`: (sum of squares, count) of a tensor."""
    means = [squares / count for squares, count in square_sums if squares]
    outlier_limit = OUTLIER_RATIO**2 * median(means) if means else 0.0
    without_outliers = [
        (squares, count) for squares, count in square_sums if count and squares / count <= outlier_limit
    ]
    total, elements = sum(squares for squares, _ in without_outliers), sum(count for _, count in without_outliers)
    return math.sqrt(total / elements) if elements else 0.0


def compare_with_reference(
    reference: ReferenceStep, records_by_rank: Sequence[Sequence[RecordedTensor]]
) -> list[TensorDifference]:
    """One for each tensor of the reference, in its order, and for what only ranks have."""
    records_by_key = group_by_key(records_by_rank)
    differences = []
    for key, reference_tensor in reference.tensors.items():
        records = records_by_key.pop(key, [])
        differences.append(_compare_tensor(reference, reference_tensor, records))
    for key, records in records_by_key.items():
        differences.append(TensorDifference(key, math.inf, 0.0, records[0][0], "one device has no such tensor"))
    return differences


def group_by_key(
    records_by_rank: Sequence[Sequence[RecordedTensor]],
) -> dict[TensorKey, list[tuple[int, RecordedTensor]]]:
    records_by_key: dict[TensorKey, list[tuple[int, RecordedTensor]]] = {}
    for rank, records in enumerate(records_by_rank):
        for record in records:
            records_by_key.setdefault((record.kind, record.name), []).append((rank, record))
    return records_by_key


def find_microbatch_dependent(
    reference: ReferenceStep, records_by_rank: Sequence[Sequence[RecordedTensor]]
) -> set[TensorKey]:
    """What differs in a reference of which each row was a micro-batch, though nothing that comes of it does: the
    places of the targets, a mean over rows, modules that are called for each row. Where rows do depend on each other,
    only what has no rows."""
    records_by_key, differences = group_by_key(records_by_rank), compare_with_reference(reference, records_by_rank)
    differing_keys = {each.key for each in differences if not each.is_rounding}
    differing_activations = {
        site for site in differing_keys if site[0] in ACTIVATION_KINDS and records_by_key.get(site)
    }
    if not any(site[0] in ("gradient", "sum", "norm") for site in differing_keys):
        unequal_modules = {
            _module_name(site) for site in differing_keys - differing_activations if site[0] in ACTIVATION_KINDS
        }
        return differing_activations | {
            site for site in reference.tensors if site[0] in ACTIVATION_KINDS and _module_name(site) in unequal_modules
        }
    return {site for site in differing_activations if _is_table_or_mean(reference.tensors[site], records_by_key[site])}


ACTIVATION_KINDS = ("activation", "activation gradient")


def _module_name(key: TensorKey) -> str:
    """Whose output it is, in whatever call."""
    return key[1].partition(" (call")[0].partition("[")[0]


def _is_table_or_mean(reference_tensor: ReferenceTensor, records: RankRecords) -> bool:
    try:
        align_tensor(reference_tensor, records)
    except TensorAlignmentError:
        return True
    return has_no_row_dimension(reference_tensor, records)


def _compare_tensor(
    reference: ReferenceStep, reference_tensor: ReferenceTensor, records: RankRecords
) -> TensorDifference:
    key, bound = reference_tensor.key, error_bound(reference, reference_tensor)
    if key in reference.microbatch_dependent or bound == math.inf:
        return TensorDifference(key, 0.0, bound, None)
    if not records:
        return TensorDifference(key, math.inf, bound, None, "no rank has it")
    try:
        pairs = align_tensor(reference_tensor, records)
    except TensorAlignmentError as error:
        return TensorDifference(key, math.inf, bound, error.rank, str(error))
    worst = TensorDifference(key, 0.0, bound, None)
    for pair in pairs:
        if reason := _precision_mismatch(pair, reference_tensor.record.dtype):
            return TensorDifference(key, math.inf, bound, pair.rank, reason)
        relative_error = relative_distance(pair.value, pair.expected, size_floor(reference, key, pair))
        if relative_error > worst.relative_error:
            worst = TensorDifference(key, relative_error, bound, pair.rank)
    return worst


def size_floor(reference: ReferenceStep, key: TensorKey, pair: AlignedTensorPair) -> float:
    """What is as good as nothing to differ from."""
    count = pair.record.numel if pair.record and pair.record.unsharded_shape is not None else pair.expected.numel()
    size = reference.learning_rate if key[0] == "parameter" else reference.typical_sizes[_size_family(key)]
    return size * math.sqrt(count)


def _precision_mismatch(pair: AlignedTensorPair, expected_dtype: str) -> str:
    record = pair.record
    if record is None:
        return ""
    if record.dtype != expected_dtype:
        return f"it is kept in {record.dtype} on rank {pair.rank}, and in {expected_dtype} on one device"
    is_coarser = MIN_ROUNDED_BITS <= record.significant_bits <= pair.expected_bits - MIN_LOST_BITS
    if is_coarser and 0 < relative_distance(pair.value, pair.expected, 0.0) < 2.0 ** (1 - record.significant_bits):
        dtype_name = {24: "float32", 11: "float16", 8: "bfloat16"}.get(
            record.significant_bits, f"{record.significant_bits} bits"
        )
        return f"its numbers were rounded to {dtype_name}: they have {record.significant_bits} bits, on one device {pair.expected_bits}"
    return ""


def error_bound(reference: ReferenceStep, reference_tensor: ReferenceTensor) -> float:
    if reference_tensor.key[0] in ("sample", "random mask"):
        return 0.0
    rounding_bound = (
        ROUNDINGS_PER_SQRT_FLOP * FLOAT64_EPSILON * math.sqrt(max(1.0, reference_tensor.record.flops_so_far))
    )
    return max(rounding_bound, NOISE_MARGIN * reference.noise.get(reference_tensor.key, 0.0))


def relative_distance(value: Tensor, expected: Tensor, floor: float) -> float:
    """Of two tensors, by their norms; `floor`: what is as good as nothing to differ from."""
    error_norm = float(torch.linalg.vector_norm(elementwise_difference(value, expected)))
    if error_norm == 0:
        return 0.0
    size = max(finite_norm(expected), floor)
    return error_norm / size if size and not math.isnan(error_norm) else math.inf


def elementwise_difference(value: Tensor, expected: Tensor) -> Tensor:
    """Their difference; 0 where both are the same infinity."""
    a, b = value.double(), expected.double()
    return torch.where(a == b, 0.0, a - b)


def finite_norm(tensor: Tensor) -> float:
    """The norm of what is neither infinite nor a mask."""
    values = tensor.double()
    return float(torch.linalg.vector_norm(torch.where(values.abs() < MASK_FILL_MAGNITUDE, values, 0.0)))
