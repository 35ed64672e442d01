"""A step in the job's own precision, compared with steps of one device that add micro-batches in other orders.

A sum wrongly kept in bfloat16 passes the check in float64. Here it lies outside the spread of summation orders.

One device adds up products in parts, as ranks that split a layer do, with the parts drawn at random.

It also compares the decisions of ranks about a step whose gradients overflow, and the updates with two loss scales.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.models.arch import loss as head_loss
from motet.parallel.model_sharding import LOSS, TENSOR_DIMENSION, ModelInventory, ModelSharding
from motet.parallel.step_plan.plan import StepPlan
from motet.parallel.tensor_parallel.sharded_module import computes_linear
from motet.parity.compare.align_with_reference import PlannedRecords, ReferenceTensor, RowPlacement, format_numbered
from motet.parity.compare.tensor_differences import (
    FLOAT64_EPSILON,
    ReferenceStep,
    TensorDifference,
    build_reference_tensors,
    compare_with_reference,
)
from motet.parity.record import record_verification_steps as recording
from motet.parity.record.engine_hooks import patched_method
from motet.parity.record.tensor_recorder import MASTER_PREFIX, RecordedTensor, RecordsByRank, TensorKey, parameter_name
from motet.parity.subjects.job_subject import JobVerificationSubject, JobVerificationSubjectOnRank
from motet.precision.recipe import SMALLEST_SCALE, PrecisionRecipe


class _SplitLayer(NamedTuple):
    layer: Any
    is_row_layer: bool  # Ranks split its inputs, otherwise its outputs
    is_transposed: bool  # The weight is [in, out]


@contextmanager
def reordered_products(module: nn.Module, sharding: ModelSharding, ranks: int, *, seed: int) -> Iterator[None]:
    """Let each linear layer that `ranks` ranks split add up as many products, of randomly chosen features; and the
    gradient of a head's input as many products, of randomly chosen entries, where ranks split the head and its loss."""
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for split in _split_layers(module, sharding):
            features = split.layer.weight.shape[split.is_row_layer != split.is_transposed]
            parts = torch.randperm(features, generator=generator).chunk(ranks)
            stack.enter_context(patched_method(split.layer, "forward", partial(_multiply, split, parts)))
        if any(comm.over == TENSOR_DIMENSION and comm.argument == LOSS for comm in sharding.boundary_comms):
            add_parts = partial(_add_input_gradients, ranks=ranks, generator=generator)
            stack.enter_context(patch.object(head_loss, "write_input_gradient", add_parts))
        yield


def _add_input_gradients(
    errors: Tensor, weight: Tensor, scale: Tensor, *, output: Tensor, ranks: int, generator: torch.Generator
) -> None:
    parts = torch.randperm(len(weight), generator=generator).chunk(ranks)
    products = [(errors[:, part] @ weight[part]).mul_(scale) for part in parts]
    output.copy_(sum(products[1:], products[0]))


def _multiply(split: _SplitLayer, parts: tuple[Tensor, ...], x: Tensor) -> Tensor:
    weight, bias = split.layer.weight, split.layer.bias
    weight = weight.T if split.is_transposed else weight
    if split.is_row_layer:
        products = [F.linear(x[..., part], weight[:, part], None if n else bias) for n, part in enumerate(parts)]
        return sum(products[1:], products[0])
    outputs = [F.linear(x, weight[part], None if bias is None else bias[part]) for part in parts]
    return torch.cat(outputs, -1)[..., torch.cat(parts).argsort()]


def _split_layers(module: nn.Module, sharding: ModelSharding) -> Iterator[_SplitLayer]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    for comm in sharding.boundary_comms:
        is_row_layer = comm.side == "output"
        if comm.over == TENSOR_DIMENSION and comm.operation in ("copy", "gather", "sum", "scatter"):
            for layer in map(module.get_submodule, (comm.module, *comm.shared_by)):
                weight = dict(layer.named_parameters(recurse=False)).get("weight")
                splits = sharding.rule(names[weight]).splits if weight is not None else ()
                is_transposed = any((split.dim == 0) == is_row_layer for split in splits)
                if splits and computes_linear(layer, is_transposed):
                    yield _SplitLayer(layer, is_row_layer, is_transposed)


