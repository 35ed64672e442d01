"""The page of the numbers that `motet plan` predicts with: devices, links and presets, each with its origin."""

import tomllib
from collections import defaultdict

from motet.cluster.cluster import PRESET_ALIASES, cluster_presets
from motet.cluster.cluster_settings import ClusterSettings, SpineLeafNetworkSettings, TorusNetworkSettings
from motet.cluster.device_specs import DEVICES, DTYPES, PRICE_SOURCE, DeviceSpec, HardwareNumberWithOrigin
from motet.collectives.cost.group_shapes import LIBRARY, LINK_CLASSES, PROTOCOLS
from motet.core.config_loading import settings_from_dict
from motet.plan.planned_cluster import shares_of
from pages import markdown_table

PAGE = "reference/planning-devices.md"
_INTRODUCTION = """# Devices, links and presets

`motet plan` predicts with the numbers on this page. A [cluster file](cluster.md) replaces them: section `[datasheet]`
those of a device, `[inside.vendor]` and `[between.vendor]` those of a class of links, `[host]` those of a host. Each
number is of a *datasheet*, *measured* or *assumed*.

## Devices
"""
_DEVICES = f"""
Peaks are TFLOP/s of dense products from the maker's datasheet. Memory is in GiB, its bandwidth and that of the links
inside of a host in GB/s, the links in one direction. Power is the limit of the device in watts, without its host.
Units compute tiles of products: streaming multiprocessors, compute units. No datasheet is public for
a row in *italics*, whose numbers are assumed. All prices are assumed, in USD per hour: {PRICE_SOURCE}.
`--` stands for a number that was not published.
"""
_USABLE = """
A process can allocate a share of the memory:
"""
_SHARES = """
## What kernels reach

Large kernels reach a share of the peaks and of the memory bandwidth, which belongs to a generation of devices. So does
the host's time for a kernel. `flash-1` and `flash-2` are FlashAttention 1 and 2, `flash-3` cuDNN's fused attention in
Transformer Engine. *Ramp* is the sequence at which the last two reach half of their rate, and *backward* their rate
over that in a forward. The shares of memory and backward are fitted to published steps of all generations. Devices with
another power limit, such as GB300 with 1400 W, have other shares where they are measured.
"""
_LINKS = """
## Classes of links

Collectives reach a share of a link's datasheet bandwidth, and a hop with the protocol LL has a start-up. *Sums in the
switch* is the share that NVLink SHARP reaches; *one way* that of collectives that add nothing up, where it is less.
"""
_LIBRARY = """
Protocols have a start-up of a hop relative to that of LL, inside of hosts and between, and a share of the bandwidth:
"""
_CONSTANTS = """
Constants of the library, in microseconds (us) or as shares:
"""
_PRESETS = """
## Presets

Bandwidths are in GB/s and one direction; `d` marks those of a datasheet, `a` assumed ones. Start-ups of messages are
assumed, each with a comment in its file. `--gpus` and `--hosts` add hosts where a preset has a network between them.
"""


def _cell(number: HardwareNumberWithOrigin | None, unit: float = 1) -> str:
    return "--" if number is None else f"{number.value / unit:.5g}"


def _device_row(device: DeviceSpec) -> list[str]:
    emphasis = "*" if device.memory_bytes.origin == "assumed" else ""
    return [
        f"{emphasis}{device.name}{emphasis}",
        *(_cell(device.peak_flops.get(dtype), 1e12) for dtype in DTYPES),
        _cell(device.memory_bytes, 2**30),
        _cell(device.bandwidth_Bps, 1e9),
        _cell(device.power_W),
        _cell(device.price_per_hour),
        str(device.units),
        f"{device.link} {_cell(device.link_Bps, 1e9)}",
    ]


def _share_rows() -> list[list[str]]:
    rows = []
    for generation in dict.fromkeys(device.generation for device in DEVICES):
        shares = shares_of(generation)
        products = (f"{shares.products[bits]:g}" for bits in ("32", "16", "8", "4"))
        attention = ", ".join(f"{share:g} ({kind})" for kind, share in shares.attention.items())
        numbers = shares.attention_ramp, shares.attention_backward, shares.memory, shares.launch_s * 1e6
        rows.append([generation, *products, attention, *(f"{each:g}" for each in numbers), shares.origin])
    return rows


def _overheads() -> str:
    shares = shares_of("Hopper")
    return (
        f"The same for all generations, and fitted to published steps of all: a tile of a product takes as long as "
        f"{shares.tile_overhead:g} more elements\nof the inner dimension; the exponential of a score as long as "
        f"{shares.head_overhead:g} more features of a head; and the shorter of arithmetic and memory traffic\nof a "
        f"product adds {shares.exposed_memory:.0%} of its time to the longer. The ramp of `flash-1` is "
        f"{shares.early_attention_ramp:g}.\n"
    )


def _usable_rows() -> list[list[str]]:
    names = defaultdict[HardwareNumberWithOrigin, list[str]](list)
    for device in DEVICES:
        names[device.usable_share].append(device.name)
    return [[f"{share.value:g}", f"{share.origin}: {share.source}", ", ".join(each)] for share, each in names.items()]


