"""Hooks that record every tensor that one rank computes in a step.

The ModelSharding gives the part of each activation that a rank has; nothing is guessed from shapes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from motet.collectives.compression.compressed_collectives import codec_numerics
from motet.core.units import dtype_name
from motet.models.dropout_mask import Spans
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.torch_private import is_in_backward
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.pipeline.stages.stage_module import StageRun
from motet.parallel.reproducible.tree_reduce import squared_norm
from motet.parallel.shard_spec import ShardSpec
from motet.parity.record.activation_parts import WHOLE_MODEL, ActivationParts, put_part
from motet.parity.record.argument_tensors import named_conditions, named_float_tensors
from motet.parity.record.recomputed_tensors import digest
from motet.train.balance.expert_balance import ExpertLoads

# In the order of a step; tensors of one kind follow the order of execution on one device.
ForwardKind = Literal[
    "starting parameter", "sample", "random mask", "used parameter", "activation", "loss", "activation gradient"
]  # fmt: skip
LaterKind = Literal[
    "gradient", "loads", "sum", "norm", "clipped gradient", "state", "parameter", "buffer", "evaluation"
]  # fmt: skip
# Kinds that one device does not have: inputs of reductions over ranks, tensors that backward recomputes differently,
# and bytes that should not be kept for backward. The model should compute with the rounded masters.
RankKind = Literal["local gradient", "partial sum", "recomputed", "saved bytes", "loss scale", "rounded master"]
TensorKind = Literal[ForwardKind, LaterKind, RankKind]
ACTIVATION_KINDS: tuple[TensorKind, ...] = ("activation", "activation gradient")
ROW_KINDS: tuple[TensorKind, ...] = ("sample", "random mask", *ACTIVATION_KINDS)
MASTER_PREFIX = "master/"
BALANCE_LOSS = "balance loss"  # The terms that balance experts, which are a part of the mean loss
MIN_ELEMENTS_FOR_BITS = 64  # Fewer do not show the precision they were rounded to
MAX_SHARD_NUMEL, SHARD_SKETCH_WIDTH = 2**18, 4096  # A shard with more elements gets a sketch of this size
MAX_ROW_NUMEL, ROW_SKETCH_WIDTH = 2048, 512  # The same for one row of an activation
MAX_MASK_ROW_NUMEL = 2**16  # Elements of a mask are small


class TensorKey(NamedTuple):
    """The identity of a tensor of a step, on all layouts."""

    kind: TensorKind
    name: str

    def __str__(self) -> str:
        if self.kind in ("sum", "norm", "evaluation"):
            return self.name
        return self.kind if self.kind == self.name else f"{self.kind} {self.name}"


class RecordedShard(NamedTuple):
    """Which elements of a tensor a rank has: a run of those of its local tensor."""

    spec: ShardSpec  # The part that the local tensor is
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def boxes(self) -> Iterator[tuple[tuple[slice, ...], slice]]:
        """Boxes of the unsharded tensor, each with the place of its elements among those of this shard."""
        for (offsets, lengths), local in self.spec.boxes(self.start, self.stop):
            box = tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))
            yield box, slice(local.start - self.start, local.stop - self.start)

    def cut(self, unsharded: Tensor) -> Tensor:
        """The same elements of the unsharded tensor, flat; zeros in the place of padding."""
        elements, shaped = unsharded.new_zeros(self.numel), unsharded.reshape(self.spec.shape)
        for box, place in self.boxes():
            elements[place] = shaped[box].reshape(-1)
        return elements


class RecordedTensor(NamedTuple):
    """A tensor, or this rank's part of one."""

    kind: TensorKind
    name: str
    value: Tensor  # A sketch, where the tensor is large
    microbatch: int = -1  # Position in the order of this rank; -1: the tensor belongs to the step
    rows: tuple[int, ...] = ()  # Rows of the global batch that the micro-batch has
    shard: RecordedShard | None = None  # None: the tensor has rows, or is a number
    dtype: str = "float64"
    is_sketched: bool = False
    significant_bits: int = 0  # 0 where there are too few numbers to tell
    flops_so_far: float = 0.0  # FLOPs until the tensor was computed, where they are counted
    squared_norm: float = 0.0  # Squared norm of the gradient before sketching
    digest: int = 0  # Checksum of the bits of all elements
    part: ShardSpec | None = None  # The part of the rows that this rank has; None: all
    stage: int = -1  # Pipeline stage whose forward the tensor belongs to

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.kind, self.name)

    def in_whole(self) -> Tensor | None:
        """The unsharded tensor, with zeros where this rank has nothing; None if only a sketch is known."""
        if self.shard is None or self.is_sketched:
            return None
        unsharded = self.value.new_zeros(self.shard.spec.shape)
        for box, place in self.shard.boxes():
            unsharded[box] = self.value[place].view(unsharded[box].shape)
        return unsharded


