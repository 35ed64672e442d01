"""The plans of a group, each made once and kept: of a collective of one kind, shape, dtype, reduction and root."""

import hashlib
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.collectives.execute.reduce_ops import make_reduce_op
from motet.collectives.shm_backend.executor import PreparedCollective
from motet.collectives.shm_backend.rank_connections import RankConnections
from motet.collectives.shm_backend.select_algorithm import ONE_STEP_ALL_REDUCE_MAX_BYTES, rank_schedule_for
from motet.collectives.shm_backend.tensor_views import dtype_name
from motet.collectives.shm_backend.transport.local_peers import DESCRIPTION_INDEX_BITS
from motet.collectives.shm_backend.transport.shared_memory import DESCRIPTION_SLOTS
from motet.core.errors import InputError

_CHUNK_ALIGNMENT = 16  # Chunks begin at a multiple of so many numbers


class PreparedCollectiveCache:
    """As many as a rank keeps descriptions; beyond that the oldest is forgotten."""

    def __init__(self, connections: RankConnections, rank: int, ranks: int) -> None:
        self._connections, self._rank, self._ranks = connections, rank, ranks
        self._plans: dict[Any, PreparedCollective] = {}
        self._made_count = 0
        self._lock = threading.Lock()

    def get_or_prepare(
        self, kind: str, tensor: Tensor, reduction: str = "", root: int = 0, lengths: tuple[int, ...] | None = None
    ) -> PreparedCollective:
        """`how` names the reduction; `lengths` are those of the chunks where they are not all alike."""
        key = (kind, tensor.dtype, tensor.shape if lengths is None else lengths, reduction, root)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._prepare(kind, tensor, reduction, root, lengths)
            with self._lock:
                self._plans[key] = plan
                if len(self._plans) > DESCRIPTION_SLOTS - 1:
                    del self._plans[next(iter(self._plans))]
        return plan

    def _prepare(
        self, kind: str, tensor: Tensor, reduction: str, root: int, lengths: tuple[int, ...] | None
    ) -> PreparedCollective:
        dtype = tensor.dtype
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InputError(
                f"{kind} of a {tensor.layout} tensor on {tensor.device}: the backend motet moves dense tensors on the "
                "CPU; for others start the group with cpu:gloo or cuda:nccl"
            )
        reduce_op = make_reduce_op(reduction, dtype, tensor.device) if reduction else None
        small = tensor.nbytes <= ONE_STEP_ALL_REDUCE_MAX_BYTES
        schedule, chunks = rank_schedule_for(kind, small, self._connections.hosts, root, self._rank)
        description = f"all-to-all of {dtype_name(dtype)} with split sizes"
        if lengths is None:
            lengths = _chunk_numels(kind, tensor.numel(), chunks, self._ranks)
            description = _describe_collective(kind, reduction, tensor, root)
        digest = hashlib.blake2b(
            f"{description}{lengths}".encode(), digest_size=8 - DESCRIPTION_INDEX_BITS // 8
        ).digest()
        with self._lock:
            index = self._made_count % (DESCRIPTION_SLOTS - 1)
            self._made_count += 1
            self._connections.write_description(index, description)
        signature = int.from_bytes(digest, "little") << DESCRIPTION_INDEX_BITS | index
        if reduce_op is not None and reduce_op.needs_wide_accumulation and schedule.needs_wider_dtype:
            reduce_op = replace(reduce_op, dtype=torch.float32)
        execution_dtype = dtype if reduce_op is None else reduce_op.dtype
        return PreparedCollective(
            description,
            signature,
            schedule,
            lengths,
            execution_dtype,
            reduce_op,
            self._ranks if reduction == "avg" else 1,
        )


def _chunk_numels(kind: str, numel: int, chunks: int, ranks: int) -> tuple[int, ...]:
    """How many numbers are in each chunk when a rank calls a collective with so many."""
    if kind == "all-to-all":
        return (numel // ranks,) * chunks
    if kind not in ("all-reduce", "reduce", "broadcast") or chunks == 1:
        return (numel,) * chunks
    chunk_numel = -(-numel // chunks // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
    return tuple(max(0, min(chunk_numel, numel - i * chunk_numel)) for i in range(chunks))


def _describe_collective(kind: str, reduction: str, tensor: Tensor, root: int) -> str:
    if kind == "barrier":
        return kind
    rooted = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
    where = f" {rooted[kind]} rank {root}" if kind in rooted else ""
    return f"{kind}{f' ({reduction})' if reduction else ''} of {dtype_name(tensor.dtype)} {list(tensor.shape)}{where}"