def _library_tables() -> tuple[str, str, str, str]:
    protocols = [
        [f"`{name}`", *(f"{each:g}" for each in constants[:3]), constants.origin]
        for name, constants in PROTOCOLS.items()
    ]
    constants = [  # No share is as small as a time
        [name, f"{each.value * 1e6:g} us" if each.value < 0.01 else f"{each.value:g}", each.origin]
        for name, each in LIBRARY.items()
    ]
    head = ["protocol", "inside", "between", "share", "origin"]
    tables = markdown_table(head, protocols), markdown_table(["constant", "value", "origin"], constants)
    return _LIBRARY, tables[0], _CONSTANTS, tables[1]


_HOSTS = """
## Hosts

Masters and moments that do not lie on the devices are in the memory of the host, or on its disk. The memory is that of
all devices of a host together, the link that of one device in one direction. *Updates* are the bytes of masters and
moments that all cores together update in a second: 0.3 of the datasheet's bandwidth of the memory, since 28 bytes
travel for 12 of them, and 70 % of the bandwidth is assumed to be reached. Channels and speeds of modules are assumed
too, as the comments of the presets say, and so are the speeds of disks. Other presets have no section `[host]`.

Memory, processors and numbers of disks are those of NVIDIA's user guides and reference architectures of DGX B200, H200
and H100, and of its announcements of DGX A100 (320 GB and 640 GB), DGX-2 and DGX-1. `gh200` is a node of four GH200 as
in JUPITER (120 GB at 512 GB/s for each), where a host with one GH200 has 480 GB at 384 GB/s, as GB200 is assumed to.
"""


def _host_rows() -> list[list[str]]:
    presets, rows = cluster_presets(), list[list[str]]()
    for name in (each for each in presets if each not in PRESET_ALIASES):
        host = settings_from_dict(ClusterSettings, tomllib.loads(presets[name]), name).host
        if host is not None:
            disk = "--" if host.scratch_Bps is None else _speed(host.scratch_Bps.with_origin)
            figures = (_speed(each.with_origin) for each in (host.memory_bytes, host.link_Bps, host.update_Bps))
            rows.append([f"`{name}`", *figures, str(host.cores), disk])
    return rows


def _speed(number: HardwareNumberWithOrigin) -> str:
    return f"{number.value / 1e9:g} {number.origin[0]}"


def _preset_row(name: str, text: str) -> list[str]:
    settings = settings_from_dict(ClusterSettings, tomllib.loads(text), name)
    inside, between = settings.inside, settings.between
    names = ", ".join(f"`{each}`" for each in (name, *(a for a, preset in PRESET_ALIASES.items() if preset == name)))
    row = [
        names,
        settings.device,
        str(settings.devices_per_host),
        inside.kind,
        _speed(inside.bandwidth_Bps.with_origin),
    ]
    if between is None:
        return [*row, "--", "--", "--", "--"]
    nics = "--" if isinstance(between, TorusNetworkSettings) else str(between.nics)
    rails = oversubscription = "--"
    if isinstance(between, SpineLeafNetworkSettings):
        rails, oversubscription = "yes" if between.rails else "no", f"{between.oversubscription:g}"
    return [*row, f"{nics} x {_speed(between.bandwidth_Bps.with_origin)}", between.kind, rails, oversubscription]


def page() -> str:
    """The page, from the tables of the code."""
    heads = ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
    head = ["device", *heads, "memory", "bandwidth", "W", "USD", "units", "links"]
    devices = markdown_table(head, [_device_row(device) for device in DEVICES])
    usable = markdown_table(["share", "origin", "devices"], _usable_rows())
    head = [
        "generation",
        "32 bits",
        "16 bits",
        "8 bits",
        "4 bits",
        "fused attention",
        "ramp",
        "backward",
        "memory",
        "launch us",
    ]
    head.append("origin")
    shares = markdown_table(head, _share_rows())
    links = markdown_table(
        ["class", "share", "hop us", "sums in the switch", "one way", "origin"],
        [
            [
                f"`{name}`",
                f"{link.efficiency:g}",
                f"{link.hop_s * 1e6:g}",
                f"{link.in_switch_efficiency or '--'}",
                f"{link.one_way_efficiency or '--'}",
                link.origin,
            ]
            for name, link in LINK_CLASSES.items()
        ],
    )
    presets = cluster_presets()
    rows = [_preset_row(name, text) for name, text in presets.items() if name not in PRESET_ALIASES]
    head = ["name", "device", "on a host", "inside", "GB/s", "NICs and GB/s", "between", "rails", "oversubscription"]
    tables = (
        _INTRODUCTION,
        _DEVICES,
        devices,
        _USABLE,
        usable,
        _SHARES,
        shares,
        _overheads(),
        _LINKS,
        links,
        *_library_tables(),
        _PRESETS,
        markdown_table(head, rows),
        _HOSTS,
        markdown_table(["name", "memory GB", "link GB/s", "updates GB/s", "cores", "disk GB/s"], _host_rows()),
    )
    return "\n".join([part.strip("\n") + "\n" for part in tables])
