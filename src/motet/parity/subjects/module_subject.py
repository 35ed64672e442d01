"""A module and batches of the caller as a subject of verification; and parallel code of the caller."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from motet.core.errors import InputError, check_input
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.layout import Layout, LayoutSettings, contributing_rows_of_rank, resolve_layout
from motet.parallel.model_sharding import ModelInventory, ModelSharding
from motet.parallel.process.process_group import RankGroup
from motet.parallel.step_plan.plan import StepPlan, make_step_plan
from motet.parity.record.record_verification_steps import VerificationSubjectOnRank
from motet.parity.record.tensor_recorder import RecordedTensor, TensorKey, TensorKind, TensorRecorder
from motet.precision.float64_mode import use_float64
from motet.precision.recipe import PrecisionSettings
from motet.train.custom_loop import parallelize
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.pipeline.custom_batches import LossFunction, loss_and_count, sizes_of_batch
from motet.train.pipeline.pipeline_step import MicroBatchWork

UserBatch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
# Called with the batch of all ranks; returns full tensors by name, the same on every rank.
ExternalStepFunction = Callable[[Any], Mapping[str, Tensor]]
SCALAR_KEYS = {"loss": TensorKey("sum", "mean loss"), "norm": TensorKey("norm", "gradient norm")}
SEED = 0
EXAMPLE_ROWS = 2  # Rows of the batch that proves the splits of layers
PRECISION = PrecisionSettings(recipe="fp64")
_BUILT_MODULES: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class ModuleVerificationSubject:
    """The functions that `motet.verify` is called with, and a layout."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], UserBatch]  # Step -> the batch of all ranks; the first dimension is the rows
    loss_fn: LossFunction  # The mean loss over rows, or the sum of losses and their count
    optimizer: OptimizerSettings
    steps: int
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    model_sharding: ModelSharding | None = None

    @cached_property
    def batch_rows(self) -> int:
        return count_rows(self.batch_fn(0))

    def batch(self, step: int) -> UserBatch:
        batch = self.batch_fn(step)
        rows, first = count_rows(batch), self.batch_rows
        check_input(rows == first, f"verify: batch {step} has {rows} rows, and batch 0 has {first}; give all {first}")
        return batch

    def numerics(self) -> AbstractContextManager[None]:
        return use_float64()

    def build(self, group: RankGroup, folder: Path) -> "ModuleVerificationSubjectOnRank":
        settings = self.optimizer.model_dump(exclude_unset=True)
        example = select_rows(self.batch(0), range(min(self.batch_rows, EXAMPLE_ROWS)))
        engine = parallelize(
            self.make_module(),
            self.layout,
            loss=self.loss_fn,
            example=[example],
            optimizer=settings,
            precision=PRECISION,
        )
        engine.loss_function = None  # A step is done in parts, in a pipeline, too
        folder.mkdir(parents=True, exist_ok=True)
        state = engine.training_state(folder / "checkpoints")
        return ModuleVerificationSubjectOnRank(engine, state, self, self.layout_for(group.world))

    def layout_for(self, world: int) -> Layout:
        return resolve_layout(self.layout, world, self.batch_rows)

    def step_plan(self, inventory: ModelInventory, world: int) -> StepPlan:
        """The plan of a step of this many ranks."""
        layout, settings, rows = self.layout_for(world), CommunicationSettings(), self.batch_rows
        return make_step_plan(
            inventory,
            layout,
            PRECISION.resolved,
            settings=settings,
            batch_sequences=rows,
            model_sharding=self.model_sharding,
        )

    def with_model_sharding(self, model_sharding: ModelSharding) -> "ModuleVerificationSubject":
        return replace(self, model_sharding=model_sharding)

    def with_microbatches(self, microbatches: int) -> "ModuleVerificationSubject":
        return replace(self, layout=LayoutSettings(microbatches=microbatches), model_sharding=None)

    def make_module(self) -> nn.Module:
        """A new module with the same values in every call."""
        torch.manual_seed(SEED)
        module = self.model_fn()
        if not isinstance(module, nn.Module) or module in _BUILT_MODULES:
            description = "the same module again" if isinstance(module, nn.Module) else f"a {type(module).__name__}"
            raise InputError(f"verify: model_fn returns {description}; let it make a new module in each call")
        _BUILT_MODULES.add(module)
        return module.double().train()


