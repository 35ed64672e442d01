"""Classes and speeds of the links that a row of published times states in words, or else those of its device.

Words such as `NVLink4 (400 GB/s cap)`, `PCIe Gen5`, `4x200Gb HDR IB`, `RoCE v2 400G`, `EFA v2` or `Slingshot-11` are
read by kind, count and speed. An `InputError` says what is missing where neither words nor device give a link.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from motet.collectives.cost.csv_rows import Row, optional_number
from motet.collectives.cost.vendor_library import rdma_class
from motet.core.errors import InputError

RACK_DEVICES = 72  # The most devices that switches of NVLink join over hosts


class StatedLink(NamedTuple):
    """A class of links, and the datasheet bandwidth of a device in one direction."""

    name: str
    bandwidth_Bps: float  # noqa: N815 - a unit


# The links of devices in the order in which they are tried: datasheets, but for MI2xx, whose value is assumed
_DEVICES = (
    (r"T4\b|RTX 20|Titan|P40|P4\b|M40|(V100|P100)\W?PCIe", "PCIe", 16e9),
    (r"RTX 50|RTX 6000D|RTX PRO|(H100|H200)\W?(PCIe|NVL)", "PCIe", 64e9),
    (r"PCIe|RTX|GTX|L4|GB10|A10G?\b|A16|A2\b|A30\b|A40\b|A[456]000", "PCIe", 32e9),
    (r"P100", "NVLink2", 80e9),
    (r"V100", "NVLink2", 150e9),
    (r"A800", "NVLink3", 200e9),
    (r"A100", "NVLink3", 300e9),
    (r"H800", "NVLink4", 200e9),
    (r"H100|H200|H20\b|GH200", "NVLink4", 450e9),
    (r"B200|B300", "NVLink5", 900e9),
    (r"MI100|MI2\d\d", "xGMI", 150e9),
    (r"MI3[0-4]\d|MI325", "xGMI", 448e9),
    (r"MI35\d", "xGMI", 538e9),
)
_INSIDE_BPS = {"NVLink2": 150e9, "NVLink3": 300e9, "NVLink4": 450e9, "NVLink5": 900e9, "xGMI": 448e9, "PCIe": 32e9}
_PCIE_BPS = {"2": 8e9, "3": 16e9, "4": 32e9, "5": 64e9, "6": 128e9}
# Bridges join parts of PCIe in pairs: datasheets
_BRIDGES = (
    (r"RTX 2080|Titan RTX|Quadro RTX", "NVLink2", 50e9),
    (r"A40\b|RTX 3090|A[456]000", "NVLink3", 56e9),
    (r"A30\b", "NVLink3", 100e9),
    (r"A800", "NVLink3", 200e9),
    (r"A100", "NVLink3", 300e9),
    (r"H200", "NVLink4", 450e9),
    (r"H[18]00", "NVLink4", 300e9),
)
# Through host memory between sockets: written, copied and read again; two hosts of RTX 4090 reach a ninth of PCIe
_HOST_MEMORY_PASSES = 6
_NETWORKS = (
    (r"EFA", "EFA"),
    (r"TCPXO|FasTrak", "TCPXO"),
    (r"TCPX", "TCPX"),
    (r"Slingshot|Cassini|\bCXI\b", "Slingshot"),
    (r"IPoIB|socket|\bTCP\b|gVNIC|\bENA\b", "Socket"),
    (r"RoCE|RDMA|\bIB\b|Infini|NDR|XDR|HDR|EDR|FDR|mlx|CX-?\d|ConnectX|BlueField|Spectrum|Thor|Pollara|HCA", "RDMA"),
    (r"Ethernet|\dGbE|\dGE\b", "Socket"),
)
_GENERATIONS = {"GDR": 1600, "XDR": 800, "NDR": 400, "HDR": 200, "EDR": 100, "FDR": 56, "QDR": 40}  # Gbit/s of a card
_USUAL_GBPS = {"TCPXO": 200, "TCPX": 100, "Slingshot": 200}  # For each device, unless stated


def inside_link(row: Row, devices: int) -> StatedLink:
    """The links inside of a host: as stated, or by the device; a host of one device needs none."""
    text, device = row["intra_link"], row["gpu"]
    by_device = _first_link(_DEVICES, device)
    stated = re.search(r"NVLink\s*-?v?\s*([2-5])?|(PCI\W?e)|(xGMI|Infinity)", text, re.IGNORECASE)
    if stated is None:
        link = by_device
    elif not stated[0].lower().startswith("nvlink"):
        link = _of_class("PCIe" if stated[2] else "xGMI", by_device, text)
    else:
        bridge = _first_link(_BRIDGES, device) if by_device and by_device.name == "PCIe" else None
        by_generation = _of_class(f"NVLink{stated[1] or 4}", by_device, text)
        link = bridge or (by_generation if stated[1] or not by_device else by_device)
    speed = _stated_bps(text, link.name if link else "PCIe")
    if link is None and speed is None and devices > 1:
        raise InputError(
            f"row {row['id']}: gpu {device!r} with link {text!r} is unknown; give a device such as V100, A100, A800, "
            "H100, H200, H20, B200, GB200, MI300X, MI250X, L40S, RTX 4090, or a link such as NVLink4, PCIe5 or 64 GB/s"
        )
    link = link or StatedLink("PCIe", _INSIDE_BPS["PCIe"])
    passes = _HOST_MEMORY_PASSES if re.search(r"no P2P|host SHM|host memory", text, re.IGNORECASE) else 1
    return StatedLink(link.name, (speed or link.bandwidth_Bps) / passes)


def _first_link(table: Sequence[tuple[str, str, float]], device: str) -> StatedLink | None:
    return next((StatedLink(*link[1:]) for link in table if re.search(link[0], device, re.IGNORECASE)), None)


def _of_class(name: str, by_device: StatedLink | None, text: str) -> StatedLink:
    if name == "PCIe":
        generation = re.search(r"PCI\W?e\W*(?:gen\W?)?([2-6])|gen\W?([2-6])", text, re.IGNORECASE)
        if generation:
            return StatedLink(name, _PCIE_BPS[generation[1] or generation[2]])
    elif "bridge" in text.lower():
        return StatedLink(name, 300e9)
    matches = by_device is not None and by_device.name == name
    return by_device if by_device and matches else StatedLink(name, _INSIDE_BPS[name])


def _stated_bps(text: str, name: str) -> float | None:
    """A bandwidth in words; makers count both directions, unless the words say otherwise."""
    links = re.search(r"([0-9]+)\s*links", text)
    if links and name.startswith("NVLink"):
        return int(links[1]) * (50e9 if name == "NVLink5" else 25e9)
    speed = re.search(r"(?:([0-9]+)\s*x\s*)?([0-9]+(?:\.[0-9]+)?)\s*([GT])B(?:/s|ps)", text)
    if speed is None or "per link" in text:
        return None
    one_way = name == "PCIe" or re.search(r"one.?way|unidir|(per|each|one) (direction|way)", text, re.IGNORECASE)
    return int(speed[1] or 1) * float(speed[2]) * (1e12 if speed[3] == "T" else 1e9) / (1 if one_way else 2)


def is_rack(row: Row, nodes: int) -> bool:
    """Whether switches of NVLink join the hosts."""
    text = row["inter_link"].strip()
    implied = text in ("", "-") and re.search(r"GB[23]00", row["gpu"]) is not None
    return nodes > 1 and (implied or re.search(r"NVLink|NVL\d|NVSwitch", text, re.IGNORECASE) is not None)


def network_link(row: Row, devices: int) -> StatedLink:
    """The links between hosts, by kind, and the share of a device: as stated, or by cards and their speed."""
    text = row["inter_link"]
    kind = next((name for words, name in _NETWORKS if re.search(words, text, re.IGNORECASE)), None)
    stated = optional_number(row, "nominal_inter_GBps_per_gpu")
    bandwidth = stated * 1e9 if stated else _network_bps(text, kind, row["gpu"], devices=devices)
    if bandwidth is None:
        raise InputError(
            f"row {row['id']}: nominal_inter_GBps_per_gpu is empty and inter_link {text!r} says no speed; "
            "give the NIC's GB/s for each GPU, or a link such as 8x400Gb IB NDR"
        )
    is_fast = rdma_class(bandwidth) == "RDMA400"
    name = {"RDMA": rdma_class(bandwidth), "EFA": "EFA400" if is_fast else "EFA"}.get(kind or "RDMA", kind)
    return StatedLink(name or rdma_class(bandwidth), bandwidth)


def _network_bps(text: str, kind: str | None, device: str, *, devices: int) -> float | None:
    if kind == "EFA" and not re.search(r"[0-9]\s*G", text):
        return 50e9 if re.search(r"v[23]|H100|H200|B200|B300", f"{text} {device}") else 6.25e9
    generation = next((speed for name, speed in _GENERATIONS.items() if name in text.upper()), None)
    speed = re.search(r"([0-9]+(?:\.[0-9]+)?)\s*([GT])", text)
    gbps = float(speed[1]) * (1000 if speed[2] == "T" else 1) if speed else generation
    if gbps is None:
        usual = _USUAL_GBPS.get(kind or "")
        return usual / 8 * 1e9 if usual else None
    if speed and re.search(r"[0-9]\s*[GT]B(/s|ps)", text):
        gbps *= 8
    cards = re.search(r"([0-9]+)\s*x", text)
    each = re.search(r"(per|/|each)\s*(GPU|device|GCD)", text, re.IGNORECASE)
    # Without a count, fast cards are one for each device, and others one for each host.
    count = devices if each else int(cards[1]) if cards else devices if gbps >= 200 else 1
    return gbps * count / 8 * 1e9 / devices


_ONE_PROCESS = r"-g\s*(?:[2-9]|1[0-9])\b|\b(?:1|one|single) process\b(?! per| for each)"


def one_process(row: Row) -> bool:
    """Whether the row says that one process drives all devices of a host."""
    text = " ".join(row.get(name, "") for name in ("notes", "source", "algo"))
    return re.search(_ONE_PROCESS, text) is not None and "mpirun" not in text


def reduces_in_network(row: Row) -> bool:
    """Whether the row says that switches between hosts add up."""
    text = row["algo"].lower()
    off = re.search(r"(no|without|non) ?-?(sharp|collnet)|(sharp|collnet)\W*(off|disabled)|collnet_enable=0", text)
    return off is None and re.search(r"(?<!nvlink )(?<!nvls )(?<!nvls-)\bsharp|collnet", text) is not None
