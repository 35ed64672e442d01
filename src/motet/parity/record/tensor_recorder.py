"""What one rank computes in a step, tensor by tensor."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from motet.collectives.compression.byte_messages import codec_numerics
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.process.rank_consistency import persistent_buffers
from motet.parallel.reproducible.accurate_norm import squared_norm
from motet.parity.record.random_sign_sketch import sketch_rows, sketch_shard
from motet.train.engine import StepStats, TrainingEngine

# In the order of a step; of what is of one kind, the order is that of execution on one device.
TensorKind = Literal[
    "starting parameter",
    "sample",
    "random mask",
    "activation",
    "loss",
    "activation gradient",
    "gradient",
    "sum",
    "norm",
    "clipped gradient",
    "state",
    "parameter",
    "buffer",
    "evaluation",
]


class RecordedTensor(NamedTuple):
    """A tensor, or this rank's part of one."""

    kind: TensorKind
    name: str
    value: Tensor  # Folded, where it is large
    microbatch: int = -1  # The micro-batch, in the order of this rank; -1: of the whole step
    rows: tuple[int, ...] = ()  # Of the global batch, that it is of
    start: int = 0
    numel: int = 0
    unsharded_shape: tuple[int, ...] | None = None  # Of the whole, where it is `numel` of its elements from `start` on
    dtype: str = "float64"
    is_sketched: bool = False
    significant_bits: int = 0  # Significant ones, of any of its numbers; 0 where it has too few numbers to tell
    flops_so_far: float = 0.0  # Of floating point, until it was there, where they are counted
    squared_norm: float = 0.0  # Of a summed gradient: its own, before it was folded


