"""The table of the small collectives by which ranks agree: all of a step besides gradients and parameters."""

from typing import NamedTuple

from motet.collectives.execute.slot_plan import HostOfRank, backend_sent_bytes


class ControlCollective(NamedTuple):
    """A collective of the backend, over the ranks that take the step together where nothing else is said."""

    purpose: str
    occurrence: str
    collective: str
    dtype: str
    fixed_numel: int
    further_elements: str = ""  # Elements whose number depends on the run


# Elements of the tensor that a rank passes.
CONTROL_COLLECTIVES = {
    "agreement": ControlCollective(
        "count of targets, squared norm, requests to stop and to save, loss, tokens, memory of each rank, summed",
        "once a step",
        "all-reduce",
        "float64",
        4,
        "one for each partial loss (one; with `run.reproducible` one for each sequence) and further sum (tokens); in a "
        "job one for each rank, in a pipeline two",
    ),
    "norm bound": ControlCollective(
        "largest gradient element", "once a step with `run.reproducible`", "all-reduce", "float64", 1
    ),
    "exact norm": ControlCollective(
        "squared norm as an integer", "once a step with `run.reproducible`", "all-reduce", "int64", 4
    ),
    "split sizes": ControlCollective(
        "sizes of an all-to-all of partial sums, over its group",
        "each bucket and micro-batch with `run.reproducible`, and each bucket over replicas",
        "all-gather",
        "int64",
        0,
        "one for each rank of the group",
    ),
    "buffer": ControlCollective(
        "a persistent buffer of the module, such as running statistics",
        "each buffer, at the start of a step",
        "broadcast",
        "uint8",
        0,
        "the bytes of the buffer",
    ),
    "micro-batches": ControlCollective(
        "most and fewest micro-batches of a rank", "once in `engine.step`; a job knows them", "all-reduce", "int64", 2
    ),
    "gather order": ControlCollective(
        "order in which forward uses buckets, over the shard group",
        'once a run with `overlap = "forward"`',
        "broadcast",
        "int64",
        0,
        "one for each bucket",
    ),
    "call check": ControlCollective(
        "comparison of the calls of all ranks, over the group of the call",
        "each collective of a named algorithm in the first step; also the counter `check_bytes`",
        "all-gather",
        "int64",
        3,
    ),
    "outer step": ControlCollective(
        "requests to stop and to save, skipped steps, validity, from all replicas",
        "each outer step",
        "all-gather",
        "float64",
        4,
    ),
    "outer validity": ControlCollective(
        "whether the replica is finite, over its ranks", "each outer step", "all-reduce", "float64", 1
    ),
}


def control_bytes(name: str, further_numel: int = 0, *, rank: int, hosts: HostOfRank) -> int:
    """Bytes that a rank sends in one of CONTROL_COLLECTIVES, over ranks on these hosts."""
    control = CONTROL_COLLECTIVES[name]
    numel = control.fixed_numel + further_numel
    return backend_sent_bytes(control.collective, numel, control.dtype, rank=rank, hosts=hosts)
