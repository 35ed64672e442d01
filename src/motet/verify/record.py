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
from motet.parallel.data_parallel.bucketed_zero import persistent_buffers
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.data_parallel.sharded_parameters import LocalShard
from motet.parallel.reproducible.accurate_norm import squared_norm
from motet.train.engine import StepStats, TrainingEngine
from motet.verify.fold import folded_part, folded_rows

Kind = Literal[
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
"""In the order of a step; of what is of one kind, the order is that of execution on one device."""


class Seen(NamedTuple):
    """A tensor, or this rank's part of one."""

    kind: Kind
    name: str
    value: Tensor
    """Folded, where it is large."""
    part: int = -1
    """The micro-batch, in the order of this rank; -1: of the whole step."""
    rows: tuple[int, ...] = ()
    """Of the global batch, that it is of."""
    start: int = 0
    numel: int = 0
    shape: tuple[int, ...] | None = None
    """Of the whole, where it is `numel` of its elements from `start` on."""
    dtype: str = "float64"
    folded: bool = False
    bits: int = 0
    """Significant ones, of any of its numbers; 0 where it has too few numbers to tell."""
    operations: float = 0.0
    """Of floating point, until it was there, where they are counted."""
    squares: float = 0.0
    """Of a summed gradient: its own, before it was folded."""


@dataclass
class Recorder:
    """Of one step."""

    seen: list[Seen] = field(default_factory=list)
    part: int = -1
    rows: tuple[int, ...] = ()
    folds: bool = True
    """Parts of parameters become short where they are long; rows of activations always."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """In this micro-batch."""
    operations: Callable[[], float] = lambda: 0.0
    """So far."""
    masks: int = 0
    """In this micro-batch."""
    counts: bool = True
    """Whether something comes of this micro-batch; if not, it is not recorded."""
    arrived: list[str] = field(default_factory=list)
    """Names of parameters in the order in which backward had their gradients."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    """On what modules gave; some of it may be a parameter, which stays."""

    def add(self, kind: Kind, name: str, value: Tensor) -> None:
        """Of the micro-batch that is computed."""
        if not self.counts:
            return
        self.calls[kind, name] += 1
        call = self.calls[kind, name]
        self.add_part(kind, name if call == 1 else f"{name} (call {call})", value, self.part, self.rows)

    def add_part(self, kind: Kind, name: str, value: Tensor, part: int, rows: tuple[int, ...]) -> None:
        with codec_numerics():
            self._add_part(kind, name, value.detach().cpu(), part, rows)

    def _add_part(self, kind: Kind, name: str, value: Tensor, part: int, rows: tuple[int, ...]) -> None:
        short = folded_rows(value)
        seen = Seen(kind, name, short.clone(), part, rows, folded=short is not value)
        self._add(seen._replace(dtype=_dtype(value), bits=bits_of(value)))

    def add_whole(self, kind: Kind, name: str, value: float) -> None:
        self._add(Seen(kind, name, torch.tensor(value, dtype=torch.float64)))

    def add_piece(self, kind: Kind, name: str, piece: LocalShard | Tensor) -> None:
        with codec_numerics():
            self._add_piece(kind, name, LocalShard(piece.shape, 0, piece) if isinstance(piece, Tensor) else piece)

    def _add_piece(self, kind: Kind, name: str, found: LocalShard) -> None:
        values = found.values.detach().cpu().reshape(-1)
        short = folded_part(values, found.start) if self.folds else values
        seen = Seen(kind, name, short.clone(), start=found.start, numel=values.numel(), shape=tuple(found.shape))
        squares = squared_norm(values) if kind == "gradient" else 0.0
        told = seen._replace(dtype=_dtype(values), bits=bits_of(values), folded=short is not values, squares=squares)
        self._add(told)

    def add_pieces(self, kind: Kind, pieces: Mapping[str, LocalShard | Tensor]) -> None:
        """In the order in which backward came to them."""
        first = [name for name in self.arrived if name in pieces]
        for name in [*first, *(name for name in pieces if name not in first)]:
            self.add_piece(kind, name, pieces[name])

    def _add(self, seen: Seen) -> None:
        self.seen.append(seen._replace(operations=float(self.operations())))

    def begin_part(self, rows: Sequence[int], counts: bool = True) -> None:
        """`rows`: that were asked for."""
        self.part, self.rows, self.counts = self.part + 1, tuple(rows), counts
        self.calls.clear()
        self.masks = 0

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """What its modules give, and the gradients of that."""
        hooks = [inner.register_forward_hook(self._hook(name or "model")) for name, inner in module.named_modules()]
        hooks += [
            p.register_post_accumulate_grad_hook(lambda _, name=name: self.arrived.append(name))
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for hook in [*hooks, *self.hooks]:
                hook.remove()

    def mask(self, site: int, mask: Tensor) -> None:
        self.masks += 1  # not the site, which may be wrong
        self.add("random mask", f"dropout {self.masks}", mask)

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not (self.counts and torch.is_grad_enabled()):
                return
            for label, tensor in tensors_of(output, name):
                self.add("activation", label, tensor)
                if tensor.requires_grad:
                    heard = self._gradient_hook(self.seen[-1].name, self.part, self.rows)
                    self.hooks.append(tensor.register_hook(heard))

        return hook

    def _gradient_hook(self, name: str, part: int, rows: tuple[int, ...]) -> Callable[[Tensor], None]:
        return lambda gradient: self.add_part("activation gradient", name, gradient, part, rows)


def tensors_of(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
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
        yield from tensors_of(value, f"{name}[{key}]")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def bits_of(tensor: Tensor) -> int:
    """How many bits its numbers need: 8 for what was rounded to bfloat16, whatever it is kept in."""
    if not tensor.is_floating_point() or tensor.numel() < ENOUGH:
        return 0
    some = tensor.detach().reshape(-1)[: 16 * ENOUGH].double()
    some = some[some.isfinite() & (some != 0)]
    if some.numel() < ENOUGH:
        return 0
    whole = (torch.frexp(some).mantissa * 2.0**53).long()
    lowest = whole & -whole
    return 53 - int(torch.log2(lowest.double().min()))


ENOUGH = 64
"""Numbers to tell from what they were rounded to."""


# --- a step that is recorded -----------------------------------------------------------------------


@contextmanager
def _overheard(engine: TrainingEngine, recorder: Recorder) -> Iterator[None]:
    """What it sums and updates is told. It stays the same engine: what it keeps from step to step is looked at too."""
    plain = engine.update

    def update(*args: Any, **kwargs: Any) -> StepStats:
        spread = engine.optimizer.sharded_parameters
        summed: dict[str, LocalShard] = (
            {} if spread.updates_on_arrival else _copies(spread.local_shards(spread.local_gradients()))
        )
        with engine.optimizer.capture_gradients() as given:
            done = plain(*args, **kwargs)
            spread.wait_for_pending()
            clipped = spread.local_shards(given) if given else {}
        if spread.updates_on_arrival:  # what was scaled and sent is scaled back
            scale = engine.gradient_scale(done.grad_norm, done.count)
            summed = {name: piece._replace(values=piece.values / scale) for name, piece in clipped.items()}
        recorder.add_pieces("gradient", summed)
        recorder.add_whole("sum", "target tokens", done.count)
        recorder.add_whole("sum", "mean loss", done.loss)
        recorder.add_whole("norm", "gradient norm", done.grad_norm)
        recorder.add_pieces("clipped gradient", clipped)
        state = engine.optimizer.state()  # masters are updated last
        for name in sorted(state, key=lambda name: name.startswith("master/")):
            recorder.add_piece("state", name, state[name])
        return done

    with instead(engine, "update", update):
        yield


@contextmanager
def instead(engine: TrainingEngine, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Of a method of this engine."""
    vars(engine)[name] = method
    try:
        yield
    finally:
        del vars(engine)[name]


def _copies(pieces: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    return {name: piece._replace(values=piece.values.clone()) for name, piece in pieces.items()}


def recorded(engine: TrainingEngine, recorder: Recorder, step: Callable[[], None]) -> None:
    """`step` is a step of the engine."""
    for name, parameter in engine.module.named_parameters():
        recorder.add_piece("starting parameter", name, local_shard(parameter))
    with recorder.watching(engine.module), _overheard(engine, recorder):
        step()
    for name, parameter in engine.module.named_parameters():
        recorder.add_piece("parameter", name, local_shard(parameter))
    for name, buffer in persistent_buffers(engine.module).items():
        recorder.add_piece("buffer", name, buffer)
