"""The time that training waits for a checkpoint: motet's saves in the background and its saves that training waits for,
`torch.save`, and `torch.distributed.checkpoint`.

Two ranks train a stack of linear layers with AdamW at stage 1, and save masters and moments. Each contender takes the
same steps with a save before the first of them, in turn in one run, and once in a round the steps go without a save.
All contenders leave their files on disk (fsync). Layers compute, or sleep as long as a GPU computes and leave the cores
to the write. How long the peers take does not depend on the steps, so they take part in one of the comparisons. In
another, motet's writes wait as long as a slow disk would take, so that updates overtake them and values are copied.

    python benchmarks/checkpoint_stall.py [--ranks 2] [--rounds 15] [--mebibytes 1024] [--folder .] [--long-s 1]
                                          [--slow-disk-MBps 250] [--page]

--page writes docs/benchmarks/checkpoint-stall.md.
"""

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts.arguments import parse_arguments
from parts.rank_processes import rank_group, rank_parser, run_on_ranks
from parts.report.pages import DOCS, fill, load_of_machine, table
from parts.rounds import interleave, progress, quartiles, ratios

if TYPE_CHECKING:
    from torch import Tensor, nn

    from motet.checkpoint.safetensors_header import DataBox
    from motet.parallel.process.process_group import RankGroup
    from motet.train.engine import TrainingEngine

PAGE = DOCS / "checkpoint-stall.md"
BYTES_PER_PARAMETER = 12  # A master and two moments of float32
ROWS = 8
ASYNC, SYNC, NONE = "motet, `async`", "motet, `sync`", "no save"
TORCH, DCP, DCP_ASYNC = "`torch.save` by each rank", "DCP `save`", "DCP `async_save`"


@dataclass(frozen=True)
class Pace:
    """Steps of a certain length."""

    words: str
    steps: int  # In which a save is written
    sleep_s: float = 0.0  # Of a step
    with_peers: bool = False
    disk_bytes_per_s: float = math.inf  # Of a rank, for motet


@dataclass
class Timing:
    """The steps of a contender in one round."""

    waited_s: float = 0.0  # Seconds in calls that save, and in updates that wait for the write
    written_s: float = 0.0  # From the beginning of the save until it is on disk
    copied_bytes: int = 0
    steps_s: list[float] = field(default_factory=list)
    slowed_steps: int = 0  # Those that began while the save was written
    total_s: float = 0.0


def main() -> None:
    parser = rank_parser(__doc__, rounds=15)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of masters and moments")
    parser.add_argument("--width", type=int, default=2048, help="of a layer")
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk")
    parser.add_argument("--long-s", type=float, default=1.0, help="sleep of a long step")
    parser.add_argument("--slow-disk-MBps", type=float, default=250.0, help="bytes per second of all ranks")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    quick = {"rounds": 1, "mebibytes": 16, "width": 256, "long_s": 0.2}
    run_on_ranks(measure, parse_arguments(parser, **quick))


def measure(options: argparse.Namespace) -> None:
    with rank_group(options.threads) as group, shared_folder(options.folder, group) as folder:
        bench, load = StallBenchmark(options, group, folder), load_of_machine()
        paces = [
            Pace("steps that leave the cores free", 2, options.long_s, with_peers=True),
            Pace("steps that compute", 3),
            Pace(
                "steps that compute, and a slow disk", 6, disk_bytes_per_s=options.slow_disk_MBps * 1e6 / options.ranks
            ),
        ]
        parts = [
            f"{bench.state_bytes / 2**20:.0f} MiB of masters and moments of {bench.layers} layers; {options.ranks} "
            f"ranks x {options.threads} threads, {options.rounds} rounds. {load}"
        ]
        interleave(bench.contenders(paces[0]), 1)  # Imports and first memory
        for pace in paces:
            timings = interleave(bench.contenders(pace), options.rounds)
            parts += [f"## {pace.words[0].upper()}{pace.words[1:]}", *report(pace, timings)]
        if group.rank == 0:
            print(*parts, sep="\n\n", flush=True)
            if options.page:
                fill(PAGE, parts)


