"""Published curves of nccl-tests and rccl-tests, and the errors of the predicted times.

Classes and speeds of the links that a row of published times states in words, or else those of its device.

Words such as `NVLink4 (400 GB/s cap)`, `PCIe Gen5`, `4x200Gb HDR IB`, `RoCE v2 400G`, `EFA v2` or `Slingshot-11` are
read by kind, count and speed. An `InputError` names the link that neither words nor device give.

Reads files of published measurements: rows of text with one clear error for a row that cannot be read.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from motet.collectives.cost.alpha_beta import bus_bandwidth_factor
from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts, rdma_class
from motet.collectives.cost.group_shapes import GroupPlacement
from motet.core.errors import InputError, check_input, convert_os_errors

Row = Mapping[str, str]


class CsvRow(dict[str, str]):
    """The values of a row by column, and the number of its line in the file."""

    line: int = 0


def read_rows(path: Path) -> list[CsvRow]:
    """The rows of a CSV file with a header. A row without an `id` gets the number of its line."""
    with (
        convert_os_errors(f"read {path}", "name a file that exists and can be read"),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        try:
            reader = csv.DictReader(file, restval="", skipinitialspace=True)
            reader.fieldnames = _column_names(path, reader.fieldnames or ())
            rows = [_row_of_line(path, row, reader) for row in reader]
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise InputError(f"{path} is not UTF-8 text: it has the byte 0x{byte:02x}; save it as UTF-8") from error
        except csv.Error as error:
            raise InputError(f"{path} is not a CSV file: {error}; give a file with a header and rows") from error
    check_input(bool(rows), f"{path} has no rows; give a file with a header and at least one row")
    return rows


def _column_names(path: Path, header: Sequence[str]) -> list[str]:
    names = [name.strip() for name in header]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    check_input(twice is None, f"{path} has the column {twice} more than once; keep one of them")
    return names


def _row_of_line(path: Path, row: Mapping[str | None, Any], reader: "csv.DictReader[str]") -> CsvRow:
    """One row without the spaces around its values; more values than columns mean that a comma is not quoted."""
    more, count = row.get(None, ()), len(reader.fieldnames or ())
    check_input(
        not any(value.strip() for value in more),
        f"{path}, line {reader.line_num}: {count + len(more)} values for {count} columns; quote values with commas, or "
        "correct the header",
    )
    values = CsvRow({name: value.strip() for name, value in row.items() if name is not None})
    values["id"], values.line = values.get("id") or f"{reader.line_num}", reader.line_num
    return values


def check_columns(path: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Check that the file has all columns."""
    missing = [name for name in names if name not in rows[0]]
    check_input(not missing, f"{path} has no column {', '.join(missing)}; its columns are {', '.join(rows[0])}")


def number(row: Row, name: str) -> float:
    """The number in a column."""
    value = optional_number(row, name)
    if value is None:
        raise InputError(f"row {row.get('id', '')}: column {name} is empty; give a number")
    return value


def optional_number(row: Row, name: str) -> float | None:
    """The number in a column that may be empty; every number in these files is 0 or more, and finite."""
    text = row.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"row {row.get('id', '')}: {name} = {text!r} is not a number; give one") from error
    check_input(0 <= value < 1e18, f"row {row.get('id', '')}: {name} = {text} is out of range; give 0 to 1e18")
    return value


def count(row: Row, name: str, default: int | None = None) -> int:
    """A whole number of at least 1, or `default` where the column is empty."""
    value = optional_number(row, name)
    if value is None and default is not None:
        return default
    value = number(row, name)
    text = f"row {row.get('id', '')}: {name} = {row[name]}"
    check_input(value >= 1 and value == int(value), f"{text} is not a count; give a whole number of at least 1")
    return int(value)


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
# Host memory between sockets: written, copied and read again; two hosts of RTX 4090 reach a ninth of PCIe
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
        link = _link_of_class("PCIe" if stated[2] else "xGMI", by_device, text)
    else:
        bridge = _first_link(_BRIDGES, device) if by_device and by_device.name == "PCIe" else None
        by_generation = _link_of_class(f"NVLink{stated[1] or 4}", by_device, text)
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


def _link_of_class(name: str, by_device: StatedLink | None, text: str) -> StatedLink:
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
            f"row {row['id']}: nominal_inter_GBps_per_gpu is empty and inter_link {text!r} has no speed; "
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


