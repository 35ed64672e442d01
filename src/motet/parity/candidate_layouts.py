"""The layouts for a number of ranks, which `motet verify --all` goes through; a new capability adds its own here.

They are written as on the command line, `dp=2 zero=1`; a setting of another section names it: `communication.overlap`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from motet.core.errors import check_input
from motet.parallel.layout import LayoutSettings, parse_layout, parse_stages
from motet.parallel.model_sharding import CONTEXT_DIMENSION, PIPELINE_DIMENSION, TENSOR_DIMENSION
from motet.train.config_rules import check_no_unused_settings
from motet.train.job import Job, job_from_tree, with_overrides

FLAT_ZERO_LAYOUTS = (
    *("zero=0", "zero=1", "zero=2"),
    "zero=0 microbatches=2",
    "zero=2 microbatches=2",
    "zero=0 communication.overlap=none",
    "zero=1 communication.overlap=forward",
    "zero=1 communication.bucket_mib=0.01 communication.first_bucket_mib=0.01",
    "zero=2 communication.all_reduce=tree communication.reduce_scatter=ring communication.all_gather=ring",
)
ZERO3_LAYOUTS = ("zero=3", "zero=3 reshard_after_forward=false", "zero=3 min_shard_numel=100", "zero=3 microbatches=2")
TENSOR_PARALLEL_LAYOUTS = ("tp=2", "tp=2 sp=true", "tp=2 dp=2 zero=2", "tp=2 sp=true dp=2 zero=3")
PIPELINE_LAYOUTS = ("pp=2", "pp=2 dp=2 zero=1", "pp=2 chunks=2 schedule=zb-v", "pp=2 tp=2")
MICROBATCHES_PER_RANK = 2  # Default for a pipeline whose layout sets no count
SERVER_BY_COLLECTIVES = "data=parameter_server server.transport=collectives"
SERVER_BY_MESSAGES = "data=parameter_server"
SMALL_KEY_MIB = 0.002
OVERRIDABLE_SECTIONS = ("communication",)  # Sections of a job that a layout may set besides the layout


def layouts_up_to(ranks: int) -> list[str]:
    """Every layout for 1, 2, ... ranks."""
    layouts = [f"dp={dp} {layout}" for dp in range(2, ranks + 1) for layout in _layouts_with(dp)]
    split = [
        layout for layout in (*TENSOR_PARALLEL_LAYOUTS, *PIPELINE_LAYOUTS) if parse_layout(layout).dims.ranks <= ranks
    ]
    return ["dp=1 microbatches=2", *layouts, *split]


def _layouts_with(dp: int) -> Iterator[str]:
    yield from (*FLAT_ZERO_LAYOUTS, *ZERO3_LAYOUTS)
    for size in (size for size in range(2, dp) if dp % size == 0):
        yield from (f"{zero} shard_group={size}" for zero in ("zero=1", "zero=2", "zero=3"))
        yield f"zero=3 secondary_group={size}"
    yield from (f"{SERVER_BY_COLLECTIVES} server.count={count}" for count in range(1, dp + 1))
    yield from (f"{SERVER_BY_MESSAGES} server.count={count}" for count in (1, 2))


def layout_text(layout: LayoutSettings) -> str:
    """The layout of a job, as on the command line."""
    words = []
    for key, value in layout.model_dump(mode="json", exclude_unset=True).items():
        pairs = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
        words += [f"{name}={str(each).lower() if isinstance(each, bool) else each}" for name, each in pairs.items()]
    return " ".join(words)


@dataclass(frozen=True)
class CandidateLayout:
    """A layout to verify, and the job in it."""

    layout: str
    job: Job

    @property
    def world(self) -> int:
        """Ranks that compute gradients."""
        return self.job.layout.dims.ranks

    @property
    def tensor_ranks(self) -> int:
        return self.job.layout.dims.size(TENSOR_DIMENSION)

    @property
    def context_ranks(self) -> int:
        """Ranks that share each row."""
        return self.job.layout.dims.size(CONTEXT_DIMENSION)

    def device_microbatches(self, rows: int) -> int:
        """The number of micro-batches of `rows` rows with which one device adds up as many sums as the layout. Ranks
        that share rows add their sums over tokens, as others do over rows."""
        if reproducible := self.job.layout_for(self.world).sharding.reproducible_batch_size:
            return reproducible
        possible = (size for size in range(1, self.context_ranks + 1) if rows % (self.microbatches * size) == 0)
        return self.microbatches * max(possible, default=1)

    @property
    def split(self) -> str:
        """The settings that decide how ranks split the model."""
        included = {
            TENSOR_DIMENSION,
            "sp",
            "rules",
            "require_split",
            PIPELINE_DIMENSION,
            "chunks",
            "schedule",
            "stages",
        }
        return json.dumps(self.job.layout.model_dump(mode="json", include=included))

    @property
    def blocks(self) -> int:
        """The fewest blocks of a model that has such stages."""
        layout = self.job.layout
        ranks = layout.dims.size(PIPELINE_DIMENSION)
        return parse_stages(layout.stages)[-1].stop if layout.stages and ranks > 1 else ranks * layout.chunks

    @property
    def microbatches(self) -> int:
        """Micro-batches of the batch, over all ranks."""
        return self.job.layout.microbatches_of_step


def make_candidate(job: Job, layout: str) -> CandidateLayout:
    """The job with a layout; raise for settings without effect, or that change numbers by design."""
    overrides = [word if word.startswith(OVERRIDABLE_SECTIONS) else f"layout.{word}" for word in layout.split()]
    source = f"layout {layout!r}"
    for word in overrides:
        key = word.rpartition(".")[2]
        check_input("=" in word, f"{source}: {key!r} is not of the form key=value, e.g. zero=2")
        is_lossy = word.startswith("communication.compress_")
        check_input(not is_lossy, f"{source}: {word} loses bits by design; leave it out to verify the rest")
    check_no_unused_settings(with_overrides(without_layout(job), overrides, source), source)
    laid_out_job = with_overrides(job, overrides, source)
    layout_settings = laid_out_job.layout
    server = layout_settings.server
    check_input(
        not layout_settings.uses_server_processes or server.mode == "sync",
        f"{source}: layout.server.mode = {server.mode!r} computes gradients with other parameters than one device, so "
        "numbers differ by design; verify server.mode=sync",
    )
    update: dict[str, object] = {
        "server": server.model_copy(update={"slice_mib": min(server.slice_mib, SMALL_KEY_MIB)})
    }
    pipeline_ranks = layout_settings.dims.size(PIPELINE_DIMENSION)
    if pipeline_ranks > 1 and layout_settings.microbatches is None:  # The default depends on the batch
        update["microbatches"] = MICROBATCHES_PER_RANK * pipeline_ranks
    small_layout = layout_settings.model_copy(update=update)
    return CandidateLayout(layout, laid_out_job.model_copy(update={"layout": small_layout}))


def without_layout(job: Job) -> Job:
    """The job without the sections that a layout may set."""
    dropped = {*OVERRIDABLE_SECTIONS, "layout", "outer"}
    return job_from_tree(job.model_dump(mode="json", exclude_unset=True, exclude=dropped))
