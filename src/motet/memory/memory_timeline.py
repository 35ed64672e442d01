"""The live bytes of a rank in a step by category, as values without torch.

A moment is an allocation or a free; moments are counted from the start of the step, so a timeline does not depend on
the speed of a machine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

Category = Literal[
    "parameters",
    "master parameters",
    "gradients",
    "moments",
    "compression errors",
    "other state",
    "saved activations",
    "recomputed activations",
    "gathered or unreduced",
    "messages",
    "workspace",
]

# In the order in which a picture stacks them: what stays lies below what comes and goes.
CATEGORIES: Mapping[Category, str] = {
    "parameters": "parameters in the dtype of forward and backward, with buffers",
    "master parameters": "parameters in the dtype of the optimizer, where it is another one",
    "gradients": "sums of gradients, kept from step to step",
    "moments": "moments of the optimizer",
    "compression errors": "what lossy codecs left out, for the next message",
    "other state": "tensors that exist before the step and are none of these",
    "saved activations": "what forward leaves for backward, and the batch",
    "recomputed activations": "what backward computes again",
    "gathered or unreduced": "parameters that ranks gather, and gradients before their sum over the ranks",
    "messages": "other tensors that ranks send or receive",
    "workspace": "everything that comes and goes in forward, backward and update",
}


_EARLIER = "before the step"


@dataclass(frozen=True)
class StorageLife:
    """A piece of memory from the moment in which it is made to the one in which it is freed."""

    category: Category
    size: int
    born: int
    freed: int | None  # None: it outlives the step
    operator: str = ""  # That made it
    block: str = ""  # Of the model, in whose forward it was made


@dataclass(frozen=True)
class StepPhase:
    """A stretch of a step, such as the forward of a micro-batch."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The pieces of memory of one rank in a step."""

    lives: tuple[StorageLife, ...]
    phases: tuple[StepPhase, ...] = ()
    moments: int = field(default=0)  # Allocations and frees

    @cached_property
    def bytes_by_category(self) -> dict[Category, list[int]]:
        """Live bytes after each moment, of the categories that occur."""
        changes: dict[Category, Counter[int]] = {}
        for life in self.lives:
            of_category = changes.setdefault(life.category, Counter())
            of_category[life.born] += life.size
            if life.freed is not None:
                of_category[life.freed] -= life.size
        return {
            category: list(accumulate(changes[category][moment] for moment in range(self.moments + 1)))
            for category in CATEGORIES
            if category in changes
        }

    @cached_property
    def total(self) -> list[int]:
        """Live bytes of all categories after each moment."""
        return [sum(each) for each in zip(*self.bytes_by_category.values(), strict=True)] or [0]

    @property
    def peak_moment(self) -> int:
        """The first moment with the most live bytes."""
        return self.total.index(max(self.total))

    @property
    def peak(self) -> int:
        return max(self.total)

    def peak_of(self, *categories: Category) -> int:
        """The most bytes that categories take together at a moment."""
        curves = [self.bytes_by_category[each] for each in categories if each in self.bytes_by_category]
        return max((sum(each) for each in zip(*curves, strict=True)), default=0)

    def before_step(self, category: Category) -> int:
        """The bytes of a category when the step begins."""
        return self.bytes_by_category.get(category, [0])[0]

    def at_peak(self) -> dict[Category, int]:
        """The bytes of each category in the moment with the most live bytes."""
        return {category: curve[self.peak_moment] for category, curve in self.bytes_by_category.items()}

    def by_operator(self, category: Category) -> dict[str, int]:
        """The bytes of a category by the operator that made them, when the category has the most; largest first."""
        counts = Counter[str]()
        for life in self._at_peak_of(category):
            counts[life.operator or _EARLIER] += life.size
        return dict(counts.most_common())

    def by_block(self, category: Category) -> dict[str, dict[str, int]]:
        """The same by the block in whose forward they were made, in the order of the blocks, and operator."""
        counts = dict[str, Counter[str]]()
        for life in self._at_peak_of(category):
            counts.setdefault(life.block or "outside of blocks", Counter())[life.operator or _EARLIER] += life.size
        return {block: dict(each.most_common()) for block, each in counts.items()}

    def _at_peak_of(self, category: Category) -> Iterator[StorageLife]:
        curve = self.bytes_by_category.get(category, [0])
        moment = curve.index(max(curve))
        for life in self.lives:
            if life.category == category and life.born <= moment and (life.freed is None or life.freed > moment):
                yield life

    def phase_at(self, moment: int) -> str:
        """The name of the phase of a moment, or an empty text."""
        return next((phase.name for phase in self.phases if phase.start <= moment < phase.stop), "")

    def columns(self, count: int) -> Iterator[tuple[int, dict[Category, int]]]:
        """(Its moment, bytes by category) of the largest total in each of at most `count` equal stretches."""
        moments = self.moments + 1
        for column in range(min(count, moments)):
            start, stop = (moments * (column + end) // min(count, moments) for end in (0, 1))
            largest = max(range(start, stop), key=self.total.__getitem__)
            yield largest, {category: curve[largest] for category, curve in self.bytes_by_category.items()}

    def as_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes the timeline again."""
        return {
            "lives": [
                [each.category, each.size, each.born, each.freed, each.operator, each.block] for each in self.lives
            ],
            "phases": [[each.name, each.start, each.stop] for each in self.phases],
            "moments": self.moments,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MemoryTimeline":
        lives = tuple(StorageLife(*row) for row in values["lives"])
        return cls(lives, tuple(StepPhase(*row) for row in values["phases"]), values["moments"])
