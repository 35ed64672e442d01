"""The layout of a job: the `[layout]` section, the value that it resolves to, and the micro-batches of each rank."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from motet.collectives.algorithms import find_algorithm
from motet.core.config_loading import FilePathText, FrozenSettings, did_you_mean, parse_value, settings_from_dict
from motet.core.errors import InputError, check_input
from motet.parallel.context_parallel.context_partition import ContextOrder, ContextParallelKind, ContextSplit
from motet.parallel.data_parallel.data_sharding import (
    BucketOwners,
    DataParallelSharding,
    MicroBatchRows,
    RowPart,
    microbatches_of_data_rank,
)
from motet.parallel.data_parallel.zero import sharded_states
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.parameter_server.server_settings import ParameterServerSettings
from motet.parallel.pipeline.pipeline_schedule import PipelineSchedule
from motet.parallel.pipeline.schedules import SCHEDULES, find_schedule
from motet.parallel.tensor_parallel.split_regions import LayerSplit


class LayoutSettings(FrozenSettings):
    """The `[layout]` section."""

    other_names: ClassVar = {
        "dp": "data*parallel* dp_* dp_size ddp",
        "tp": "*tensor*parallel* tp_* mp_size",
        "pp": "pipeline*parallel* pp_*",
        "cp": "*context*parallel* cp_size cp_degree",
        "ep": "*expert*parallel* ep_*",
        "sp": "*sequence*parallel*",
        "zero": "zero_* stage deepspeed *fsdp* use_distributed_optimizer",
        "chunks": "*virtual* vpp*",
        "microbatches": "*accum* *num_microbatches",
        "schedule": "pipeline_schedule",
        "data": "parameter_server",
    }
    dp: Annotated[int, Field(ge=1)] | None = None
    """Data-parallel ranks; when not given, all ranks that `tp`, `cp` and `pp` leave."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """State that ranks shard instead of replicating: 0 none, 1 master parameters and optimizer states, 2 gradients too,
    3 parameters too."""
    reshard_after_forward: bool = True
    """Stage 3: gather parameters again for backward, instead of keeping them after forward."""
    min_shard_numel: Annotated[int, Field(ge=0)] = 0
    """Stage 3: parameters with fewer elements are replicated, and their gradients travel in buckets."""
    shard_group: Annotated[int, Field(ge=1)] | None = None
    """Neighbouring ranks that hold one copy of the sharded state; all of `dp` x `cp` when not given."""
    secondary_group: Annotated[int, Field(ge=1)] | None = None
    """Stage 3: neighbouring ranks that hold a secondary copy of the parameters between forward and backward, so that
    gathering for backward stays inside of a host."""
    microbatches: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Micro-batches of a rank in a step, one forward and backward each. When not given, one; in a pipeline the largest
    of 4, 2 and 1 times `pp` that divides the rows of a rank, or else their largest divisor below."""
    reduce_gradients: Literal["microbatch", "step"] = "microbatch"
    """Stages 2 and 3: after each micro-batch ranks reduce its gradients, and keep shards; or they add up unsharded
    gradients, and reduce them once a step, which sends less and takes memory. Stages 0 and 1 always reduce once."""
    tp: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the weights of each layer (tensor parallelism)."""
    sp: bool = False
    """Ranks of `tp` split activations over the sequence where the layers are not split (sequence parallelism)."""
    rules: dict[str, LayerSplit] = Field(default={})
    """Glob of names of layers, such as `"*.up_proj"` -> how `tp` splits them: by `columns` (output features), by `rows`
    (input features), or not at all (`whole`). Of several globs that match a layer the last one counts; a layer without
    any is split as motet proposes."""
    require_split: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The share of the parameters that `tp` has to split at least, of the trained matrices of a model without experts,
    adapters and layers that `rules` keep whole; a layout that splits less is refused."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Ranks that split each sequence (context parallelism)."""
    cp_kind: ContextParallelKind = "all-gather"
    """Exchange of keys and values for attention: `all-gather` gathers all of them before attention; `ring` passes
    blocks of them from rank to rank; `all-to-all` exchanges a part of the sequence for a part of the heads, and back
    (Ulysses)."""
    cp_order: ContextOrder | None = None
    """The tokens of each rank: `contiguous` ones, or in `head-tail` order one piece from the front of the sequence and
    one from its back, so that ranks have equally much work under a causal mask. When not given, `head-tail` if every
    layer is causal and has no window, else `contiguous`."""
    cp_inner: Annotated[int, Field(ge=1)] = 1
    """Neighbouring ranks that exchange by `all-to-all` inside of a `ring` of `cp` / `cp_inner` such groups."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the blocks of the model (pipeline parallelism)."""
    chunks: Annotated[int, Field(ge=1)] = 1
    """Model chunks that a rank of a pipeline holds (virtual stages)."""
    schedule: FilePathText | None = None
    """Order of forwards and backwards in a pipeline: `gpipe`, `1f1b`, `interleaved`, `breadth-first`,
    `zb-interleaved`, `zb-v`, `dualpipe-v`, or the path of a file. When not given, `1f1b`, or with `chunks` above 1
    `interleaved`."""
    stages: str | None = None
    """Blocks of each of `pp` x `chunks` stages, or of each stage of a schedule's file, in the order of the model, such
    as `0-3,4-7`; when not given, stages are balanced by their predicted time."""
    ep: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the experts of a layer; they are ranks of `dp` and `cp` (expert parallelism). Not built yet."""
    data: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """Sum of gradients: ranks exchange them, or push them to servers that keep the parameters."""
    server: ParameterServerSettings = ParameterServerSettings()

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        kind = SCHEDULES.get(self.schedule or "") if self.pp > 1 else None
        chunks = kind and kind.chunks
        check_input(
            chunks in (None, self.chunks),
            f"layout.chunks = {self.chunks} does not go with layout.schedule = {self.schedule!r}, where a rank holds "
            f"{chunks}; set layout.chunks={chunks}",
        )
        count = self.pp * self.chunks
        if self.schedule is None or self.schedule in SCHEDULES:  # A file says itself how many stages it has
            self.check_stage_count(count, f"layout.pp = {self.pp} x layout.chunks = {self.chunks} is {count}")
        elif self.stages is not None:
            parse_stages(self.stages)
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        if self.cp > 1:
            _check_divides("cp_inner", self.cp_inner, self.cp, ranks_text=f"layout.cp = {self.cp}")
        return self

    def check_stage_count(self, count: int, expected: str) -> None:
        """Check that `stages` has a range of blocks for each of `count` stages of a pipeline."""
        ranges = count if self.stages is None else len(parse_stages(self.stages))
        check_input(
            ranges == count or self.pp == 1,
            f"layout.stages = {self.stages!r} has {ranges} range{'s' * (ranges > 1)} of blocks, but {expected}; write "
            f"{count} ranges",
        )

    @property
    def dims(self) -> ParallelDims:
        """The dimensions, with one data-parallel rank if `dp` is not given."""
        return ParallelDims((("pp", self.pp), ("dp", self.dp or 1), ("cp", self.cp), ("tp", self.tp)))

    @property
    def microbatches_of_step(self) -> int:
        """Micro-batches of all ranks, or of all work items of a parameter server."""
        work_items = self.server.work_items_per_step if self.uses_server_processes else None
        return (work_items or self.dp or 1) * (self.microbatches or self.pp)

    @property
    def uses_server_processes(self) -> bool:
        """Whether servers and a coordinator are processes in addition to the workers."""
        return self.data == "parameter_server" and self.server.transport == "point-to-point"

    @property
    def uses_server_collectives(self) -> bool:
        """Whether some of the ranks are servers too."""
        return self.data == "parameter_server" and self.server.transport == "collectives"


@dataclass(frozen=True)
class Layout:
    """A layout that fits a number of ranks; a plan may have one that cannot run yet."""

    dims: ParallelDims
    sharding: DataParallelSharding  # Sharding over the ranks of data and context parallelism
    schedule: str = "1f1b"  # Name or file of the pipeline's schedule
    chunks: int = 1  # Stages that a rank of a pipeline holds
    stages: tuple[range, ...] = ()  # Blocks of each stage, where they are named
    sp: bool = False
    cp_kind: ContextParallelKind = "all-gather"
    cp_order: ContextOrder = "head-tail"
    cp_inner: int = 1  # Ranks of an all-to-all inside of a ring
    ep: int = 1
    expert_tp: int = 1  # Ranks of tp that split each expert, which only plans of other frameworks have

    @cached_property
    def dp(self) -> int:
        return self.dims.size("dp")

    @cached_property
    def tp(self) -> int:
        return self.dims.size("tp")

    @cached_property
    def cp(self) -> int:
        return self.dims.size("cp")

    @cached_property
    def pp(self) -> int:
        return self.dims.size("pp")

    @property
    def ranks(self) -> int:
        return self.dims.ranks

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or of groups of ranks, that read different rows."""
        return self.dp

    @property
    def cuts_rows(self) -> bool:
        """Whether several ranks share each row."""
        return self.cp > 1

    @property
    def zero(self) -> int:
        return self.sharding.zero

    @property
    def shards(self) -> int:
        """Ranks of data and context parallelism that hold one copy of the sharded state."""
        return self.sharding.shards

    @property
    def microbatches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.sharding.microbatches

    def pipeline_schedule(self, microbatches: int) -> PipelineSchedule:
        """The order of a step with this number of micro-batches."""
        return find_schedule(self.schedule, self.pp, chunks=self.chunks, microbatches=microbatches)

    def data_rank(self, rank: int) -> int:
        """The index of a rank among the ranks of data parallelism: ranks with the same one read the same rows."""
        return self.dims.coordinates(rank)["dp"]

    @property
    def context(self) -> ContextSplit:
        """The way in which ranks of context parallelism share each row."""
        return ContextSplit(self.cp, self.cp_order, self.cp_kind, self.cp_inner)

    def replica_layout(self) -> "Layout":
        """The layout of one independent replica."""
        shards = self.sharding.shards
        return Layout(ParallelDims((("dp", shards),)), replace(self.sharding, ranks=shards))

    def at_stage_3(self, factor: int) -> "Layout":
        """The layout in which `factor` times as many data-parallel ranks shard everything."""
        ranks = self.sharding.ranks * factor
        sizes = tuple((name, size * factor if name == "dp" else size) for name, size in self.dims.sizes)
        sharding = DataParallelSharding(ranks, self.sharding.microbatches, 3, ranks, ranks_of_row=self.cp)
        return replace(self, dims=ParallelDims(sizes), sharding=sharding)

    def with_sharding(self, **changes: Any) -> "Layout":
        """The layout with other fields of its sharding."""
        return replace(self, sharding=replace(self.sharding, **changes))

    def __str__(self) -> str:
        """Its settings that are not the defaults, as `parse_layout` reads them."""
        sharding, in_pipeline = self.sharding, self.pp > 1
        words = {
            "dp": self.dp,
            "data": "parameter_server" if sharding.bucket_owners else None,
            "zero": None if sharding.bucket_owners else self.zero,
            "shard_group": sharding.shards if sharding.shards != _shards(self.zero, None, sharding.ranks) else None,
            "reshard_after_forward": None if sharding.reshard_after_forward else "false",
            "reduce_gradients": "step" if sharding.sums_gradients else None,
            "tp": self.tp,
            "sp": "true" if self.sp else None,
            "cp": self.cp,
            "cp_kind": self.cp_kind if self.cp > 1 and self.cp_kind != "all-gather" else None,
            "cp_order": self.cp_order if self.cp > 1 and self.cp_order != "head-tail" else None,
            "cp_inner": self.cp_inner,
            "pp": self.pp,
            "chunks": self.chunks,
            "schedule": self.schedule if in_pipeline else None,
            "stages": ",".join(f"{blocks.start}-{blocks.stop - 1}" for blocks in self.stages) or None,
            "ep": self.ep,
            "expert_tp": self.expert_tp,
            "microbatches": self.microbatches if in_pipeline or self.microbatches > 1 else None,
        }
        shown = {name: value for name, value in words.items() if value is not None and (value != 1 or name in _SAID)}
        return " ".join(f"{name}={value}" for name, value in shown.items())


