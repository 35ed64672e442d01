"""The prepared collectives of a group, by kind, shape, dtype, reduction and root."""

import hashlib
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute.reduce_ops import dtype_name, make_reduce_op
from motet.collectives.shm_backend.executor import PreparedCollective
from motet.collectives.shm_backend.rank_connections import RankConnections
from motet.collectives.shm_backend.slot_plan import ONE_STEP_ALL_REDUCE_MAX_BYTES, slot_plan_for
from motet.collectives.shm_backend.tensor_views import describe_tensor
from motet.collectives.shm_backend.transport.local_peers import DESCRIPTION_INDEX_BITS
from motet.collectives.shm_backend.transport.shared_memory import DESCRIPTION_SLOTS
from motet.core.errors import InputError

_CHUNK_ALIGNMENT = 16  # Elements
_ROOT_PREPOSITIONS = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}


class PreparedCollectiveCache:
    """At most as many prepared collectives as a rank keeps descriptions; the oldest is dropped."""

    def __init__(self, connections: RankConnections, rank: int, ranks: int) -> None:
        self._connections, self._rank, self._ranks = connections, rank, ranks
        self._prepared: dict[Any, PreparedCollective] = {}
        self._made_count = 0
        self._lock = threading.Lock()

    def get_or_prepare(
        self, kind: str, tensor: Tensor, *, reduction: str = "", root: int = 0, lengths: tuple[int, ...] | None = None
    ) -> PreparedCollective:
        """`lengths` gives the elements of each chunk where these differ."""
        key = (kind, tensor.dtype, tensor.shape if lengths is None else lengths, reduction, root)
        if (cached := self._prepared.get(key)) is not None:
            return cached
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InputError(
                f"{kind} of a {tensor.layout} tensor on {tensor.device}: the backend motet moves dense tensors on the "
                "CPU; for others start the group with cpu:gloo or cuda:nccl"
            )
        reduce_op = make_reduce_op(reduction, tensor.dtype, tensor.device) if reduction else None
        is_small = tensor.nbytes <= ONE_STEP_ALL_REDUCE_MAX_BYTES
        plan = slot_plan_for(kind, self._rank, self._connections.hosts, is_small=is_small, root=root)
        description = f"all-to-all of {dtype_name(tensor.dtype)} with split sizes"
        if lengths is None:
            lengths = self._chunk_numels(kind, tensor.numel(), plan.chunks)
            description = _describe_collective(kind, reduction, tensor, root=root)
        digest_size = 8 - DESCRIPTION_INDEX_BITS // 8
        digest = hashlib.blake2b(f"{description}{lengths}".encode(), digest_size=digest_size).digest()
        with self._lock:
            index = self._made_count % (DESCRIPTION_SLOTS - 1)
            self._made_count += 1
            self._connections.write_description(index, description)
        signature = int.from_bytes(digest, "little") << DESCRIPTION_INDEX_BITS | index
        if reduce_op is not None and reduce_op.needs_wide_accumulation and plan.needs_wider_dtype:
            reduce_op = replace(reduce_op, dtype=torch.float32)
        dtype = tensor.dtype if reduce_op is None else reduce_op.dtype
        divisor = self._ranks if reduction == "avg" else 1
        prepared = PreparedCollective(description, signature, plan, lengths, dtype, reduce_op, divisor)
        with self._lock:
            self._prepared[key] = prepared
            if len(self._prepared) > DESCRIPTION_SLOTS - 1:
                del self._prepared[next(iter(self._prepared))]
        return prepared

    def _chunk_numels(self, kind: str, numel: int, chunks: int) -> tuple[int, ...]:
        if kind == "all-to-all":
            return (numel // self._ranks,) * chunks
        if kind not in ("all-reduce", "reduce", "broadcast") or chunks == 1:
            return (numel,) * chunks
        chunk_numel = -(-numel // chunks // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
        return tuple(max(0, min(chunk_numel, numel - i * chunk_numel)) for i in range(chunks))


def _describe_collective(kind: str, reduction: str, tensor: Tensor, *, root: int) -> str:
    if kind == "barrier":
        return kind
    where = f" {_ROOT_PREPOSITIONS[kind]} rank {root}" if kind in _ROOT_PREPOSITIONS else ""
    return f"{kind}{f' ({reduction})' if reduction else ''} of {describe_tensor(tensor)}{where}"
