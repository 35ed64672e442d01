"""The settings of a cluster file: hosts, devices, and the networks inside of a host and between hosts.

`alpha_s` is the one-way start-up of a message and `bandwidth_Bps` the speed of a link in one direction. A quantity is
`{ value = 25e9, origin = "datasheet" }`, or a bare number, which counts as assumed. Limits are far from existing
hardware, and keep times within what can be computed and drawn.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from motet.cluster.device_specs import HardwareNumberWithOrigin
from motet.cluster.devices.datasheets import Origin
from motet.core.base_settings import FrozenSettings


class _QuantitySettings(FrozenSettings):
    value: float
    origin: Origin = "assumed"
    source: str = ""
    """Who measured the number, or on what ground it is assumed."""

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


RateValue = Annotated[FlopsSetting, BeforeValidator(_bare_number_to_table)]
DelayValue = Annotated[LatencySecondsSetting, BeforeValidator(_bare_number_to_table)]
BandwidthValue = Annotated[BytesPerSecondSetting, BeforeValidator(_bare_number_to_table)]

ShareValue = Annotated[ShareSetting, BeforeValidator(_bare_number_to_table)]
FlopsValue = Annotated[PeakFlopsSetting, BeforeValidator(_bare_number_to_table)]
HopValue = Annotated[HopSecondsSetting, BeforeValidator(_bare_number_to_table)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class VendorLinkSettings(FrozenSettings):
    """How NCCL or RCCL uses the links of a network, for the planner; by default the class of the device's links."""

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
    """Rates that kernels of one rank reach alone on a host whose processors execute them, for `motet plan`."""

    products: Annotated[dict[str, RateValue], Field(min_length=1)]
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
    cores: Count
    """Ranks of a host that compute simultaneously; more of them share the cores."""
    busy_factor: Annotated[float, Field(ge=1, le=100)] = 1.0
    """The time of products and of attention while all cores compute, over that of a rank alone."""
    busy_memory_factor: Annotated[float, Field(ge=1, le=100)] = 1.0
    """The time of kernels that stream activations while all cores compute, over that of a rank alone."""


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
    rates: KernelRatesSettings | None = None
    """Measured rates of kernels, for processors; without it, rates are shares of the table of devices."""
