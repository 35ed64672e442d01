"""All-reduce between CPU ranks of one host: the backend `motet` compared with Gloo, OpenMPI and a plain copy of memory.

All of them run in the same rank processes on tensors of the same size, a few calls each in turn; a round gives one
ratio per peer, and medians with quartiles over the rounds are printed. Processes are not bound to cores: Gloo has
threads of its own that would then share their rank's core. OpenMPI takes part when mpirun and mpi4py are installed.

The last column is the limit: in any algorithm each rank reads its numbers and writes the result, which is the traffic
of copying a tensor of that size. The share is the time of such a copy, by all ranks at once, over ours.

    python benchmarks/collectives.py [--ranks 2 4] [--rounds 15] [--sizes-KiB 1 16 64 ...] [--page]

--page writes docs/benchmarks/collectives.md.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, collected_results, fill, store_result, table
from parts.rounds import interleave, quartiles, ratios

SIZES_KIB = [1, 4, 16, 64, 256, 512, 1024, 4096, 16384, 65536, 262144]
ROUND_S = 0.05
"""The approximate time for which a contender is measured in each round."""
PAGE = DOCS / "collectives.md"
Calls = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes-KiB", dest="sizes", type=int, nargs="+", default=SIZES_KIB)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, ranks=[2], rounds=1, sizes=[64, 4096])
    if "MOTET_BENCHMARK_STORE" in os.environ:
        measure(options)
        return
    parts, code = [], 0
    for ranks in options.ranks:
        with collected_results() as rows:
            code = max(code, launch(ranks))
        parts += [f"## {ranks} ranks on {os.cpu_count()} cores", table(rows[0], rows[1:])] if rows else []
    if code == 0 and options.page:
        fill(PAGE, [f"{options.rounds} rounds. Times are microseconds, medians with quartiles.", *parts])
    sys.exit(code)


def launch(ranks: int) -> int:
    """Start the ranks, under mpirun where that exists, and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MOTET_BENCHMARK_STORE": f"{folder}/store", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *sys.argv]
        if shutil.which("mpirun"):
            flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            return subprocess.call(["mpirun", *flags, "-n", str(ranks), *command], env=environment)
        places = [environment | {"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
        started = [subprocess.Popen(command, env=place) for place in places]
        return max(process.wait() for process in started)


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import motet.collectives.shm_backend  # noqa: F401  (registers it)

    torch.set_num_threads(1)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "")))
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "")))
    store = dist.FileStore(os.environ["MOTET_BENCHMARK_STORE"], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    motet_ranks = dist.new_group(backend="cpu:motet")
    mpi = openmpi()
    if rank == 0:
        print(f"\n{ranks} ranks, {os.cpu_count()} cores, not bound; times in us: median (lower to upper quartile)")
        heads = ["KiB", "motet", "Gloo", "Gloo / motet"]
        heads += ["OpenMPI", "OpenMPI / motet"] if mpi else []
        show([*heads, "share of a copy"])
    for size in options.sizes:
        x, y = torch.zeros(size * 256), torch.zeros(size * 256)
        calls: Calls = {
            "motet": lambda x=x: dist.all_reduce(x, group=motet_ranks),
            "gloo": lambda x=x: dist.all_reduce(x),
            "copy": lambda x=x, y=y: y.copy_(x),
        }
        if mpi:
            calls["mpi"] = lambda x=x: mpi(x)
        times = rounds(calls, options.rounds, lambda: dist.barrier(group=motet_ranks))
        if rank == 0:
            row = [str(size), spread(times["motet"], 1e6), spread(times["gloo"], 1e6), ratio(times, "gloo")]
            row += [spread(times["mpi"], 1e6), ratio(times, "mpi")] if mpi else []
            show([*row, f"{statistics.median(times['copy']) / statistics.median(times['motet']):.2f}"])
    dist.barrier(group=motet_ranks)
    dist.destroy_process_group()


def openmpi() -> Callable[[object], None] | None:
    """An all-reduce in place by OpenMPI, if this process runs under it."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return None
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())  # type: ignore[attr-defined]


def rounds(calls: Calls, count: int, meet: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round; which one comes first changes from round to round."""
    repeats = dict.fromkeys(calls, 1)

    def one_round(name: str) -> float:
        meet()
        start = time.perf_counter()
        for _ in range(repeats[name]):
            calls[name]()
        return (time.perf_counter() - start) / repeats[name]

    contenders = {name: partial(one_round, name) for name in calls}
    interleave(contenders, 1)
    repeats |= agreed(calls, meet)
    return interleave(contenders, count)


def agreed(calls: Calls, meet: Callable[[], object]) -> dict[str, int]:
    """How often each is called in a round, the same on all ranks: the slowest rank's count."""
    import torch
    import torch.distributed as dist

    counts = torch.zeros(len(calls), dtype=torch.int64)
    for i, call in enumerate(calls.values()):
        meet()
        start = time.perf_counter()
        call()
        counts[i] = max(1, min(200, int(ROUND_S / (time.perf_counter() - start))))
    dist.all_reduce(counts, op=dist.ReduceOp.MIN)
    return dict(zip(calls, counts.tolist(), strict=True))


def spread(values: list[float], unit: float) -> str:
    low, middle, high = quartiles(values)
    digits = 0 if middle * unit >= 100 else 1
    return f"{middle * unit:,.{digits}f} ({low * unit:,.{digits}f} to {high * unit:,.{digits}f})"


def ratio(times: dict[str, list[float]], peer: str) -> str:
    low, middle, _ = quartiles(ratios(times[peer], times["motet"]))
    return f"{middle:.2f}x (lower quartile {low:.2f}x)"


def show(cells: list[str]) -> None:
    store_result(cells)
    widths = [8, 26, 28, 30, 28, 30, 16] if len(cells) == 7 else [8, 26, 28, 30, 16]
    print("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


if __name__ == "__main__":
    main()
