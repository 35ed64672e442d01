"""Reads a layout to be planned: the grammar of `[layout]`, with `recompute` in addition."""

from motet.core.errors import InputError, check_input
from motet.parallel.layout import parse_layout
from motet.plan.planned_layout import PlannedLayout, Recompute

RECOMPUTE: tuple[Recompute, ...] = (
    "none",
    "selective",
    "full",
    "attention",
    "activations",
    "up-projections",
)


def layout_from_words(text: str, devices: int, global_batch: int) -> PlannedLayout:
    """The layout of settings such as "tp=8 pp=16 zero=1 recompute=full" on a number of devices."""
    words = text.split()
    chosen = [word.partition("=")[2] for word in words if word.startswith("recompute=")]
    recompute: Recompute = "none"
    if chosen:
        matching = [kind for kind in RECOMPUTE if kind == chosen[-1]]
        check_input(matching, f"recompute = {chosen[-1]!r} in a layout: use one of {', '.join(RECOMPUTE)}")
        recompute = matching[0]
    settings = parse_layout(" ".join(word for word in words if not word.startswith("recompute=")))
    others = settings.tp * settings.cp * settings.pp
    dp = settings.dp or max(1, devices // others)
    product = f"dp = {dp} x tp = {settings.tp} x cp = {settings.cp} x pp = {settings.pp}"
    check_input(
        dp * others == devices,
        f"layout {text!r}: {product} = {dp * others}, but --gpus {devices}; change one of them, or leave dp out",
    )
    if global_batch % dp:
        raise InputError(
            f"layout {text!r}: a global batch of {global_batch} rows cannot be cut evenly over dp = {dp}; choose a "
            f"divisor, or another data.batch_sequences"
        )
    microbatches = settings.microbatches or _default_microbatches(settings.pp, global_batch // dp)
    return PlannedLayout(
        dp=dp,
        zero=settings.zero,
        shard_group=settings.shard_group,
        reshard_after_forward=settings.reshard_after_forward,
        tp=settings.tp,
        sp=settings.sp,
        cp=settings.cp,
        cp_kind=settings.cp_kind or "ring",
        pp=settings.pp,
        chunks=settings.chunks,
        schedule=settings.schedule or ("interleaved" if settings.chunks > 1 else "1f1b"),
        stages=settings.stages,
        ep=settings.ep,
        microbatches=microbatches,
        recompute=recompute,
    )


def _default_microbatches(pp: int, rows: int) -> int:
    """One without a pipeline, otherwise the most that 4 x pp and the rows of a rank allow."""
    if pp == 1:
        return 1
    return max(count for count in range(1, min(4 * pp, rows) + 1) if rows % count == 0)