@dataclass(frozen=True)
class ModuleVerificationSubjectOnRank(VerificationSubjectOnRank):
    """A module on one rank, without an evaluation set."""

    subject: ModuleVerificationSubject
    layout: Layout

    def learning_rate(self, step: int) -> float:
        return self.subject.optimizer.learning_rate

    def step(self, step: int, recorder: TensorRecorder) -> None:
        global_batch, engine = self.subject.batch(step), self.engine
        row_ranges = contributing_rows_of_rank(self.layout, engine.group.rank, self.subject.batch_rows)
        counts = dict[int, float]()

        def microbatch_at(index: int) -> MicroBatchWork:
            rows = row_ranges[index]
            recorder.begin_microbatch(rows)
            batch = select_rows(global_batch, rows)
            for name, tensor in named_tensors(batch):
                recorder.add("sample", name, tensor)
            sizes = sizes_of_batch(batch) if engine.pipeline else {}
            return MicroBatchWork(partial(compute, index, batch), sizes, partial(drawing_masks, rows))

        def drawing_masks(rows: range) -> AbstractContextManager[object]:
            return recorder.recording_masks(self._randomness(step, rows))

        def compute(index: int, batch: UserBatch) -> Tensor:
            loss, counts[index] = self._loss_sum_and_count(batch)
            recorder.add("loss", "loss", loss)
            return loss

        engine.begin_step()
        losses = engine.run_microbatches(microbatch_at, len(row_ranges))
        engine.update(self.learning_rate(step), sum(map(float, losses)), sum(counts.values()))

    @contextmanager
    def loss_of_rows(self, step: int, rows: range) -> Iterator[tuple[Tensor, float]]:
        with self._randomness(step, rows):
            yield self._loss_sum_and_count(select_rows(self.subject.batch(step), rows))

    def _loss_sum_and_count(self, batch: UserBatch) -> tuple[Tensor, float]:
        output, rows = self.subject.loss_fn(self.engine.module, batch), count_rows(batch)
        value, count = loss_and_count(output, "verify")
        return (value, count) if isinstance(output, tuple) else (value * rows, float(rows))

    def _randomness(self, step: int, rows: range) -> AbstractContextManager[object]:
        return self._dropout_mode.for_rows(step, torch.arange(rows.start, rows.stop))

    @cached_property
    def _dropout_mode(self) -> LayoutInvariantDropoutMode:
        return LayoutInvariantDropoutMode(SEED, self.engine.module)


def default_loss(module: nn.Module, batch: Any) -> Any:
    """The output of the module for the batch, or its `loss`."""
    arguments = (batch,) if isinstance(batch, Tensor) else batch
    output = module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)
    return output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)


def named_tensors(batch: UserBatch) -> Iterator[tuple[str, Tensor]]:
    sentence = f"verify: a batch is a {type(batch).__name__}; give a tensor, or a mapping or sequence of tensors"
    check_input(isinstance(batch, Tensor | Mapping | Sequence), sentence)
    named = {"batch": batch} if isinstance(batch, Tensor) else batch
    yield from named.items() if isinstance(named, Mapping) else ((str(n), each) for n, each in enumerate(named))


def count_rows(batch: UserBatch) -> int:
    counts = {}
    for name, tensor in named_tensors(batch):
        wrong_type = f"verify: {name} of a batch is a {type(tensor).__name__}; give tensors"
        check_input(isinstance(tensor, Tensor), wrong_type)
        counts[name] = len(tensor) if tensor.ndim else 0
    uneven = f"verify: the tensors of a batch have {counts} rows; give tensors whose first dimension is the rows"
    check_input(len(set(counts.values())) == 1 and 0 not in counts.values(), uneven)
    return next(iter(counts.values()))


def select_rows(batch: UserBatch, rows: range) -> Any:
    """Some rows of a batch, with floating-point numbers in float64."""
    rows_by_name = {name: tensor[rows.start : rows.stop] for name, tensor in named_tensors(batch)}
    selected = {name: rows.double() if rows.is_floating_point() else rows for name, rows in rows_by_name.items()}
    if isinstance(batch, Tensor | Mapping):
        return selected["batch"] if isinstance(batch, Tensor) else selected
    return type(batch)(*selected.values()) if hasattr(batch, "_fields") else tuple(selected.values())


def record_external_steps(subject: ModuleVerificationSubject, step: ExternalStepFunction) -> list[list[RecordedTensor]]:
    """The full tensors that parallel code of the caller returns for each step."""
    records_by_step = []
    for step_index in range(subject.steps):
        recorder = TensorRecorder()
        for name, tensor in step(select_rows(subject.batch(step_index), range(subject.batch_rows))).items():
            _record_output(recorder, name, tensor)
        records_by_step.append(recorder.records)
    return records_by_step


def _record_output(recorder: TensorRecorder, key: str, value: Any) -> None:
    prefix, _, inner = key.partition(".")
    if not isinstance(value, Tensor | float | int):
        raise InputError(f"verify: your step returns {key} = {value!r}; return a tensor, zeros for no gradient")
    if key in SCALAR_KEYS:
        recorder.add_scalar(*SCALAR_KEYS[key], float(value))
        return
    check_input(
        prefix in ("gradient", "parameter", "activation") and inner,
        f"verify: your step returns {key!r}; names are loss, norm, gradient.NAME, parameter.NAME (of the module's "
        "parameters) and activation.NAME (of its modules)",
    )
    kind: TensorKind = next(each for each in get_args(TensorKind) if each == prefix)
    if kind == "activation":
        recorder.add_for_microbatch(kind, inner, torch.as_tensor(value), microbatch=-1, rows=())
    else:
        recorder.add_shard(kind, inner, torch.as_tensor(value))
