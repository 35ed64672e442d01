"""The variants of benchmarks/server_training.py: the time of a parameter server's update, and its work items."""

from parts.study import COMMON, Study, Variant

RANKS = 4
WORK_ITEMS_PER_STEP = 4
"""Work items of a step: one for each worker."""


def _mode(mode: str, *more: str) -> tuple[str, ...]:
    return tuple(f"layout.server.{setting}" for setting in (f"mode={mode}", *more))


VARIANTS = {
    "sync": Variant("`sync`", _mode("sync"), 7, bound=0),
    "sync-int8": Variant(
        "`sync`, `compress_pushes=int8`, `compress_pulls=int8`",
        _mode("sync", "compress_pushes=int8", "compress_pulls=int8"),
        0,
        "sync, int8",
        bound=0,
    ),
    "first-k": Variant("`first-k`, `first_k=3`", _mode("first-k", "first_k=3"), 1, "first 3 of 4", bound=0),
    "bounded-1": Variant("`bounded`, `staleness=1`", _mode("bounded", "staleness=1"), 2, "bounded, 1", bound=1),
    "bounded-4": Variant("`bounded`, `staleness=4`", _mode("bounded", "staleness=4"), 3, "bounded, 4", bound=4),
    "async": Variant("`async`", _mode("async"), 4),
    "async-by-staleness": Variant(
        "`async`, `learning_rate_scaling=by-staleness`",
        _mode("async", "learning_rate_scaling=by-staleness"),
        5,
        "async, by staleness",
    ),
    "async-compensated": Variant(
        "`async`, `delay_compensation=1000`", _mode("async", "delay_compensation=1000"), 6, "async, compensated"
    ),
}
SERVER_STUDY = Study(
    page="server-training",
    variants=VARIANTS,
    reference="sync",
    reference_run="the synchronous run",
    ranks=RANKS,
    where="with four workers and a server",
    common=(*COMMON, "layout.data=parameter_server"),
    prefix="server-",
)
