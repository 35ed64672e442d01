"""AdamW and SGD with moments that are stored in another format than that of the masters, parameter by parameter.

What an element becomes depends on its value, gradient and moments, on the other elements of its block, and on the
seed, the step, the name of the parameter and the index of the element in it: not on the shards of the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.seeds import derive_seed
from motet.models.dropout_mask import hash_indices
from motet.parallel.data_parallel.flat_parameters import LocalShard
from motet.parallel.shard_spec import ShardSpec
from motet.precision.float64_mode import float32_zero
from motet.precision.recipe import PrecisionRecipe
from motet.train.optimizer.elementwise_updates import ElementwiseUpdate, elementwise_update
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.stored_moments import StoredMoment, make_stored_moment

# Elements of whole blocks that are updated together; on a CPU they fit in its cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 22


@dataclass(frozen=True)
class ParameterMoments:
    """The moments of the elements of a parameter in one master tensor."""

    name: str
    spec: ShardSpec  # What this rank holds of the parameter, before data parallelism shards it
    start: int  # The first element here, counted in what the rank holds
    in_master: slice  # In the flat master tensor
    stored: Mapping[str, StoredMoment]  # By kind

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
        shards: Mapping[str, LocalShard],  # Of the parameters, in the masters
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
    """Row-major indices in the whole tensor of elements that a rank holds, from their indices in what it holds."""
    if spec == ShardSpec.full(spec.shape):
        return local
    indices, stride = torch.zeros_like(local), 1
    for held, length, spans in zip(spec.local_shape[::-1], spec.shape[::-1], spec.spans[::-1], strict=True):
        along, local = local % held, local // held
        indices += stride * _along_whole(spans, along)
        stride *= length
    return indices


def _along_whole(spans: Sequence[tuple[int, int]], along: Tensor) -> Tensor:
    """Indices along a dimension of the whole; padding follows the last span."""
    firsts = [0, *accumulate(stop - first for first, stop in spans)][:-1]
    shifts = [first - local for (first, _), local in zip(spans, firsts, strict=True)]
    span = torch.bucketize(along, torch.tensor(firsts, device=along.device), right=True) - 1
    return along + torch.tensor(shifts, device=along.device)[span]
