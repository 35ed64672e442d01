"""Subjects of verification, and their recorded steps: from states of one device, in a row, from an own checkpoint.

A step in float16 whose gradients overflow on one rank, and a step that continues from the checkpoint after it.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from pydantic import TypeAdapter
from torch import Tensor

from motet.parallel.layout import Layout
from motet.parallel.model_sharding import ModelInventory, ModelSharding
from motet.parallel.process.module_inventory import persistent_buffers
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.plan import StepPlan
from motet.parity.record.engine_hooks import (
    patched_method,
    place_recorder,
    record_parameters,
    record_state,
    record_step,
)
from motet.parity.record.recomputed_tensors import digest
from motet.parity.record.saved_bytes import record_saved_bytes
from motet.parity.record.tensor_recorder import MASTER_PREFIX, RecordedShard, RecordedTensor, TensorKind, TensorRecorder
from motet.train.engine import StepStats, TrainingEngine
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.state import TrainingState

SINGLE_RANK_GROUP = RankGroup(0, 1, None, torch.device("cpu"))
# How the steps of a layout begin: each from a state of the reference; one after another; the last one again, from the
# checkpoint that the layout wrote before it; and one after another without waiting for updates that are in flight.
FROM_REFERENCE, TRAJECTORY, RESUMED = "from the state of one device", "in a row", "from its own checkpoint"
UNOBSERVED = "in a row without a look between them"
NATIVE_PHASE = "in its own precision"
NATIVE_STEPS_AFTER = 2  # Steps that follow the one that is compared, with the parameters that it has left
COPY_KINDS: frozenset[TensorKind] = frozenset(
    ["starting parameter", "used parameter", "parameter", "state", "rounded master", "sum"]
)
NATIVE_FOLDER = "native"  # Subfolder of the job in its own precision, if that is verified, too


@dataclass(frozen=True)
class VerificationSubjectOnRank(ABC):
    """A subject that was built on one rank."""

    engine: TrainingEngine
    state: TrainingState

    @abstractmethod
    def learning_rate(self, step: int) -> float: ...

    @abstractmethod
    def step(self, step: int, recorder: TensorRecorder) -> None:
        """Train for one step; record samples, random masks and losses."""

    @abstractmethod
    def loss_of_rows(self, step: int, rows: range) -> AbstractContextManager[tuple[torch.Tensor, float]]:
        """The sum of the losses of some rows, and their count. Its backward is done inside of the context."""

    def logits_of_rows(self, step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, targets and weights of some rows, where ranks may split the logits."""
        raise NotImplementedError

    def evaluation_metrics(self) -> dict[str, float]:
        return {}

    def inference_metrics(self) -> dict[str, float]:
        """Numbers of forwards without gradients."""
        return {}

    def evaluation_losses(self, rows: range) -> list[tuple[torch.Tensor, float]]:
        """The sum of the losses and their count, for some rows of each batch of the evaluation."""
        return []


class VerificationSubject(Protocol):
    """A job or a module, with a layout."""

    @property
    def optimizer(self) -> OptimizerSettings: ...

    @property
    def batch_rows(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def numerics(self) -> AbstractContextManager[None]:
        """The precision in which everything is computed inside."""

    def build(self, group: RankGroup, folder: Path) -> VerificationSubjectOnRank: ...

    def layout_for(self, world: int) -> Layout: ...

    def step_plan(self, inventory: ModelInventory, world: int) -> StepPlan:
        """The plan of a step of this many ranks."""

    def with_model_sharding(self, model_sharding: ModelSharding) -> Self:
        """The subject whose ranks split the model in this way, and do not look for another one."""

    def with_microbatches(self, microbatches: int) -> Self:
        """The subject on one device that splits the batch into micro-batches."""


class RecordedStepKey(NamedTuple):
    """A step, and how it begins."""

    phase: str
    step: int


RecordedStep = tuple[RecordedStepKey, list[RecordedTensor]]


def step_checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


@contextmanager
def single_thread() -> Iterator[None]:
    """One thread, as each rank has; more of them slow down ranks that wait for each other."""
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)


