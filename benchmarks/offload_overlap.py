"""Steps with states on the host over links of known speed, against what the planner says of them.

Blocks of a module sleep instead of computing, and copies between device and host sleep as long as a link of a certain
speed would take, each direction in a thread; gradients, updates and values are real. So compute, transfers and their
overlap are known, whatever the machine. The planner's simulation of the update (motet/plan/time/host_update.py) gets
the seconds of each part and says which of them no computation hides.

    python benchmarks/offload_overlap.py [--rounds 15] [--blocks 8] [--forward-ms 20] [--link-ms 10 20 40]
                                         [--update-ms 30] [--page]

--link-ms is the time of a block's sums, or of its values, on the link. With --update-ms the host also takes as long for
the update of a block, over the first of the links. --page writes docs/benchmarks/offload-overlap.md.
"""

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table
from parts.rounds import interleave, progress, quartiles
from torch import Tensor, nn

import motet
from motet.memory.tiers.device_limit import host_memory
from motet.memory.tiers.host_link import Arrival, ImmediateLink
from motet.plan.time.host_update import PartSeconds, simulate_host_update

PAGE = DOCS / "offload-overlap.md"
TIMED_STEPS = 3
WIDTH = 512  # A block has 1 MiB of parameters, and is one bucket
MODES = {
    "exact": {},
    "exact, `overlap = forward`": {"overlap": "forward"},
    "delayed": {"update": "delayed"},
    "delayed, `overlap = forward`": {"update": "delayed", "overlap": "forward"},
}
HEADER = [
    "link (ms for a block)",
    "host (ms for a block)",
    "update",
    "step (ms)",
    "predicted (ms)",
    "of which exposed (ms)",
    "measured / predicted",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of a block; backward takes twice as long")
    parser.add_argument("--link-ms", type=float, nargs="+", default=[10.0, 20.0, 40.0])
    parser.add_argument("--update-ms", type=float, nargs="*", default=[30.0], help="of a block on a slow host")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, rounds=1, blocks=3, link_ms=[10.0], update_ms=[])
    torch.set_num_threads(1)
    text, rows = measure(options)
    result = table(HEADER, rows)
    print(f"{text}\n\n{result}")
    if options.page:
        fill(PAGE, [text, result])


def measure(options: argparse.Namespace) -> tuple[str, list[list[str]]]:
    """The conditions, and a row for each link and kind of update."""
    forward_s = options.forward_ms / 1e3
    cases = [*((link, 0.0) for link in options.link_ms), *((options.link_ms[0], slow) for slow in options.update_ms)]
    steps = {
        (link, slow, mode): make_step(options, link / 1e3, mode, slow_s=slow / 1e3)
        for link, slow in cases
        for mode in MODES
    }
    device = make_step(options, None, "exact")
    for each in (*steps.values(), device):
        each()  # The first step records the order of the forward
    progress("measure the update of a block")
    update_s = seconds_of_update()
    times = interleave({**steps, "device": device}, options.rounds)
    rows = []
    for link, slow, mode in steps:
        seconds, host_s = times[link, slow, mode], update_s + slow / 1e3
        exposed = exposed_seconds(mode, options.blocks, forward_s, link_s=link / 1e3, update_s=host_s)
        pairs = zip(seconds, times["device"], strict=True)
        low, middle, high = quartiles([each / (on_device + exposed) for each, on_device in pairs])
        predicted = statistics.median(times["device"]) + exposed
        rows.append(
            [
                f"{link:g}",
                f"{host_s * 1e3:.1f}",
                mode,
                f"{statistics.median(seconds) * 1e3:.0f}",
                f"{predicted * 1e3:.0f}",
                f"{exposed * 1e3:.0f}",
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
            ]
        )
    text = (
        f"{options.blocks} blocks that sleep {options.forward_ms:g} ms forward and twice as long backward; the step "
        f"takes {statistics.median(times['device']) * 1e3:.0f} ms with states on the device. "
        f"{options.rounds} rounds."
    )
    return text, rows


def exposed_seconds(mode: str, blocks: int, forward_s: float, *, link_s: float, update_s: float) -> float:
    """The seconds that computation does not hide, by the planner."""
    parts = [PartSeconds(send=link_s, update=update_s, receive=link_s)] * blocks
    reduced = [2 * forward_s * (index + 1) for index in range(blocks)]
    needed = [forward_s * index if "forward" in mode else 0.0 for index in range(blocks)]
    delay_s = 3 * forward_s * blocks if "delayed" in mode else None
    return simulate_host_update(parts, reduced=reduced, needed=needed, norm_s=0.0, delay_s=delay_s).exposed_s


