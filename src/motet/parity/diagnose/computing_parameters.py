"""The parameters that a model computes with, against its masters rounded to the job's dtype, bit for bit.

Float64 shows no such mistake: there a master and its parameter are one tensor, or have the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from motet.core.units import dtype_name
from motet.parity.compare.align_with_reference import PlannedRecords, format_numbered
from motet.parity.compare.tensor_differences import TensorDifference, relative_distance
from motet.parity.diagnose.mismatch_evidence import DTYPE_EPSILON, MismatchEvidence, locate_elements
from motet.parity.diagnose.tensor_hypotheses import EXACT_HYPOTHESES, NOT_UPDATED, explain
from motet.parity.diagnose.tolerances import wider_tolerances
from motet.parity.record.tensor_recorder import (
    MASTER_PREFIX,
    RankRecords,
    RecordedShard,
    RecordedTensor,
    RecordsByRank,
    TensorKey,
    TensorKind,
    group_by_key,
    parameter_name,
    sketch_shard,
)

BEFORE_UPDATE: tuple[TensorKind, ...] = ("starting parameter", "used parameter")
AFTER_UPDATE: tuple[TensorKind, ...] = ("parameter",)
SKETCH_TOLERANCE = 1e-12  # A sketch is a sum in float64


@dataclass(frozen=True)
class StepMasters:
    """The masters that a step has left on all ranks, and those of the steps before it."""

    records_by_rank: RecordsByRank
    planned: PlannedRecords
    previous: "StepMasters | None" = None

    @cached_property
    def _records(self) -> Mapping[TensorKey, RankRecords]:
        return group_by_key(self.records_by_rank)

    def differing_copies(self) -> Iterator[TensorDifference]:
        """Masters whose values differ between ranks."""
        for key, rank_records in self._records.items():
            if key.kind == "state" and (copies := self.planned.differing_copies(rank_records)):
                yield TensorDifference(key, torch.inf, 0.0, copies[-1][0], self.planned.describe_copies(copies))

    def wrong_parameters(
        self, kinds: Sequence[TensorKind], records_by_rank: RecordsByRank
    ) -> Iterator[TensorDifference]:
        """The recorded parameters of these kinds that are not the rounded masters of this step."""
        records = group_by_key(records_by_rank).items()
        copies = ((key, rank_records) for kind in kinds for key, rank_records in records if key.kind == kind)
        for key, rank_records in (
            each for each in copies if not each[0].name.startswith(MASTER_PREFIX)
        ):  # The initial ones
            wrong = [
                (rank, record, expected) for rank, record in rank_records for expected in self._wrong(rank, record)
            ]
            if not wrong:
                continue
            rank, record, expected = wrong[0]
            ranks, cause = format_numbered("rank", sorted({rank for rank, *_ in wrong})), ""
            if expected.shape == record.value.shape:
                cause = self._explain(rank, record, expected)
            updates = {rank for rank, _ in self._master_records("state", key.name)}
            if len(updates) == 1 and "which rank" not in cause:
                cause += f"; rank {min(updates)} updates it" * (cause != "")
            dtype = self._dtype(key.name)
            rounded = f" rounded to {dtype}" * (dtype != self._master_records("state", key.name)[0][1].dtype)
            reason = f"on {ranks} it is not its master{rounded}{cause and ': '}{cause}"
            yield TensorDifference(key, relative_distance(record.value, expected), 0.0, rank, reason, record)

    def _wrong(self, rank: int, record: RecordedTensor) -> Iterator[Tensor]:
        """The values that a parameter should have, if it has others."""
        is_master = record.dtype != self._dtype(record.name) and record.kind != "used parameter"  # A master of stage 3
        if record.shard is None or is_master:
            return
        expected = self._gather("rounded master", record.name, record.shard, rank=rank)
        if expected is not None and not _is_equal(record, expected):
            yield expected

    def _master_records(self, kind: TensorKind, name: str) -> RankRecords:
        own_name = self.planned.own_name(parameter_name(name))
        return self._records.get(TensorKey(kind, MASTER_PREFIX * (kind == "state") + own_name), [])

    def _dtype(self, name: str) -> str:
        return next((record.dtype for _, record in self._master_records("rounded master", name)), "")

    def _gather(self, kind: TensorKind, name: str, shard: RecordedShard, *, rank: int) -> Tensor | None:
        """The elements of a shard, from the masters that ranks update: its own, where it has some. None: unknown."""
        pieces = dict[int, tuple[RecordedShard, RecordedTensor]]()
        for _, record in sorted(self._master_records(kind, name), key=lambda each: each[0] == rank):
            if record.shard is not None and record.shard.spec == shard.spec:
                pieces[record.shard.start] = record.shard, record
        parts = [pieces[start] for start in sorted(pieces)]
        ends = [0, *(part.stop for part, _ in parts)]
        if not parts or [part.start for part, _ in parts] != ends[:-1] or shard.stop > ends[-1]:
            return None
        if any(record.is_sketched for _, record in parts):
            sketches = [r.value if r.is_sketched else sketch_shard(r.value, part.start, True) for part, r in parts]
            return torch.stack(sketches).sum(0) if shard.numel == ends[-1] else None
        return sketch_shard(torch.cat([record.value for _, record in parts])[shard.start : shard.stop], shard.start)

    def _explain(self, rank: int, record: RecordedTensor, expected: Tensor) -> str:
        assert record.shard is not None
        name, shard, steps, before = record.name, record.shard, 1, self.previous
        while before is not None:
            old = before._gather("rounded master", name, shard, rank=rank)
            if old is not None and _is_equal(record, old) and not torch.equal(old, expected):
                return f"{NOT_UPDATED}: it keeps its earlier value" + f", {steps} updates ago" * (steps > 1)
            before, steps = before.previous, steps + 1
        if record.is_sketched:
            return ""
        wrong = record.value != expected
        location = locate_elements(shard, wrong, self._master_records("state", name))
        master = self._gather("state", name, shard, rank=rank)
        text = ""
        if master is not None and master.dtype != expected.dtype:
            text = _other_rounding(record.value[wrong], master[wrong], expected[wrong])
        evidence = self._evidence(rank, record, expected, wrong=wrong)
        if not (text := text or explain(evidence, EXACT_HYPOTHESES)):
            with wider_tolerances(torch.finfo(expected.dtype).eps / 2):  # It may have been rounded afterwards
                text = explain(evidence, EXACT_HYPOTHESES)
        return text + location

    def _evidence(self, rank: int, record: RecordedTensor, expected: Tensor, *, wrong: Tensor) -> MismatchEvidence:
        assert record.shard is not None
        indices = wrong.nonzero().flatten()
        elements = slice(int(indices[0]), int(indices[-1]) + 1)
        own_name, others = self.planned.own_name(parameter_name(record.name)), dict[str, Tensor]()
        for key, rank_records in self._records.items():
            if key.kind == "rounded master" and (shard := rank_records[0][1].shard) is not None:
                all_of_it = RecordedShard(shard.spec, 0, max(r.shard.stop for _, r in rank_records if r.shard))
                value = self._gather("rounded master", key.name, all_of_it, rank=rank)
                others |= {} if value is None else {key.name: value.double()}
        older = self.previous
        before = None if older is None else older._gather("rounded master", record.name, record.shard, rank=rank)
        return MismatchEvidence(
            record.value[elements].double(),
            expected[elements].double(),
            rank,
            kind="parameter",
            name=record.name,
            alternatives={
                f"that of {name}": value[record.shard.start : record.shard.stop][elements]
                for name, value in others.items()
                if name != own_name and value.numel() >= record.shard.stop
            },
            value_before_step=None if before is None else before[elements].double(),
            source_tensors={f"the rounded master of {name}": value for name, value in others.items()},
        )


def _is_equal(record: RecordedTensor, expected: Tensor) -> bool:
    if record.is_sketched and record.value.shape == expected.shape:
        return relative_distance(record.value, expected) <= SKETCH_TOLERANCE
    return torch.equal(record.value, expected)


def _other_rounding(value: Tensor, master: Tensor, expected: Tensor) -> str:
    """Words for another way to round these masters that gives the value."""
    exact, rounded = master.double(), expected.double()
    for dtype in DTYPE_EPSILON:
        if dtype != value.dtype and torch.equal(exact.to(dtype).to(value.dtype), value):
            return f"its master was rounded to {dtype_name(dtype)} first"
    error, right = value.double() - exact, (rounded - exact).abs()
    ulp = torch.finfo(value.dtype).eps * exact.abs()
    if bool((error.abs() > ulp).any()) or bool((error.abs() < right).any()):
        return ""
    if bool((error * exact <= 0).all()):
        return "its master was cut off, not rounded to the nearest"
    return "its master was rounded to the neighbour that is further away"
