"""The predicted timeline of a rank, drawn from its forwards and backwards in their order, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby

from motet.memory.memory_timeline import Category, StepPhase, StorageLife
from motet.memory.policy_choice import MIN_SENT_BYTES
from motet.parallel.pipeline.pipeline_schedule import PipelineAction
from motet.parallel.pipeline.schedule_drawing import KIND_NAMES
from motet.parallel.step_plan.sent_activations import HostActivations
from motet.parallel.step_plan.stage_memory import MomentBytes, StagePeaks, sums_of_others


@dataclass(eq=False)
class SavedLife:
    """A tensor that is saved for backward."""

    life: StorageLife
    block: int | None  # None: outside of blocks
    waits: bool = False  # Until backward ends
    is_sent: bool = False  # The host has it from the end of the next block to its backward
    is_on_device: bool = True
    has_copy: bool = False  # On the host

    @property
    def here(self) -> int:
        """Its bytes on the device."""
        return self.life.size * self.is_on_device


@dataclass
class StepDrawing:
    """Adds the forwards and backwards of a rank to a timeline."""

    saved: Mapping[int, Sequence[SavedLife]]  # Saved tensors by stage
    peaks: Mapping[int, StagePeaks]  # Peaks by stage
    # Saved tensors that weight gradients need after a backward of inputs, with their bytes of gradients of outputs
    factors: Mapping[str, Fraction]
    transient: int = 0
    gradients: int = 0  # Bytes of gradients that are state from the first backward on
    gathers: bool = False  # Parameters are gathered in forwards too
    lives: list[StorageLife] = field(default_factory=list)
    phases: list[StepPhase] = field(default_factory=list)
    moment: int = 0
    first_gradient: int = 0  # The moment in which a backward has ended
    host: HostActivations = field(default_factory=HostActivations)
    _open: dict[tuple[int, int], list[SavedLife]] = field(default_factory=dict)
    _leaving: list[SavedLife] = field(default_factory=list)  # Tensors of the last block, which can be sent
    _gradients: dict[tuple[int, int], list[StorageLife]] = field(default_factory=dict)  # They wait for those of weights
    _on_host: int = 0

    def add(self, action: PipelineAction) -> None:
        """Add what an action makes, and what it frees."""
        start, key = self.moment, (action.stage, action.microbatch)
        self.moment += 1
        if action.kind == "F":
            self._open[key] = self._forward(action.stage)
        else:
            self._open[key] = self._backward(action, self._open.pop(key, []))
            self.first_gradient = self.first_gradient or self.moment
            self.moment += 1
            if self.transient:
                self.lives.append(StorageLife("gathered or unreduced", self.transient, self.moment - 1, self.moment))
        self.phases.append(StepPhase(f"{KIND_NAMES[action.kind]} {action.microbatch}", start, self.moment))

    def _forward(self, stage: int) -> list[SavedLife]:
        """The tensors that a forward saves. When a block ends, whose output the next one saves, the tensors of the
        block before it leave the device."""
        kept, peaks, leaving = list[SavedLife](), self.peaks.get(stage), list[SavedLife]()
        for block, saved in groupby(self.saved.get(stage, ()), key=lambda each: each.block):
            made = list[SavedLife]()
            for each in saved:
                self.moment += 1
                made.append(replace(each, life=replace(each.life, born=self.moment)))
                if each.life.size >= MIN_SENT_BYTES:  # The output of the block before
                    self._leave(leaving)
                    leaving = []
            kept += made
            if block is not None:
                self._leave(leaving)
                leaving, self._leaving = self._leaving, [each for each in made if each.is_sent]
        self._leave(leaving)
        if peaks is not None:
            self._add_peak(stage, peaks.forward, peaks.kept)
        return sorted(kept, key=lambda each: not each.waits)  # Backward frees them in reverse

    def _backward(self, action: PipelineAction, before: list[SavedLife]) -> list[SavedLife]:
        """Free the tensors of a forward; returns what is left. When the backward of a block begins, the tensors
        of the block before it come to the device."""
        kept, peaks, blocks = list[SavedLife](), self.peaks.get(action.stage), dict[int, list[SavedLife]]()
        for each in before:
            blocks.setdefault(-1 if each.block is None else each.block, []).append(each)
        last = blocks[max(blocks)] if before else []
        if not any(each is other for each in self._leaving[:1] for other in last):
            self._leave(self._leaving)
        self._leaving, current = [], len(before) and max(blocks) + 1
        left, is_drawn = sum(each.here for each in before), peaks is None or action.kind in ("F", "W")
        for each in reversed(before):
            if each.block is not None and each.block != current:
                current = each.block
                if peaks is not None and action.kind == "I" and current == min(blocks.keys() - {-1}):
                    self._add_peak(action.stage, peaks.backward, peaks.backward.saved)  # Factors of others wait by now
                left += self._fetch([*blocks[current], *blocks.get(current - 1, ())])
            is_last = each is before[0]
            live = peaks.backward if peaks else MomentBytes()
            is_near = not is_drawn and (left - each.here < live.saved <= left or is_last)
            if is_near and left <= live.saved + live.workspace:
                self._add_peak(action.stage, live, left)
                is_drawn = True
            self._on_host -= each.life.size * each.has_copy
            each.has_copy = False
            if action.kind == "I" and each.life.operator in self.factors:
                kept.insert(0, each)
                size = int(each.life.size * self.factors[each.life.operator])
                self._gradients.setdefault((action.stage, action.microbatch), []).append(
                    StorageLife("workspace", size, self.moment, None, each.life.operator)
                )
                continue
            left -= each.here
            self._free(each)
            if is_near and not is_drawn:  # Before it was freed, more would be drawn than there is
                self._add_peak(action.stage, live, left)
                is_drawn = True
        if action.kind == "W":
            waited = self._gradients.pop((action.stage, action.microbatch), [])
            self.lives += [replace(life, freed=self.moment) for life in waited]
        return kept

    def _fetch(self, saved: Sequence[SavedLife]) -> int:
        """Bring tensors to the device that are not there; returns their bytes."""
        size = 0
        for each in (each for each in saved if each.has_copy and not each.is_on_device):
            self.moment += 1
            each.life, each.is_on_device = replace(each.life, born=self.moment), True
            size += each.life.size
        self.host = replace(self.host, to_device=self.host.to_device + size)
        return size

    def _leave(self, saved: Sequence[SavedLife]) -> None:
        """Send tensors to the host, and free them on the device."""
        for each in saved:
            self._free(each)
            each.has_copy = True
            self._on_host += each.life.size
            to_host, peak = self.host.to_host + each.life.size, max(self.host.peak_bytes, self._on_host)
            self.host = replace(self.host, to_host=to_host, peak_bytes=peak)

    def _free(self, each: SavedLife) -> None:
        self.moment += 1
        each.is_on_device = False
        self.lives.append(replace(each.life, freed=self.moment))

    def _add_peak(self, stage: int, live: MomentBytes, kept: int) -> None:
        """Draw the moment of a pass in which the rank has most bytes, while `kept` bytes of saved tensors are alive."""
        self.moment += 1
        parts: dict[Category, int] = {"recomputed activations": live.recomputed}
        sums, state = live.gradients + sums_of_others(self.peaks, stage), self.gradients if self.first_gradient else 0
        parts["gathered or unreduced"] = live.gathered + max(0, sums - state)
        parts["workspace"] = max(0, live.total - kept - live.recomputed - live.gathered - live.gradients)
        born, self.moment = self.moment, self.moment + 1
        self.lives += [StorageLife(category, size, born, self.moment) for category, size in parts.items() if size]