ORDER_COUNT = 4  # Steps that show how far other orders are
LOSS_ORDER_COUNT = 36  # Orders for the loss, which is one number; a forward without records is fast
FEW_ORDERS = 80.0  # The root mean square of few errors may be far too small, as Student's distribution says
MAX_Z_SCORE = 8.0  # The orders are few, and the tails of their errors are heavier than a normal distribution's
MAX_FLIPPED_ROUNDINGS = 4  # Elements that a kernel which takes another path may round to the other side
FLOAT32_ROUNDINGS = 8  # Factors such as the norm are rounded too, which no order of sums shows
BITWISE_KINDS = ("norm", "state")
SUMMED_KINDS = ("gradient", "clipped gradient", "state")
SCALAR_KINDS = ("loss", "sum", "norm")
LOSSES = (TensorKey("loss", "loss"), TensorKey("sum", "mean loss"))
BROKEN_PROMISE = 'its bits are not those of one device, as run.reproducible = "layout" promises'
LARGEST_ROUNDING = 2.0**-5  # A few roundings to bfloat16
MIN_LOG_STD = 0.1  # A smaller standard deviation of log errors is an accident


class DifferenceZScore(NamedTuple):
    """A tensor's distance from one device, in standard deviations of other orders of summation."""

    difference: TensorDifference  # Its bound is the largest error that rounding explains
    z: float
    typical_error: float  # The geometric mean over other orders

    @property
    def is_rounding(self) -> bool:
        return not self.difference.reason and self.z <= MAX_Z_SCORE

    @property
    def cause(self) -> str:
        if self.difference.reason:
            return self.difference.reason
        return (
            f"it is {self.difference.relative_error / self.typical_error:.1f} times as far from one device as other "
            f"orders of the same sums (z = {self.z:.0f}), while it is the same in float64: "
            + ("something is rounded that should not be" if self._is_small else "no rounding is as large")
        )

    @property
    def _is_small(self) -> bool:
        return self.difference.relative_error < LARGEST_ROUNDING


@dataclass(frozen=True)
class SummationOrderSpread:
    """A step of one device, and how far the same step with micro-batches in other orders is from it."""

    reference: ReferenceStep
    log_errors: Mapping[TensorKey, torch.Tensor]
    compute_dtype: torch.dtype

    def z_score_of(self, difference: TensorDifference, *, part_ratio: float = 0.0) -> DifferenceZScore:
        """The score of a difference. Ranks that add parts of a gradient round each to the compute dtype, one device
        rounds their sum; `part_ratio` is the size of all parts, relative to the sum."""
        if difference.reason:
            return DifferenceZScore(difference, math.inf, 0.0)
        log_errors, tensor = self.log_errors[difference.key], self.reference.tensors[difference.key]
        error = log_error(difference, tensor, self.compute_dtype, targets=self.reference.target_count)
        if tensor.key.kind in SCALAR_KINDS:  # One number has a random sign, and so a random log of its size
            errors = log_errors.exp()
            limit = float(errors.square().mean().sqrt()) * (1 + FEW_ORDERS / len(errors) ** 2)
            bounded = difference._replace(bound=MAX_Z_SCORE * limit)
            return DifferenceZScore(bounded, math.exp(error) / limit, float(log_errors.mean().exp()))
        std_of_size, mean = math.sqrt(0.5 / max(1, tensor.value.numel())), float(log_errors.mean())
        if part_ratio:  # Each part is summed in another order, too (measured: 1.2 eps, RMSNorm in bfloat16)
            mean = max(mean, math.log(torch.finfo(self.compute_dtype).eps * max(1.0, part_ratio)))
        log_std = max(float(log_errors.std()), self.pooled_log_std[tensor.key.kind], std_of_size, MIN_LOG_STD)
        std = log_std * math.sqrt(1 + 1 / len(log_errors))
        bounded = difference._replace(bound=math.exp(mean + MAX_Z_SCORE * std))
        return DifferenceZScore(bounded, (error - mean) / std, math.exp(mean))

    @cached_property
    def pooled_log_std(self) -> dict[str, float]:
        """Kind -> the standard deviation over all tensors of it."""
        variances: dict[str, list[float]] = {}
        for key, errors in self.log_errors.items():
            variances.setdefault(key.kind, []).append(float(errors.var()))
        return {kind: math.sqrt(sum(each) / len(each)) for kind, each in variances.items()}