@contextmanager
def shared_folder(where: Path, group: "RankGroup") -> "Iterator[Path]":
    """A new folder, which the ranks share and the first one removes."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(dir=where, prefix="motet-stall-") as name:
        names = [name]  # Those of other ranks stay empty
        dist.broadcast_object_list(names, src=0)
        yield Path(names[0])
        dist.barrier()


def loss_sum(module: "nn.Module", tokens: "Tensor") -> "tuple[Tensor, int]":
    import torch.nn.functional as F

    return F.cross_entropy(module(tokens), tokens, reduction="sum"), len(tokens)


def report(pace: Pace, timings: Mapping[str, Sequence[Timing]]) -> list[str]:
    """The tables of a pace."""
    without = timings[NONE]
    step_s = [each.total_s / pace.steps for each in without]
    kind = f"sleeps {pace.sleep_s:g} s" if pace.sleep_s else "computes"
    disk = (
        "" if math.isinf(pace.disk_bytes_per_s) else f" A rank writes at most {pace.disk_bytes_per_s / 1e6:.0f} MB/s."
    )
    text = f"A step {kind} and takes {statistics.median(step_s):.2f} s without a save, with {ROWS} rows a rank.{disk}"
    head = ["", "waits (s)", "added to the steps (s)", "until on disk (s)", "copied (MiB)", "a step during the write"]
    rows = []
    for name, mine in timings.items():
        if name != NONE:
            slowed = [ratio for pair in zip(mine, step_s, strict=True) if (ratio := slowdown(*pair))]
            rows.append(
                [
                    name,
                    seconds_text([each.waited_s for each in mine]),
                    seconds_text(added_s(mine, without)),
                    seconds_text([each.written_s for each in mine]),
                    f"{statistics.median(each.copied_bytes for each in mine) / 2**20:.0f}" if "motet" in name else "",
                    "{1:.2f}x ({0:.2f} to {2:.2f})".format(*quartiles(slowed)) if slowed else "",
                ]
            )
    return [text, table(head, rows), *report_ratios(timings)]


def report_ratios(timings: Mapping[str, Sequence[Timing]]) -> list[str]:
    """The table that compares saves in the background with others."""
    rows = []
    for name in (name for name in timings if name not in (NONE, ASYNC)):
        waits = ratios(*([each.waited_s for each in timings[who]] for who in (ASYNC, name)))
        added = ratios(*(added_s(timings[who], timings[NONE]) for who in (ASYNC, name)))
        cells = ["{1:.3f} ({0:.3f} to {2:.3f})".format(*quartiles(values)) for values in (waits, added)]
        rows.append([f"{ASYNC} / {name}", *cells])
    return [table(["", "waits", "added to the steps"], rows)]


def added_s(timings: Sequence[Timing], without: Sequence[Timing]) -> list[float]:
    """The seconds by which the steps of each round took longer than without a save."""
    return [each.total_s - none.total_s for each, none in zip(timings, without, strict=True)]


def slowdown(timing: Timing, step_s: float) -> float | None:
    """The time of steps that began during the write, over that of a step without a save."""
    if not timing.slowed_steps:
        return None
    return statistics.fmean(timing.steps_s[: timing.slowed_steps]) / step_s


def seconds_text(values: Sequence[float]) -> str:
    return "{1:.3f} ({0:.3f} to {2:.3f})".format(*quartiles(values))


Save = Callable[[Timing], None]


class StallBenchmark:
    """One rank: the engine that trains, and the contenders that save its state."""

    def __init__(self, options: argparse.Namespace, group: "RankGroup", folder: Path) -> None:
        import torch
        import torch.distributed as dist
        from parts.sleeping_model import SleepingModel

        import motet
        from motet.checkpoint.settings import CheckpointSettings

        self._group, self._folder, self._saves = group, folder, 0
        self.layers = -(-options.mebibytes * 2**20 // (BYTES_PER_PARAMETER * options.width**2))
        self._tokens = torch.arange(ROWS)
        self._pace = Pace("", 1)
        self._let_sleep(0.0)
        model = SleepingModel(options.width, self.layers)
        self._engine: TrainingEngine = motet.parallelize(model, "zero=1", loss=loss_sum)
        self._state = self._engine.training_state(folder / "motet", CheckpointSettings(keep=1))
        self._step()  # Moments exist after a step
        # Tensors of the same shapes, since a view of a bucket would be copied once more by the peers
        self._tensors = {f"{n} {group.rank}": shard.values.clone() for n, shard in self._state.tensors().items()}
        self.state_bytes = round(self._over_ranks(sum(values.nbytes for values in self._tensors.values()), sum))
        self._gloo = dist.new_group(backend="gloo")
        self._dcp_future: Future[Any] | None = None
        self._dcp_s = 0.0

    def contenders(self, pace: Pace) -> dict[str, Callable[[], Timing]]:
        """Functions that take the steps of a pace, by the way in which they save."""
        saves: dict[str, Save] = {NONE: self._save_nothing, ASYNC: self._start_motet, SYNC: self._save_motet}
        if pace.with_peers:
            saves |= {TORCH: self._save_torch, DCP: self._save_dcp, DCP_ASYNC: self._start_dcp}
        return {name: partial(self._take_steps, pace, save) for name, save in saves.items()}

    def _take_steps(self, pace: Pace, save: Save) -> Timing:
        """The steps of a pace, with a save before the first; it must be on disk after the last."""
        import torch.distributed as dist

        self._let_sleep(pace.sleep_s)
        self._pace, self._saves, timing = pace, self._saves + 1, Timing()
        dist.barrier()
        start_s = time.perf_counter()
        save(timing)
        timing.waited_s = timing.written_s = time.perf_counter() - start_s
        for _ in range(pace.steps):
            timing.slowed_steps += self._is_writing()
            began_s = time.perf_counter()
            self._step()
            timing.steps_s.append(time.perf_counter() - began_s)
        self._finish(timing)
        dist.barrier()
        timing.total_s = time.perf_counter() - start_s
        timing.waited_s, timing.written_s = (self._over_ranks(s, max) for s in (timing.waited_s, timing.written_s))
        timing.slowed_steps = round(self._over_ranks(timing.slowed_steps, max))
        if self._group.rank == 0:
            shutil.rmtree(self._peer_folder, ignore_errors=True)
        steps = " ".join(f"{seconds:.2f}" for seconds in timing.steps_s)
        copied = f"{timing.copied_bytes / 2**20:.0f} MiB copied"
        progress(f"waits {timing.waited_s:.3f} s, on disk after {timing.written_s:.2f} s, {copied}; steps {steps}")
        return timing

    def _step(self) -> None:
        self._engine.step(self._tokens, learning_rate=1e-6)

    def _let_sleep(self, step_s: float) -> None:
        from parts.sleeping_model import BACKWARD, FORWARD

        os.environ[FORWARD] = str(step_s / self.layers / 3)
        os.environ[BACKWARD] = str(2 * step_s / self.layers / 3)

    def _over_ranks(self, value: float, reduce: Callable[[Sequence[float]], float]) -> float:
        import torch.distributed as dist

        values = [0.0] * self._group.world
        dist.all_gather_object(values, value)
        return reduce(values)

    # --- the ways to save -----------------------------------------------------------------------------------

    @property
    def _peer_folder(self) -> Path:
        return self._folder / f"peer-{self._saves}"

    def _is_writing(self) -> bool:
        return self._state.saver.is_writing or (self._dcp_future is not None and not self._dcp_future.done())

    def _save_nothing(self, _: Timing) -> None:
        pass

    def _start_motet(self, _: Timing) -> None:
        from motet.checkpoint import background_writer
        from motet.checkpoint.data_files import DataFileWriter

        class SlowWriter(DataFileWriter):
            def write_box(self, box: "DataBox", values: "Tensor") -> None:
                time.sleep(values.nbytes / disk_bytes_per_s)
                super().write_box(box, values)

        disk_bytes_per_s = self._pace.disk_bytes_per_s
        background_writer.DataFileWriter = DataFileWriter if math.isinf(disk_bytes_per_s) else SlowWriter  # type: ignore[misc]
        self._state.start_save(self._saves)

    def _save_motet(self, timing: Timing) -> None:
        self._start_motet(timing)
        self._state.saver.finish()

    def _save_torch(self, _: Timing) -> None:
        import torch

        self._peer_folder.mkdir(exist_ok=True)
        with (self._peer_folder / f"rank-{self._group.rank}.pt").open("wb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def _save_dcp(self, _: Timing) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._tensors, checkpoint_id=self._peer_folder, process_group=self._gloo)

    def _start_dcp(self, _: Timing) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        start_s = time.perf_counter()
        future = async_save(self._tensors, checkpoint_id=self._peer_folder, process_group=self._gloo)
        assert isinstance(future, Future)
        future.add_done_callback(lambda _: setattr(self, "_dcp_s", time.perf_counter() - start_s))
        self._dcp_future = future

    def _finish(self, timing: Timing) -> None:
        """Wait until a save that is under way is on disk."""
        start_s = time.perf_counter()
        if self._dcp_future is not None:
            self._dcp_future.result()
            timing.written_s, self._dcp_future = self._dcp_s, None
        saved = self._state.saver.finish()
        timing.waited_s += time.perf_counter() - start_s
        if saved is not None:
            timing.waited_s, timing.written_s, timing.copied_bytes = saved.stall_s, saved.duration_s, saved.copied_bytes


if __name__ == "__main__":
    main()