_SAID = ("dp", "zero", "microbatches")  # Written also if they are 1


def layout_of_sizes(
    *,
    zero: int = 0,
    shard_group: int | None = None,
    reshard_after_forward: bool = True,
    reduces_once: bool = False,
    microbatches: int = 1,
    **rest: Any,
) -> Layout:
    """A layout whose sizes are all known: dimensions that are not given have one rank."""
    dims = ParallelDims(tuple((name, rest.pop(name, 1)) for name in ("pp", "dp", "cp", "tp")))
    ranks, cp = dims.size("dp", "cp"), dims.size("cp")
    shards = _shards(zero, shard_group, ranks)
    how: dict[str, Any] = {"reduces_once": reduces_once, "ranks_of_row": cp}
    return Layout(dims, DataParallelSharding(ranks, microbatches, zero, shards, reshard_after_forward, **how), **rest)


def _shards(zero: int, shard_group: int | None, ranks: int) -> int:
    """Ranks that hold one copy of the state that a stage shards; one rank where it shards nothing."""
    return (shard_group or ranks) if sharded_states(zero).optimizer_states else 1


def microbatches_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[MicroBatchRows]:
    """The rows and places of a rank, by micro-batch: its index along `dp` decides the rows, and along `cp` the places.
    Code that reads a batch selects the micro-batch from it."""
    microbatches = microbatches_of_data_rank(layout.sharding, layout.data_rank(rank), batch_sequences)
    if layout.cp == 1:
        return microbatches
    part = RowPart(layout.context, layout.dims.coordinates(rank)["cp"])
    return [microbatch._replace(part=part) for microbatch in microbatches]


