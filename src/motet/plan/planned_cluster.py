"""The hardware of a plan: devices, the reach of fast links, and costs of collectives, from a cluster file or a preset.

The rates that kernels reach on a device: datasheets, and a table of shares by generation.

The shares are constants of device generations and kinds of kernels. docs/reference/planning-constants.md says how
they were found.

The time of collectives of CPU ranks: the Programs that motet's backend executes, on the links of a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import get_args

from motet.cluster.cluster import MAX_RANKS, Cluster, build_cluster, cluster_presets, device_of_cluster
from motet.cluster.cluster_settings import ClusterSettings, HostSettings, KernelRatesSettings, ProductDtype
from motet.cluster.device_specs import UNKNOWN_GENERATION, DeviceSpec
from motet.collectives.algorithms import build
from motet.collectives.cost.alpha_beta import CollectiveCost, estimate_cost
from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts, fabric_of
from motet.collectives.execute.slot_plan import ONE_STEP_ALL_REDUCE_MAX_BYTES, select_program
from motet.core.config_loading import read_toml, settings_from_dict
from motet.core.errors import InputError, check_input
from motet.core.units import DTYPE_BYTES
from motet.plan.time.kernel_times import DeviceRates
from motet.plan.time.step_time import StepTimes


@dataclass(frozen=True)
class GenerationShares:
    """The shares of the datasheet's numbers that kernels reach."""

    generation: str
    products: Mapping[str, float]  # Shares of very large matrix products by bits of their inputs
    attention: Mapping[str, float]  # Shares of fused attention in a forward by kernel, of the peak of 16 bits
    attention_ramp: float  # Tokens at which fused attention reaches half of its rate
    launch_s: float  # Host time for each kernel, with framework and autograd
    origin: str
    attention_backward: float = 0.65  # Over the forward's rate. This and all below: fitted to steps of all generations
    early_attention_ramp: float = 400.0  # Tokens at which `flash-1` reaches half of its rate
    memory: float = 0.84  # Share for streaming kernels
    head_overhead: float = 95.0  # This and the next two: the constants of DeviceRates with these names
    tile_overhead: float = 145.0
    exposed_memory: float = 0.5


# Kernels of fused attention: FlashAttention 1 of 2022, FlashAttention 2 of 2023, and cuDNN's of 2024 and later
FUSED_ATTENTION = ("flash-1", "flash-2", "flash-3")
_FITTED = "fitted to the published steps of this generation, where these have such products and kernels"


_ATTENTION_TILE_OF_PROCESSORS = 512  # Keys of a tile of torch's fused attention

_PROCESSOR_KINDS = "processors"
# Generation: shares of products of 16, 8, 4 and 32 bits, of each kind of fused attention, its ramp, launch_s, origin
_SHARES = {
    "Volta": (
        (0.62, 0.62, 0.62, 0.9),
        (0.3, 0.4, 0.4),
        500,
        10e-6,
        "products fitted to six published steps, the rest assumed",
    ),
    "Ampere": ((0.83, 0.83, 0.83, 0.9), (0.42, 0.55, 0.7), 500, 11e-6, _FITTED),
    "Hopper": ((0.69, 0.8, 0.8, 0.8), (0.235, 0.36, 0.475), 1150, 11e-6, _FITTED),
    "Hopper at 500 W": ((0.67, 0.7, 0.7, 0.6), (0.2, 0.25, 0.475), 1150, 8e-6, _FITTED),
    "Blackwell": ((0.62, 0.65, 0.635, 0.7), (0.08, 0.13, 0.5), 2400, 6.8e-6, _FITTED),
    "Blackwell at 1400 W": ((0.68, 0.83, 0.66, 0.7), (0.08, 0.13, 0.53), 2400, 6.8e-6, _FITTED),
    "CDNA": (
        (0.47, 0.45, 0.45, 0.7),
        (0.2, 0.3, 0.3),
        2700,
        10e-6,
        "assumed, products after published benchmarks of MI300X: no published step is of this generation",
    ),
    "TPU": (
        (0.85, 0.85, 0.85, 0.8),
        (0.5, 0.5, 0.5),
        1000,
        1e-6,  # A step is one compiled program
        "assumed, after published FLOP/s of MaxText: no published step is of this generation",
    ),
    _PROCESSOR_KINDS: (
        (0.5, 0.5, 0.5, 0.8),
        (0.4, 0.4, 0.4),
        64,
        8e-6,
        "assumed; the rates of a processor differ widely",
    ),
}
_GENERATIONS = {
    generation: GenerationShares(
        generation,
        dict(zip(("16", "8", "4", "32"), products, strict=True)),
        dict(zip(FUSED_ATTENTION, attention, strict=True)),
        ramp,
        launch_s,
        origin,
    )
    for generation, (products, attention, ramp, launch_s, origin) in _SHARES.items()
}
_GENERATIONS |= {
    generation: replace(_GENERATIONS[like], origin=f"assumed: like {like}")
    for generation, like in (("Pascal", "Volta"), ("Turing", "Volta"), ("Ada", "Hopper"), ("Gaudi", "CDNA"))
}
_WIDE = ("bfloat16", "float16", "float32")


