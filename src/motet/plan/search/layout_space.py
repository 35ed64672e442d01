"""The layouts that a model, a global batch and a number of devices allow, and why others are not possible."""

from collections.abc import Iterator
from dataclasses import dataclass

from motet.models.settings import DecoderSettings, TransformerSettings
from motet.plan.planned_layout import PlannedLayout

_MOST_CHUNKS = 16
_MOST_MICRO_BATCH = 16  # Rows
_SHORTEST_PART = 1024  # Tokens of a sequence that context parallelism leaves a rank


@dataclass(frozen=True)
class SearchSpace:
    """The numbers that layouts must divide."""

    model: TransformerSettings
    sequence: int
    global_batch: int
    devices: int
    devices_per_host: int

    def layouts(self) -> Iterator[PlannedLayout]:
        """All layouts without recomputation; stages of ZeRO follow one another."""
        for tp in self._tensor_degrees():
            for pp in self._pipeline_degrees(tp):
                for cp in self._context_degrees(tp * pp):
                    dp = self.devices // (tp * pp * cp)
                    if self.global_batch % dp:
                        continue
                    for ep in self._expert_degrees(dp * cp * tp):
                        yield from self._schedules(PlannedLayout(dp=dp, tp=tp, sp=tp > 1, pp=pp, cp=cp, ep=ep))

    def _schedules(self, layout: PlannedLayout) -> Iterator[PlannedLayout]:
        per_rank = self.global_batch // layout.dp
        for rows in divisors(per_rank, _MOST_MICRO_BATCH):
            microbatches = per_rank // rows
            for chunks in self._chunks(layout.pp, microbatches):
                for zero in (1, 0, 2, 3) if layout.dp * layout.cp > 1 else (0,):
                    if layout.pp > 1 and zero >= 2:  # Reduces or gathers for each micro-batch of each stage
                        continue
                    for group in self._shard_groups(layout, zero):
                        schedule = "interleaved" if chunks > 1 else "1f1b"
                        yield PlannedLayout(
                            dp=layout.dp,
                            zero=zero,
                            shard_group=group,
                            tp=layout.tp,
                            sp=layout.sp,
                            cp=layout.cp,
                            pp=layout.pp,
                            chunks=chunks,
                            schedule=schedule,
                            ep=layout.ep,
                            microbatches=microbatches,
                        )

    def _tensor_degrees(self) -> Iterator[int]:
        """Divisors of the heads and of the devices, up to two hosts."""
        model = self.model
        kv_heads = (model.kv_heads or model.heads) if isinstance(model, DecoderSettings) else model.heads
        for degree in divisors(self.devices, 2 * self.devices_per_host):
            shares = kv_heads % degree == 0 or degree % kv_heads == 0
            if model.heads % degree == 0 and model.ffn_hidden % degree == 0 and shares:
                yield degree

    def _pipeline_degrees(self, tp: int) -> Iterator[int]:
        for degree in divisors(self.devices // tp, self.model.layers):
            if self._can_balance(degree):
                yield degree

    def _can_balance(self, stages: int) -> bool:
        """Whether stages get equally many layers, if the first and the last may have one less."""
        return -self.model.layers % stages <= 2

    def _chunks(self, pp: int, microbatches: int) -> Iterator[int]:
        yield 1
        if pp == 1 or microbatches < pp:
            return
        for chunks in range(2, min(_MOST_CHUNKS, self.model.layers // pp + 1) + 1):
            stages = pp * chunks
            if stages <= self.model.layers + 2 and self._can_balance(stages):
                yield chunks

    def _context_degrees(self, ranks: int) -> Iterator[int]:
        for degree in divisors(self.devices // ranks, max(1, self.sequence // _SHORTEST_PART)):
            if self.sequence % (2 * degree) == 0 or degree == 1:
                yield degree

    def _expert_degrees(self, ranks: int) -> Iterator[int]:
        experts = self.model.experts if isinstance(self.model, DecoderSettings) else None
        if experts is None:
            yield 1
            return
        yield from (degree for degree in divisors(experts.count, 2 * 64) if ranks % degree == 0)

    def _shard_groups(self, layout: PlannedLayout, zero: int) -> Iterator[int | None]:
        yield None
        inside = self.devices_per_host // layout.tp
        if zero == 3 and 1 < inside < layout.dp and layout.dp % inside == 0 and layout.cp == 1:
            yield inside


def divisors(number: int, most: int) -> list[int]:
    """The divisors up to a limit, in ascending order."""
    return [value for value in range(1, min(number, most) + 1) if number % value == 0]