def run_recorded_step(
    subject: VerificationSubjectOnRank, step: int, *, evaluates: bool = False, **options: Any
) -> list[RecordedTensor]:
    """The records of a step, and of the evaluation after it; `options` are those of the recorder."""
    recorder = TensorRecorder(**options)
    record_step(subject.engine, recorder, lambda: subject.step(step, recorder))
    return recorder.records + (record_evaluation(subject) if evaluates else [])


def record_evaluation(subject: VerificationSubjectOnRank) -> list[RecordedTensor]:
    recorder = TensorRecorder()
    for name, value in {**subject.evaluation_metrics(), **subject.inference_metrics()}.items():
        recorder.add_scalar("evaluation", name, value)
    return recorder.records


def record_phases(
    subject: VerificationSubject,
    group: RankGroup,
    folder: Path,
    *,
    checkpoint_subfolder: str,
    on_sharding: Callable[[ModelSharding], object] = lambda sharding: None,
) -> Iterator[RecordedStep]:
    """The records of a rank in all phases of its layout, whose own checkpoints go to the subfolder.

    `on_sharding` is called with the split of the model that the ranks have found, once for all phases.
    """
    own_folder, last_step = folder / checkpoint_subfolder, subject.steps - 1
    on_rank = subject.build(group, own_folder)
    on_sharding(on_rank.engine.plan.model_sharding)
    subject = subject.with_model_sharding(on_rank.engine.plan.model_sharding)
    for step in range(subject.steps):
        on_rank.state.restore(step_checkpoint_path(folder, step))
        yield RecordedStepKey(FROM_REFERENCE, step), run_recorded_step(on_rank, step)
    on_rank = subject.build(group, own_folder)
    for step in range(subject.steps):  # From its own initial values, with evaluations between steps as in training
        if step == last_step:
            on_rank.state.save(step)
        elif step:
            on_rank.evaluation_metrics()
        yield RecordedStepKey(TRAJECTORY, step), run_recorded_step(on_rank, step, evaluates=step == last_step)
    on_rank = subject.build(group, own_folder)
    on_rank.state.restore(step_checkpoint_path(own_folder, last_step))
    records = run_recorded_step(on_rank, last_step, evaluates=True)
    records += record_saved_bytes(on_rank.engine, partial(on_rank.step, last_step))
    yield RecordedStepKey(RESUMED, last_step), records
    if on_rank.engine.optimizer.sharded_parameters.updates_in_forward:  # Recording parameters waits for them
        on_rank = subject.build(group, own_folder)
        for step in range(last_step):
            on_rank.step(step, TensorRecorder())
        records = run_recorded_step(on_rank, last_step, evaluates=True)
        yield RecordedStepKey(UNOBSERVED, last_step), [r for r in records if r.kind != "starting parameter"]


def record_native_steps(
    subject: VerificationSubject, group: RankGroup, folder: Path, *, compute: torch.dtype
) -> Iterator[RecordedStep]:
    """The last step in the precision of the job, from the checkpoint of one device, and the masters before it.

    The initial state and the restored one come first, as the ends of two steps before; more steps follow.
    """
    last_step = subject.steps - 1
    with subject.numerics():
        on_rank = subject.build(group, folder)
        initial = record_starting_masters(on_rank)
        yield RecordedStepKey(NATIVE_PHASE, last_step - 2), _record_parameter_state(on_rank, compute)
        on_rank.state.restore(step_checkpoint_path(folder, last_step))
        yield RecordedStepKey(NATIVE_PHASE, last_step - 1), _record_parameter_state(on_rank, compute)
        records = run_recorded_step(on_rank, last_step, rounds_masters_to=compute)
        yield RecordedStepKey(NATIVE_PHASE, last_step), initial + records
        for step in range(subject.steps, subject.steps + NATIVE_STEPS_AFTER):
            records = run_recorded_step(on_rank, step, rounds_masters_to=compute, kinds=COPY_KINDS)
            yield RecordedStepKey(NATIVE_PHASE, step), records


