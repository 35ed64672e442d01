"""Ranks layouts: memory first, then a lower bound of the time, then the simulation of layouts that may be the best.

Calls a function for parts of a list in forked worker processes, one for each core.

A process with several threads, or with torch, does not fork: a worker has none of the other threads, and waits forever
for a lock that one of them held. It calls the function itself.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.memory.policy_choice import Place
from motet.parallel.layout import Layout
from motet.plan.memory.step_memory import (
    PlannedMemory,
    estimate_memory,
    fits,
    host_problem,
    least_memory,
    planned_state,
)
from motet.plan.planned_cluster import PlannedCluster
from motet.plan.planned_step import ParameterCounts, PlannedStep, Recompute, count_parameters
from motet.plan.search.layout_space import SearchSpace, with_balanced_stages
from motet.plan.time.step_time import StepTime

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_WORKERS = 8
_PART = 50  # Items that a worker takes from the list each time
_LEAST_PARTS = 8  # Fewer take less time than it takes to start processes

_call: Callable[[int], Any] | None = None  # What workers call; they are forked while it is set


def map_parts(
    function: Callable[[Sequence[_Item]], list[_Result]],
    items: Sequence[_Item],
    report: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[_Result]:
    """The results of `function(part)` of consecutive parts, in their order. `report` gets the items done and all."""
    for number, results in enumerate(_results_of_parts(function, items), 1):
        report(min(number * _PART, len(items)), len(items))
        yield from results


def _results_of_parts(
    function: Callable[[Sequence[_Item]], list[_Result]], items: Sequence[_Item]
) -> Iterator[list[_Result]]:
    parts = [items[start : start + _PART] for start in range(0, len(items), _PART)]
    workers = min(_worker_count(), _MOST_WORKERS)
    if workers == 1 or len(parts) < _LEAST_PARTS:
        yield from map(function, parts)
        return
    # The prediction of one layout does not wait for these imports.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    global _call
    _call = lambda index: function(parts[index])  # noqa: E731 - workers inherit it, which need not be pickled
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            yield from pool.map(_call_part, range(len(parts)))
    finally:
        _call = None


def _worker_count() -> int:
    """The cores of this process; one where it must not fork."""
    can_fork = threading.active_count() == 1 and "torch" not in sys.modules
    return len(os.sched_getaffinity(0)) if can_fork and hasattr(os, "sched_getaffinity") else 1


def _call_part(index: int) -> Any:
    assert _call is not None
    return _call(index)


# In the order of the time that they cost: the first that fits is the best for a layout.
_RECOMPUTATION: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class RankedPlan:
    """A layout with its prediction."""

    step: PlannedStep
    memory: PlannedMemory
    time: StepTime


@dataclass(frozen=True)
class RejectedPlan:
    """A layout that does not fit, with the reason, and the bytes that are missing at least."""

    layout: str
    reason: str
    missing_bytes: float  # Infinite if no memory would help
    is_host_full: bool = False  # The devices have enough memory, and their host has not


class Candidate(NamedTuple):
    """A layout with its recomputation, and a bound of its time."""

    bound_s: float
    layout: Layout
    recompute: Recompute = "none"
    states: Place = "device"


LayoutKind = tuple[int, ...]
"""The degrees and the stage of ZeRO of a layout. Layouts of a kind differ in micro-batches, chunks and schedules."""


def kind_of(layout: Layout) -> LayoutKind:
    """The degrees of tensor, pipeline, context and expert parallelism, and the stage of ZeRO."""
    return layout.tp, layout.pp, layout.cp, layout.ep, layout.zero


@dataclass(frozen=True)
class RankedKind:
    """The fastest layout of a kind, and the time of the next one."""

    best: RankedPlan
    next_s: float | None = None  # None if no other of its kind fits, or all are slower than the ranked ones

    @property
    def simplicity(self) -> tuple[float, ...]:
        """Few techniques are simple; with as many, more free memory comes first."""
        step, layout = self.best.step, self.best.step.layout
        techniques = [*(degree > 1 for degree in kind_of(layout)), layout.chunks > 1, step.recompute != "none"]
        techniques.append(step.states != "device")
        return sum(techniques), self.best.memory.worst.outside, self.best.time.seconds


@dataclass(frozen=True)
class Ranking:
    """The best kinds of layouts, and all layouts that do not fit.

    The first `equal` kinds are as fast as the fastest one within the tolerance, the simplest of them first; the others
    follow by their time. `untrained` is a faster layout that cannot be trained, with the reason. `tried` are the places
    off the devices in which states were tried, with the number of layouts that fit so.
    """

    kinds: tuple[RankedKind, ...]
    rejected: tuple[RejectedPlan, ...]
    considered: int  # Layouts that fit
    equal: int = 0
    untrained: tuple[RankedPlan, str] | None = None
    tried: Mapping[Place, int] = field(default_factory=dict)

    @property
    def plans(self) -> tuple[RankedPlan, ...]:
        """The best layout of each kind."""
        return tuple(kind.best for kind in self.kinds)


Refusal = Callable[[PlannedStep], str | None]
"""Why a step cannot be trained, or None."""
Report = Callable[[str, int, int], None]
"""Gets a task, and how many layouts of how many are done; it may not start a thread, since processes are forked."""


def _tiers_of(cluster: PlannedCluster) -> tuple[Place, ...]:
    """The places off the devices in which motet can keep states on a cluster, the fastest first."""
    if cluster.host is None:
        return ()
    return ("host", "disk") if cluster.host.scratch_Bps is not None else ("host",)


class LayoutRanking:
    """Ranks the layouts of one job on one cluster; `headroom` is the share of its memory that stays free.

    Where fewer kinds of layouts fit than are ranked, the others are tried with states on the host, and where
    its memory is not enough, on disk.
    """

    def __init__(
        self, step: PlannedStep, cluster: PlannedCluster, *, headroom: float = 0.0, tries_tiers: bool = False
    ) -> None:
        """`step` has any layout; its model, batch, precision, framework and place of states count."""
        self._step, self._cluster = step, cluster
        self._limit = cluster.device.usable_bytes * (1 - headroom)
        self.may_use_tiers = tries_tiers and step.stack.memory == "motet" and step.states == "device"
        self._tiers = _tiers_of(cluster) if self.may_use_tiers else ()
        cluster.step_times.check_places(step)
        self._times = cluster.step_times
        self._stages = dict[int, tuple[range, ...]]()
        self._parameters = dict[tuple[object, ...], ParameterCounts]()

    def rank(
        self,
        top: int,
        report: Report = lambda *_: None,
        *,
        tolerance: float = 0.0,
        refusal: Refusal | None = None,
    ) -> Ranking:
        """The `top` best kinds of layouts that can be trained, or of all if none can."""
        space = self._space()
        layouts = [*space.layouts()]
        rejected = [RejectedPlan(size, reason, inf) for size, reason in space.refusals().items()]
        outcomes = [*map_parts(self._bounds, layouts, partial(report, "time and memory of layouts"))]
        kinds_that_fit = {kind_of(each.layout) for each in outcomes if isinstance(each, Candidate)}
        needs_memory = any(isinstance(each, RejectedPlan) and each.missing_bytes < inf for each in outcomes)
        tried = self._tiers if len(kinds_that_fit) < top and needs_memory else ()
        if tried:  # Where many layouts fit, trying the others would take as long again
            self._try_tiers(layouts, outcomes, report)
        fitting = [outcome for outcome in outcomes if isinstance(outcome, Candidate)]
        rejected += [outcome for outcome in outcomes if isinstance(outcome, RejectedPlan)]
        search = self._search(fitting, KindSearch(top, tolerance, self._refused(refusal)), report)
        if not search.kinds:
            search = self._search(fitting, KindSearch(top, tolerance), report)
        kinds, equal = search.ranked()
        by_place = {place: sum(each.states == place for each in fitting) for place in tried}
        return Ranking(kinds, tuple(rejected), len(fitting), equal, self._untrained(search, refusal), by_place)

    def _try_tiers(self, layouts: Sequence[Layout], outcomes: list[RejectedPlan | Candidate], report: Report) -> None:
        """Replace the outcomes of layouts that do not fit on the devices by those with states elsewhere."""
        needs_memory = [
            index
            for index, outcome in enumerate(outcomes)
            if isinstance(outcome, RejectedPlan) and outcome.missing_bytes < inf
        ]
        others = [layouts[index] for index in needs_memory]
        tried = map_parts(self._bounds_in_tiers, others, partial(report, "states off the devices"))
        for index, outcome in zip(needs_memory, tried, strict=True):
            outcomes[index] = outcome

    def _refused(self, refusal: Refusal | None) -> Callable[[Candidate], bool]:
        return lambda each: refusal is not None and refusal(self._step_of(each)) is not None

    def _search(self, fitting: Sequence[Candidate], search: "KindSearch", report: Report) -> "KindSearch":
        predicted = count(1)

        def predict(candidate: Candidate, limit_s: float) -> RankedPlan:
            report("exact times of the best layouts", next(predicted), len(fitting))
            return self._predict(self._step_of(candidate))

        search.add(fitting, predict)
        if not search.kinds:
            return search
        bounds = partial(self._bounds_of_variants, limits=search.limits())
        variants = [*map_parts(bounds, fitting, partial(report, "variants of layouts"))]

        def predict_variant(candidate: Candidate, limit_s: float) -> RankedPlan | None:
            report("exact times of variants", next(predicted), len(variants))
            return self._predict_variant(candidate, limit_s)

        search.add(variants, predict_variant)
        return search

    def _untrained(self, search: "KindSearch", refusal: Refusal | None) -> tuple[RankedPlan, str] | None:
        """The fastest layout that was left out because it cannot be trained, if it is faster than all others."""
        if refusal is None or not search.refused:
            return None
        fastest = KindSearch(1, 0.0, limit_s=search.fastest_s)
        fastest.add(search.refused, self._predict_variant)
        plan = next((kind.best for kind in fastest.ranked()[0]), None)
        return None if plan is None else (plan, refusal(plan.step) or "")

    def predict(self, step: PlannedStep) -> tuple[RankedPlan, str | None]:
        """The prediction of one layout, and why it does not fit, or None."""
        plan = self._predict(step)
        return plan, fits(plan.memory, self._limit) or self._host_problem(step, plan.memory)[0]

    def least_state(self, step: PlannedStep) -> float:
        """State of the mean rank of a pipeline, which the fullest one has at least."""
        return planned_state(step, self._parameters_of_rank(step)).in_place("device", step.states).total

    def _space(self) -> SearchSpace:
        step, cluster = self._step, self._cluster
        sizes = cluster.devices, cluster.devices_per_host
        return SearchSpace(step.spec, step.sequence, step.global_batch, *sizes)

    def _bounds(self, layouts: Sequence[Layout]) -> list[RejectedPlan | Candidate]:
        """Why each layout does not fit, or its candidate with the recomputation that it needs."""
        return [self._outcome(self._first_that_fits(layout, self._step.states)) for layout in layouts]

    def _bounds_in_tiers(self, layouts: Sequence[Layout]) -> list[RejectedPlan | Candidate]:
        """The same with states in the first place off the devices in which a layout fits."""
        return [self._outcome(self._fit_in_tiers(layout)) for layout in layouts]

    def _fit_in_tiers(self, layout: Layout) -> PlannedStep | RejectedPlan:
        first, *others = self._tiers
        outcome = self._first_that_fits(layout, first)
        for place in others:
            if isinstance(outcome, RejectedPlan) and outcome.is_host_full:
                outcome = self._first_that_fits(layout, place)
        return outcome

    def _outcome(self, step: PlannedStep | RejectedPlan) -> RejectedPlan | Candidate:
        if isinstance(step, RejectedPlan):
            return step
        return Candidate(self._times.lower_bound(step), step.layout, step.recompute, step.states)

    def _bounds_of_variants(self, candidates: Sequence[Candidate], limits: "KindLimits") -> list[Candidate]:
        """The variants of candidates that are faster than the limit of their kind by their bound."""
        space, below = self._space(), list[Candidate]()
        for _, layout, recompute, states in candidates:
            limit_s = limits.of(kind_of(layout))
            # Another schedule may keep less, and fit with less recomputation
            least = Candidate(0.0, layout, "none" if layout.pp > 1 else recompute, states)
            for variant in space.variants(layout):
                schedules, step = space.schedules(variant), self._step_of(least._replace(layout=variant))
                bounds = self._times.lower_bounds(step, schedules, limit_s)
                for schedule, bound in zip(schedules, bounds, strict=True):
                    if bound < limit_s:
                        chosen = least._replace(bound_s=bound, layout=replace(variant, schedule=schedule))
                        below += [chosen] * (chosen.layout != layout or chosen.recompute != recompute)
        return below

    def _predict_variant(self, candidate: Candidate, limit_s: float) -> RankedPlan | None:
        """The prediction of a variant that fits, unless its recomputation makes it slower than a limit."""
        step = self._first_that_fits(candidate.layout, candidate.states, limit_s=limit_s)
        return None if isinstance(step, RejectedPlan) else self._predict(step)

    def _predict(self, step: PlannedStep) -> RankedPlan:
        return RankedPlan(step, estimate_memory(step).on_device(self._limit), self._times.predict(step))

    def _step_of(self, candidate: Candidate) -> PlannedStep:
        return replace(self._step, layout=candidate.layout, recompute=candidate.recompute, states=candidate.states)

    def _with_stages(self, layout: Layout) -> Layout:
        """The layout with the stages that the framework cuts the model into, as `--layout` gets them."""
        count = layout.pp * layout.chunks
        if count not in self._stages:
            self._stages[count] = with_balanced_stages(self._step, layout).stages
        return replace(layout, stages=self._stages[count])

    def _host_problem(self, step: PlannedStep, memory: PlannedMemory) -> tuple[str | None, float]:
        """Why states off the devices do not fit on the hosts, and the bytes that are missing on one."""
        if step.states == "device" or (host := self._cluster.host) is None:
            return None, 0.0
        per_host = min(self._cluster.devices_per_host, step.layout.ranks)
        sizes = host.memory_bytes.value, per_host
        return host_problem(memory, *sizes, shares_with_devices=self._cluster.is_processor)

    def _first_that_fits(self, layout: Layout, states: Place, limit_s: float = inf) -> PlannedStep | RejectedPlan:
        """The step with the least recomputation that fits, or why none does that is faster than a limit."""
        step = replace(self._step, layout=layout, recompute="none", states=states)
        least = self.least_state(step)
        if least > self._limit:
            text = f"states {format_bytes(least)} at least > {format_bytes(self._limit)}"
            return RejectedPlan(step.layout_text, text, least - self._limit)
        for recompute in _RECOMPUTATION:
            try:
                step = replace(step, layout=self._with_stages(layout), recompute=recompute)
                if limit_s < inf and self._times.lower_bound(step) >= limit_s:  # More recomputation takes longer
                    return RejectedPlan(step.layout_text, f"takes more than {limit_s:.3g} s", inf)
                if recompute != _RECOMPUTATION[-1] and least_memory(step) > self._limit:
                    continue  # Report the reason of the last one
                memory = estimate_memory(step, only_fullest=True).on_device(self._limit)
            except InputError as error:
                return RejectedPlan(step.layout_text, str(error), inf)
            reason = fits(memory, self._limit)
            if reason is None:
                reason, missing_bytes = self._host_problem(step, memory)
                is_full = reason is not None
                return RejectedPlan(step.layout_text, reason or "", missing_bytes, is_full) if is_full else step
        return RejectedPlan(step.layout_text, reason or "", memory.worst.outside - self._limit)

    def _parameters_of_rank(self, step: PlannedStep) -> ParameterCounts:
        """Parameters of the mean rank of a pipeline."""
        layout = step.layout
        key = layout.tp, layout.sp, layout.ep, layout.expert_tp
        if key not in self._parameters:
            self._parameters[key] = count_parameters((block, block.repeat) for block in step.rank_spec.blocks)
        return ParameterCounts(*(count / layout.pp for count in self._parameters[key]))


@dataclass(frozen=True)
class KindLimits:
    """The time below which a layout is ranked, by its kind."""

    overall_s: float
    kind_s: Mapping[LayoutKind, float]

    def of(self, kind: LayoutKind) -> float:
        """The limit for layouts of a kind."""
        return min(self.overall_s, self.kind_s.get(kind, inf))


class KindSearch:
    """Keeps the two fastest layouts of each kind, of all kinds that can be ranked.

    Candidates are predicted in the order of their bounds, until no other can be among them. The ranking has the `top`
    fastest kinds, and all that are slower than the fastest by no more than the tolerance.
    """

    def __init__(
        self,
        top: int,
        tolerance: float,
        is_refused: Callable[[Candidate], bool] = lambda each: False,
        *,
        limit_s: float = inf,
    ) -> None:
        """`limit_s` is the time that every layout must be faster than."""
        self._top, self._tolerance, self._is_refused, self._limit_s = top, tolerance, is_refused, limit_s
        self.kinds = dict[LayoutKind, list[RankedPlan]]()
        self.refused = list[Candidate]()

    @property
    def fastest_s(self) -> float:
        """Seconds of the fastest layout so far."""
        return min((plans[0].time.seconds for plans in self.kinds.values()), default=self._limit_s)

    def limits(self) -> KindLimits:
        """The limits that the layouts so far set."""
        times = sorted(plans[0].time.seconds for plans in self.kinds.values())
        overall_s = max(times[self._top - 1], times[0] * (1 + self._tolerance)) if len(times) >= self._top else inf
        kind_s = {kind: plans[1].time.seconds for kind, plans in self.kinds.items() if len(plans) > 1}
        return KindLimits(min(overall_s, self._limit_s), kind_s)

    def add(self, candidates: Iterable[Candidate], predict: Callable[[Candidate, float], RankedPlan | None]) -> None:
        """`predict` gets the time that a plan must be faster than."""
        limits = self.limits()
        for candidate in sorted(candidates, key=attrgetter("bound_s")):
            if candidate.bound_s >= limits.overall_s:
                break
            kind = kind_of(candidate.layout)
            limit_s = limits.of(kind)
            if candidate.bound_s >= limit_s:
                continue
            if self._is_refused(candidate):
                self.refused.append(candidate)
                continue
            plan = predict(candidate, limit_s)
            if plan is not None and plan.time.seconds < limit_s:
                plans = [*self.kinds.get(kind, ()), plan]
                self.kinds[kind] = sorted(plans, key=lambda each: each.time.seconds)[:2]
                limits = self.limits()

    def ranked(self) -> tuple[tuple[RankedKind, ...], int]:
        """The best kinds, and how many of them are equal within the tolerance, the simplest of which come first."""
        limit_s = self.limits().overall_s
        kinds = [
            RankedKind(plans[0], next((each.time.seconds for each in plans[1:] if each.time.seconds < limit_s), None))
            for plans in self.kinds.values()
        ]
        kinds.sort(key=lambda kind: kind.best.time.seconds)
        equal = sum(kind.best.time.seconds <= self.fastest_s * (1 + self._tolerance) for kind in kinds)
        ordered = [*sorted(kinds[:equal], key=attrgetter("simplicity")), *kinds[equal:]]
        return tuple(ordered[: self._top]), min(equal, self._top)
