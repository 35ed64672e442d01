"""Step times of a parameter server over shaped links, against ring all-reduce and the prediction.

Three workers, one to three servers and the coordinator are hosts in miniature: network namespaces around a switch, each
with a link of 200 Mbit/s both ways. The model has 9 MB of parameters, and sleeps instead of computing
(parts/sleeping_model.py): 0.24 s forward and 0.48 s backward. So two cores can stand for seven hosts, and slow workers
are exactly as slow as they should be.

The prediction is that of parts/parameter_server_simulation.py for the same slices, links and times: the protocol
itself, simulated on links. It uses the measured rate of one connection and the measured time of an update;
nothing is fitted.

    python benchmarks/servers.py [--rounds 3] [--steps 12] [--only NAME ...] [--page]

It needs root, iproute2 and no other work on the machine. --page writes docs/benchmarks/parameter-server.md.
"""

import argparse
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts import missing
from parts.arguments import parse_arguments
from parts.network_namespaces import bytes_per_second, star_network
from parts.report.pages import DOCS, fill, table
from parts.sleeping_model import BACKWARD, FORWARD, RANDOM, SLOW, TIMES, slowness

WORKERS, LAYERS, WIDTH = 3, 8, 500
FORWARD_S, BACKWARD_S = 0.03, 0.06
"""The width of a layer."""
HANDLING_S = 0.002
"""The latency of any message between processes: assumed, and small against the rest."""
SKIP = 3
"""Steps until all have got going."""
PAGE = DOCS / "parameter-server.md"
LIMIT_S = 240
RUN_TOKEN = secrets.token_hex(32)  # The hosts of a run authenticate with it


@dataclass(frozen=True)
class Way:
    """A configuration to measure."""

    name: str
    servers: int = 2
    """Servers; 0: ring all-reduce among the workers."""
    settings: tuple[str, ...] = ()
    slow: str = ""
    """`one`: the first worker takes four times as long; `random`: each does now and then."""

    @property
    def mode(self) -> str:
        return next((s.removeprefix("mode=") for s in self.settings if s.startswith("mode=")), "sync")


ARRIVAL, PACKED = ("send_order=fifo",), ("compress_pushes=int8", "compress_pulls=int8")
FIRST, BOUNDED, ASYNC = ("mode=first-k", "first_k=2"), ("mode=bounded", "staleness=3"), ("mode=async",)
PLAIN = [
    Way("ring all-reduce", 0),
    *(Way(f"{n} server{'s' * (n > 1)}", n) for n in (1, 2, 3)),
    *(Way(f"{n} server{'s' * (n > 1)}, not scheduled", n, ARRIVAL) for n in (1, 2, 3)),
    *(Way(f"{n} server{'s' * (n > 1)}, int8", n, PACKED) for n in (1, 2, 3)),
]
UNEVEN = [
    Way(f"{mode}, {workers}", servers, settings, slow)
    for slow, workers in (("one", "one worker slow"), (RANDOM, "workers slow at random"))
    for mode, servers, settings in (
        ("ring all-reduce", 0, ()),
        ("sync", 2, ()),
        ("first-k", 2, FIRST),
        ("bounded", 2, BOUNDED),
        ("async", 2, ASYNC),
    )
]
WAYS = [*PLAIN, *UNEVEN]