@dataclass(frozen=True)
class NativeReference:
    """The steps of one device in the job's own precision; layouts repeat the last one."""

    subject: JobVerificationSubject
    folder: Path  # Folder with the state before each step
    inventory: ModelInventory
    row_placements: dict[TensorKey, RowPlacement]
    steps: Sequence[ReferenceStep]  # One device that takes the batch as one micro-batch
    bitwise_reference: ReferenceStep | None  # The bits that every layout must have if the job is reproducible


def run_native_reference(
    subject: JobVerificationSubject, folder: Path, row_placements: dict[TensorKey, RowPlacement]
) -> NativeReference:
    """Train on one device, in the job's own precision."""
    last_step, bitwise_reference, steps = subject.steps - 1, None, list[ReferenceStep]()
    with subject.numerics(), recording.single_thread():
        on_rank = subject.with_microbatches(1).build(recording.SINGLE_RANK_GROUP, folder)
        for step in range(subject.steps):
            on_rank.state.save(step)
            records = recording.run_recorded_step(on_rank, step, sketches_shards=False)
            tensors = build_reference_tensors(records)
            steps.append(ReferenceStep(tensors, on_rank.learning_rate(step), {}, row_placements))
        if subject.job.run.reproducible:
            same_bits, rate = subject.build(recording.SINGLE_RANK_GROUP, folder), on_rank.learning_rate(last_step)
            exact = recording.record_restored_step(same_bits, folder, last_step, sketches_shards=False)
            bitwise_reference = ReferenceStep(build_reference_tensors(exact), rate, {}, row_placements)
    return NativeReference(subject, folder, on_rank.engine.plan.inventory, row_placements, steps, bitwise_reference)


def measure_order_spreads(
    native: NativeReference, microbatches: int, *, sharding: ModelSharding | None = None, ranks: int = 1
) -> list[SummationOrderSpread]:
    """Repeat the step on one device with as many micro-batches as a layout has, and as many parts of each product that
    its ranks split, and the steps after it, of which the loss is compared; none in float64."""
    subject, last_step = native.subject, native.subject.steps - 1
    if (compute := subject.job.precision.resolved.compute) == "float64":
        return []
    with subject.numerics(), recording.single_thread():
        on_rank = subject.with_microbatches(microbatches).build(recording.SINGLE_RANK_GROUP, native.folder)
        masters = {sketches: recording.record_starting_masters(on_rank, sketches) for sketches in (False, True)}
        restored = recording.record_restored_step(on_rank, native.folder, last_step, sketches_shards=False)
        split = build_reference_tensors(record for record in masters[False] + restored if record.microbatch < 0)
        single = native.steps[last_step].tensors
        added = {key: tensor for key, tensor in split.items() if key not in single}
        tensors = {**added, **single, **split}
        references = [ReferenceStep(tensors, on_rank.learning_rate(last_step), {}, native.row_placements)]
        references += [ReferenceStep(build_reference_tensors(each), 0.0) for each in _following_losses(on_rank)]
        errors = [dict[TensorKey, list[float]]() for _ in references]
        dtype, module = getattr(torch, compute), on_rank.engine.module
        split_products = partial(reordered_products, module, sharding or ModelSharding(), ranks)
        for seed, order in enumerate(_random_row_orders(subject.batch_rows, microbatches)):
            with split_products(seed=seed):
                ordered = on_rank.with_row_order(order)
                records = recording.record_restored_step(ordered, native.folder, last_step)
                all_steps = [masters[True] + records, *_following_losses(ordered)]
            for reference, records, step_errors in zip(references, all_steps, errors, strict=True):
                for difference in compare_with_reference(reference, [records]):
                    error = log_error(
                        difference, reference.tensors[difference.key], dtype, targets=reference.target_count
                    )
                    step_errors.setdefault(difference.key, []).append(error)
        on_rank.state.restore(recording.step_checkpoint_path(native.folder, last_step))
        for error in _loss_errors(on_rank, microbatches, split_products):
            for key in LOSSES:
                difference = TensorDifference(key, error, 0.0)
                errors[0][key].append(log_error(difference, tensors[key], dtype, targets=references[0].target_count))
    return [
        SummationOrderSpread(
            reference, {k: torch.tensor(e, dtype=torch.float64) for k, e in step_errors.items()}, dtype
        )
        for reference, step_errors in zip(references, errors, strict=True)
    ]