def contributing_rows_of_rank(layout: Layout, rank: int, batch_sequences: int) -> list[range]:
    """The rows of a rank whose gradients count, by micro-batch."""
    microbatches = microbatches_of_rank(layout, rank, batch_sequences)
    return [microbatch.rows for microbatch in microbatches if microbatch.contributes_gradients]


def resolve_layout(
    settings: LayoutSettings,
    ranks: int,
    batch_sequences: int,
    *,
    reproducible: bool = False,
    default_order: Callable[[], ContextOrder] = lambda: "head-tail",
) -> Layout:
    """The layout for a number of ranks; with `reproducible`, gradients are summed by one tree over the batch.
    `default_order` gives the order of tokens on ranks of context parallelism where the settings do not."""
    dims = resolve_dims(settings, ranks)
    sharding = _resolve_sharding(settings, dims.size("dp"), batch_sequences, reproducible=reproducible)
    layout = _make_layout(settings, dims, sharding)
    if settings.cp > 1 and settings.cp_order is None:
        layout = replace(layout, cp_order=default_order())
    if settings.pp == 1:
        return layout
    pipeline = layout.pipeline_schedule(sharding.microbatches)
    settings.check_stage_count(pipeline.stages, f"layout.schedule = {layout.schedule!r} has {pipeline.stages} stages")
    layout = replace(layout, dims=replace(dims, ends=(("pp", pipeline.stage_ranks[-1]),)))
    if not pipeline.splits_backward:
        return layout
    check_input(
        not reproducible,
        f"layout.schedule = {layout.schedule!r} adds up parts of the gradients of a micro-batch in another order than "
        "one rank; use layout.schedule=1f1b, or interleaved with layout.chunks, or leave run.reproducible out",
    )
    # The gradients of a micro-batch come in several parts, which are added up first.
    return replace(layout, sharding=replace(sharding, reduces_once=True))


