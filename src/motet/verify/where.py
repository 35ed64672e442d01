"""Where a tensor differs: on which ranks, in which elements, and in what numbers that could be told."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from motet.verify.compare import Reference, apart, distance, floor_of, sites_of
from motet.verify.equations import TARGETS
from motet.verify.fold import folded_part
from motet.verify.parts import Part, Whole, listed
from motet.verify.record import Seen
from motet.verify.shares import WhatIf
from motet.verify.verdict import Found

Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Where:
    """One difference."""

    what_if: WhatIf
    ranks: Sequence[Sequence[Seen]]
    found: Found
    reference: Reference
    whole: Whole
    parts: Sequence[Part]

    def _off(self, part: Part) -> float:
        return distance(part.value, part.expected, floor_of(self.reference, self.whole.site, part))

    @cached_property
    def _worst(self) -> Part:
        return max(self.parts, key=self._off)

    @cached_property
    def _wrong(self) -> list[Part]:
        return [part for part in self.parts if self._off(part) > self.found.difference.bound]

    def _where(self) -> str:
        """On which ranks, and where in the tensor, if not on all and everywhere."""
        ranks = sorted({part.rank for part in self._wrong if part.rank is not None})
        all_ranks = {part.rank for part in self.parts if part.value.numel()}
        text = f", on rank{'s' * (len(ranks) > 1)} {listed(ranks)} alone" if 0 < len(ranks) < len(all_ranks) else ""
        places = self._region
        if places is not None and self._worst.seen is not None:
            start = self._worst.seen.start
            first, last = start + places.start, start + places.stop - 1
            which = f"element {first}" if first == last else f"elements {first} to {last}"
            text += f", in {which} of {self.whole.value.numel()}{self._owner(first, last)}"
        return text

    @cached_property
    def _region(self) -> slice | None:
        """Where it differs, if that is a part of what the rank has."""
        value, expected, seen = self._worst.value, self._worst.expected, self._worst.seen
        if seen is None or seen.shape is None or seen.folded or value.numel() < 2:
            return None
        off = apart(value, expected).abs().nan_to_num(math.inf)
        wrong = (off > 1e-3 * self.found.difference.bound * float(expected.double().abs().max())).nonzero()
        if not len(wrong):
            return None
        first, last = int(wrong[0]), int(wrong[-1])
        return slice(first, last + 1) if last + 1 - first < 0.95 * value.numel() else None

    def _owner(self, first: int, last: int) -> str:
        """Whose shard that is."""
        pieces = sites_of(self.ranks).get(("state", f"master/{self.whole.site[1].rpartition('/')[2]}"), [])
        for rank, seen in pieces:
            if 0 < seen.numel < self.whole.value.numel() and seen.start <= first and last < seen.start + seen.numel:
                return f", which rank {rank} updates"
        return ""

    @cached_property
    def _cut(self) -> Cut:
        """What of a whole tensor the worst part is about."""
        seen, region = self._worst.seen, self._region
        if seen is None or seen.shape is None:
            return lambda tensor: tensor

        def cut(tensor: Tensor) -> Tensor:
            own = folded_part(tensor.reshape(-1)[seen.start : seen.start + seen.numel], seen.start)
            return own if region is None else own[region]

        return cut

    @cached_property
    def sizes(self) -> dict[str, float]:
        """What factors may come from."""
        layout = self.what_if.layout
        targets = {c.rank: 0.0 for c in self.what_if.computed}
        for c in self.what_if.computed:
            targets[c.rank] += c.targets
        rows = self.what_if.trial.rows
        parts = layout.reproducible_batch_size or layout.dp * layout.microbatches
        return {
            "dp": float(layout.dp),
            "micro-batches of a rank": float(layout.microbatches),
            "all micro-batches": float(parts),
            "ranks that share a copy": float(layout.shards),
            "replicas": layout.dp / layout.shards,
            "rows of the batch": float(rows),
            "rows of a rank": rows / layout.dp,
            "rows of a micro-batch": rows / parts,
            TARGETS: sum(targets.values()),
            **{f"{TARGETS} of rank {rank}": count for rank, count in targets.items()},
            **{f"{TARGETS} of micro-batch {c.part} of rank {c.rank}": c.targets for c in self.what_if.computed},
            "what gradients are scaled by": self._scale,
            "the square of dp": float(layout.dp) ** 2,
        }

    @property
    def _scale(self) -> float:
        """What sums of gradients are multiplied by, before an update."""
        engine = self.what_if.built.engine
        norm, count = (self.reference.tensor(site) for site in (("norm", "gradient norm"), ("sum", "target tokens")))
        return 1.0 if norm is None or count is None else engine.gradient_scale(float(norm), float(count))
