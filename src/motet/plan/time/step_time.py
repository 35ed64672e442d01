"""The time of a step: `predict` simulates it, `lower_bound` never exceeds that, and `events` gives its timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from motet.cluster.cluster_settings import HostSettings
from motet.parallel.pipeline.schedules import SCHEDULES
from motet.plan.planned_step import PlannedStep
from motet.plan.time.host_update import HostRates
from motet.plan.time.kernel_times import DeviceRates
from motet.plan.time.stage_times import CollectiveCosts, GroupTimes
from motet.plan.time.step_events import StepEvent, events_of_step
from motet.plan.time.step_simulation import StepSimulation, splits_backward

_BYTES_OF_STORED_TOKEN = 4


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and the parts that add up to them."""

    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class StepTimes:
    """Predicts steps on devices that a network joins."""

    rates: DeviceRates
    devices_per_host: int
    costs: CollectiveCosts
    storage_Bps: float = inf  # noqa: N815 - a unit; of a host
    host: HostSettings | None = None

    def predict(self, step: PlannedStep) -> StepTime:
        """The time of a step."""
        return StepTime(*self._simulation(step).run())

    def lower_bound(self, step: PlannedStep) -> float:
        """Seconds that the step takes at least."""
        return self._simulation(step).lower_bound()

    def lower_bounds(self, step: PlannedStep, schedules: Sequence[str], limit_s: float) -> list[float]:
        """Seconds that the step takes at least with each of these schedules, or a limit that all of them exceed."""
        simulation = self._simulation(step)
        work_s = simulation.lower_bound_of_schedules()
        if work_s >= limit_s:
            return [work_s] * len(schedules)
        bounds = dict[object, float]()  # Schedules with the same ranks of stages, split backwards or not, have one
        keys = [(SCHEDULES[name].is_v, splits_backward(name)) for name in schedules]
        for name, key in zip(schedules, keys, strict=True):
            if key not in bounds:
                bounds[key] = simulation.with_schedule(name).lower_bound()
        return [bounds[key] for key in keys]

    def events(self, step: PlannedStep) -> list[StepEvent]:
        """The events of the simulation, of one rank for each rank of the pipeline."""
        return events_of_step(self._simulation(step))

    def _simulation(self, step: PlannedStep) -> StepSimulation:
        groups = GroupTimes(step.layout, self.devices_per_host, self.costs, step.shards)
        read_s = _data_bytes_of_host(step, self.devices_per_host) / self.storage_Bps
        return StepSimulation(step, self.rates, groups, read_s=read_s, host=self._host_rates(step))

    def check_places(self, step: PlannedStep) -> None:
        """Refuse a step with states in a place whose speed is not known."""
        self._host_rates(step)

    def _host_rates(self, step: PlannedStep) -> HostRates | None:
        if step.states == "device":
            return None
        per_host = min(self.devices_per_host, step.layout.ranks)
        return HostRates.for_rank(self.host, per_host, on_disk=step.states == "disk")


def _data_bytes_of_host(step: PlannedStep, devices_per_host: int) -> float:
    """Bytes of the tokens that the ranks of a host need for a step; those of one replica read the same rows."""
    layout = step.layout
    replicas = min(layout.dp, -(-devices_per_host // (layout.tp * layout.cp)))
    return _BYTES_OF_STORED_TOKEN * step.tokens * replicas / layout.dp
