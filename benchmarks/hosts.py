"""All-reduce between two hosts over a slow link: hierarchical and a flat ring, measured and predicted.

The hosts are network namespaces with two ranks each; `tc tbf` shapes the link between them to 200 Mbit/s in each
direction. Start-up, bandwidth and the cost of adding are calibrated on messages of 256 KiB, 2 MiB and 16 MiB, and
cost.py predicts the time of each Program on the calibrated cluster. Then the Programs take turns.

    python benchmarks/hosts.py [--sizes 1 8 64] [--rounds 15] [--rate 200mbit] [--burst 32kb] [--page]

It needs root and iproute2, which it installs with apt where it can; otherwise it says why it is skipped. --page writes
docs/benchmarks/hosts.md.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, collected_results, fill, store_result, table
from parts.rounds import interleave, quartiles, ratio_text

from motet.core.token_authentication import new_run_token

HOSTS, RANKS_PER_HOST = 2, 2
ALGORITHMS = {"ring": {}, "hierarchical": {"hosts": HOSTS}, "hierarchical-sharded": {"hosts": HOSTS}}
PREFIX = "motet-hosts-"
PAGE = DOCS / "hosts.md"


def add_link_arguments(parser: argparse.ArgumentParser, page: Path) -> None:
    """The arguments of a benchmark over a shaped link, and of its ranks."""
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--burst", default="32kb", help="bytes that may pass unshaped after a rest")
    parser.add_argument("--congestion", default="reno", help="TCP's congestion control")
    parser.add_argument("--page", action="store_true", help=f"write {page.name}")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64], help="MiB")
    parser.add_argument("--rounds", type=int, default=15)
    add_link_arguments(parser, PAGE)
    options = parse_arguments(parser, sizes=[1], rounds=1)
    if options.rank is not None:
        measure_as_rank(options)
        return 0
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are taken down
    with (
        collected_results() as results,
        tempfile.TemporaryDirectory(prefix=PREFIX) as folder,
        two_hosts(options) as hosts,
    ):
        code = start_ranks(hosts, folder)
    if code == 0 and options.page:
        calibrated, *rows = results
        where = (
            f"A link of {options.rate} with a burst of {options.burst}, {options.congestion}; {options.rounds} rounds."
        )
        heads = ["size", "algorithm", "measured", "quartiles", "predicted", "error", "faster than the ring"]
        fill(PAGE, [where, table(heads, rows), calibrated])
    return code


def missing() -> str | None:
    """The reason why this machine cannot make miniature hosts, or None."""
    if os.geteuid() != 0:
        return "hosts in miniature are network namespaces, which only root can make"
    if shutil.which("tc") is None or shutil.which("ip") is None:
        if shutil.which("apt-get"):
            subprocess.run(["apt-get", "install", "--yes", "--quiet", "iproute2"], capture_output=True, check=False)
        if shutil.which("tc") is None or shutil.which("ip") is None:
            return "the commands ip and tc are missing; install iproute2"
    trial = f"{PREFIX}{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return None if made.returncode == 0 else f"network namespaces cannot be made here: {made.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(options: argparse.Namespace) -> Iterator[list[str]]:
    """Two namespaces, joined by a cable that is shaped at both ends; they are gone afterwards, whatever happens."""
    hosts = [f"{PREFIX}{os.getpid()}-{n}" for n in range(HOSTS)]
    try:
        for host in hosts:
            run("ip", "netns", "add", host)
        ends = [("cable", "netns", host) for host in hosts]
        # The kernel hands packets on in bundles. Those that are larger than the burst would be taken apart, and every
        # packet would wake its receiver: half a core for 200 Mbit/s.
        bundle = ("gso_max_size", "16384")
        run("ip", "link", "add", *ends[0], *bundle, "type", "veth", "peer", *ends[1], *bundle)
        for n, host in enumerate(hosts):
            run("ip", "-n", host, "address", "add", f"10.77.0.{n + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run("ip", "-n", host, "link", "set", device, "up")
            shape = ("tbf", "rate", options.rate, "burst", options.burst, "latency", "50ms")
            run("ip", "netns", "exec", host, "tc", "qdisc", "add", "dev", "cable", "root", *shape)
            setting = f"net.ipv4.tcp_congestion_control={options.congestion}"
            run("ip", "netns", "exec", host, "sysctl", "--quiet", "--write", setting)
        print(f"link: {options.rate}, burst {options.burst}, {options.congestion}")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def start_ranks(hosts: list[str], folder: str, ranks_per_host: int = RANKS_PER_HOST) -> int:
    ranks, token = [], new_run_token().environment()
    try:
        for rank in range(HOSTS * ranks_per_host):
            command = ["ip", "netns", "exec", hosts[rank // ranks_per_host], sys.executable, *sys.argv]
            environment = os.environ | token | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen([*command, "--rank", str(rank), "--folder", folder], env=environment))
        return max(rank.wait() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def measure_as_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from parts.link_measurement import calibrate_cluster

    from motet.cluster.cluster import cluster_from_dict
    from motet.collectives import build
    from motet.collectives.cost.alpha_beta import estimate_cost
    from motet.collectives.execute.program_runner import measure_program

    torch.set_num_threads(1)
    world = HOSTS * RANKS_PER_HOST
    store = dist.FileStore(str(Path(options.folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    tree = calibrate_cluster(group, RANKS_PER_HOST)
    cluster = cluster_from_dict(tree, "two hosts in miniature")
    programs = {name: build("all-reduce", name, world, **choices) for name, choices in ALGORITHMS.items()}
    if options.rank == 0:
        store_result(calibration_text(tree))
    for size in options.sizes:
        runs = {
            name: partial(measure_program, made, group, size=size << 20, repeats=1) for name, made in programs.items()
        }
        results = interleave(runs, options.rounds, stride=0)
        seconds = {name: [second for result in rounds for second in result.seconds] for name, rounds in results.items()}
        if options.rank == 0:
            for name, made in programs.items():
                predicted = float(estimate_cost(made, cluster).seconds(size << 20))
                report(size, name, seconds, predicted)
    dist.barrier()
    dist.destroy_process_group()


def calibration_text(tree: dict[str, dict[str, dict[str, float]]]) -> str:
    parts = []
    for place, words in (("inside", "Calibrated within a host"), ("between", "between hosts")):
        port = tree[place]
        alpha_us, megabytes = port["alpha_s"]["value"] * 1e6, port["bandwidth_Bps"]["value"] / 1e6
        bus = f", bus {port['bus_Bps']['value'] / 1e6:,.0f} MB/s" if "bus_Bps" in port else ""
        parts.append(f"{words}: alpha {alpha_us:.0f} us, {megabytes:,.1f} MB/s{bus}")
    parts.append(f"adding: {1e-6 / tree['gamma_s_per_byte']['value']:,.0f} MB/s.")
    print(*parts, sep="; ", flush=True)
    return "; ".join(parts)


def report(size: int, name: str, seconds: dict[str, list[float]], predicted: float) -> None:
    low, measured, high = (1e3 * s for s in quartiles(seconds[name]))
    faster = "" if name == "ring" else ratio_text(seconds["ring"], seconds[name])
    error = f"{1e3 * predicted / measured - 1:+.1%}"
    spread = f"{low:,.1f} - {high:,.1f}"
    row = [f"{size} MiB", name, f"{measured:,.1f} ms", spread, f"{1e3 * predicted:,.1f} ms", error, faster]
    store_result(row)
    print(" | ".join(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
