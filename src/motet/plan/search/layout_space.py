"""The layouts that a model, a global batch and a number of devices allow, and why others are not possible.

`layouts` has one layout for all sizes, ZeRO stages and chunks; `variants` has the same sizes with options that are
seldom the fastest: other schedules, tensor parallelism without sequence parallelism, stage 3 that keeps its parameters
after forward or reduces gradients once a step. Groups of stage 3 in pipelines are predicted when a person names them.

The module also reads a layout to be planned: the grammar of `[layout]`, with `recompute` and `optimizer` in addition.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, get_args

from motet.core.errors import check_input
from motet.memory.policy_choice import Place
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import ModelSpec
from motet.parallel.context_parallel.context_partition import ContextOrder, default_order
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.layout import Layout, LayoutSettings, layout_of_settings, layout_of_sizes, parse_layout
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.parallel.pipeline.stages.stage_balance import balance_stages, costs_of_spec
from motet.plan.planned_step import PlannedStep, Recompute

_Choice = TypeVar("_Choice", bound=str)

_MOST_CHUNKS = 16
_MOST_ROWS, _MOST_TOKENS = 16, 2**17  # Limits of a micro-batch, whichever is more: larger ones are not faster
SOURCE_PROBLEM = "parts of a model that reads a source besides its tokens cannot be planned yet"
_SHORTEST_PART = 1024  # Tokens of a sequence that context parallelism leaves a rank


@dataclass(frozen=True)
class SearchSpace:
    """The numbers that layouts must divide."""

    spec: ModelSpec
    sequence: int
    global_batch: int
    devices: int
    devices_per_host: int

    def layouts(self) -> Iterator[Layout]:
        """All layouts without recomputation; stages of ZeRO follow one another."""
        default: ContextOrder = default_order(self.spec.attention)
        for tp in self._tensor_degrees():
            for pp in self._pipeline_degrees(tp):
                for cp in self._context_degrees(tp * pp):
                    dp = self.devices // (tp * pp * cp)
                    if self._data_problem(dp):
                        continue
                    sp = tp > 1 and self.sequence % tp == 0
                    order = default if cp > 1 else "head-tail"
                    for ep in self._expert_degrees(dp * cp * tp):
                        yield from self._schedules(
                            layout_of_sizes(dp=dp, tp=tp, sp=sp, pp=pp, cp=cp, cp_order=order, ep=ep)
                        )

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """One of `layouts`, and others with its sizes and its schedule."""
        gathers = sharded_states(layout.zero).parameters
        for sp in (True, False) if layout.sp else (False,):
            for reshards in (True, False) if gathers and layout.pp == 1 else (True,):
                each = replace(layout, sp=sp).with_sharding(reshard_after_forward=reshards)
                yield each
                if gathers and layout.microbatches > 1:
                    yield each.with_sharding(reduces_once=True)

    def schedules(self, layout: Layout) -> list[str]:
        """The schedules of a layout's chunks, its own first; with one chunk, interleaved is 1F1B."""
        if layout.pp == 1:
            return [layout.schedule]
        names = [name for name, kind in SCHEDULES.items() if kind.chunks in (None, layout.chunks)]
        same = {layout.schedule} | ({"interleaved", "breadth-first"} if layout.chunks == 1 else set())
        return [layout.schedule, *(name for name in names if name not in same)]

    def refusals(self) -> dict[str, str]:
        """Sizes that divide the devices and are in no layout, each with the reason."""
        problems = {
            "tp": self._tensor_problem,
            "pp": self._pipeline_problem,
            "cp": self._context_problem,
            "dp": self._data_problem,
            "ep": self._expert_problem,
        }
        degrees = divisors(self.devices, self.devices)
        pairs = ((f"{name}={n}", problem(n)) for name, problem in problems.items() for n in degrees)
        return {size: reason for size, reason in pairs if reason is not None}

    def _schedules(self, layout: Layout) -> Iterator[Layout]:
        per_rank = self.global_batch // layout.dp
        for rows in divisors(per_rank, max(_MOST_ROWS, _MOST_TOKENS // self.sequence)):
            microbatches = per_rank // rows
            for chunks in self._chunks(layout.pp, microbatches):
                for zero in (1, 0, 2, 3) if layout.dp * layout.cp > 1 else (0,):
                    for group in self._shard_groups(layout, zero):
                        schedule = "interleaved" if chunks > 1 else "1f1b"
                        yield layout_of_sizes(
                            dp=layout.dp,
                            zero=zero,
                            shard_group=group,
                            tp=layout.tp,
                            sp=layout.sp,
                            cp=layout.cp,
                            cp_order=layout.cp_order,
                            pp=layout.pp,
                            chunks=chunks,
                            schedule=schedule,
                            ep=layout.ep,
                            microbatches=microbatches,
                        )

    def _tensor_degrees(self) -> list[int]:
        return [n for n in divisors(self.devices, self.devices) if self._tensor_problem(n) is None]

    def _tensor_problem(self, degree: int) -> str | None:
        """Why a degree of tensor parallelism is impossible: it must divide the heads, and span two hosts at most."""
        if degree > 2 * self.devices_per_host:
            return f"tensor parallelism over more than two hosts of {self.devices_per_host} devices"
        if degree > 1 and self.spec.split_problem:
            return self.spec.split_problem
        heads = [(attention.heads, "heads") for attention in self.spec.attention]
        for size, name in (*heads, *((width, "features of feed-forward networks") for width in self.spec.inner_widths)):
            if size % degree:
                return f"does not divide {size} {name}"
        all_kv_heads = (attention.kv_heads or attention.heads for attention in self.spec.attention)
        kv_heads = next((count for count in all_kv_heads if count % degree and degree % count), None)
        return None if kv_heads is None else f"does not divide {kv_heads} key heads"

    def _pipeline_degrees(self, tp: int) -> list[int]:
        return [n for n in divisors(self.devices // tp, max(1, self._layers)) if self._pipeline_problem(n) is None]

    def _pipeline_problem(self, degree: int) -> str | None:
        layers = self._layers
        if degree > 1 and self.spec.has_source:
            return SOURCE_PROBLEM
        if degree > max(1, layers):
            return f"more stages than the {layers} layers"
        return None if self._can_balance(degree) else f"{layers} layers cannot be shared evenly by {degree} stages"

    def _data_problem(self, degree: int) -> str | None:
        batch = self.global_batch
        return None if batch % degree == 0 else f"does not divide the global batch of {batch} rows"

    def _can_balance(self, stages: int) -> bool:
        """Whether stages get equally many layers, if the first and the last may have one less."""
        return -self._layers % stages <= 2

    @property
    def _layers(self) -> int:
        return self.spec.policy_count

    def _chunks(self, pp: int, microbatches: int) -> Iterator[int]:
        yield 1
        if pp == 1 or microbatches < pp:
            return
        for chunks in range(2, min(_MOST_CHUNKS, self._layers // pp + 1) + 1):
            stages = pp * chunks
            if stages <= self._layers + 2 and self._can_balance(stages):
                yield chunks

    def _context_degrees(self, ranks: int) -> list[int]:
        degrees = divisors(self.devices // ranks, max(1, self.sequence // _SHORTEST_PART))
        return [degree for degree in degrees if self._context_problem(degree) is None]

    def _context_problem(self, degree: int) -> str | None:
        if degree > 1 and self.spec.has_source:
            return SOURCE_PROBLEM
        if degree > max(1, self.sequence // _SHORTEST_PART):
            return f"leaves a rank fewer than {_SHORTEST_PART} tokens of a sequence of {self.sequence}"
        parts = 2 * degree  # Each rank has an early and a late part of a sequence, so that causal attention is even
        return None if degree == 1 or self.sequence % parts == 0 else f"does not cut {self.sequence} tokens evenly"

    def _expert_degrees(self, ranks: int) -> list[int]:
        most = self.spec.expert_count or 1
        return [n for n in divisors(most, most) if ranks % n == 0 and self._expert_problem(n) is None]

    def _expert_problem(self, degree: int) -> str | None:
        experts = self.spec.expert_count
        if experts is None or experts % degree == 0:
            return None
        return f"does not divide {experts} experts"

    def _shard_groups(self, layout: Layout, zero: int) -> Iterator[int | None]:
        yield None
        inside = self.devices_per_host // layout.tp
        gathers, can_divide = sharded_states(zero).parameters, 1 < inside < layout.dp and layout.dp % inside == 0
        if gathers and can_divide and layout.pp == layout.cp == 1:
            yield inside


def divisors(number: int, most: int) -> list[int]:
    """The divisors up to a limit, in ascending order."""
    return [value for value in range(1, min(number, most) + 1) if number % value == 0]


# Settings of `[layout]` that a plan has no value for
_NOT_PLANNED = ("data", "server", "rules", "secondary_group", "min_shard_numel")


class PlannedLayout(NamedTuple):
    """A layout with the settings of `[memory]` that a plan prints with it."""

    layout: Layout
    recompute: Recompute = "none"
    states: Place | None = None  # That of the job when not given


def layout_from_words(
    text: str, devices: int, global_batch: int, *, order: ContextOrder = "head-tail"
) -> PlannedLayout:
    """The layout of settings such as "tp=8 pp=16 recompute=full optimizer=host" on a number of devices. `order` is the
    default of `cp_order`."""
    kinds: dict[str, Recompute] = {kind: kind for kind in get_args(Recompute) if " " not in kind}
    places: dict[str, Place] = {place: place for place in get_args(Place)}
    words = text.split()
    recompute, states = _last_choice(words, "recompute", kinds), _last_choice(words, "optimizer", places)
    settings = parse_layout(" ".join(word for word in words if not word.startswith(("recompute=", "optimizer="))))
    _check_is_planned(text, settings)
    others = settings.tp * settings.cp * settings.pp
    dp = settings.dp or max(1, devices // others)
    product = f"dp = {dp} x tp = {settings.tp} x cp = {settings.cp} x pp = {settings.pp}"
    check_input(
        dp * others == devices,
        f"layout {text!r}: {product} = {dp * others}, but --gpus {devices}; change one of them, or leave dp out",
    )
    check_input(
        global_batch % dp == 0,
        f"layout {text!r}: a global batch of {global_batch} rows cannot be cut evenly over dp = {dp}; choose a "
        f"divisor, or another data.batch_sequences",
    )
    layout = layout_of_settings(settings, dp, global_batch, order=order)
    check_input(
        layout.schedule in SCHEDULES,
        f"layout {text!r}: there is no schedule {layout.schedule!r}, and that of a file cannot be planned; use one of "
        f"{', '.join(SCHEDULES)}",
    )
    return PlannedLayout(layout, recompute or "none", states)


def _last_choice(words: Sequence[str], name: str, choices: Mapping[str, _Choice]) -> _Choice | None:
    chosen = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    for text in chosen:
        check_input(text in choices, f"{name} = {text!r} in a layout: use one of {', '.join(choices)}")
    return choices[chosen[-1]] if chosen else None


def _check_is_planned(text: str, settings: LayoutSettings) -> None:
    not_planned = [name for name in _NOT_PLANNED if name in settings.model_fields_set]
    check_input(not not_planned, f"layout {text!r}: {', '.join(not_planned)} cannot be planned yet; leave it out")


def with_layout(step: PlannedStep, text: str, devices: int) -> PlannedStep:
    """The step with the layout of a text, and with the stages that the framework cuts the model into."""
    order = default_order(step.spec.attention)
    layout, recompute, states = layout_from_words(text, devices, step.global_batch, order=order)
    layout = with_balanced_stages(step, layout)
    step = replace(step, layout=layout, recompute=recompute, states=states or step.states)
    check_layout(step)
    return step


def check_layout(step: PlannedStep) -> None:
    """Check that the model and the sequence of a step can be cut as its layout says."""
    layout, layers = step.layout, step.spec.policy_count
    shards, ranks = layout.sharding.shards, layout.sharding.ranks
    check_input(ranks % shards == 0, f"shard_group = {shards} does not divide dp x cp = {ranks}; choose a divisor")
    if layout.stages:
        message = (
            f"the stages of layout {str(layout)!r} hold {layout.stages[-1].stop} blocks, but the model has {layers}"
        )
        check_input(layout.stages[-1].stop == layers, f"{message}; end the last range with block {layers - 1}")
    check_input(
        step.sequence % layout.cp == 0,
        f"cp = {layout.cp} does not divide sequences of {step.sequence} tokens; choose a divisor of {step.sequence}",
    )
    problem = step.spec.split_problem
    check_input(layout.tp == 1 or problem is None, f"tp = {layout.tp}: {problem}; set tp = 1")
    for name in ("pp", "cp"):
        degree = getattr(layout, name)
        message = f"{name} = {degree}: {SOURCE_PROBLEM}; set {name} = 1"
        check_input(degree == 1 or not step.spec.has_source, message)
    experts = step.spec.expert_count or 1
    remedy = "choose a divisor of it" if step.spec.expert_count else "leave ep out for a model without experts"
    check_input(
        experts % layout.ep == 0, f"ep = {layout.ep} does not divide the number of experts, {experts}; {remedy}"
    )


def with_balanced_stages(step: PlannedStep, layout: Layout) -> Layout:
    """A layout with the stages that motet cuts a model into, by the time of its blocks, where no others are named."""
    if layout.pp == 1 or layout.stages or not step.stack.balances_stages:
        return layout
    targets = None if step.masked_fraction is None else round(step.sequence * step.masked_fraction)
    costs = costs_of_spec(step.spec, MicroBatchShape(1, step.sequence, targets=targets), step.recipe.compute)
    stages = balance_stages(costs, layout.pp * layout.chunks)
    check_input(
        all(stages),
        f"{len(stages)} stages cannot share {len(costs.times)} blocks; use {len(costs.times)} stages at most",
    )
    return replace(layout, stages=tuple(stages))