def _following_losses(subject: JobVerificationSubjectOnRank) -> list[list[RecordedTensor]]:
    """The sums of the steps that follow the last one."""
    steps = range(subject.steps, subject.steps + recording.NATIVE_STEPS_AFTER)
    return [recording.run_recorded_step(subject, step, kinds=frozenset(["sum"])) for step in steps]


def _loss_errors(
    subject: JobVerificationSubjectOnRank,
    microbatches: int,
    split_products: Callable[..., AbstractContextManager[None]],
) -> Iterator[float]:
    """The relative errors of the loss of the last step in many orders of the products that ranks split."""
    step, rows = subject.steps - 1, subject.job.data.batch_sequences

    def loss() -> float:
        total = 0.0
        for part in torch.arange(rows).chunk(microbatches):
            with torch.no_grad(), subject.loss_of_rows(step, range(int(part[0]), int(part[-1]) + 1)) as (summed, _):
                total += float(summed)
        return total

    expected = loss()
    for seed in range(ORDER_COUNT, LOSS_ORDER_COUNT):
        with split_products(seed=seed):
            yield abs(loss() - expected) / abs(expected or 1.0)


def _random_row_orders(rows: int, microbatches: int) -> Iterator[list[int]]:
    """Orders of the rows in which micro-batches keep their rows."""
    for seed in range(ORDER_COUNT):
        order = torch.randperm(microbatches, generator=torch.Generator().manual_seed(seed))
        yield torch.arange(rows).view(microbatches, -1)[order].flatten().tolist()


def log_error(
    difference: TensorDifference, tensor: ReferenceTensor, compute_dtype: torch.dtype, *, targets: float
) -> float:
    """The log of the relative error, which is at least that of a few roundings."""
    kind, dtype = tensor.key.kind, getattr(torch, tensor.record.dtype)
    if kind in ("starting parameter", "sample", "random mask") or not dtype.is_floating_point:
        return math.log(max(difference.relative_error, FLOAT64_EPSILON))
    elements = max(1.0, float(tensor.value.numel()))
    if kind in SCALAR_KINDS:  # Summed in float32, whatever dtype they are recorded in
        # A rounding changes the loss of one target, and hardly the gradient of the others.
        dtype, elements = torch.float32, targets if kind == "norm" else targets**2
    flipped = torch.finfo(compute_dtype).eps * math.sqrt(MAX_FLIPPED_ROUNDINGS / max(1.0, elements))
    stored = torch.finfo(dtype).eps * (FLOAT32_ROUNDINGS if dtype.itemsize >= 4 else 1)
    return math.log(max(difference.relative_error, flipped, stored))


def z_scores_of_step(
    native: NativeReference,
    spread: SummationOrderSpread | None,
    records: RecordsByRank,
    *,
    planned: PlannedRecords,
) -> Iterator[DifferenceZScore]:
    """Compare a step of a layout with other orders of summation, in the order of execution, then bit by bit where the
    job is reproducible and this is the last step."""
    if spread is not None:
        frozen = {tensor.name for tensor in planned.plan.inventory.tensors if tensor.kind == "frozen"}
        recipe, shared = native.subject.job.precision.resolved, _names_of_several_stages(planned.plan)
        for difference in compare_with_reference(spread.reference, records, planned):
            name = parameter_name(difference.key.name)
            if name not in shared and (name in frozen or _is_compared(recipe, difference.key)):
                is_sum = difference.key.kind in SUMMED_KINDS and planned.is_sum_of_parts(name)
                yield spread.z_score_of(difference, part_ratio=_part_ratio(spread, records, name) if is_sum else 0.0)
    if native.bitwise_reference is not None:
        exact = compare_with_reference(native.bitwise_reference, records, planned)
        wrong = [each for each in exact if each.key.kind in BITWISE_KINDS and each.relative_error]
        for each in wrong:
            yield DifferenceZScore(each._replace(reason=each.reason or BROKEN_PROMISE), math.inf, 0.0)