def layout_of_settings(
    settings: LayoutSettings, dp: int, batch_sequences: int, *, order: ContextOrder = "head-tail"
) -> Layout:
    """The layout of settings on `dp` data-parallel ranks, which need not run: its pipeline has no order. `order` is the
    default of `cp_order`."""
    dims = ParallelDims((("pp", settings.pp), ("dp", dp), ("cp", settings.cp), ("tp", settings.tp)))
    microbatches = settings.microbatches or _default_microbatches(settings.pp, batch_sequences // dp)
    layout = _make_layout(settings, dims, _all_reduce_layout(settings, dp, microbatches))
    return replace(layout, cp_order=order) if settings.cp > 1 and settings.cp_order is None else layout


def _make_layout(settings: LayoutSettings, dims: ParallelDims, sharding: DataParallelSharding) -> Layout:
    layout = replace(
        Layout(dims, sharding, sp=settings.sp, ep=settings.ep),
        cp_kind=settings.cp_kind,
        cp_order=settings.cp_order or "head-tail",
        cp_inner=settings.cp_inner,
    )
    if settings.pp == 1:  # Nothing reads settings of pipelines
        return layout
    stages = parse_stages(settings.stages) if settings.stages else ()
    schedule = settings.schedule or ("1f1b" if settings.chunks == 1 else "interleaved")
    return replace(layout, schedule=schedule, chunks=settings.chunks, stages=stages)


def resolve_dims(settings: LayoutSettings, ranks: int) -> ParallelDims:
    """The dimensions of a layout; the product of their sizes must be the number of ranks."""
    sizes, needed = dict(settings.dims.sizes), settings.dims.ranks
    verb, remedy = "match", "leave layout.dp out"
    names = [name for name, size in sizes.items() if size > 1 or (name == "dp" and settings.dp)]
    if settings.dp is None:
        sizes["dp"] = max(1, ranks // needed)
        needed, verb, remedy = needed * sizes["dp"], "divide", "choose other sizes"
    product = " x ".join(f"layout.{name} = {sizes[name]}" for name in names)
    check_input(
        needed == ranks,
        f"{product} does not {verb} {ranks} ranks; start {needed} ranks (--ranks {needed}) or {remedy}",
    )
    shared = sizes["dp"] * sizes["cp"]
    _check_divides("ep", settings.ep, shared, ranks_text=f"the {shared} ranks of data and context parallelism")
    schedule, hint = settings.schedule, f"use one of {', '.join(SCHEDULES)}"
    check_input(
        schedule is None or schedule in SCHEDULES or Path(schedule).is_file(),
        f"layout.schedule = {schedule!r} is not a file; {did_you_mean(schedule or '', SCHEDULES) or hint}",
    )
    return ParallelDims(tuple(sizes.items()))


def _resolve_sharding(
    settings: LayoutSettings, ranks: int, batch_sequences: int, *, reproducible: bool
) -> DataParallelSharding:
    check_input(
        not reproducible or batch_sequences >= ranks,
        f"data.batch_sequences = {batch_sequences} leaves some of {ranks} ranks without a sequence; use "
        f"data.batch_sequences = {ranks} or more, or {batch_sequences} ranks at most",
    )
    if reproducible:
        sharding = _all_reduce_layout(settings, ranks, -(-batch_sequences // ranks))
        return replace(sharding, reproducible_batch_size=batch_sequences)
    microbatches = settings.microbatches or _default_microbatches(settings.pp, batch_sequences // ranks)
    count = ranks * microbatches
    below = batch_sequences // count * count
    choices = f"{below} or {below + count}" if below else f"{count}"
    which = " of data parallelism" * (settings.dims.ranks > settings.dims.size("dp"))
    check_input(
        below == batch_sequences,
        f"data.batch_sequences = {batch_sequences} cannot be cut evenly over {ranks} ranks{which} x {microbatches} "
        f"micro-batches = {count}; use data.batch_sequences = {choices}, or another number of ranks"
        f"{' or micro-batches' * (microbatches > 1)}",
    )
    if settings.uses_server_collectives:
        owners = _bucket_owners(settings.server, ranks)
        owners_or_none = owners if ranks > 1 else None
        return DataParallelSharding(ranks, microbatches, int(ranks > 1), ranks, bucket_owners=owners_or_none)
    return _all_reduce_layout(settings, ranks, microbatches)


def _default_microbatches(pp: int, rows: int) -> int:
    """Micro-batches of a rank with `rows` rows: enough to keep the bubble of a pipeline small."""
    divisors = [count for count in range(1, 4 * pp + 1) if rows % count == 0] or [1]
    return next((n * pp for n in (4, 2, 1) if n * pp in divisors), divisors[-1]) if pp > 1 else 1


def _all_reduce_layout(settings: LayoutSettings, dp: int, microbatches: int) -> DataParallelSharding:
    ranks, kinds = dp * settings.cp, "data and context" if settings.cp > 1 else "data"
    shards, secondary = _shards(settings.zero, settings.shard_group, ranks), settings.secondary_group
    _check_divides("shard_group", shards, ranks, ranks_text=f"{ranks} ranks of {kinds} parallelism")
    sharding = DataParallelSharding(
        ranks,
        microbatches,
        settings.zero,
        shards,
        settings.reshard_after_forward,
        min_shard_numel=settings.min_shard_numel,
        reduces_once=settings.reduce_gradients == "step",
        ranks_of_row=settings.cp,
    )
    if settings.zero < 3 or secondary is None:
        return sharding
    if secondary != shards:
        _check_divides("secondary_group", secondary, shards, ranks_text=f"the {shards} ranks of a shard group")
        check_input(
            settings.reshard_after_forward,
            f"layout.secondary_group = {secondary} has no effect with layout.reshard_after_forward = false, which "
            "keeps gathered parameters for backward; leave one of them out",
        )
    return sharding.with_secondary_shards(secondary)


def _check_divides(field: str, size: int, ranks: int, *, ranks_text: str) -> None:
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    check_input(ranks % size == 0, f"layout.{field} = {size} does not divide {ranks_text}; use one of {divisors}")


def _bucket_owners(server: ParameterServerSettings, dp: int) -> BucketOwners:
    check_input(
        server.count <= dp,
        f"layout.server.count = {server.count} servers among {dp} ranks; with layout.server.transport = "
        f"'collectives' the servers are workers, too: set layout.server.count={dp} at most",
    )
    for collective, name in (("reduce", server.reduce_algorithm), ("broadcast", server.broadcast_algorithm)):
        try:
            find_algorithm(collective, name).check_ranks(dp)
        except InputError as error:
            raise InputError(f"layout.server.{collective}_algorithm = {name!r}: {error}") from None
    return BucketOwners(server.count, server.slice_mib, server.reduce_algorithm, server.broadcast_algorithm)


def parse_stages(text: str) -> tuple[range, ...]:
    """The blocks of each stage of a text such as "0-3,4-7"; every block is in one stage, and they are in order."""
    stages: list[range] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)-(\d+)|(\d+)", part.strip(), re.ASCII)
        first, last = map(int, (match[1], match[2]) if match[3] is None else (match[3], match[3])) if match else (1, 0)
        key, start = f"layout.stages = {text!r}: {part.strip()!r}", stages[-1].stop if stages else 0
        check_input(first <= last, f"{key} is not a range of blocks; write FIRST-LAST, such as {start}-{start + 3}")
        problem = "leaves a gap" if first > start else "overlaps the range before"
        check_input(first == start, f"{key} {problem}; begin it with block {start}")
        stages.append(range(first, last + 1))
    return tuple(stages)


def _settings_in(text: str) -> Iterator[tuple[str, str]]:
    for word in text.split():
        key, equals, value = word.partition("=")
        form = f"not of the form key=value; write {' '.join(sizes_in_words(word))}"
        check_input(key and equals and value, f"layout {text!r}: {word!r} is {form}")
        yield key, value


def parse_layout(text: str) -> LayoutSettings:
    """Parse settings such as "zero=2 shard_group=4"."""
    tree: dict[str, object] = {}
    for key, value in _settings_in(text):
        section, dot, inner = key.partition(".")
        if dot and isinstance(keys := tree.setdefault(section, {}), dict):
            keys[inner] = parse_value(value)
        else:
            tree[key] = parse_value(value)
    return settings_from_dict(LayoutSettings, tree, f"layout {text!r}")


def sizes_in_words(text: str) -> list[str]:
    """The settings that words such as "dp2,zero:1" mean, or else an example."""
    pairs = re.findall(r"([a-z_]+)[:-]?([0-9]+)", text) or [("dp", "2"), ("zero", "1")]
    return [f"{name}={size}" for name, size in pairs]


def with_default_ranks(layout: str, ranks: int) -> str:
    """A layout with its number of ranks; `dp` gets the ranks that the other dimensions leave."""
    sizes = [f"{key}={value}" for key, value in _settings_in(layout) if key in ("pp", "dp", "cp", "tp")]
    settings = parse_layout(" ".join(sizes))  # The other words may be settings of other sections
    return layout if settings.dp else f"dp={resolve_dims(settings, ranks).size('dp')} {layout}".strip()
