"""AdamW and SGD with moments that are stored in another format than that of the masters, parameter by parameter.

The update of an element depends on its value, gradient and moments, on the other elements of its block, and on the
seed, the step, the name of the parameter and the index of the element in it: not on the shards of the ranks.

Moments of the shard of a parameter in fewer bits than it is updated with.

8-bit codes are numbers of a table with seven digits of range, times the scale of their block, which is the largest
absolute value in it. The table holds 1, so that values that were decoded have the same scale and codes again.

The updates of AdamW and SGD as operations on the elements of flat tensors, each rounded as IEEE 754 says.

AdamW and SGD in which every element has the same bits in whatever shard and at whatever position it is.
A fused step may compute the last elements of a tensor by other instructions, which round differently (torch's AdamW
does on x86). Here each operation is one multiplication, addition, division or root, rounded as IEEE 754 says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from motet.core.seeds import derive_seed
from motet.models.dropout_mask import hash_indices
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.shard_spec import ShardSpec
from motet.precision.float64_mode import float32_zero
from motet.precision.recipe import IN_BLOCKS, PrecisionRecipe, block_elements
from motet.train.optimizer.optimizer_settings import OptimizerSettings

RandomBits = Callable[[], Tensor]  # 32 bits for each element, of which the upper 16 are used
# With a smaller scale, products with the smallest number of a table would be subnormal in float32.
_SMALLEST_SCALE = 2.0**-100


class StoredMoment(Protocol):
    """One moment of consecutive elements of a parameter."""

    def read(self, where: slice, dtype: torch.dtype) -> Tensor:
        """Decode the elements of `where`, which covers complete blocks."""

    def write(self, where: slice, values: Tensor, random_bits: RandomBits | None) -> None:
        """Store values in `where`, rounded stochastically by random bits if the format asks for it, else to nearest."""


def make_stored_moment(
    dtype: str, numel: int, *, shape: torch.Size, is_signed: bool, device: torch.device
) -> StoredMoment:
    """Zeros for `numel` elements of a parameter of this shape."""
    if dtype == IN_BLOCKS:
        return BlockwiseMoment(numel, block_elements(shape), is_signed=is_signed, device=device)
    return DtypeMoment(torch.zeros(numel, dtype=getattr(torch, dtype), device=device))


class DtypeMoment:
    """A moment in a floating-point dtype."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def read(self, where: slice, dtype: torch.dtype) -> Tensor:
        return self.values[where].to(dtype)

    def write(self, where: slice, values: Tensor, random_bits: RandomBits | None) -> None:
        if random_bits is not None and self.values.dtype == torch.bfloat16:
            values = round_stochastically(values.float(), random_bits())
        self.values[where] = values