@dataclass(frozen=True)
class Measured:
    step_s: float
    """Seconds for as many samples as a synchronous step has."""
    server_bytes: float
    """Bytes that a server sends and receives in a step, on average, without its traffic with the coordinator."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--burst", default="32kb")
    parser.add_argument("--only", nargs="+", help="ways with such a word in the name")
    parser.add_argument("--page", action="store_true")
    options = parse_arguments(parser, rounds=1, steps=4, only=["1 server, int8"])
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [way for way in WAYS if not options.only or any(word in way.name for word in options.only)]
    names = ["coordinator", *(f"s{n}" for n in range(3)), *(f"w{n}" for n in range(WORKERS))]
    with star_network(names, options.rate, options.burst, free=["coordinator"]) as hosts:
        rate = statistics.median(bytes_per_second(hosts["w0"][0], hosts["s0"]) for _ in range(3))
        update_s = seconds_of_update()
        print(
            f"one connection carries {rate / 1e6:.1f} MB/s; an update takes {update_s * 1e9:.2f} ns per byte",
            flush=True,
        )
        found: dict[str, list[Measured]] = {way.name: [] for way in chosen}
        for number in range(options.rounds):
            for way in chosen:
                found[way.name].append(measure(way, hosts, options.steps))
                done = found[way.name][-1]
                print(f"round {number + 1}, {way.name}: {done.step_s:.3f} s per step", flush=True)
    predicted = {way.name: predict(way, rate, update_s, options.steps) for way in chosen}
    parts = report(chosen, found, predicted, (rate, update_s))
    print("\n\n".join(parts))
    if options.page:
        fill(PAGE, [*parts, f"{options.rounds} rounds of {options.steps} steps, links of {options.rate}."])
    return 0


# --- measured --------------------------------------------------------------------------------------


def measure(way: Way, hosts: dict[str, tuple[str, str]], steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="motet-servers-") as folder:
        processes = list(started(way, hosts, steps, Path(folder)))
        try:
            ended = [process.wait(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        logs = "\n".join(path.read_text()[-1500:] for path in sorted(Path(folder).glob("*.log")))
        if any(ended):
            raise SystemExit(f"{way.name} did not end: {ended}\n{logs}")
        return read(Path(folder) / "run" / "events.jsonl", way)


def started(
    way: Way, hosts: dict[str, tuple[str, str]], steps: int, folder: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    workers = [f"w{n}" for n in range(WORKERS)]
    names = ["coordinator", *(f"s{n}" for n in range(way.servers)), *workers] if way.servers else workers
    (folder / "text.txt").write_text("waiting is computing, too. " * 4000, encoding="utf-8")
    command = [sys.executable, "-m", "motet", "train", str(job_file(folder)), *settings_of(way, steps)]
    for rank, name in enumerate(names):
        space, _ = hosts[name]
        environment = {
            **os.environ,
            "MOTET_RUN_TOKEN": RUN_TOKEN,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts[names[0]][1],
            "MASTER_PORT": "4990",
            "GLOO_SOCKET_IFNAME": "cable",
            "OMP_NUM_THREADS": "1",
            FORWARD: str(FORWARD_S),
            BACKWARD: str(BACKWARD_S),
            SLOW: slow_of(way, name),
        }
        with (folder / f"{name}.log").open("wb") as log:
            yield subprocess.Popen(
                ["ip", "netns", "exec", space, *command], cwd=folder, env=environment, stdout=log, stderr=log
            )


def slow_of(way: Way, name: str) -> str:
    if way.slow == RANDOM:
        return f"{RANDOM}:{name}"
    return str(TIMES) if way.slow == "one" and name == "w0" else "1"


def job_file(folder: Path) -> Path:
    path = folder / "sleeper.toml"
    path.write_text(
        f"""[model]
