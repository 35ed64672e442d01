"""Published curves of nccl-tests and rccl-tests, and how far the predicted times are from them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from motet.collectives.cost import published_links
from motet.collectives.cost.alpha_beta import bus_bandwidth_factor
from motet.collectives.cost.csv_rows import Row, check_columns, count, number, read_rows
from motet.collectives.cost.group_shapes import GroupPlacement
from motet.collectives.cost.vendor_library import FabricSpec, VendorCosts
from motet.core.errors import InputError, check_input

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
    algorithms: tuple[str, ...]  # As stated; none if the library chose

    def seconds(self, costs: dict[FabricSpec, VendorCosts]) -> float:
        """The predicted time; `costs` keeps what rows of one fabric share."""
        known = costs.setdefault(self.fabric, VendorCosts(self.fabric))
        possible = {shape.algorithm for shape in known.shapes(self.collective, self.placement)}
        algorithms = tuple(name for name in self.algorithms if name in possible)
        return known.time(self.collective, self.size_bytes, self.placement, algorithms=algorithms).seconds


def question_of(row: Row) -> VendorQuestion:
    """The facts of a row; an `InputError` says what cannot be derived."""
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
    in_rack = max(1, published_links.RACK_DEVICES // per_node) if published_links.is_rack(row, nodes) else 1
    return GroupPlacement(nodes * per_node, min(nodes, in_rack) * per_node)


def _fabric(row: Row) -> FabricSpec:
    _, per_node = _hosts_and_devices(row)
    placement = _placement(row)
    inside = published_links.inside_link(row, per_node)
    between = inside if placement.hosts == 1 else published_links.network_link(row, per_node)
    is_switched = per_node > 2 and not re.search(r"GH200|PCIe|bridge", f"{row['gpu']} {row['intra_link']}")
    has_switch = inside.name in ("NVLink4", "NVLink5") and (is_switched or placement.ranks_per_host > per_node)
    library: Literal["nccl", "rccl"] = "rccl" if inside.name == "xGMI" else "nccl"
    return FabricSpec(
        *inside,
        *between,
        placement.ranks_per_host,
        has_switch,
        library,
        in_network_reduction=published_links.reduces_in_network(row),
        devices_per_process=per_node if published_links.one_process(row) else 1,
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
