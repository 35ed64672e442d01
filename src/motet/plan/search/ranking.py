"""Ranks layouts: memory first, then a lower bound of the time, then the simulation of what can still be the best."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import itemgetter

from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.plan.memory.rank_memory import PlannedMemory, fits
from motet.plan.memory.step_memory import estimate_memory, least_memory, planned_state
from motet.plan.planned_cluster import PlannedCluster
from motet.plan.planned_layout import PlannedLayout, Recompute
from motet.plan.planned_step import PlannedStep, is_expert
from motet.plan.search.forked_processes import map_parts
from motet.plan.search.layout_space import SearchSpace
from motet.plan.search.parse_plan_layout import with_balanced_stages
from motet.plan.time.step_time import StepTime

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


# What does not fit, or a bound of the time and the layout with its recomputation
_Outcome = RejectedPlan | tuple[float, PlannedLayout]


@dataclass(frozen=True)
class Ranking:
    """The best layouts, best first, and all that do not fit."""

    plans: tuple[RankedPlan, ...]
    rejected: tuple[RejectedPlan, ...]
    considered: int  # Layouts that fit


class LayoutRanking:
    """Ranks the layouts of one job on one cluster."""

    def __init__(self, step: PlannedStep, cluster: PlannedCluster) -> None:
        """`step` has any layout; its model, batch, precision and framework count."""
        self._step, self._cluster = step, cluster
        self._limit = cluster.device.usable_bytes
        self._times = cluster.step_times
        self._stages = dict[int, str | None]()
        self._parameters = dict[tuple[object, ...], tuple[float, float]]()

    def rank(self, top: int) -> Ranking:
        """The `top` best layouts of all."""
        space = self._space()
        rejected = [RejectedPlan(size, reason, inf) for size, reason in space.refusals().items()]
        fitting = list[tuple[float, PlannedLayout]]()
        for outcome in map_parts(self._bounds, [*space.layouts()]):
            if isinstance(outcome, RejectedPlan):
                rejected.append(outcome)
            else:
                fitting.append(outcome)
        best = best_by_bound(fitting, lambda layout, _: self._predict(replace_layout(self._step, layout)), top)
        limit = best[-1].time.seconds if len(best) == top else inf
        bounds = partial(self._bounds_of_variants, limit_s=limit)
        variants = map_parts(bounds, [layout for _, layout in fitting])
        best = best_by_bound(variants, self._predict_variant, top, plans=best)
        return Ranking(tuple(best), tuple(rejected), len(fitting))

    def predict(self, layout: PlannedLayout) -> tuple[RankedPlan, str | None]:
        """The prediction of one layout, and why it does not fit, if so."""
        plan = self._predict(replace_layout(self._step, layout))
        return plan, fits(plan.memory, self._limit)

    def least_state(self, layout: PlannedLayout) -> float:
        """State of the mean rank of a pipeline, which the fullest one has at least."""
        return planned_state(replace_layout(self._step, layout), *self._parameters_of_rank(layout)).total

    def _space(self) -> SearchSpace:
        step, cluster = self._step, self._cluster
        sizes = cluster.devices, cluster.devices_per_host
        return SearchSpace(step.spec, step.sequence, step.global_batch, *sizes)

    def _bounds(self, layouts: Sequence[PlannedLayout]) -> list[_Outcome]:
        """Why each layout does not fit, or a bound of its time, and the layout with its recomputation."""
        outcomes = map(self._first_that_fits, layouts)
        return [
            each if isinstance(each, RejectedPlan) else (self._times.lower_bound(each), each.layout)
            for each in outcomes
        ]

    def _bounds_of_variants(
        self, layouts: Sequence[PlannedLayout], limit_s: float
    ) -> list[tuple[float, PlannedLayout]]:
        """The variants of layouts that are faster than a limit by their bound, with it."""
        space, below = self._space(), list[tuple[float, PlannedLayout]]()
        for layout in layouts:
            # Another schedule may keep less, and fit with less recomputation
            base = replace(layout, recompute="none") if layout.pp > 1 else layout
            for variant in space.variants(base):
                schedules = space.schedules(variant)
                bounds = self._times.lower_bounds(replace_layout(self._step, variant), schedules, limit_s)
                for schedule, bound in zip(schedules, bounds, strict=True):
                    if bound < limit_s and (schedule, variant) != (base.schedule, base):
                        below.append((bound, replace(variant, schedule=schedule)))
        return below

    def _predict_variant(self, layout: PlannedLayout, limit_s: float) -> RankedPlan | None:
        """The prediction of what fits, unless the recomputation that it needs makes it slower than a limit."""
        step = self._first_that_fits(layout)
        if isinstance(step, RejectedPlan) or self._times.lower_bound(step) >= limit_s:
            return None
        return self._predict(step)

    def _predict(self, step: PlannedStep) -> RankedPlan:
        return RankedPlan(step, estimate_memory(step).on_device(self._limit), self._times.predict(step))

    def _with_stages(self, layout: PlannedLayout) -> PlannedLayout:
        """The layout with the stages that the framework cuts the model into, as `--layout` gets them."""
        count = layout.pp * layout.chunks
        if count not in self._stages:
            self._stages[count] = with_balanced_stages(self._step, layout).stages
        return replace(layout, stages=self._stages[count])

    def _first_that_fits(self, layout: PlannedLayout) -> PlannedStep | RejectedPlan:
        least = self.least_state(layout)
        if least > self._limit:
            text = f"states {format_bytes(least)} at least > {format_bytes(self._limit)}"
            return RejectedPlan(str(layout), text, least - self._limit)
        for recompute in _RECOMPUTATION:
            chosen = replace(layout, recompute=recompute)
            try:
                chosen = self._with_stages(chosen)
                step = replace_layout(self._step, chosen)
                if recompute != _RECOMPUTATION[-1] and least_memory(step) > self._limit:
                    continue  # The reason is that of the last one
                memory = estimate_memory(step, only_fullest=True).on_device(self._limit)
            except InputError as error:
                return RejectedPlan(str(chosen), str(error), inf)
            reason = fits(memory, self._limit)
            if reason is None:
                return step
        return RejectedPlan(str(chosen), reason or "", memory.worst.outside - self._limit)

    def _parameters_of_rank(self, layout: PlannedLayout) -> tuple[float, float]:
        """Parameters of the mean rank of a pipeline: (all others, those of experts)."""
        key = layout.tp, layout.sp, layout.ep, layout.expert_tp
        if key not in self._parameters:
            blocks = replace_layout(self._step, layout).rank_spec.blocks
            total = sum(block.parameter_count * block.repeat for block in blocks)
            experts = sum(
                parameter.numel * block.repeat
                for block in blocks
                for parameter in block.layer.parameters
                if is_expert(parameter.name)
            )
            self._parameters[key] = float(total - experts), float(experts)
        dense, experts_of_rank = self._parameters[key]
        return dense / layout.pp, experts_of_rank / layout.pp


def best_by_bound(
    candidates: Iterable[tuple[float, PlannedLayout]],
    predict: Callable[[PlannedLayout, float], RankedPlan | None],
    top: int,
    *,
    plans: Sequence[RankedPlan] = (),
) -> list[RankedPlan]:
    """The `top` fastest of plans and of candidates with a bound below their time, which are predicted until no other
    can be one. `predict` gets the time that a plan must be faster than."""
    best = [*plans]
    for bound, layout in sorted(candidates, key=itemgetter(0)):
        limit_s = best[-1].time.seconds if len(best) == top else inf
        if bound >= limit_s:
            break
        plan = predict(layout, limit_s)
        if plan is not None:
            best = sorted([*best, plan], key=lambda each: each.time.seconds)[:top]
    return best


def replace_layout(step: PlannedStep, layout: PlannedLayout) -> PlannedStep:
    """The same step with another layout."""
    return replace(step, layout=layout)