factory = "parts.sleeping_model:SleepingModel"
arguments = {{ width = {WIDTH}, layers = {LAYERS} }}
[data]
source = "text.txt"
tokenizer = "bytes"
sequence_length = 8
batch_sequences = {WORKERS}
cache = "."
validation_fraction = 0.0
test_fraction = 0.0
[monitor]
tensorboard = false
sample_tokens = 0
[run]
threads = 1
timeout_s = 120
folder = "run"
device = "cpu"
"""
    )
    return path


def settings_of(way: Way, steps: int) -> list[str]:
    if not way.servers:
        return [
            f"run.steps={steps}",
            "communication.all_reduce=ring",
            "communication.bucket_mib=1",
            "run.cpu_backend=gloo",
        ]
    server = [f"count={way.servers}", "slice_mib=0.5", *way.settings]
    return [f"run.steps={steps}", "layout.data=parameter_server", *(f"layout.server.{s}" for s in server)]


def read(path: Path, way: Way) -> Measured:
    """Read step times from the times of the events; a parameter server emits them when the step is decided."""
    from motet.monitor.events import read_steps

    steps = read_steps(path)
    measured = steps[SKIP:]
    moved = sum(s.server.sent_bytes + s.server.received_bytes for s in measured if s.server)
    seconds = (measured[-1].time - steps[SKIP - 1].time) / len(measured)
    return Measured(seconds, moved / len(measured) / max(way.servers, 1))


# --- predicted -------------------------------------------------------------------------------------


def plan_bytes(way: Way) -> tuple[list[tuple[int, int, int, str]], int]:
    """(bytes pushed, bytes pulled, layer, server) of each piece, as the job cuts them; bytes of all gradients."""
    from parts.sleeping_model import SleepingModel

    from motet.train.job import load_job
    from motet.train.parameter_server.process_roles import build_partition

    with tempfile.TemporaryDirectory() as folder:
        served = way if way.servers else Way("", 1)
        job = load_job(str(job_file(Path(folder))), settings_of(served, 1))
    module = SleepingModel(WIDTH, LAYERS)
    plan = build_partition(module, job)
    layers = {"embedding": 0, "head": LAYERS - 1}
    found = []
    for piece in plan.slices:
        members = [
            m
            for m in plan.buckets[piece.bucket_id].members
            if m.start < piece.flat_range.stop and m.stop > piece.flat_range.start
        ]
        at = [layers.get(m.name.split(".")[0], int(m.name.split(".")[1]) if "blocks" in m.name else 0) for m in members]
        sizes = [
            codec.wire_bytes([piece.numel], "float32") if codec else 4 * piece.numel
            for codec in (plan.compression.push_codec, plan.compression.pull_codec)
        ]
        found.append((sizes[0], sizes[1], min(at), f"s{piece.server_index}"))
    assert plan.recipe.reduce == "float32"
    return found, 4 * sum(p.numel() for p in module.parameters())


def predict(way: Way, rate: float, update_s: float, steps: int) -> float:
    """Predict the same steps, in which the same workers are slow."""
    if not way.servers:
        return ring(way, rate, steps)
    from parts.parameter_server_simulation import (
        ParameterServerSimulation,
        ServerSimulationCosts,
        SimulatedParameterSlice,
    )

    from motet.parallel.parameter_server.protocol.messages import ConsistencyPolicy
    from motet.parallel.parameter_server.server_settings import ParameterServerSettings, consistency_policy

    pieces, _ = plan_bytes(way)
    loads = [SimulatedParameterSlice(push, pull, (server,), layer) for push, pull, layer, server in pieces]
    given: dict[str, object] = dict(setting.split("=") for setting in way.settings)
    settings = ParameterServerSettings.model_validate({k: int(v) if str(v).isdigit() else v for k, v in given.items()})
    rule: ConsistencyPolicy = consistency_policy(settings, WORKERS, steps)
    begun: dict[int, list[int]] = {}

    def slow(worker: int, share: int) -> float:
        """The delay of a worker by the number of work items it has begun, as the workers themselves compute it."""
        mine = begun.setdefault(worker, [])
        if share not in mine:
            mine.append(share)
        return slowness(slow_of(way, f"w{worker}"), mine.index(share))

    computing = (FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS
    setting = ServerSimulationCosts(rate, HANDLING_S, *computing, update_s, slow)
    return (
        ParameterServerSimulation(rule, loads, WORKERS, setting, settings.send_order == "priority")
        .run()
        .seconds_per_step(SKIP)
    )


def ring(way: Way, rate: float, steps: int) -> float:
    """Buckets one after another, each once the slowest worker's backward has it; all wait for the last."""
    from motet.cluster.cluster import uniform_cluster
    from motet.collectives.algorithms import build
    from motet.collectives.cost.alpha_beta import estimate_cost

    once = estimate_cost(build("all-reduce", "ring", WORKERS), uniform_cluster(WORKERS, HANDLING_S, rate))
    pieces, _ = plan_bytes(way)
    seconds = []
    for step in range(steps):
        times = max(slowness(slow_of(way, f"w{worker}"), step) for worker in range(WORKERS))
        free = LAYERS * FORWARD_S * times
        for size, _, layer, _ in pieces:
            there = times * (LAYERS * FORWARD_S + (LAYERS - layer) * BACKWARD_S)
            free = max(free, there) + float(once.seconds(size))
        seconds.append(free)
    return statistics.mean(seconds[SKIP:])