class SleepingLink(ImmediateLink):
    """A link of two directions, in each of which one transfer follows the other."""

    def __init__(self, seconds_per_byte: float) -> None:
        super().__init__(torch.device("cpu"))
        self._down, self._up = _Direction(seconds_per_byte), _Direction(seconds_per_byte)

    def _to_host(self, tensors: Sequence[Tensor], *, may_be_freed: bool) -> tuple[list[Tensor], Arrival]:
        with host_memory():
            copies = [torch.empty_like(tensor) for tensor in tensors]
        return copies, self._down.send(copies, tensors)

    def _to_device(self, target: Tensor, values: Tensor) -> Arrival:
        return self._up.send([target], [values.to(target.dtype, copy=True)])


class _Arrival:
    def __init__(self) -> None:
        self.event = threading.Event()

    def let_device_wait(self) -> None:
        self.event.wait()

    wait_on_host = let_device_wait


class _Direction:
    """Does transfers in a thread, of which none overtakes another."""

    def __init__(self, seconds_per_byte: float) -> None:
        self._seconds_per_byte = seconds_per_byte
        self._waiting: queue.Queue[tuple[Sequence[Tensor], Sequence[Tensor], _Arrival]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, copies: Sequence[Tensor], sources: Sequence[Tensor]) -> Arrival:
        arrival = _Arrival()
        self._waiting.put((copies, sources, arrival))
        return arrival

    def _run(self) -> None:
        while True:
            copies, sources, arrival = self._waiting.get()
            time.sleep(sum(copy.nbytes for copy in copies) * self._seconds_per_byte)
            with torch.no_grad():
                for copy, source in zip(copies, sources, strict=True):
                    copy.copy_(source)
            arrival.event.set()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class SleepingBlock(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self._seconds = nn.Linear(WIDTH, WIDTH, bias=False), seconds

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x, self._seconds)
        return slept + self.linear(slept)


def loss_sum(module: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    return module(inputs).square().sum(), len(inputs)


def make_step(
    options: argparse.Namespace, link_s: float | None, mode: str, *, slow_s: float = 0.0
) -> Callable[[], float]:
    """A function that takes some steps and returns the seconds of one; without a link, states lie on the device."""
    module = nn.Sequential(*(SleepingBlock(options.forward_ms / 1e3) for _ in range(options.blocks)))
    settings = MODES[mode]
    memory: dict[str, Any] = {} if link_s is None else {"optimizer": "host"}
    memory |= {"update": settings["update"]} if "update" in settings else {}
    mebibytes = WIDTH * WIDTH * 4 / 2**20
    communication: dict[str, Any] = {"bucket_mib": mebibytes, "first_bucket_mib": mebibytes}
    communication |= {"overlap": settings["overlap"]} if "overlap" in settings else {}
    ways: dict[str, Any] = {"memory": memory, "communication": communication, "optimizer": {"weight_decay": 0.0}}
    engine = motet.parallelize(module, "zero=1", loss=loss_sum, **ways)
    states = engine.optimizer.states
    if link_s is not None:
        assert states is not None
        states.link = SleepingLink(link_s / (WIDTH * WIDTH * 4))
        update_slice = engine.optimizer._update_slice

        def update_slowly(index: int, following: Sequence[int]) -> None:
            time.sleep(slow_s)
            update_slice(index, following)

        engine.optimizer._update_slice = update_slowly  # type: ignore[method-assign]  # A slow host
    inputs = torch.randn(8, WIDTH)

    def steps() -> float:
        for index in range(1 + TIMED_STEPS):
            if index == 1:  # What the step before it has left to do counts
                start = time.perf_counter()
            engine.step(inputs, learning_rate=1e-4)
        return (time.perf_counter() - start) / TIMED_STEPS

    return steps


def seconds_of_update() -> float:
    """The seconds in which torch's AdamW updates a block."""
    parameter = nn.Parameter(torch.randn(WIDTH * WIDTH))
    parameter.grad = torch.randn(WIDTH * WIDTH)
    optimizer, seconds = torch.optim.AdamW([parameter], fused=True), []
    for _ in range(10):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