def shares_of(generation: str) -> GenerationShares:
    """The shares of a generation of the table of devices, or those of a processor for another."""
    return _GENERATIONS.get(generation, _GENERATIONS[_PROCESSOR_KINDS])


def product_peak(device: DeviceSpec, dtype: str) -> float | None:
    """The peak of products of a dtype, or of the next wider one by which they are computed."""
    narrow = {"float4": ("float4", "float8")}.get(dtype, (dtype.removeprefix("mx"),))
    names = (name for name in (*narrow, *_WIDE) if name in device.peak_flops)
    return next((device.peak_flops[name].value for name in names), None)


def rates_of(device: DeviceSpec, shares: GenerationShares | None = None) -> DeviceRates:
    """The rates of a device. A dtype without matrix units is multiplied like the next wider one."""
    shares = shares or shares_of(device.generation)
    peaks = {name: number.value for name, number in device.peak_flops.items()}
    sixteen = peaks.get("bfloat16") or peaks.get("float16") or peaks.get("float32", 1e12)
    eight = peaks.get("float8", sixteen)
    single = peaks.get("float32", sixteen / 2)
    products = {
        "bfloat16": peaks.get("bfloat16", sixteen) * shares.products["16"],
        "float16": peaks.get("float16", sixteen) * shares.products["16"],
        "float8": eight * shares.products["8"],
        "float4": peaks.get("float4", eight) * shares.products["4"],
        "float32": single * shares.products["32"],
        "tfloat32": peaks.get("tfloat32", single) * shares.products["32"],
        "float64": peaks.get("float64", single / 2) * shares.products["32"],
    }
    attention = {kind: share * sixteen for kind, share in shares.attention.items()}
    backward = {kind: rate * shares.attention_backward for kind, rate in attention.items()}
    products["mxfloat8"] = products["float8"]
    memory_Bps = device.bandwidth_Bps.value * shares.memory  # noqa: N806 - a unit
    return DeviceRates(
        products,
        device.units,
        attention,
        backward,
        shares.attention_ramp,
        shares.early_attention_ramp,
        shares.head_overhead,
        shares.tile_overhead,
        shares.exposed_memory,
        memory_Bps,
        shares.launch_s,
    )


def rates_with_measured(device: DeviceSpec, rates: KernelRatesSettings) -> DeviceRates:
    """The rates of a GPU, of which those of a file replace the ones that follow from its datasheet."""
    assumed = rates_of(device)
    return replace(
        assumed,
        product_flops={**assumed.product_flops, **{name: rate.value for name, rate in rates.products.items()}},
        attention_flops=dict.fromkeys(FUSED_ATTENTION, rates.attention.value),
        attention_backward_flops=dict.fromkeys(FUSED_ATTENTION, rates.attention_backward.value),
        memory_Bps=rates.memory_Bps.value,
        launch_s=rates.launch_s.value,
    )


def measured_rates(rates: KernelRatesSettings) -> DeviceRates:
    """The measured rates of a processor. A dtype without one is multiplied like the first one."""
    first = next(iter(rates.products.values()))
    products = dict.fromkeys((*DTYPE_BYTES, *get_args(ProductDtype)), first.value)
    products |= {name: rate.value for name, rate in rates.products.items()}
    return DeviceRates(
        products,
        0,
        dict.fromkeys(FUSED_ATTENTION, rates.attention.value),
        dict.fromkeys(FUSED_ATTENTION, rates.attention_backward.value),
        attention_ramp=0.0,
        early_attention_ramp=0.0,
        head_overhead=rates.attention_overhead,
        tile_overhead=rates.product_edge,
        exposed_memory=1.0,
        memory_Bps=rates.memory_Bps.value,
        launch_s=rates.launch_s.value,
        cores=rates.cores or 0,
        attention_tile=_ATTENTION_TILE_OF_PROCESSORS,
        busy_factor=rates.busy_factor,
        busy_memory_factor=rates.busy_memory_factor,
    )


