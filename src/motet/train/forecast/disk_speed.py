"""The speed of the disk that keeps a run's states, against the figure of its cluster file."""

from collections.abc import Callable

from motet.core.direct_io import IoTraffic
from motet.core.errors import InputError
from motet.core.units import format_bytes
from motet.memory.tiers.optimizer_states import FileStates
from motet.train.build import TrainingComponents
from motet.train.job import Job

TOLERANCE = 3.0  # A plan that is further from the disk than this misleads
_UNCOUNTED_STEPS = 2  # In which files are read for the first time
_STEPS = 3
_BYTES = 256 << 20  # Fewer are too few for a speed, and cost a run little


class DiskSpeed:
    """Compares both speeds once, when a run has taken some steps."""

    def __init__(self, folder: str, traffic: Callable[[], IoTraffic], planned: Callable[[], tuple[float, str] | None]):
        """`traffic` is that of this rank; `planned` returns bytes in a second for this rank, in both directions
        together, and the words that say where they come from. It is called once."""
        self._folder, self._traffic, self._planned = folder, traffic, planned
        self._steps, self._before, self._is_done = 0, IoTraffic(), False

    def warning_after_step(self) -> str | None:
        """The warning, after the step that completes the measurement if the disk is far slower than planned."""
        self._steps += 1
        if self._is_done or self._steps < _UNCOUNTED_STEPS:
            return None
        if self._steps == _UNCOUNTED_STEPS:
            self._before = self._traffic()
            return None
        moved = self._traffic() - self._before
        if self._steps < _UNCOUNTED_STEPS + _STEPS or moved.bytes_read + moved.bytes_written < _BYTES:
            return None
        self._is_done, planned = True, self._planned()
        if planned is None or moved.bytes_per_s * TOLERANCE >= planned[0]:
            return None
        return (
            f"memory.folder = {self._folder!r} is slower than the plan: this rank reads and writes "
            f"{format_bytes(moved.bytes_per_s)} in a second, and {planned[1]} gives it {format_bytes(planned[0])}; set "
            "memory.folder to the disk of the plan or memory.optimizer to host, or plan again with a lower scratch_Bps"
        )


def disk_speed_of_run(job: Job, parts: TrainingComponents) -> DiskSpeed | None:
    """The comparison of a run whose states lie on disk, and whose `communication.cluster` may have a figure."""
    states, source = parts.engine.optimizer.states, job.communication.cluster
    if not isinstance(states, FileStates) or source is None:
        return None
    local_ranks = len(parts.group.local_ranks or range(parts.group.world))

    def planned() -> tuple[float, str] | None:
        # After some steps: a run starts without the planner
        from motet.plan.planned_cluster import load_planned_cluster
        from motet.plan.time.host_update import HostRates

        try:
            host = load_planned_cluster(source, parts.group.world).host
            rates = HostRates.for_rank(host, local_ranks, on_disk=True)
        except InputError:
            return None  # The cluster plans no such run, or no disk
        assert host is not None and host.scratch_Bps is not None and rates.disk_Bps is not None
        ranks = f"{local_ranks} rank{'s' if local_ranks > 1 else ''}"
        return rates.disk_Bps, f"scratch_Bps = {host.scratch_Bps.value:g} of {source} for {ranks}"

    return DiskSpeed(str(job.memory.folder), lambda: states.traffic, planned)
