"""Published curves of nccl-tests and rccl-tests, and how far the predicted times are from them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from motet.collectives.cost.alpha_beta import bus_bandwidth_factor
from motet.collectives.cost.csv_rows import Row, check_columns, count, number, optional_number, read_rows
from motet.collectives.cost.vendor_library import FabricSpec, GroupPlacement, VendorCosts, rdma_class
from motet.core.errors import InputError, check_input

COLUMNS = tuple(
    word
    for line in (
        "id source collective gpu nodes gpus_per_node ranks intra_link inter_link nominal_inter_GBps_per_gpu",
        "algo bytes time_us busbw_GBps quality",
    )
    for word in line.split()
)
_COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "send-receive",
    "send_recv": "send-receive",
}
# Datasheet bandwidth of a device in one direction by the class of its links, and of parts with less.
_INSIDE_BPS = {"NVLink2": 150e9, "NVLink3": 300e9, "NVLink4": 450e9, "NVLink5": 900e9, "xGMI": 538e9, "PCIe": 32e9}
_LESS = {"A800": 200e9, "H800": 200e9}
_PCIE_BPS = {"3": 16e9, "4": 32e9, "5": 64e9}
_DEVICES = (
    ("PCIE|RTX|L4|GB10|T4", "PCIe"),
    ("P100|V100", "NVLink2"),
    ("A100|A800|A30", "NVLink3"),
    ("H100|H200|H800|H20|GH200", "NVLink4"),
    ("B200|B300|GB200|GB300", "NVLink5"),
    ("MI[23]", "xGMI"),
)
_NETWORKS = (
    ("EFA", "EFA"),
    ("TCPX|FasTrak", "TCPXO"),
    ("IPoIB|socket|TCP|Ethernet without", "Socket"),
)
_RESTRICTED = (("ring", ("ring",)), ("nvlstree", ("nvls-tree", "tree", "ring")), ("tree", ("tree", "ring")))
LARGE, MIDDLE = 16 * 2**20, 2**20


@dataclass(frozen=True)
class PublishedTime:
    """One measured time, and the predicted one."""

    curve: str
    source: str
    collective: str
    device: str
    network: str
    ranks: int
    quality: str
    size_bytes: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The absolute relative error."""
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def size_class(self) -> str:
        """`large` from 16 MiB, `middle` from 1 MiB, else `small`."""
        return "large" if self.size_bytes >= LARGE else "middle" if self.size_bytes >= MIDDLE else "small"

    def bus_bandwidth(self, seconds: float) -> float:
        """The bus bandwidth of nccl-tests if the collective takes so long."""
        return float(bus_bandwidth_factor(self.collective, self.ranks)) * self.size_bytes / seconds


@dataclass(frozen=True)
class PublishedCurves:
    """All predicted rows of a file, and how many were skipped for which reason."""

    times: tuple[PublishedTime, ...]
    skipped: dict[str, int]


def read_published_curves(path: Path) -> PublishedCurves:
    """Predict every row of a file. A row of quality A that cannot be predicted is an error; others are skipped."""
    rows = read_rows(path)
    check_columns(path, rows, COLUMNS)
    times, skipped, costs = list[PublishedTime](), defaultdict[str, int](int), dict[FabricSpec, VendorCosts]()
    for row in rows:
        if row["quality"].strip() != "A" and (reason := _cannot_be_read(row)):
            skipped[reason] += 1
            continue
        if number(row, "time_us") == 0 or number(row, "bytes") == 0:
            skipped["a time or a size of 0"] += 1
            continue
        times.append(_predicted(row, costs))
    return PublishedCurves(tuple(times), dict(skipped))


def _cannot_be_read(row: Row) -> str | None:
    try:
        _fabric(row)
        _placement(row)
        number(row, "time_us"), number(row, "bytes")
    except InputError as error:
        return str(error).partition(": ")[2].partition(";")[0] or str(error)
    return None


def _predicted(row: Row, costs: dict[FabricSpec, VendorCosts]) -> PublishedTime:
    collective, fabric, placement = _collective(row), _fabric(row), _placement(row)
    known = costs.setdefault(fabric, VendorCosts(fabric))
    size = number(row, "bytes")
    stated = row["algo"].lower()
    algorithms = next((names for word, names in _RESTRICTED if word in stated.replace(" ", "")), ())
    if collective != "all-reduce" or placement.hosts == 1:
        algorithms = algorithms if algorithms == ("ring",) else ()
    if collective not in ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce"):
        algorithms = ()
    seconds = known.time(collective, size, placement, algorithms=algorithms).seconds
    network = fabric.inter_link if placement.hosts > 1 else fabric.intra_link
    times = number(row, "time_us") * 1e-6, seconds
    facts = row["id"], row["source"], collective, row["gpu"], network, placement.ranks, row["quality"].strip()
    return PublishedTime(*facts, size, *times)


def _collective(row: Row) -> str:
    name = row["collective"].strip().lower().replace("-", "_")
    known = ", ".join(_COLLECTIVES)
    check_input(
        name in _COLLECTIVES, f"row {row['id']}: collective {row['collective']!r} is unknown; give one of {known}"
    )
    return _COLLECTIVES[name]


def _placement(row: Row) -> GroupPlacement:
    nodes, per_node, ranks = count(row, "nodes"), count(row, "gpus_per_node"), count(row, "ranks")
    text = f"row {row['id']}: ranks = {ranks} are not nodes x gpus_per_node = {nodes} x {per_node}"
    check_input(ranks == nodes * per_node, f"{text}; correct one of them")
    return GroupPlacement(ranks, per_node)