@dataclass(frozen=True)
class ProgramCosts:
    """Costs by the steps of Programs; ranks of a group are neighbours."""

    cluster: Cluster

    def seconds(self, collective: str, size_bytes: float, *, ranks: int, ranks_per_host: int) -> float:
        """Seconds of a collective, of which `ranks_per_host` ranks are on one host."""
        is_small = size_bytes <= ONE_STEP_ALL_REDUCE_MAX_BYTES
        cost = _cost(self.cluster, collective, (ranks, ranks_per_host), is_small=is_small)
        return float(cost.seconds(size_bytes))


@lru_cache(maxsize=1024)
def _cost(cluster: Cluster, collective: str, group: tuple[int, int], *, is_small: bool) -> CollectiveCost:
    ranks, per_host = group
    members = tuple(rank // per_host * cluster.devices_per_host + rank % per_host for rank in range(ranks))
    check_input(
        members[-1] < cluster.ranks,
        f"a group of {ranks} ranks does not fit cluster {cluster.name}, which has {cluster.ranks}; describe it with "
        "more hosts or devices",
    )
    if collective == "send-receive":
        program = build("broadcast", "flat", ranks)  # One message
    else:
        hosts = tuple(rank // per_host for rank in range(ranks))
        program = select_program(collective, hosts, is_small=is_small, root=0)
    return estimate_cost(program, cluster, (members,))


_OF_PROCESSORS = ("product_edge", "attention_overhead", "cores", "busy_factor", "busy_memory_factor")  # In [rates]
_PROCESSORS = "CPU"  # The generation of devices that are processors
_SLOWEST_LINK = 1e-6  # Share of the memory's bandwidth; a network of 200 Mbit/s between processors has 2e-3


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
    measured: KernelRatesSettings | None = None  # The section [rates] of a file
    host: HostSettings | None = None

    @property
    def step_times(self) -> StepTimes:
        """The predictor of times. Ranks on processors run the Programs of motet's backend."""
        per_host = min(self.devices_per_host, self.devices)
        if self.measured is None:
            rates = rates_of(self.device)
        elif self.is_processor:
            rates = measured_rates(self.measured)
        else:
            rates = rates_with_measured(self.device, self.measured)
        costs = ProgramCosts(self.network) if self.is_processor else VendorCosts(self.fabric)
        return StepTimes(rates, per_host, costs, self.storage_Bps, self.host)

    @property
    def is_processor(self) -> bool:
        """Whether processors of the hosts are the devices. An unknown device with measured rates is one."""
        is_unknown = self.device.generation == UNKNOWN_GENERATION
        return self.device.generation == _PROCESSORS or (is_unknown and self.measured is not None)


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
        f"{option} {devices} is not a multiple of the {per_host} devices of a host of cluster {source}; give {choices}",
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
    per_host = settings.devices_per_host
    storage_Bps = settings.storage_Bps.value  # noqa: N806 - a unit
    cluster = PlannedCluster(
        network.name, device, devices, per_host, fabric, network, storage_Bps, settings.rates, settings.host
    )
    if settings.rates is None or not cluster.is_processor:
        _check_links(device, fabric)
    if settings.rates is not None:
        _check_rates(settings.rates, settings.device, is_processor=cluster.is_processor)
    return cluster


def _check_rates(rates: KernelRatesSettings, device: str, *, is_processor: bool) -> None:
    section = f"[rates] with device = {device!r}"
    check_input(
        rates.cores is not None or not is_processor,
        f"{section} has no cores; add the ranks of a host that compute simultaneously",
    )
    unused = [] if is_processor else [name for name in _OF_PROCESSORS if name in rates.model_fields_set]
    names = " and ".join(unused)
    check_input(not unused, f"{section} has {names}, which only the rates of processors have; leave out {names}")


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
