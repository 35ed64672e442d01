"""The hardware of a plan: devices, how far fast links reach, and what they cost, from a cluster file or a preset."""

from dataclasses import dataclass, replace
from pathlib import Path

from motet.cluster.cluster_settings import (
    ClusterSettings,
    FullMeshSettings,
    PcieTreeSettings,
    SpineLeafNetworkSettings,
    TorusNetworkSettings,
)
from motet.cluster.cluster_toml import build_cluster, cluster_presets
from motet.cluster.device_specs import DeviceSpec, HardwareNumberWithOrigin, find_planned_device
from motet.collectives.cost.vendor_library import FabricSpec, VendorCosts, fabric_of_device
from motet.core.config_loading import read_toml, settings_from_dict
from motet.core.errors import check_input
from motet.plan.device_rates import rates_of
from motet.plan.time.step_time import StepTimes

# USD per device and hour, rounded list prices of on-demand clouds: examples that a plan multiplies, assumed.
_PRICES = {"P100": 1.0, "V100": 2.0, "A100": 2.0, "A800": 2.0, "H100": 3.0, "H800": 3.0, "H200": 3.5, "B200": 5.0}
_PRICES |= {"B300": 6.0, "GB200": 6.0, "GB300": 7.0, "MI300X": 3.0, "TPU v4": 3.2, "TPU v5p": 4.2}
# CUDA reports nearly as many GiB as the datasheet says GB, but less of the newest parts.
_USABLE_GIB_OF_GB = 0.99
_USABLE_OF_LARGE = {"B300": 0.935, "GB300": 0.935, "MI300X": 1.0}


@dataclass(frozen=True)
class PlannedCluster:
    """Devices of one kind, `devices_per_host` of which fast links join."""

    name: str
    device: DeviceSpec
    devices: int
    devices_per_host: int
    fabric: FabricSpec

    @property
    def step_times(self) -> StepTimes:
        """The predictor of times."""
        return StepTimes(rates_of(self.device), min(self.devices_per_host, self.devices), VendorCosts(self.fabric))

    @property
    def price_per_hour(self) -> float | None:
        """USD per device and hour; None if no price is known."""
        return _PRICES.get(self.device.name.split("-")[0].removesuffix(" SXM"))


def usable_bytes(device: DeviceSpec) -> float:
    """The memory of a device that a process can allocate."""
    share = _USABLE_OF_LARGE.get(device.name, _USABLE_GIB_OF_GB)
    return share * device.memory_bytes.value / 1e9 * 2**30


def load_planned_cluster(source: str, devices: int) -> PlannedCluster:
    """The hardware of a preset or a TOML file with a number of devices; a preset has as many hosts as that takes."""
    check_input(devices >= 1, f"--gpus {devices}: give 1 or more")
    presets = cluster_presets()
    values = read_toml("cluster", source, presets)
    settings = settings_from_dict(ClusterSettings, values, source)
    per_host = settings.devices_per_host
    hosts = -(-devices // per_host)
    below, above = devices // per_host * per_host, hosts * per_host
    choices = f"{below} or {above}" if below else f"{above}"
    check_input(
        devices < per_host or devices % per_host == 0,
        f"--gpus {devices} is no multiple of the {per_host} devices of a host of cluster {source}; give {choices}",
    )
    has_network = settings.between is not None
    is_fixed = source not in presets
    limit = settings.hosts * per_host
    check_input(
        not is_fixed or devices <= limit,
        f"--gpus {devices} is more than the {limit} devices of cluster {source}; give {limit} or fewer, or raise "
        f"hosts = {settings.hosts} in the file",
    )
    check_input(
        has_network or hosts == 1,
        f"--gpus {devices} needs {hosts} hosts, but cluster {source} has no section [between]; give {per_host} "
        "or fewer",
    )
    build_cluster(settings, Path(source).stem)  # Checks that its parts agree
    device = _planned_device(settings)
    fabric = fabric_of_device(device.name, per_host, intra_Bps=_inside_bps(settings), inter_Bps=_between_bps(settings))
    return PlannedCluster(Path(source).stem, device, devices, per_host, fabric)


def _planned_device(settings: ClusterSettings) -> DeviceSpec:
    """The device of the table; the ranks of a CPU box have no row, and no memory that is known."""
    if settings.device == "CPU":
        flops, memory, bandwidth = (HardwareNumberWithOrigin(value, "assumed") for value in (100e9, 8e9, 10e9))
        return DeviceSpec("CPU", {"float32": flops, "bfloat16": flops}, memory, bandwidth)
    return find_planned_device(settings.device)


def _inside_bps(settings: ClusterSettings) -> float:
    inside = settings.inside
    speed = inside.bandwidth_Bps.value
    if isinstance(inside, FullMeshSettings):
        return speed * max(1, settings.devices_per_host - 1)
    if isinstance(inside, TorusNetworkSettings):
        return speed * sum(2 if size > 2 else 1 for size in inside.dims if size > 1)
    if isinstance(inside, PcieTreeSettings):
        return min(speed, inside.bridge_Bps.value)
    return speed


def _between_bps(settings: ClusterSettings) -> float:
    """The share of the NICs of a host that each of its devices has."""
    between = settings.between
    if between is None:
        return _inside_bps(settings)
    if isinstance(between, TorusNetworkSettings):
        return between.bandwidth_Bps.value
    share = between.nics / settings.devices_per_host
    slower = between.oversubscription if isinstance(between, SpineLeafNetworkSettings) else 1.0
    return between.bandwidth_Bps.value * share / slower


def with_devices(cluster: PlannedCluster, devices: int) -> PlannedCluster:
    """The same hardware with another number of devices."""
    return replace(cluster, devices=devices)