class BlockwiseMoment:
    """A moment as one code for each element and one scale for each block."""

    def __init__(self, numel: int, block: int, *, is_signed: bool, device: torch.device) -> None:
        self._block, self._is_signed = block, is_signed
        self._table = torch.tensor(code_table(is_signed=is_signed), device=device)
        self._borders = (self._table[1:] + self._table[:-1]) / 2
        self._zero = int(self._table.eq(0).nonzero())
        self.codes = torch.full((numel,), self._zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(numel // block, device=device)

    def read(self, where: slice, dtype: torch.dtype) -> Tensor:
        values = self._table[self.codes[where].int()].view(-1, self._block)
        return (values * self.scales[self._blocks(where)].unsqueeze(1)).view(-1).to(dtype)

    def write(self, where: slice, values: Tensor, random_bits: RandomBits | None) -> None:
        """Store the nearest numbers of the table. A second moment that is not zero is not rounded to zero, since the
        update divides by its root."""
        blocks = values.float().view(-1, self._block)
        largest = blocks.abs().amax(1, keepdim=True)
        scales = torch.where(largest >= _SMALLEST_SCALE, largest, torch.zeros_like(largest))
        codes = torch.bucketize(blocks / scales.clamp(min=_SMALLEST_SCALE), self._borders)
        if not self._is_signed:
            codes.masked_fill_((codes == self._zero) & (blocks > 0), self._zero + 1)
        self.codes[where] = torch.where(scales > 0, codes, self._zero).view(-1).to(torch.uint8)
        self.scales[self._blocks(where)] = scales.view(-1)

    def _blocks(self, where: slice) -> slice:
        return slice(where.start // self._block, where.stop // self._block)


@cache
def code_table(*, is_signed: bool) -> tuple[float, ...]:
    """The numbers of the codes, in ascending order: zero, and in each factor of ten below 1 half as many numbers, at
    equal distances, as in the one above, down to a single one."""
    decades = 7 if is_signed else 8
    numbers = sorted(
        10.0**-decade * (0.1 + 0.9 * (index + 1) / count)
        for decade in range(decades)
        for count in [2 ** (decades - 1 - decade)]
        for index in range(count)
    )
    return (*(-number for number in reversed(numbers)), 0.0, *numbers) if is_signed else (0.0, *numbers)


def round_stochastically(values: Tensor, random_bits: Tensor) -> Tensor:
    """float32 values as bfloat16: up or down with probabilities whose mean is the value.

    bfloat16 cuts off the lower half of the 32 bits of a value. A random number of 16 bits is added, so that the sum
    carries into the upper half with a probability proportional to the lower half.
    """
    carried = values.view(torch.int32) + ((random_bits >> 16) & 0xFFFF)
    rounded = (carried & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


# Updates parameters with their gradients and moments, in the order of `OptimizerSettings.moment_kinds`, in place.
ElementwiseUpdate = Callable[[Tensor, Tensor, Sequence[Tensor]], None]


def elementwise_update(settings: OptimizerSettings, group: dict[str, Any], count: float) -> ElementwiseUpdate:
    """The update of a group of parameters in the step of this number, counted from 1."""
    return _adamw(settings, group, count) if settings.name == "adamw" else _sgd(settings, group)


def _adamw(settings: OptimizerSettings, group: dict[str, Any], count: float) -> ElementwiseUpdate:
    rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], settings.betas
    correction1, root2 = 1 - beta1**count, (1 - beta2**count) ** 0.5

    def update(p: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        mean, square = moments
        p.mul_(1 - rate * decay)
        mean.mul_(beta1).add_(g * (1 - beta1))
        square.mul_(beta2).add_((g * g).mul_(1 - beta2))
        p.sub_((mean * (rate / correction1)).div_(square.sqrt().div_(root2).add_(settings.eps)))

    return update


def _sgd(settings: OptimizerSettings, group: dict[str, Any]) -> ElementwiseUpdate:
    def update(p: Tensor, g: Tensor, moments: Sequence[Tensor]) -> None:
        change = (p * group["weight_decay"]).add_(g) if group["weight_decay"] else g
        for buffer in moments:
            buffer.mul_(settings.momentum).add_(change)
            change = (buffer * settings.momentum).add_(change) if settings.nesterov else buffer
        p.sub_(change * group["lr"])

    return update


# Elements of whole blocks that are updated together; on a CPU they fit in its cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 22


@dataclass(frozen=True)
class ParameterMoments:
    """The moments of the elements of a parameter in one master tensor."""

    name: str
    spec: ShardSpec  # The part of the parameter on this rank, before data parallelism shards it
    start: int  # Index of the first element in that part
    in_master: slice  # The elements in the flat master tensor
    stored: Mapping[str, StoredMoment]  # Moments by kind

    def chunks(self, numel: int) -> list[tuple[slice, slice]]:
        """Ranges of at most `numel` elements: here, and in the master tensor."""
        first, count = self.in_master.start, self.in_master.stop - self.in_master.start
        starts = range(0, count, numel)
        pairs = ((start, min(start + numel, count)) for start in starts)
        return [(slice(start, stop), slice(first + start, first + stop)) for start, stop in pairs]


class CompactMomentsOptimizer(torch.optim.Optimizer):
    """Updates masters chunk by chunk with moments that are decoded, changed, and rounded to their format again."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: OptimizerSettings,
        recipe: PrecisionRecipe,
        *,
        shards: Mapping[str, LocalShard],  # Shards of the parameters, in the masters
        specs: Mapping[str, ShardSpec],
    ) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self.seed = 0
        self._settings = settings
        masters = [master for group in self.param_groups for master in group["params"]]
        self._moments = {master: list[ParameterMoments]() for master in masters}
        for master in masters:
            self.state[master]["step"] = float32_zero(master.device)
        for name, shard in shards.items():
            if shard.values.numel():
                master = next(each for each in masters if _holds(each, shard.values))
                spec = specs.get(name, ShardSpec.full(tuple(shard.shape)))
                self._moments[master].append(self._new_moments(name, shard, spec, recipe=recipe, master=master))
        self._copies: dict[Tensor, dict[str, Tensor]] = {}

    def _new_moments(
        self, name: str, shard: LocalShard, spec: ShardSpec, *, recipe: PrecisionRecipe, master: Tensor
    ) -> ParameterMoments:
        first, count = (shard.values.data_ptr() - master.data_ptr()) // master.itemsize, shard.values.numel()
        make = partial(
            make_stored_moment, recipe.moment_dtype(name, shard.shape), count, shape=shard.shape, device=master.device
        )
        stored = {kind: make(is_signed=kind != "exp_avg_sq") for kind in self._settings.moment_kinds}
        return ParameterMoments(name, spec, shard.start, slice(first, first + count), stored)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all masters that have a gradient; a closure is ignored."""
        self.drop_copies()
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    count = self.state[master]["step"].add_(1).item()
                    update = elementwise_update(self._settings, group, count)
                    for moments in self._moments[master]:
                        self._update(moments, master, update, step=int(count))

    def _update(self, moments: ParameterMoments, master: Tensor, update: ElementwiseUpdate, *, step: int) -> None:
        values, gradients = master.view(-1), master.grad.view(-1)  # type: ignore[union-attr]  # step checks it
        keys = {kind: derive_seed(self.seed, step, "moment", kind, moments.name) for kind in moments.stored}
        for here, in_master in moments.chunks(_CPU_CHUNK if master.device.type == "cpu" else _DEVICE_CHUNK):
            decoded = [stored.read(here, master.dtype) for stored in moments.stored.values()]
            update(values[in_master], gradients[in_master], decoded)
            first, stop = moments.start + here.start, moments.start + here.stop
            for (kind, stored), new in zip(moments.stored.items(), decoded, strict=True):
                draw = partial(_random_bits, keys[kind], moments.spec, slice(first, stop), device=master.device)
                stored.write(here, new, draw)

    # --- the moments as tensors like the masters -----------------------------------------------------------

    def state_copies(self, master: Tensor) -> dict[str, Tensor]:
        """The count of steps, and decoded copies of the moments of a master, which are the same until the next step.

        `store_copies` takes over what was written to them.
        """
        if master not in self._copies:
            self._copies[master] = {kind: torch.zeros_like(master) for kind in self._settings.moment_kinds}
            for moments in self._moments[master]:
                for kind, stored in moments.stored.items():
                    for here, in_master in moments.chunks(_DEVICE_CHUNK):
                        self._copies[master][kind].view(-1)[in_master] = stored.read(here, master.dtype)
        return {"step": self.state[master]["step"], **self._copies[master]}

    def store_copies(self) -> None:
        """Store the moments in the copies, each rounded to the nearest value of its format."""
        for master, copies in self._copies.items():
            for moments in self._moments[master]:
                for kind, stored in moments.stored.items():
                    for here, in_master in moments.chunks(_DEVICE_CHUNK):
                        stored.write(here, copies[kind].view(-1)[in_master], None)
        self.drop_copies()

    def drop_copies(self) -> None:
        """Free the decoded copies of moments."""
        self._copies = {}


def _holds(master: nn.Parameter, values: Tensor) -> bool:
    first = master.data_ptr()
    return first <= values.data_ptr() < first + master.numel() * master.itemsize


def _random_bits(key: int, spec: ShardSpec, where: slice, *, device: torch.device) -> Tensor:
    """Bits for some of the elements that a rank holds, by their indices in the whole parameter."""
    return hash_indices(key, indices_in_whole(spec, torch.arange(where.start, where.stop, device=device)))


def indices_in_whole(spec: ShardSpec, local: Tensor) -> Tensor:
    """Row-major indices in the complete tensor, from indices in the part that a rank holds."""
    if spec == ShardSpec.full(spec.shape):
        return local
    indices, stride = torch.zeros_like(local), 1
    for held, length, spans in zip(spec.local_shape[::-1], spec.shape[::-1], spec.spans[::-1], strict=True):
        along, local = local % held, local // held
        indices += stride * _along_whole(spans, along)
        stride *= length
    return indices


def _along_whole(spans: Sequence[tuple[int, int]], along: Tensor) -> Tensor:
    """Indices along a dimension of the complete tensor; padding follows the last span."""
    firsts = [0, *accumulate(stop - first for first, stop in spans)][:-1]
    shifts = [first - local for (first, _), local in zip(spans, firsts, strict=True)]
    span = torch.bucketize(along, torch.tensor(firsts, device=along.device), right=True) - 1
    return along + torch.tensor(shifts, device=along.device)[span]


BLOCK_ELEMENTS = 1 << 16  # Elements of a block, whose tensors all fit in the cache of a CPU


class BitwiseReproducibleOptimizer(torch.optim.Optimizer):
    """AdamW or SGD whose state is laid out as in torch's optimizers; the caller creates it."""

    def __init__(self, groups: list[dict[str, Any]], settings: OptimizerSettings) -> None:
        super().__init__(groups, {"lr": settings.learning_rate})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; a closure is ignored."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group)

    def _update(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        count = 0.0
        if "step" in state:
            state["step"] += 1
            count = state["step"].item()
        update = elementwise_update(self._settings, group, count)
        moments = [state[kind] for kind in self._settings.moment_kinds]
        for p, g, *blocks in _blocks(parameter, parameter.grad, *moments):
            update(p, g, blocks)


def _blocks(*tensors: Tensor | None) -> Any:
    return zip(*(tensor.view(-1).split(BLOCK_ELEMENTS) for tensor in tensors if tensor is not None), strict=True)