RecordsByRank = Sequence[Sequence[RecordedTensor]]
RankRecords = Sequence[tuple[int, RecordedTensor]]  # Records, each with its rank


def group_by_key(records_by_rank: RecordsByRank) -> dict[TensorKey, list[tuple[int, RecordedTensor]]]:
    records_by_key: dict[TensorKey, list[tuple[int, RecordedTensor]]] = {}
    for rank, records in enumerate(records_by_rank):
        for record in records:
            records_by_key.setdefault(record.key, []).append((rank, record))
    return records_by_key


@dataclass
class TensorRecorder:
    """The tensors of one step, in the order in which they were computed."""

    specs: Mapping[str, ShardSpec] = field(default_factory=dict)  # Parts by name; other tensors are whole
    activations: ActivationParts | None = None  # None: this rank has all of them
    rank: int = 0
    records: list[RecordedTensor] = field(default_factory=list)
    microbatch: int = -1
    next_microbatch: int = 0
    rows: tuple[int, ...] = ()
    sketches_shards: bool = True  # Rows of activations are always sketched
    rounds_masters_to: torch.dtype | None = None  # Masters are recorded in this dtype, too
    kinds: frozenset[TensorKind] | None = None  # The kinds to record; None: all
    call_counts: Counter[tuple[int, int, TensorKey]] = field(default_factory=Counter)  # Calls by micro-batch and stage
    sampled: dict[int, int] = field(default_factory=dict)  # By micro-batch: the stage whose samples are recorded
    stage_run: Callable[[], StageRun | None] = lambda: None  # The forward of a pipeline stage that is under way
    blocks: tuple[str, ...] = ()  # Modules that stages consist of
    flops_so_far: Callable[[], float] = lambda: 0.0
    is_recording: bool = True  # False for a micro-batch whose results are discarded
    activation_order: dict[str, int] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)  # Parameters that are recorded, by moment and name
    forward_digests: dict[tuple[int, TensorKey], int] = field(default_factory=dict)  # Digests by micro-batch
    gradient_order: list[str] = field(default_factory=list)  # Parameters in the order of backward
    gradient_hooks: list[RemovableHandle] = field(default_factory=list)  # An output may be a parameter, which stays

    def add(self, kind: TensorKind, name: str, value: Tensor, *, part: ShardSpec | None = None) -> None:
        """Record a tensor of the micro-batch that is computed now, or this rank's part of it."""
        if not self.is_recording or not self._records(kind):
            return
        run = self.stage_run()
        place = self.microbatch, run.stage if run else 0, TensorKey(kind, name)
        call = self.call_counts[place] = self.call_counts[place] + 1
        name = name if call == 1 else f"{name} (call {call})"
        stage = run.stage if run else -1
        self.add_for_microbatch(kind, name, value, microbatch=self.microbatch, rows=self.rows, part=part, stage=stage)

    def add_samples(self, tensors: Mapping[str, Tensor]) -> None:
        """Record the samples of a micro-batch: once for all stages of the rank, twice if a stage computes it twice."""
        run = self.stage_run()
        stage = run.stage if run else -1
        if self.is_recording and self._records("sample") and self.sampled.setdefault(self.microbatch, stage) == stage:
            for name, value in tensors.items():
                self.add_for_microbatch("sample", name, value, microbatch=self.microbatch, rows=self.rows, stage=stage)

    def _records(self, kind: TensorKind) -> bool:
        return self.kinds is None or kind in self.kinds

    def _count_calls(self, key: TensorKey) -> int:
        run = self.stage_run()
        return self.call_counts[self.microbatch, run.stage if run else 0, key]

    @codec_numerics()
    def add_for_microbatch(
        self,
        kind: TensorKind,
        name: str,
        value: Tensor,
        *,
        microbatch: int,
        rows: tuple[int, ...],
        part: ShardSpec | None = None,
        stage: int = -1,
    ) -> None:
        value = value.detach().cpu()
        if kind == "activation":
            self.activation_order.setdefault(name, len(self.activation_order))
        if self.activations is not None and kind in ACTIVATION_KINDS:
            part = self.activations.local_spec(name, self.rank, tuple(value.shape), rows=len(rows))
        elif self.activations is not None and self.activations.tokens is not None and kind == "sample":
            shape, _ = self.activations.tokens.in_rows(tuple(value.shape), self.rank, len(rows))
            part = self.activations.token_spec(self.rank, tuple(shape), rows=len(rows))
        part = part if part and part.local_shape != part.shape else None
        sketch = self._sketch_rows(TensorKey(kind, name), value, part)
        self._append(kind, name, value, sketch=sketch, microbatch=microbatch, rows=rows, part=part, stage=stage)

    def _sketch_rows(self, key: TensorKey, value: Tensor, part: ShardSpec | None) -> Tensor:
        counts = None
        if part is not None and key.kind == "activation" and self.activations is not None:
            counts = partial(self.activations.holders, key.name, part.shape)  # Gradients of shared outputs are summands
        return sketch_rows(key, value, part, holders=counts)

    def _add_recomputed(self, kind: TensorKind, name: str, value: Tensor) -> None:
        """Record a tensor that backward recomputes, if its bits differ from those recorded in forward."""
        key = TensorKey(kind, name)
        expected = self.forward_digests.get((self.microbatch, key))
        is_repeated = self._count_calls(key) > 1  # Which call backward repeats is not known
        if self.is_recording and not is_repeated and digest(value) != expected:
            self.add_recomputed(f"{kind} {name}", value)

    def add_recomputed(self, words: str, value: Tensor) -> None:
        """Record that backward recomputes a tensor with other numbers than forward."""
        if not any(record.kind == "recomputed" and record.name == words for record in self.records):
            self._append("recomputed", words, value.detach().cpu(), sketch=value.detach(), microbatch=self.microbatch)

    def add_scalar(self, kind: TensorKind, name: str, value: float) -> None:
        self.add_numbers(kind, name, torch.tensor(value, dtype=torch.float64))

    def add_numbers(self, kind: TensorKind, name: str, tensor: Tensor) -> None:
        """Record numbers of the step that every rank has."""
        if self._records(kind):
            self._append(kind, name, tensor, sketch=tensor)

    def add_expert_loads(self, experts: ExpertLoads, target_count: float) -> None:
        """Record the loads of experts in a step, the assignments that a limit dropped, and the terms of the loss."""
        for layer in experts.layers:
            self.add_numbers("loads", layer.name, torch.tensor([*layer.loads, layer.dropped], dtype=torch.float64))
        self.add_scalar("sum", BALANCE_LOSS, experts.loss_sum / (target_count or 1.0))

    def add_step_scalars(self, target_count: float, mean_loss: float, gradient_norm: float) -> None:
        """The metrics of a step."""
        self.add_scalar("sum", "target tokens", target_count)
        self.add_scalar("sum", "mean loss", mean_loss)
        self.add_scalar("norm", "gradient norm", gradient_norm)

    @codec_numerics()
    def add_shard(self, kind: TensorKind, name: str, shard: LocalShard | Tensor, *, microbatch: int = -1) -> None:
        """Record this rank's part of a parameter, or a tensor that every rank has."""
        start, tensor = (0, shard) if isinstance(shard, Tensor) else (shard.start, shard.values)
        values, shape = tensor.detach().cpu().reshape(-1), tuple[int, ...](shard.shape)
        numel: int = prod(shape)
        if not self._records(kind) or (numel and not values.numel()):
            return
        spec = self.specs.get(parameter_name(name), ShardSpec.full(shape))
        if spec.local_shape != shape:  # The plan has another shape, which the comparison will report
            spec = ShardSpec.full(shape)
        square = squared_norm(values).item() if kind == "gradient" else 0.0
        sketch = sketch_shard(values, start) if self.sketches_shards else values
        place = RecordedShard(spec, start, start + values.numel())
        self._append(kind, name, values, sketch=sketch, squared_norm=square, shard=place, microbatch=microbatch)
        if self.rounds_masters_to and kind == "state" and name.startswith(MASTER_PREFIX):
            rounded = LocalShard(torch.Size(shape), start, values.to(self.rounds_masters_to))
            self.add_shard("rounded master", parameter_name(name), rounded)

    def add_shards(self, kind: TensorKind, shards: Mapping[str, LocalShard | Tensor]) -> None:
        """Record shards in the order in which backward reached their parameters."""
        for name in dict.fromkeys([*(name for name in self.gradient_order if name in shards), *shards]):
            self.add_shard(kind, name, shards[name])

    def _append(self, kind: TensorKind, name: str, value: Tensor, *, sketch: Tensor, **more: Any) -> None:
        copy, checksum = value.clone(memory_format=torch.contiguous_format), digest(value)
        if kind in ("activation", "random mask"):
            self.forward_digests.setdefault((more["microbatch"], TensorKey(kind, name)), checksum)
        more |= {"significant_bits": count_significant_bits(value), "flops_so_far": float(self.flops_so_far())}
        more |= {"dtype": dtype_name(value.dtype), "is_sketched": sketch is not value, "digest": checksum}
        self.records.append(RecordedTensor(kind, name, copy if sketch is value else sketch, **more))

    def begin_microbatch(self, rows: Sequence[int], is_recording: bool = True) -> None:
        """Assign the records that follow to the next micro-batch."""
        self.microbatch, self.rows, self.is_recording = self.next_microbatch, tuple(rows), is_recording
        self.next_microbatch += 1
        self.call_counts = Counter({place: n for place, n in self.call_counts.items() if place[0] != self.microbatch})

    def expect_rows_of(self, row_tokens: int) -> None:
        """Let the records that follow be parts of rows with these tokens."""
        if self.activations and self.activations.tokens and self.activations.tokens.row_tokens != row_tokens:
            tokens = replace(self.activations.tokens, row_tokens=row_tokens)
            self.activations = replace(self.activations, tokens=tokens)

    @contextmanager
    def within_microbatch(
        self, place: tuple[int, tuple[int, ...], bool], context: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Assign the records that follow to a micro-batch that has begun before; pipelines alternate between them."""
        self.microbatch, self.rows, self.is_recording = place
        with context():
            yield

    @contextmanager
    def recording_hooks(self, module: nn.Module) -> Iterator[None]:
        """Record the outputs of all inner modules, the gradients of these, and the parameters that both used."""
        hooks = []
        for name, inner in module.named_modules():
            # Other tensors of the same memory: reading these does not use the parameter.
            direct = {f"{name}.{n}".lstrip("."): (n, p.detach()) for n, p in inner.named_parameters(recurse=False)}
            hooks.append(inner.register_forward_hook(self._forward_hook(name or WHOLE_MODEL, direct)))
            if name.rpartition(".")[2].isdigit():  # A block
                hooks.append(inner.register_forward_pre_hook(self._conditions_hook(name), with_kwargs=True))
        note, trained = self.gradient_order.append, [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        hooks += [p.register_post_accumulate_grad_hook(lambda _, name=n: note(name)) for n, p in trained]
        try:
            yield
        finally:
            for hook in [*hooks, *self.gradient_hooks]:
                hook.remove()

    @contextmanager
    def recording_masks(self, randomness: AbstractContextManager[object]) -> Iterator[None]:
        """Record the dropout masks that are drawn inside."""
        with randomness as mode, ExitStack() as stack:
            if isinstance(mode, LayoutInvariantDropoutMode):
                mode.on_mask, mode.on_recomputed_mask = self._add_mask, partial(self._add_recomputed, "random mask")
                stack.callback(setattr, mode, "on_mask", None)
                stack.callback(setattr, mode, "on_recomputed_mask", None)
            yield

    def _add_mask(self, site: str, keep: Tensor, row: tuple[tuple[int, ...], Spans] | None) -> None:
        run = self.stage_run()
        if run is not None and run.stage and not site.startswith(("block ", "after ")):
            return  # The first stage draws it, too
        part = row and ShardSpec((len(self.rows), *row[0]), (((0, len(self.rows)),), *map(tuple, row[1])))
        self.add("random mask", site, keep.view(part.local_shape) if part else keep, part=part)

    def _forward_hook(
        self, name: str, parameters: Mapping[str, tuple[str, Tensor]]
    ) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not self.is_recording or not torch.is_grad_enabled():
                return
            run = self.stage_run()
            is_complete = run is None or any(f"{name}.".startswith(f"{block}.") for block in self.blocks)
            self._add_used_parameters("forward", module, parameters)
            if not self._records("activation"):
                return
            for label, tensor in named_float_tensors(output, name):
                if is_in_backward() and self._count_calls(TensorKey("activation", label)):
                    self._add_recomputed("activation", label, tensor)
                    continue
                self.add("activation", label, tensor)
                if (
                    not is_complete and tensor.isnan().any()
                ):  # Outside of blocks a stage has NaN for parameters of other stages
                    self.records.pop()
                    continue
                # The stage before has the whole gradient of a tensor that passes through a block.
                is_passed = run is not None and any(tensor is each for each in run.received)
                if tensor.requires_grad and not is_passed:
                    last = self.records[-1]
                    place: dict[str, Any] = {"microbatch": last.microbatch, "rows": last.rows, "stage": last.stage}
                    add = partial(self.add_for_microbatch, "activation gradient", last.name, **place)
                    add_used = partial(self._add_used_parameters, "backward", module, parameters)
                    self.gradient_hooks += [tensor.register_hook(lambda _, each=add_used: each())]
                    self.gradient_hooks += [tensor.register_hook(add)]

        return hook

    def _conditions_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        """A hook that records the documents and positions that a block gets together with its activations."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.is_recording and torch.is_grad_enabled() and not is_in_backward():
                for label, tensor in named_conditions({str(n): each for n, each in enumerate(args)} | kwargs, name):
                    self.add("sample", label, tensor)

        return hook

    def _add_used_parameters(
        self, moment: str, module: nn.Module, parameters: Mapping[str, tuple[str, Tensor]]
    ) -> None:
        """Record parameters of a module in the first micro-batch, if they are unsharded now."""
        held = {name: pair for name, pair in parameters.items() if not self.blocks or name in self.specs}
        for full_name, (own_name, alias) in held.items() if self.microbatch == 0 else ():
            value = module._parameters[own_name] if isinstance(alias, DTensor) else alias
            if not isinstance(value, DTensor | None) and (moment, full_name) not in self.used:
                self.used.add((moment, full_name))
                self.add_shard("used parameter", f"{moment}/{full_name}", value)


def parameter_name(state_name: str) -> str:
    """The parameter that a tensor of the optimizer, such as `exp_avg/NAME`, belongs to; other names stay."""
    return state_name.rpartition("/")[2]


def count_significant_bits(tensor: Tensor) -> int:
    """The bits that the tensor's numbers need: 8 for values rounded to bfloat16, whatever dtype holds them."""
    sample = tensor.detach().reshape(-1)[: 16 * MIN_ELEMENTS_FOR_BITS].double()
    sample = sample[sample.isfinite() & (sample != 0)]
    if not tensor.is_floating_point() or sample.numel() < MIN_ELEMENTS_FOR_BITS:
        return 0
    mantissas = (torch.frexp(sample).mantissa * 2.0**53).long()
    return 53 - int(torch.log2((mantissas & -mantissas).double().min()))


# --- sketches of large tensors: sums of their elements with pseudo-random signs -----
# Sketching is linear, so sums of tensors have the sums of their sketches, and it keeps norms approximately.


def sketch_rows(
    key: TensorKey, value: Tensor, part: ShardSpec | None, *, holders: Callable[[], Tensor] | None = None
) -> Tensor:
    """The sketch of each row, if rows are large; the sketches of the parts that ranks have sum to that of the row.
    `holders` gives the number of ranks that have each element."""
    shape = part.shape if part else value.shape
    limit = MAX_MASK_ROW_NUMEL if key.kind == "random mask" else MAX_ROW_NUMEL
    if len(shape) < 2 or shape[0] == 0 or prod(shape[1:]) <= limit:
        return value
    if part is not None:
        value = put_part(value.double(), part)
        value = value if holders is None else value / holders()
    return _sketch(value.reshape(len(value), -1), 0, ROW_SKETCH_WIDTH)


def sketch_shard(values: Tensor, start: int, is_large: bool = False) -> Tensor:
    """The sketch of a shard that begins at `start`; the sketches of all shards sum to that of the tensor."""
    is_kept = values.numel() <= MAX_SHARD_NUMEL and not is_large
    return values if is_kept else _sketch(values.view(1, -1), start, SHARD_SKETCH_WIDTH)[0]


def _sketch(rows: Tensor, start: int, width: int) -> Tensor:
    count = rows.shape[1]
    padding_before, padding_after = start % width, -(start + count) % width
    signed = torch.nn.functional.pad(rows.double() * _random_signs(start, count), (padding_before, padding_after))
    return signed.view(rows.shape[0], -1, width).sum(1)


@lru_cache(maxsize=16)
def _random_signs(start: int, count: int) -> Tensor:
    return (1 - 2 * (_hash_indices(torch.arange(start, start + count)) & 1)).to(torch.int8)


def _hash_indices(indices: Tensor) -> Tensor:
    """Bits that look random (the finaliser of SplitMix64, with arithmetic shifts)."""
    hashed = indices * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        hashed = (hashed ^ (hashed >> shift)) * factor
    return (hashed ^ (hashed >> 31)) >> 17
