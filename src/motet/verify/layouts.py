"""The layouts that there are for a number of ranks: the one list that verification goes through.

Who adds a capability adds its layouts here. A layout is written as on the command line, `dp=2 zero=1`; what is of
another section of the job says so, as in `communication.overlap=forward`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from motet.core.errors import InputError
from motet.parallel.layout import LayoutSettings
from motet.train.config_rules import check_no_unused_settings
from motet.train.job import Job, job_from_tree, with_overrides

FLAT = ("zero=0", "zero=1", "zero=2")
MORE_FLAT = (
    "zero=0 microbatches=2",
    "zero=2 microbatches=2",
    "zero=0 communication.overlap=none",
    "zero=1 communication.overlap=forward",
    "zero=1 communication.bucket_mib=0.01 communication.first_bucket_mib=0.01",
    "zero=2 communication.all_reduce=tree communication.reduce_scatter=ring communication.all_gather=ring",
)
FULL = ("zero=3", "zero=3 regather=false", "zero=3 whole_below=100", "zero=3 microbatches=2")
PROGRAMS = "data=parameter_server server.transport=programs"
MESSAGES = "data=parameter_server"
PIECE_MIB = 0.002
SECTIONS = ("communication",)
"""Beside that of the layout, those that a layout may say something of."""


def layouts_for(ranks: int) -> list[str]:
    """For each number of ranks up to these."""
    return ["dp=1 microbatches=2", *(f"dp={dp} {layout}" for dp in range(2, ranks + 1) for layout in _of(dp))]


def _of(dp: int) -> Iterator[str]:
    yield from (*FLAT, *MORE_FLAT, *FULL)
    for size in (size for size in range(2, dp) if dp % size == 0):
        yield from (f"{zero} shard_group={size}" for zero in ("zero=1", "zero=2", "zero=3"))
        yield f"zero=3 secondary_group={size}"
    for count in range(1, dp + 1):
        yield f"{PROGRAMS} server.count={count}"
    yield from (f"{MESSAGES} server.count=1", f"{MESSAGES} server.count=2")


def described(layout: LayoutSettings) -> str:
    """The layout of a job, as on the command line."""
    words = []
    for key, value in layout.model_dump(mode="json", exclude_unset=True).items():
        pairs = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
        words += [f"{name}={str(each).lower() if isinstance(each, bool) else each}" for name, each in pairs.items()]
    return " ".join(words)


def with_ranks(layout: str, ranks: int) -> str:
    """A layout that says how many ranks it is for."""
    return layout if any(word.startswith("dp=") for word in layout.split()) else f"dp={ranks} {layout}".strip()


@dataclass(frozen=True)
class Candidate:
    """A layout that is to be verified, and the job in it."""

    text: str
    job: Job

    @property
    def world(self) -> int:
        """Ranks that compute."""
        assert self.job.layout.dp is not None, "with_ranks"
        return self.job.layout.dp

    @property
    def parts(self) -> int:
        """Micro-batches that the batch is cut into over all ranks."""
        layout = self.job.layout
        shares = (layout.server.work_items_per_step or self.world) if layout.uses_server_processes else self.world
        return shares * layout.microbatches


def laid_out(job: Job, layout: str) -> Candidate:
    """The job with a layout; what the layout does not make sense with is refused."""
    overrides = [word if word.startswith(SECTIONS) else f"layout.{word}" for word in layout.split()]
    for word in overrides:
        if "=" not in word:
            raise InputError(
                f"layout {layout!r}: {word.rpartition('.')[2]!r} is not of the form key=value, e.g. zero=2"
            )
        if word.startswith("communication.compress_"):
            raise InputError(f"layout {layout!r}: {word} loses bits by design; leave it out to verify the rest")
    source = f"layout {layout!r}"
    check_no_unused_settings(with_overrides(bare_of(job), overrides, source), source)
    found = with_overrides(job, overrides, source)
    if found.layout.uses_server_processes and found.layout.server.mode != "sync":
        raise InputError(
            f"{source}: with layout.server.mode = {found.layout.server.mode!r} gradients are of other parameters than "
            "on one device, so numbers differ by design; verify server.mode=sync"
        )
    return Candidate(layout, _in_small_pieces(found))


def _in_small_pieces(job: Job) -> Job:
    """A small model has enough of them for all servers."""
    server = job.layout.server
    small = server.model_copy(update={"piece_mib": min(server.slice_mib, PIECE_MIB)})
    return job.model_copy(update={"layout": job.layout.model_copy(update={"server": small})})


def bare_of(job: Job) -> Job:
    """Without what sections say that a layout may say something of."""
    tree = job.model_dump(mode="json", exclude_unset=True)
    return job_from_tree({key: value for key, value in tree.items() if key not in (*SECTIONS, "layout", "outer")})
