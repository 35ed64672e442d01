"""The plans of a group, each made once and kept: of a collective of one kind, shape, dtype, reduction and root."""

import hashlib
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from motet.collectives.arithmetic import arithmetic
from motet.collectives.backend.arena import TEXTS
from motet.collectives.backend.chunks import dtype_name
from motet.collectives.backend.neighbours import INDEX_BITS
from motet.collectives.backend.pick import SMALL_BYTES, lowered
from motet.collectives.backend.player import Plan
from motet.collectives.backend.station import Station
from motet.core.errors import InputError

_ALIGNED = 16
"""Chunks begin at a multiple of so many numbers."""


class Plans:
    """As many as a rank keeps descriptions; beyond that the oldest is forgotten."""

    def __init__(self, station: Station, rank: int, ranks: int) -> None:
        self._station, self._rank, self._ranks = station, rank, ranks
        self._kept: dict[Any, Plan] = {}
        self._made = 0
        self._lock = threading.Lock()

    def find(
        self, kind: str, tensor: Tensor, how: str = "", root: int = 0, lengths: tuple[int, ...] | None = None
    ) -> Plan:
        """`how` names the reduction; `lengths` are those of the chunks where they are not all alike."""
        key = (kind, tensor.dtype, tensor.shape if lengths is None else lengths, how, root)
        plan = self._kept.get(key)
        if plan is None:
            plan = self._make(kind, tensor, how, root, lengths)
            with self._lock:
                self._kept[key] = plan
                if len(self._kept) > TEXTS - 1:
                    del self._kept[next(iter(self._kept))]
        return plan

    def _make(self, kind: str, tensor: Tensor, how: str, root: int, lengths: tuple[int, ...] | None) -> Plan:
        dtype = tensor.dtype
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InputError(
                f"{kind} of a {tensor.layout} tensor on {tensor.device}: the backend motet moves dense tensors on the "
                "CPU; for others start the group with cpu:gloo or cuda:nccl"
            )
        reduce = arithmetic(how, dtype, tensor.device) if how else None
        small = tensor.nbytes <= SMALL_BYTES
        part, chunks = lowered(kind, small, self._station.hosts, root, self._rank)
        text = f"all-to-all of {dtype_name(dtype)} with split sizes"
        if lengths is None:
            lengths = _lengths(kind, tensor.numel(), chunks, self._ranks)
            text = _text(kind, how, tensor, root)
        digest = hashlib.blake2b(f"{text}{lengths}".encode(), digest_size=8 - INDEX_BITS // 8).digest()
        with self._lock:
            index = self._made % (TEXTS - 1)
            self._made += 1
            self._station.describe(index, text)
        signature = int.from_bytes(digest, "little") << INDEX_BITS | index
        if reduce is not None and reduce.rounds and part.widens:
            reduce = replace(reduce, dtype=torch.float32)
        played = dtype if reduce is None else reduce.dtype
        return Plan(text, signature, part, lengths, played, reduce, self._ranks if how == "avg" else 1)


def _lengths(kind: str, numel: int, chunks: int, ranks: int) -> tuple[int, ...]:
    """How many numbers are in each chunk when a rank calls a collective with so many."""
    if kind == "all-to-all":
        return (numel // ranks,) * chunks
    if kind not in ("all-reduce", "reduce", "broadcast") or chunks == 1:
        return (numel,) * chunks
    each = -(-numel // chunks // _ALIGNED) * _ALIGNED
    return tuple(max(0, min(each, numel - i * each)) for i in range(chunks))


def _text(kind: str, how: str, tensor: Tensor, root: int) -> str:
    if kind == "barrier":
        return kind
    rooted = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
    where = f" {rooted[kind]} rank {root}" if kind in rooted else ""
    return f"{kind}{f' ({how})' if how else ''} of {dtype_name(tensor.dtype)} {list(tensor.shape)}{where}"