def _part_ratio(spread: SummationOrderSpread, records_by_rank: RecordsByRank, name: str) -> float:
    """The root of the sum of the squares of the gradients that ranks add, relative to their sum."""
    parts = [r.value for records in records_by_rank for r in records if r.kind == "local gradient" and r.name == name]
    total = spread.reference.value_of(TensorKey("gradient", name))
    size = 0.0 if total is None else float(total.double().norm())
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts)) / size if size else 1.0


def _names_of_several_stages(plan: StepPlan) -> frozenset[str]:
    """The parameters that several stages of a pipeline use, such as tied weights. Stages add the gradients of their
    uses in the dtype of reductions, where one device rounds the sum to that of the parameter in every order of sums."""
    tensors = (tensor for tensor in plan.inventory.tensors if len(plan.model_sharding.stages_of(tensor)) > 1)
    return frozenset(name for tensor in tensors for name in (tensor.name, *tensor.aliases))


def _is_compared(recipe: PrecisionRecipe, key: TensorKey) -> bool:
    """Masters replace the parameters of the model; stage 3 has no others."""
    is_model_parameter = key.kind in ("parameter", "starting parameter") and not key.name.startswith(MASTER_PREFIX)
    return recipe.compute == recipe.master or not is_model_parameter


MAX_CHANGE = 0.05  # Relative change of a norm with another scale, with which other small gradients underflow


class LossScaleMistake(NamedTuple):
    """The first mistake of ranks in the order of their steps."""

    place: str
    rank: int
    cause: str


def find_loss_scale_mistake(records_by_rank: RecordsByRank, *, is_dynamic: bool) -> LossScaleMistake | None:
    """Compare the numbers of ranks (`record_overflow`) with each other and with the expected ones."""
    ranks = [{record.name: float(record.value) for record in records} for records in records_by_rank]
    scale, overflowing = int(ranks[0]["scale"]), len(ranks) - 1
    if unaware := [rank for rank, numbers in enumerate(ranks) if not numbers["is skipped"]]:
        cause = (
            f"gradients overflow on rank {overflowing} alone, and {format_numbered('rank', unaware)} updates its part"
        )
        return LossScaleMistake("the decision to skip a step", unaware[0], f"{cause}; all ranks must skip the step")
    expected = max(scale // 2, SMALLEST_SCALE) if is_dynamic else scale
    for name, place, words in (
        ("scale after it", "the loss scale after an overflow", "after a step that overflows it"),
        ("scale from a checkpoint", "the loss scale from a checkpoint", f"it was saved as {expected}, and restored it"),
    ):
        if wrong := [rank for rank, numbers in enumerate(ranks) if numbers[name] != expected]:
            value = f"{ranks[wrong[0]][name]:g}, not {expected}"
            return LossScaleMistake(place, wrong[0], f"{words} is {value}, on {format_numbered('rank', wrong)}")
    return _find_scaled_norm(ranks, scale)


def _find_scaled_norm(ranks: list[dict[str, float]], scale: int) -> LossScaleMistake | None:
    for name, place in (("norm", "the gradient norm"), ("clipped", "the clipped gradients")):
        for rank, numbers in enumerate(ranks):
            norm, other, other_scale = numbers[name], numbers[f"{name} with the other scale"], numbers["other scale"]
            if not norm or not math.isfinite(norm) or abs(other / norm - 1) <= MAX_CHANGE:
                continue
            cause = (
                f"with loss scale {other_scale:g} {place} are {other / norm:.3g} times those with loss scale {scale}"
            )
            cause = cause.replace("norm are", "norm is").replace("those", "that") if name == "norm" else cause
            near = any(
                abs(other / norm * factor - 1) <= MAX_CHANGE for factor in (other_scale / scale, scale / other_scale)
            )
            cause += ": the scale is not divided out, or not before gradients are clipped" if near else ""
            return LossScaleMistake(place, rank, cause)
    return None