COLUMNS = tuple(
    word
    for line in (
        "id source collective gpu nodes gpus_per_node ranks intra_link inter_link nominal_inter_GBps_per_gpu",
        "algo bytes time_us busbw_GBps quality",
    )
    for word in line.split()
)
# Names without separators, as nccl-tests and others write them
_COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "allgatherv": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoallv": "all-to-all",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "send-receive",
    "sendreceive": "send-receive",
    "p2p": "send-receive",
}
# Words of the algorithm -> the algorithms among which the library chose
_RESTRICTED = (
    (r"\brings?\b", ("ring",)),
    (r"nvls\W?tree", ("nvls-tree", "tree", "ring")),
    (r"\btree", ("tree", "ring")),
)
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
        """The bus bandwidth of nccl-tests if the collective takes this long."""
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
    reasons = "; ".join(f"{rows} with {reason}" for reason, rows in skipped.items())
    check_input(times, f"{path} has no row that can be predicted ({reasons}); correct at least one")
    return PublishedCurves(tuple(times), dict(skipped))


def _cannot_be_read(row: Row) -> str | None:
    try:
        question_of(row)
        number(row, "time_us")
    except InputError as error:
        return str(error).partition(": ")[2].partition(";")[0] or str(error)
    return None


@dataclass(frozen=True)
class VendorQuestion:
    """The facts of a row on which its prediction depends."""

    fabric: FabricSpec
    collective: str
    placement: GroupPlacement
    size_bytes: float
    algorithms: tuple[str, ...]  # Stated algorithms; none if the library chose

    def seconds(self, costs: dict[FabricSpec, VendorCosts]) -> float:
        """The predicted time; `costs` keeps the costs that rows of one fabric share."""
        known = costs.setdefault(self.fabric, VendorCosts(self.fabric))
        possible = {shape.algorithm for shape in known.shapes(self.collective, self.placement)}
        algorithms = tuple(name for name in self.algorithms if name in possible)
        return known.time(self.collective, self.size_bytes, self.placement, algorithms=algorithms).seconds


def question_of(row: Row) -> VendorQuestion:
    """The facts of a row; an `InputError` names the missing fact."""
    stated = next((names for words, names in _RESTRICTED if re.search(words, row["algo"], re.IGNORECASE)), ())
    return VendorQuestion(_fabric(row), _collective(row), _placement(row), number(row, "bytes"), stated)


def _predicted(row: Row, costs: dict[FabricSpec, VendorCosts]) -> PublishedTime:
    question = question_of(row)
    fabric, placement = question.fabric, question.placement
    network = fabric.inter_link if placement.hosts > 1 else fabric.intra_link
    times = number(row, "time_us") * 1e-6, question.seconds(costs)
    facts = row["id"], row["source"], question.collective, row["gpu"], network, placement.ranks, row["quality"].strip()
    return PublishedTime(*facts, question.size_bytes, *times)


def _collective(row: Row) -> str:
    name = re.sub(r"[^a-z]|perf$", "", row["collective"].lower())
    known = ", ".join(sorted(set(_COLLECTIVES.values())))
    check_input(
        name in _COLLECTIVES, f"row {row['id']}: collective {row['collective']!r} is unknown; give one of {known}"
    )
    return _COLLECTIVES[name]


def _hosts_and_devices(row: Row) -> tuple[int, int]:
    """Hosts and devices of each; an empty column follows from the two others."""
    stated = {name: row[name].strip() for name in ("nodes", "gpus_per_node", "ranks")}
    nodes = count(row, "nodes") if stated["nodes"] or not all(list(stated.values())[1:]) else 0
    per_node = count(row, "gpus_per_node") if stated["gpus_per_node"] or not (nodes and stated["ranks"]) else 0
    nodes = nodes or max(1, count(row, "ranks") // per_node)
    per_node = per_node or max(1, count(row, "ranks") // nodes)
    ranks = count(row, "ranks", nodes * per_node)
    text = f"row {row['id']}: ranks = {ranks} are not nodes x gpus_per_node = {nodes} x {per_node}"
    check_input(ranks == nodes * per_node, f"{text}; correct one of them")
    check_input(ranks > 1, f"row {row['id']}: ranks = 1 exchange nothing; give 2 or more")
    return nodes, per_node


def _placement(row: Row) -> GroupPlacement:
    nodes, per_node = _hosts_and_devices(row)
    in_rack = max(1, RACK_DEVICES // per_node) if is_rack(row, nodes) else 1
    return GroupPlacement(nodes * per_node, min(nodes, in_rack) * per_node)


def _fabric(row: Row) -> FabricSpec:
    _, per_node = _hosts_and_devices(row)
    placement = _placement(row)
    inside = inside_link(row, per_node)
    between = inside if placement.hosts == 1 else network_link(row, per_node)
    is_switched = per_node > 2 and not re.search(r"GH200|PCIe|bridge", f"{row['gpu']} {row['intra_link']}")
    has_switch = inside.name in ("NVLink4", "NVLink5") and (is_switched or placement.ranks_per_host > per_node)
    library: Literal["nccl", "rccl"] = "rccl" if inside.name == "xGMI" else "nccl"
    return FabricSpec(
        *inside,
        *between,
        placement.ranks_per_host,
        has_switch,
        library,
        in_network_reduction=reduces_in_network(row),
        devices_per_process=per_node if one_process(row) else 1,
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