def _record_parameter_state(subject: VerificationSubjectOnRank, compute: torch.dtype) -> list[RecordedTensor]:
    """The masters now, in the compute dtype, too, and the parameters that the model computes with."""
    recorder = TensorRecorder(rounds_masters_to=compute, kinds=COPY_KINDS)
    place_recorder(subject.engine, recorder)
    record_state(recorder, subject.engine.optimizer.state())
    record_parameters(subject.engine, recorder, "parameter")
    return recorder.records


def native_steps(steps: int) -> list[RecordedStepKey]:
    """The steps in the precision of a job with `steps` steps, after the states before the first of them."""
    return [RecordedStepKey(NATIVE_PHASE, step) for step in range(steps - 3, steps + NATIVE_STEPS_AFTER)]


def record_starting_masters(subject: VerificationSubjectOnRank, sketches_shards: bool = True) -> list[RecordedTensor]:
    """Initial masters, which do not depend on any order of summation."""
    recorder = TensorRecorder(sketches_shards=sketches_shards)
    place_recorder(subject.engine, recorder)
    for name, shard in subject.engine.optimizer.state().items():
        if name.startswith(MASTER_PREFIX):
            recorder.add_shard("starting parameter", name, shard)
    return recorder.records


def record_restored_step(
    subject: VerificationSubjectOnRank, folder: Path, step: int, **options: Any
) -> list[RecordedTensor]:
    subject.state.restore(step_checkpoint_path(folder, step))
    return run_recorded_step(subject, step, **options)


@dataclass(frozen=True)
class RecordFolder(Mapping[RecordedStepKey, list[list[RecordedTensor]]]):
    """The records of one layout by each rank, for every phase and step that it did; read when they are asked for."""

    folder: Path
    layout_index: int
    world: int
    steps: int = 0  # Number of steps of each phase

    @property
    def checkpoint_subfolder(self) -> str:
        return f"layout-{self.layout_index}"

    def __getitem__(self, at: RecordedStepKey) -> list[list[RecordedTensor]]:
        with torch.serialization.safe_globals([RecordedTensor, RecordedShard, ShardSpec]):
            return [torch.load(self._file(at, rank), weights_only=True) for rank in range(self.world)]

    def __iter__(self) -> Iterator[RecordedStepKey]:
        all_steps = [(phase, step) for phase in (FROM_REFERENCE, TRAJECTORY) for step in range(self.steps)]
        all_steps += [(phase, self.steps - 1) for phase in (RESUMED, UNOBSERVED)]
        return (at for at in starmap(RecordedStepKey, all_steps) if self._file(at, 0).exists())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def save_model_sharding(self, rank: int, model_sharding: ModelSharding) -> None:
        """Save the split of the model by which the ranks train; all ranks have the same one, or steps will differ."""
        if rank == 0:
            self._model_sharding_file.write_bytes(TypeAdapter(ModelSharding).dump_json(model_sharding))

    def model_sharding(self) -> ModelSharding:
        """The split of the model by which the ranks train."""
        return TypeAdapter(ModelSharding).validate_json(self._model_sharding_file.read_bytes())

    def save(self, at: RecordedStepKey, rank: int, records: list[RecordedTensor]) -> None:
        torch.save(records, self._file(at, rank))

    def mark_done(self, rank: int) -> None:
        (self.folder / f"layout-{self.layout_index}-done-{rank}").touch()

    def is_done(self) -> bool:
        return all((self.folder / f"layout-{self.layout_index}-done-{rank}").exists() for rank in range(self.world))

    def delete(self) -> None:
        """Delete records and checkpoints; the marks of ranks that are done stay."""
        shutil.rmtree(self.folder / self.checkpoint_subfolder)
        for file in self.folder.glob(f"layout-{self.layout_index}-*-rank-*.pt"):
            file.unlink()

    @property
    def _model_sharding_file(self) -> Path:
        return self.folder / f"layout-{self.layout_index}-model-sharding.json"

    def _file(self, at: RecordedStepKey, rank: int) -> Path:
        return self.folder / f"layout-{self.layout_index}-{at.phase.replace(' ', '-')}-{at.step}-rank-{rank}.pt"


