"""The settings of a cluster file: hosts, devices, and the networks inside of a host and between hosts.

`alpha_s` is the one-way start-up of a message and `bandwidth_Bps` the speed of a link in one direction. A quantity is
`{ value = 25e9, origin = "datasheet" }`, or a bare number, which counts as assumed. Limits are far from existing
hardware, and keep times in a range that can be computed and drawn.

A directed link of a cluster, and its load if flows are hashed onto its parallel paths.

Start-up time and bandwidth of a link, fitted to measured times, in the form of a cluster file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BeforeValidator, Field

from motet.cluster.device_specs import HardwareNumberWithOrigin, Origin
from motet.core.config_loading import FrozenSettings
from motet.core.errors import check_input


class _QuantitySettings(FrozenSettings):
    value: float
    origin: Origin = "assumed"
    source: str = ""
    """The source of the measurement, or the ground of the assumption."""

    @property
    def with_origin(self) -> HardwareNumberWithOrigin:
        return HardwareNumberWithOrigin(self.value, self.origin, self.source)


class LatencySecondsSetting(_QuantitySettings):
    """A quantity that may be 0."""

    value: Annotated[float, Field(ge=0, le=1e6)]


class BytesPerSecondSetting(_QuantitySettings):
    """A quantity of at least one byte per second."""

    value: Annotated[float, Field(ge=1, le=1e18)]


class ShareSetting(_QuantitySettings):
    """A share of a number."""

    value: Annotated[float, Field(ge=0.01, le=1)]


class DeviceMemorySetting(_QuantitySettings):
    """The size of a device's memory."""

    value: Annotated[float, Field(ge=1e7, le=1e15)]


class MemoryBandwidthSetting(_QuantitySettings):
    """The bandwidth of a device's memory."""

    value: Annotated[float, Field(ge=1e8, le=1e16)]


class PeakFlopsSetting(_QuantitySettings):
    """The peak of products of a dtype."""

    value: Annotated[float, Field(ge=1e8, le=1e19)]


class WattsSetting(_QuantitySettings):
    """The power of a device."""

    value: Annotated[float, Field(ge=0.1, le=1e6)]


class PriceSetting(_QuantitySettings):
    """The price of a device and hour in USD; 0 for a device that costs nothing."""

    value: Annotated[float, Field(ge=0, le=1e5)]


class HopSecondsSetting(_QuantitySettings):
    """The start-up of a hop."""

    value: Annotated[float, Field(ge=0, le=1)]


class FlopsSetting(_QuantitySettings):
    """A rate of at least one FLOP/s."""

    value: Annotated[float, Field(ge=1, le=1e20)]


def _bare_number_to_table(value: Any) -> Any:
    return {"value": value} if isinstance(value, int | float | str) else value


def _to_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, bool) else tuple(value) if isinstance(value, list) else value