def _fabric(row: Row) -> FabricSpec:
    inside = _inside_link(row)
    text = row["intra_link"]
    pcie = re.search(r"PCIe\s*gen?\s*([345])|PCIe([345])", text, re.IGNORECASE)
    speed = next((bps for part, bps in _LESS.items() if part in row["gpu"]), _INSIDE_BPS[inside])
    speed = _PCIE_BPS[pcie[1] or pcie[2]] if inside == "PCIe" and pcie else speed
    if "no P2P" in text:  # Through host memory: written and read again
        speed /= 4
    nodes = count(row, "nodes")
    between = _nic_bps(row) if nodes > 1 else speed
    stated = (name for words, name in _NETWORKS if re.search(words, row["inter_link"], re.IGNORECASE))
    network = next(stated, rdma_class(between if nodes > 1 else 0.0))
    has_switch = inside in ("NVLink4", "NVLink5") and count(row, "gpus_per_node") > 2
    library: Literal["nccl", "rccl"] = "rccl" if inside == "xGMI" else "nccl"
    return FabricSpec(inside, speed, network, between, count(row, "gpus_per_node"), has_switch, library)


def _inside_link(row: Row) -> str:
    """The class of the links inside of a host: as stated, or by the device."""
    stated = re.search(r"NVLink\s*-?([2345])|(PCIe)|(xGMI|Infinity)", row["intra_link"], re.IGNORECASE)
    if stated:
        return f"NVLink{stated[1]}" if stated[1] else "PCIe" if stated[2] else "xGMI"
    for words, link in _DEVICES:
        if re.search(words, row["gpu"], re.IGNORECASE):
            return link
    known = "V100, A100, A800, H100, H200, H800, H20, B200, B300, MI300X, L40S, RTX 4090"
    raise InputError(
        f"row {row['id']}: gpu {row['gpu']!r} with link {row['intra_link']!r} is unknown; give a device such as "
        f"{known}, or a link such as NVLink4 or PCIe5"
    )


def _nic_bps(row: Row) -> float:
    """The NIC's share of a device: as stated, or by cards and their speed."""
    stated = optional_number(row, "nominal_inter_GBps_per_gpu")
    if stated:
        return stated * 1e9
    cards = re.search(r"([0-9]+)\s*x\s*([0-9]+)\s*G", row["inter_link"])
    if cards:
        return int(cards[1]) * int(cards[2]) / 8 * 1e9 / count(row, "gpus_per_node")
    raise InputError(
        f"row {row['id']}: nominal_inter_GBps_per_gpu is empty and inter_link {row['inter_link']!r} says no speed; "
        "give the NIC's GB/s for each GPU, or a link such as 8x400Gb IB NDR"
    )


def _summary(times: Iterable[PublishedTime]) -> dict[str, Any]:
    errors = sorted(time.error for time in times)
    if not errors:
        return {"rows": 0, "median": None, "p90": None}
    return {"rows": len(errors), "median": median(errors), "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))]}


def curve_report(curves: PublishedCurves) -> dict[str, Any]:
    """Errors of quality A by size, of all rows, and of each curve with its peak bus bandwidth."""
    gated = [time for time in curves.times if time.quality == "A"] or list(curves.times)
    by_curve = defaultdict[str, list[PublishedTime]](list)
    for time in curves.times:
        by_curve[time.curve].append(time)
    parts = [_one_curve(times) for times in by_curve.values()]
    # A curve that ends below 16 MiB has no peak
    peaks = [part for part in parts if part["quality"] == "A" and part["largest_bytes"] >= LARGE]
    near = sum(abs(part["predicted_peak_Bps"] / part["measured_peak_Bps"] - 1) <= 0.08 for part in peaks)
    report: dict[str, Any] = {"rows": len(curves.times), "skipped": curves.skipped} | _without_rows(_summary(gated))
    for name in ("large", "middle", "small"):
        report[name] = _summary(time for time in gated if time.size_class == name)
    report["peaks"] = {"curves": len(peaks), "within_8_percent": near}
    report["all_qualities"] = _summary(curves.times)
    return report | {"curves": parts}


def _without_rows(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "rows"}


def _one_curve(times: Sequence[PublishedTime]) -> dict[str, Any]:
    first = times[0]
    return {
        "id": first.curve,
        "source": first.source,
        "collective": first.collective,
        "gpu": first.device,
        "network": first.network,
        "ranks": first.ranks,
        "quality": first.quality,
        "largest_bytes": max(time.size_bytes for time in times),
        "measured_peak_Bps": max(time.bus_bandwidth(time.measured_s) for time in times),
        "predicted_peak_Bps": max(time.bus_bandwidth(time.predicted_s) for time in times),
    } | _summary(times)


GROUPS: dict[str, Callable[[PublishedTime], str]] = {
    "collective": lambda time: time.collective,
    "gpu": lambda time: time.device,
    "network": lambda time: time.network,
    "source": lambda time: time.source,
}


def errors_by(curves: PublishedCurves, key: str) -> dict[str, dict[str, Any]]:
    """Errors of the rows of quality A by collective, GPU, network or source."""
    groups = defaultdict[str, list[PublishedTime]](list)
    for time in curves.times:
        if time.quality == "A":
            groups[GROUPS[key](time)].append(time)
    return {name: _summary(times) for name, times in sorted(groups.items())}