CHANGED_BUFFER = "buffer "  # And its name: 1 if the step with an overflow changes it
OVERFLOW_PHASE = "with an overflow on one rank"


def record_overflow(
    subject: VerificationSubject, group: RankGroup, folder: Path, *, rank_folder: Path
) -> list[RecordedTensor]:
    """Numbers of a rank: with the scale of the job, when the gradients of the last rank overflow, and after that step.

    All steps begin with the state of one device in `folder`; the checkpoint of the ranks goes to `rank_folder`.
    """
    recorder, last_step = TensorRecorder(), subject.steps - 1

    def add(name: str, value: float) -> None:
        recorder.add_scalar("loss scale", name, value)

    with subject.numerics():
        on_rank = subject.build(group, rank_folder)
        on_rank.state.restore(step_checkpoint_path(folder, last_step))
        optimizer = on_rank.engine.optimizer
        add("scale", optimizer.loss_scale)
        stats, clipped = _run_step(on_rank, last_step)
        add("norm", stats.grad_norm)
        add("clipped", clipped)
        on_rank.state.restore(step_checkpoint_path(folder, last_step))
        updates, buffers = list[None](), persistent_buffers(on_rank.engine.module)
        before = {name: digest(buffer) for name, buffer in buffers.items() if not buffer.is_meta}
        with ExitStack() as stack:
            stack.enter_context(patched_method(optimizer, "update", lambda *_: updates.append(None)))
            if group.rank == group.world - 1:
                stack.enter_context(_infinite_norm(on_rank.engine))
            stats, _ = _run_step(on_rank, last_step)
        add("is skipped", float(stats.is_overflow and not updates))
        add("scale after it", optimizer.loss_scale)
        for name, bits in before.items():
            add(f"{CHANGED_BUFFER}{name}", float(digest(buffers[name]) != bits))
        on_rank.state.save(last_step)
        on_rank = subject.build(group, rank_folder)
        on_rank.state.restore(step_checkpoint_path(rank_folder, last_step))
        optimizer = on_rank.engine.optimizer
        add("scale from a checkpoint", optimizer.loss_scale)
        first_scale = int(recorder.records[0].value)
        if optimizer.loss_scaler and optimizer.loss_scale == first_scale:  # A static one does not change
            optimizer.loss_scaler = replace(optimizer.loss_scaler, scale=first_scale // 2 or 2)
        add("other scale", optimizer.loss_scale)
        stats, clipped = _run_step(on_rank, last_step)
        add("norm with the other scale", stats.grad_norm)
        add("clipped with the other scale", clipped)
    return recorder.records


def _run_step(subject: VerificationSubjectOnRank, step: int) -> tuple[StepStats, float]:
    """The outcome of a step, and the norm of the gradients that the optimizer of this rank gets."""
    engine, outcomes = subject.engine, list[StepStats]()
    update = engine.update

    def observed(*args: Any, **kwargs: Any) -> StepStats:
        outcomes.append(update(*args, **kwargs))
        return outcomes[-1]

    with patched_method(engine, "update", observed), engine.optimizer.capture_gradients() as captured:
        subject.step(step, TensorRecorder())
        engine.synchronize()
    return outcomes[0], float(
        torch.stack([g.double().square().sum() for g in captured] or [torch.zeros(())]).sum().sqrt()
    )


@contextmanager
def _infinite_norm(engine: TrainingEngine) -> Iterator[None]:
    """The gradients of this rank overflow: its summand of the squared norm is infinite."""
    original = engine.optimizer.squared_norm

    def overflowing() -> Tensor:
        return torch.full_like(original(), torch.inf)  # Ranks may compute it together

    with patched_method(engine.optimizer, "squared_norm", overflowing):
        yield
