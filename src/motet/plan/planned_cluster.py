"""The hardware of a plan: devices, how far fast links reach, and what they cost, from a cluster file or a preset."""

from dataclasses import dataclass
from pathlib import Path

from motet.cluster.cluster import Cluster
from motet.cluster.cluster_settings import ClusterSettings, KernelRatesSettings
from motet.cluster.cluster_toml import MAX_RANKS, build_cluster, cluster_presets
from motet.cluster.device_specs import UNKNOWN_GENERATION, DeviceSpec
from motet.cluster.devices.described_device import device_of_cluster
from motet.collectives.cost.cluster_fabric import fabric_of
from motet.collectives.cost.vendor_library import FabricSpec, VendorCosts
from motet.core.config_loading import read_toml, settings_from_dict
from motet.core.errors import InputError, check_input
from motet.plan.device_rates import measured_rates, rates_of
from motet.plan.time.program_costs import ProgramCosts
from motet.plan.time.step_time import StepTimes

_PROCESSORS = "CPU"  # The generation of devices that are processors
_SLOWEST_LINK = 1e-6  # Of the bandwidth of the memory; a network of 200 Mbit/s between processors has 2e-3


@dataclass(frozen=True)
class PlannedCluster:
    """Devices of one kind, `devices_per_host` of which fast links join."""

    name: str
    device: DeviceSpec
    devices: int
    devices_per_host: int
    fabric: FabricSpec
    network: Cluster
    storage_Bps: float  # noqa: N815 - a unit; of a host
    measured: KernelRatesSettings | None = None  # Of processors

    @property
    def step_times(self) -> StepTimes:
        """The predictor of times. Ranks on processors run the Programs of motet's backend."""
        per_host = min(self.devices_per_host, self.devices)
        rates = rates_of(self.device) if self.measured is None else measured_rates(self.measured)
        costs = ProgramCosts(self.network) if self.is_processor else VendorCosts(self.fabric)
        return StepTimes(rates, per_host, costs, self.storage_Bps)

    @property
    def is_processor(self) -> bool:
        """Whether processors of the hosts are the devices."""
        return self.measured is not None or self.device.generation == _PROCESSORS


def load_planned_cluster(source: str, devices: int, *, option: str = "--gpus") -> PlannedCluster:
    """The hardware of a preset or a TOML file with a number of devices; a preset has as many hosts as that takes."""
    check_input(devices >= 1, f"{option} {devices}: give 1 or more")
    check_input(devices <= MAX_RANKS, f"{option} {devices} is more than the {MAX_RANKS} that a cluster may have")
    presets = cluster_presets()
    values = read_toml("cluster", source, presets)
    settings = settings_from_dict(ClusterSettings, values, source)
    if source in presets and settings.between is None and settings.inside.kind == "torus":
        settings = _grown_torus(settings, devices)
    per_host = settings.devices_per_host
    hosts = -(-devices // per_host)
    below, above = devices // per_host * per_host, hosts * per_host
    choices = f"{below} or {above}" if below else f"{above}"
    check_input(
        devices < per_host or devices % per_host == 0,
        f"{option} {devices} is no multiple of the {per_host} devices of a host of cluster {source}; give {choices}",
    )
    has_network = settings.between is not None
    is_fixed = source not in presets
    limit = settings.hosts * per_host
    check_input(
        not is_fixed or devices <= limit,
        f"{option} {devices} is more than the {limit} devices of cluster {source}; give {limit} or fewer, or raise "
        f"hosts = {settings.hosts} in the file",
    )
    check_input(
        has_network or hosts == 1,
        f"{option} {devices} needs {hosts} hosts, but cluster {source} has no section [between]; give {per_host} "
        "or fewer",
    )
    try:
        return describe_hardware(settings.model_copy(update={"hosts": hosts}), Path(source), devices)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def describe_hardware(settings: ClusterSettings, source: Path, devices: int) -> PlannedCluster:
    """The hardware of settings, whose numbers are checked."""
    device, network = device_of_cluster(settings), build_cluster(settings, source.stem)
    fabric = fabric_of(network)
    check_input(
        settings.rates is None or device.generation in (_PROCESSORS, UNKNOWN_GENERATION),
        f"[rates] are those of processors, and device = {settings.device!r} is none; leave the section out, or set "
        'device = "CPU"',
    )
    if settings.rates is None:
        _check_links(device, fabric)
    per_host = settings.devices_per_host
    storage_Bps = settings.storage_Bps.value  # noqa: N806 - a unit
    return PlannedCluster(network.name, device, devices, per_host, fabric, network, storage_Bps, settings.rates)


def _grown_torus(settings: ClusterSettings, devices: int) -> ClusterSettings:
    """A torus of as many cubes as the devices need, joined along the shortest dimensions."""
    inside, cubes, rest = settings.inside, *divmod(devices, settings.devices_per_host)
    if inside.kind != "torus" or rest or cubes <= 1:
        return settings
    dims, factor = sorted(inside.dims), 2
    while cubes > 1:
        while cubes % factor:
            factor += 1
        dims[0] *= factor
        dims.sort()
        cubes //= factor
    network = inside.model_copy(update={"dims": tuple(dims)})
    return settings.model_copy(update={"inside": network, "devices_per_host": devices})


def _check_links(device: DeviceSpec, fabric: FabricSpec) -> None:
    memory = device.bandwidth_Bps.value
    for section, speed in (("inside", fabric.intra_Bps), ("between", fabric.inter_Bps)):
        check_input(
            _SLOWEST_LINK * memory <= speed <= memory,
            f"[{section}] gives each device {speed:g} byte/s, out of the range from {_SLOWEST_LINK * memory:g} to "
            f"the {memory:g} byte/s of its memory; correct bandwidth_Bps there or in [datasheet]",
        )