@dataclass
class TensorRecorder:
    """Of one step."""

    records: list[RecordedTensor] = field(default_factory=list)
    microbatch: int = -1
    rows: tuple[int, ...] = ()
    sketches_shards: bool = True  # Parts of parameters become short where they are long; rows of activations always
    call_counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # In this micro-batch
    flops_so_far: Callable[[], float] = lambda: 0.0  # So far
    mask_count: int = 0  # In this micro-batch
    is_recording: bool = True  # Whether something comes of this micro-batch; if not, it is not recorded
    # Names of parameters in the order in which backward had their gradients.
    gradient_order: list[str] = field(default_factory=list)
    # On what modules gave; some of it may be a parameter, which stays.
    gradient_hooks: list[RemovableHandle] = field(default_factory=list)

    def add(self, kind: TensorKind, name: str, value: Tensor) -> None:
        """Of the micro-batch that is computed."""
        if not self.is_recording:
            return
        self.call_counts[kind, name] += 1
        call = self.call_counts[kind, name]
        self.add_for_microbatch(kind, name if call == 1 else f"{name} (call {call})", value, self.microbatch, self.rows)

    def add_for_microbatch(
        self, kind: TensorKind, name: str, value: Tensor, microbatch: int, rows: tuple[int, ...]
    ) -> None:
        with codec_numerics():
            self._add_for_microbatch(kind, name, value.detach().cpu(), microbatch, rows)

    def _add_for_microbatch(
        self, kind: TensorKind, name: str, value: Tensor, microbatch: int, rows: tuple[int, ...]
    ) -> None:
        sketch = sketch_rows(value)
        record = RecordedTensor(kind, name, sketch.clone(), microbatch, rows, is_sketched=sketch is not value)
        self._append(record._replace(dtype=_dtype_name(value), significant_bits=count_significant_bits(value)))

    def add_scalar(self, kind: TensorKind, name: str, value: float) -> None:
        self._append(RecordedTensor(kind, name, torch.tensor(value, dtype=torch.float64)))

    def add_shard(self, kind: TensorKind, name: str, shard: LocalShard | Tensor) -> None:
        with codec_numerics():
            self._add_shard(kind, name, LocalShard(shard.shape, 0, shard) if isinstance(shard, Tensor) else shard)

    def _add_shard(self, kind: TensorKind, name: str, shard: LocalShard) -> None:
        values = shard.values.detach().cpu().reshape(-1)
        sketch = sketch_shard(values, shard.start) if self.sketches_shards else values
        record = RecordedTensor(
            kind, name, sketch.clone(), start=shard.start, numel=values.numel(), unsharded_shape=tuple(shard.shape)
        )
        full_record = record._replace(
            dtype=_dtype_name(values),
            significant_bits=count_significant_bits(values),
            is_sketched=sketch is not values,
            squared_norm=squared_norm(values) if kind == "gradient" else 0.0,
        )
        self._append(full_record)

    def add_shards(self, kind: TensorKind, shards: Mapping[str, LocalShard | Tensor]) -> None:
        """In the order in which backward came to them."""
        in_backward_order = [name for name in self.gradient_order if name in shards]
        for name in [*in_backward_order, *(name for name in shards if name not in in_backward_order)]:
            self.add_shard(kind, name, shards[name])

    def _append(self, record: RecordedTensor) -> None:
        self.records.append(record._replace(flops_so_far=float(self.flops_so_far())))

    def begin_microbatch(self, rows: Sequence[int], is_recording: bool = True) -> None:
        """`rows`: that were asked for."""
        self.microbatch, self.rows, self.is_recording = self.microbatch + 1, tuple(rows), is_recording
        self.call_counts.clear()
        self.mask_count = 0

    @contextmanager
    def recording_hooks(self, module: nn.Module) -> Iterator[None]:
        """What its modules give, and the gradients of that."""
        hooks = [
            inner.register_forward_hook(self._make_forward_hook(name or "model"))
            for name, inner in module.named_modules()
        ]
        hooks += [
            p.register_post_accumulate_grad_hook(lambda _, name=name: self.gradient_order.append(name))
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for hook in [*hooks, *self.gradient_hooks]:
                hook.remove()

    def record_dropout_mask(self, dropout_index: int, mask: Tensor) -> None:
        self.mask_count += 1  # not the site, which may be wrong
        self.add("random mask", f"dropout {self.mask_count}", mask)

    def _make_forward_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not (self.is_recording and torch.is_grad_enabled()):
                return
            for label, tensor in named_float_tensors(output, name):
                self.add("activation", label, tensor)
                if tensor.requires_grad:
                    gradient_hook = self._make_gradient_hook(self.records[-1].name, self.microbatch, self.rows)
                    self.gradient_hooks.append(tensor.register_hook(gradient_hook))

        return hook

    def _make_gradient_hook(self, name: str, microbatch: int, rows: tuple[int, ...]) -> Callable[[Tensor], None]:
        return lambda gradient: self.add_for_microbatch("activation gradient", name, gradient, microbatch, rows)


def named_float_tensors(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of whatever a module gives."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
        return
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, list | tuple):
        items = enumerate(output)
    for key, value in items:
        yield from named_float_tensors(value, f"{name}[{key}]")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def count_significant_bits(tensor: Tensor) -> int:
    """How many bits its numbers need: 8 for what was rounded to bfloat16, whatever it is kept in."""
    if not tensor.is_floating_point() or tensor.numel() < MIN_ELEMENTS_FOR_BITS:
        return 0
    sample = tensor.detach().reshape(-1)[: 16 * MIN_ELEMENTS_FOR_BITS].double()
    sample = sample[sample.isfinite() & (sample != 0)]
    if sample.numel() < MIN_ELEMENTS_FOR_BITS:
        return 0
    mantissas = (torch.frexp(sample).mantissa * 2.0**53).long()
    lowest_set_bits = mantissas & -mantissas
    return 53 - int(torch.log2(lowest_set_bits.double().min()))


MIN_ELEMENTS_FOR_BITS = 64  # Numbers to tell from what they were rounded to


# --- a step that is recorded -----------------------------------------------------------------------


@contextmanager
def _recording_update(engine: TrainingEngine, recorder: TensorRecorder) -> Iterator[None]:
    """What it sums and updates is told. It stays the same engine: what it keeps from step to step is looked at too."""
    original_update = engine.update

    def update(*args: Any, **kwargs: Any) -> StepStats:
        sharded_parameters = engine.optimizer.sharded_parameters
        summed_gradients: dict[str, LocalShard] = (
            {}
            if sharded_parameters.updates_on_arrival
            else _clone_shards(sharded_parameters.local_shards(sharded_parameters.local_gradients()))
        )
        with engine.optimizer.capture_gradients() as captured_gradients:
            stats = original_update(*args, **kwargs)
            sharded_parameters.wait_for_pending()
            clipped_gradients = sharded_parameters.local_shards(captured_gradients) if captured_gradients else {}
        if sharded_parameters.updates_on_arrival:  # what was scaled and sent is scaled back
            scale = engine.gradient_scale(stats.grad_norm, stats.count)
            summed_gradients = {
                name: piece._replace(values=piece.values / scale) for name, piece in clipped_gradients.items()
            }
        recorder.add_shards("gradient", summed_gradients)
        recorder.add_scalar("sum", "target tokens", stats.count)
        recorder.add_scalar("sum", "mean loss", stats.loss)
        recorder.add_scalar("norm", "gradient norm", stats.grad_norm)
        recorder.add_shards("clipped gradient", clipped_gradients)
        state = engine.optimizer.state()  # masters are updated last
        for name in sorted(state, key=lambda name: name.startswith("master/")):
            recorder.add_shard("state", name, state[name])
        return stats

    with patched_method(engine, "update", update):
        yield


@contextmanager
def patched_method(engine: TrainingEngine, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Of a method of this engine."""
    vars(engine)[name] = replacement
    try:
        yield
    finally:
        del vars(engine)[name]


def _clone_shards(shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    return {name: piece._replace(values=piece.values.clone()) for name, piece in shards.items()}


def record_step(engine: TrainingEngine, recorder: TensorRecorder, step: Callable[[], None]) -> None:
    """`step` is a step of the engine."""
    for name, parameter in engine.module.named_parameters():
        recorder.add_shard("starting parameter", name, local_shard(parameter))
    with recorder.recording_hooks(engine.module), _recording_update(engine, recorder):
        step()
    for name, parameter in engine.module.named_parameters():
        recorder.add_shard("parameter", name, local_shard(parameter))
    for name, buffer in persistent_buffers(engine.module).items():
        recorder.add_shard("buffer", name, buffer)