ProductDtype = Literal["float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "mxfloat8", "float4"]
RateValue = Annotated[FlopsSetting, BeforeValidator(_bare_number_to_table)]
DelayValue = Annotated[LatencySecondsSetting, BeforeValidator(_bare_number_to_table)]
BandwidthValue = Annotated[BytesPerSecondSetting, BeforeValidator(_bare_number_to_table)]

ShareValue = Annotated[ShareSetting, BeforeValidator(_bare_number_to_table)]
FlopsValue = Annotated[PeakFlopsSetting, BeforeValidator(_bare_number_to_table)]
HopValue = Annotated[HopSecondsSetting, BeforeValidator(_bare_number_to_table)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class VendorLinkSettings(FrozenSettings):
    """The use of a network's links by NCCL or RCCL, for the planner; by default the class of the device's links."""

    link: str = ""
    """A class of links, such as `NVLink4`, `PCIe`, `RDMA`, `EFA` or `Socket`."""
    efficiency: ShareValue | None = None
    """The reached share of `bandwidth_Bps`."""
    one_way_efficiency: ShareValue | None = None
    """The share that collectives reach that add nothing up."""
    in_switch_efficiency: ShareValue | None = None
    """The share that sums in the switch reach."""
    hop_s: HopValue | None = None
    """The start-up of a hop with the protocol LL."""


class NetworkPortSettings(FrozenSettings):
    """The settings of every network: the port of a rank."""

    alpha_s: DelayValue
    bandwidth_Bps: BandwidthValue  # noqa: N815 - a unit
    """The speed of a rank's port, of one NIC between hosts, or of the link to one neighbour in a mesh or torus."""
    vendor: VendorLinkSettings = VendorLinkSettings()


class DeviceSwitchSettings(NetworkPortSettings):
    """Every device has one port to an ideal switch, as with NVSwitch."""

    kind: Literal["switch"]


class FullMeshSettings(NetworkPortSettings):
    """Every pair of devices has its own links."""

    kind: Literal["mesh"]


class PcieTreeSettings(NetworkPortSettings):
    """Devices under PCIe switches, whose uplinks join in one host bridge."""

    kind: Literal["pcie"]
    devices_per_switch: Count
    bridge_Bps: BandwidthValue  # noqa: N815 - a unit
    """The speed of all traffic between the switches, in both directions together."""


class MemoryBusSettings(NetworkPortSettings):
    """Devices that share one memory bus, as CPU ranks do."""

    kind: Literal["bus"]
    bus_Bps: BandwidthValue  # noqa: N815 - a unit
    """The speed of all messages together, each counted once."""


class TorusNetworkSettings(NetworkPortSettings):
    """A grid with a link to each neighbour and in each direction."""

    kind: Literal["torus"]
    dims: Annotated[tuple[Count, ...], Field(min_length=1)]
    wrap: Annotated[tuple[bool, ...], BeforeValidator(_to_tuple)] = (True,)
    """Whether the ends of a dimension are joined: one value for all, or one for each. `false`: a mesh of neighbours."""
    hop_s: DelayValue = LatencySecondsSetting(value=0)
    """The delay of each link on the way."""


class NicSwitchSettings(NetworkPortSettings):
    """Hosts whose NICs are all on one ideal switch."""

    kind: Literal["switch"]
    nics: Count = 1
    """NICs per host, shared evenly by its devices."""


class SpineLeafNetworkSettings(NetworkPortSettings):
    """Hosts whose NICs are on leaf switches, with uplinks to an ideal spine."""

    kind: Literal["spine_leaf"]
    nics: Count = 1
    """NICs per host, shared evenly by its devices."""
    hosts_per_leaf: Count
    rails: bool = False
    """Rail-optimised: a leaf takes the NIC of the same number from each of its hosts."""
    uplinks: Annotated[int, Field(ge=1, le=4096)]
    """Uplinks of each leaf. The time to compute the load of the fullest grows with their number."""
    oversubscription: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """The bandwidth of the NICs under a leaf over that of its uplinks."""
    flows: Literal["hashed", "pinned"] = "hashed"
    """Hashed: each message takes a random uplink (ECMP). Pinned: messages are spread evenly."""
    hop_s: DelayValue = LatencySecondsSetting(value=0)
    """The delay of an uplink, once up and once down."""


IntraHostNetworkSettings = Annotated[
    DeviceSwitchSettings | FullMeshSettings | PcieTreeSettings | MemoryBusSettings | TorusNetworkSettings,
    Field(discriminator="kind"),
]
InterHostNetworkSettings = Annotated[
    NicSwitchSettings | SpineLeafNetworkSettings | TorusNetworkSettings, Field(discriminator="kind")
]


class DatasheetFlopsSettings(FrozenSettings):
    """Peaks of dense products in FLOP/s by dtype of their inputs; `tfloat32` is float32 that may be rounded."""

    float64: FlopsValue | None = None
    float32: FlopsValue | None = None
    tfloat32: FlopsValue | None = None
    bfloat16: FlopsValue | None = None
    float16: FlopsValue | None = None
    float8: FlopsValue | None = None
    float4: FlopsValue | None = None


class DatasheetSettings(FrozenSettings):
    """A device that the table does not have, or numbers that replace those of the table."""

    flops: DatasheetFlopsSettings = DatasheetFlopsSettings()
    memory_bytes: Annotated[DeviceMemorySetting, BeforeValidator(_bare_number_to_table)] | None = None
    bandwidth_Bps: Annotated[MemoryBandwidthSetting, BeforeValidator(_bare_number_to_table)] | None = None  # noqa: N815
    """The bandwidth of the device's memory."""
    usable_memory: ShareValue | None = None
    """The share of the memory that a process can allocate; 0.99 for a device that the table does not have."""
    power_W: Annotated[WattsSetting, BeforeValidator(_bare_number_to_table)] | None = None  # noqa: N815 - a unit
    price_per_hour: Annotated[PriceSetting, BeforeValidator(_bare_number_to_table)] | None = None
    """USD per device and hour."""
    units: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Units that compute tiles of a product, such as streaming multiprocessors; 1 unless the table has another."""
    generation: str = ""
    """A generation of the table of devices, whose kernels reach like shares of the peaks, such as `Hopper`."""


class KernelRatesSettings(FrozenSettings):
    """Rates that kernels of one rank reach alone, on a processor or a GPU, for `motet plan`."""

    products: Annotated[dict[ProductDtype, RateValue], Field(min_length=1)]
    """FLOP/s of matrix products, by the dtype of their inputs."""
    product_edge: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    """Elements that each dimension of a product counts in addition, because edges and packing take time."""
    attention: RateValue
    """FLOP/s of fused attention in a forward, with heads of 128 features."""
    attention_backward: RateValue
    """FLOP/s of fused attention in a backward, with heads of 128 features."""
    attention_overhead: Annotated[float, Field(ge=0, le=1e4)] = 0.0
    """Features of a head whose FLOPs take as long as the exponential of a score."""
    memory_Bps: BandwidthValue  # noqa: N815 - a unit
    """The bandwidth of kernels that stream activations."""
    launch_s: DelayValue
    """The host's time for one kernel, with framework and autograd."""
    cores: Count | None = None
    """Ranks of a host that compute simultaneously; more of them share the cores. GPUs have none."""
    busy_factor: Annotated[float, Field(ge=1, le=100)] = 1.0
    """The time of products and of attention while all cores compute, over that of a rank alone."""
    busy_memory_factor: Annotated[float, Field(ge=1, le=100)] = 1.0
    """The time of kernels that stream activations while all cores compute, over that of a rank alone."""


class HostSettings(FrozenSettings):
    """The memory, processors and disk of one host, for steps whose optimizer states do not lie on the devices."""

    memory_bytes: Annotated[DeviceMemorySetting, BeforeValidator(_bare_number_to_table)]
    """The memory of a host, which its ranks share."""
    link_Bps: BandwidthValue  # noqa: N815 - a unit
    """The speed of the link between one device and the host, in one direction."""
    update_Bps: BandwidthValue  # noqa: N815 - a unit
    """Bytes of masters and moments that all cores of a host update together in a second."""
    cores: Count
    """Cores of a host."""
    scratch_Bps: BandwidthValue | None = None  # noqa: N815 - a unit
    """The speed of reads and writes together on the disk that keeps states; without it, states lie on no disk."""


class ClusterSettings(FrozenSettings):
    """One cluster file."""

    device: str = ""
    """A name of the table of devices, or of another device."""
    datasheet: DatasheetSettings | None = None
    hosts: Count = 1
    devices_per_host: Count
    gamma_s_per_byte: DelayValue | None = None
    """Adding one byte to another; without it, three times the device's memory traffic of one byte."""
    inside: IntraHostNetworkSettings
    between: InterHostNetworkSettings | None = None
    """Needed where there are several hosts."""
    storage_Bps: BandwidthValue = BytesPerSecondSetting(value=1e9, origin="assumed")  # noqa: N815 - a unit
    """The bandwidth at which a host reads training data, while others do."""
    host: HostSettings | None = None
    """The memory and processors of a host; without it, states of the optimizer lie on the devices alone."""
    rates: KernelRatesSettings | None = None
    """Measured rates of kernels, for processors; without it, rates are shares of the table of devices."""


Number = float | Fraction


def with_origin(value: Number, origin: Origin = "assumed") -> HardwareNumberWithOrigin:
    """A value that stays a Fraction if it is one, so that sums over links are exact; its type says float."""
    return HardwareNumberWithOrigin(cast(float, value), origin)


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A resource that messages cross in one direction, or in both directions if they share it."""

    alpha_s: HardwareNumberWithOrigin  # At a port the one-way start-up of each message, elsewhere a delay
    bandwidth_Bps: HardwareNumberWithOrigin  # noqa: N815 - a unit; all paths together
    is_port: bool = False  # An endpoint sends (or receives) its messages over its port in turn
    hashed_paths: int = 1  # Equal paths, on one of which each flow is hashed. 1: the load is always even

    def __post_init__(self) -> None:
        bandwidth, alpha = self.bandwidth_Bps.value, self.alpha_s.value
        check_input(bandwidth > 0, f"a link with bandwidth_Bps = {bandwidth} carries nothing; give more than 0")
        check_input(alpha >= 0, f"a link with alpha_s = {alpha} has a negative start-up; give 0 or more")
        check_input(self.hashed_paths >= 1, f"a link cannot have {self.hashed_paths} paths; give 1 or more")

    def imbalance(self, flows: int) -> float:
        """The time of the fullest path over that of an even load, if equal flows are hashed: 1 to `hashed_paths`."""
        assert flows >= 1
        return 1 if self.hashed_paths == 1 else self.hashed_paths * expected_max_load(flows, self.hashed_paths) / flows


@lru_cache(maxsize=4096)
def expected_max_load(balls: int, bins: int) -> float:
    """The expected number of balls in the fullest of equally likely bins, with a relative error of 1e-10.

    P(no bin holds more than k) is P(all of `bins` Poisson counts are at most k, given that their sum is `balls`). The
    probability of a sum is a coefficient of a power of the Poisson law cut off at k: a Fourier transform and back.
    """
    import numpy as np  # Few commands cost hashed flows, and all others start faster without it

    assert balls >= 0 and bins >= 1
    count_probabilities, sum_probability = _poisson(balls / bins, balls), _poisson(balls, balls)[-1]
    expected, before = float(balls // bins), 1.0  # some bin holds at least that many
    for k in range(balls // bins, balls):
        length = 1 << max(bins * k, balls).bit_length()  # no sum wraps around
        sums = np.fft.irfft(np.fft.rfft(count_probabilities[: k + 1], length) ** bins, length)
        more = 1 - float(sums[balls]) / sum_probability
        if more < 1e-11 or (more < 1e-6 and more >= before):  # `more` falls with k, except for rounding
            break
        expected, before = expected + more, more
    return expected


def _poisson(mean: float, last: int) -> list[float]:
    """The probabilities of 0 .. last, by logarithms, since the factors overflow."""
    if mean == 0:
        return [1.0] + [0.0] * last
    return [math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(last + 1)]


class AlphaBetaFit(NamedTuple):
    """The time of a message is `alpha_s` plus its bytes over `bandwidth_Bps`."""

    alpha_s: float
    bandwidth_Bps: float  # noqa: N815 - a unit

    def port_description(self) -> dict[str, Any]:
        """The keys of a port in a cluster file."""
        return {"alpha_s": measured(self.alpha_s), "bandwidth_Bps": measured(self.bandwidth_Bps)}


def measured(value: float) -> dict[str, Any]:
    """The entry of a cluster file for a measured number."""
    return {"value": value, "origin": "measured"}


def fit_alpha_beta(sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBetaFit:
    """The line through the measured times with the least squared relative errors, and alpha >= 0."""
    weights = [1 / time_s**2 for time_s in seconds]

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    size, time_s = mean(sizes), mean(seconds)
    variance = mean([(s - size) ** 2 for s in sizes])
    covariance = mean([(s - size) * (t - time_s) for s, t in zip(sizes, seconds, strict=True)])
    beta = covariance / variance if variance else 0.0
    alpha = time_s - beta * size
    if alpha < 0 or beta <= 0:  # The best line through zero
        alpha, beta = 0.0, mean([s * t for s, t in zip(sizes, seconds, strict=True)]) / mean([s * s for s in sizes])
    return AlphaBetaFit(alpha, 1 / beta)