def seconds_of_update() -> float:
    """Measure the seconds that a server needs for a byte of gradients: norm, update and publishing."""
    import torch

    from motet.parallel.data_parallel.buckets import build_buckets
    from motet.parallel.parameter_server.process.server_process import (
        ParameterSlicingPlan,
        ParameterStore,
        tensor_bytes,
    )
    from motet.parallel.parameter_server.protocol.messages import ParameterSlice, UpdateScalars
    from motet.precision.recipe import RECIPES
    from motet.train.optimizer.optimizer_settings import OptimizerSettings
    from motet.train.optimizer.sharded_optimizer import make_torch_optimizer

    torch.set_num_threads(1)
    numel = 2**17
    buckets = build_buckets({"w": (0, numel)}, 1, numel)
    plan = ParameterSlicingPlan(buckets, (ParameterSlice(0, slice(0, numel), 0),), RECIPES["fp32"], ((1.0, 0.1),))
    shelf = ParameterStore(plan, lambda groups: make_torch_optimizer(groups, OptimizerSettings()))
    times = []
    for share in range(20):
        shelf.add_push(0, share, bytearray(tensor_bytes(torch.randn(numel))))
        start = time.perf_counter()
        shelf.squared_norm(0, [share])
        shelf.apply_update(0, [share], UpdateScalars(1e-3, 1.0, is_applied=True))
        times.append((time.perf_counter() - start) / (4 * numel))
    return statistics.median(times)


# --- told ------------------------------------------------------------------------------------------


def report(
    chosen: list[Way], found: dict[str, list[Measured]], predicted: dict[str, float], known: tuple[float, float]
) -> list[str]:
    """The tables of the ways on even workers and on uneven ones."""
    _, whole = plan_bytes(Way("", 1))
    parts = [
        f"One connection carries {known[0] / 1e6:.1f} MB/s, an update takes {known[1] * 1e9:.2f} ns for each byte of "
        f"gradients; {whole / 1e6:.2f} MB of gradients and as many of parameters."
    ]
    for ways in (PLAIN, UNEVEN):
        rows = [row(way, found[way.name], predicted[way.name], whole) for way in ways if way in chosen]
        if rows:
            head = [
                "",
                "step",
                "over rounds",
                "predicted",
                "predicted / measured",
                "bytes at a server",
                "2WP / servers",
            ]
            parts.append(table(head, rows))
    return parts


def row(way: Way, measured: list[Measured], predicted: float, whole: int) -> list[str]:
    times = sorted(m.step_s for m in measured)
    middle = statistics.median(times)
    moved = statistics.median(m.server_bytes for m in measured)
    packed = sum(sum(piece[:2]) for piece in plan_bytes(way)[0]) / (2 * whole)
    formula = 2 * WORKERS * whole * packed / way.servers if way.servers else 0.0
    return [
        way.name,
        f"{middle:.2f} s",
        f"{times[0]:.2f} to {times[-1]:.2f}",
        f"{predicted:.2f} s",
        f"{predicted / middle:.2f}",
        f"{moved / 1e6:.2f} MB" if way.servers else "",
        f"{formula / 1e6:.2f} MB" if way.servers else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
