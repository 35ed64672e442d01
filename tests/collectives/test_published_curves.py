"""`motet collectives validate`: published times of nccl-tests next to predicted ones."""

import csv
import json
import xml.etree.ElementTree as ET
from math import log10
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from motet.cli.collectives.collectives_commands import collectives_app
from motet.collectives.cost.cluster_fabric import FabricSpec, VendorCosts
from motet.collectives.cost.group_shapes import GroupPlacement
from motet.collectives.cost.published_curves import COLUMNS, curve_report, read_published_curves
from motet.collectives.draw.cost_plot import curve_panels_svg
from motet.core.errors import InputError
from refusals import refused

FILE = Path(__file__).parents[3] / "shared" / "validation" / "collectives.csv"
ROW = {
    "id": "x",
    "source": "somebody",
    "collective": "all_reduce",
    "gpu": "H100-SXM-80GB",
    "nodes": "2",
    "gpus_per_node": "8",
    "ranks": "16",
    "intra_link": "NVLink4",
    "inter_link": "8x400Gb IB NDR",
    "quality": "A",
    "bytes": str(2**30),
    "time_us": "4300",
}


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(collectives_app, ["validate", *words])


def test_the_report_counts_every_row_by_size(tmp_path: Path) -> None:
    sizes = ((1024, "31"), (4 * 2**20, "150"), (2**30, "4300"))
    rows = [ROW | {"bytes": str(size), "time_us": time} for size, time in sizes]
    rows += [ROW | {"id": "y", "quality": "C", "gpu": "unheard of", "intra_link": ""}, ROW | {"time_us": "0"}]
    path = write_rows(tmp_path / "a.csv", *rows)
    report = json.loads(run(str(path), "--json").output)
    assert [report[name]["rows"] for name in ("large", "middle", "small")] == [1, 1, 1]
    assert report["rows"] == 3 and sum(report["skipped"].values()) == 2
    assert "a time or a size of 0" in report["skipped"]
    (curve,) = report["curves"]
    costs = VendorCosts(FabricSpec("NVLink4", 450e9, "RDMA400", 50e9, 8, in_switch_inside=True))
    seconds = costs.time("all-reduce", 2**30, GroupPlacement(16, 8)).seconds
    assert report["large"]["median"] == pytest.approx(abs(seconds / 4.3e-3 - 1))
    assert curve["measured_peak_Bps"] == pytest.approx(15 / 8 * 2**30 / 4.3e-3)
    assert curve["predicted_peak_Bps"] == pytest.approx(15 / 8 * 2**30 / seconds)
    assert "from 16 MiB: 1 rows" in run(str(path)).output


def test_the_picture_has_a_panel_for_each_curve_of_quality_a(tmp_path: Path) -> None:
    sizes = [2**power for power in range(6, 30, 4)]
    rows = [ROW | {"id": name, "bytes": str(n), "time_us": str(50 + n / 2e5)} for name in ("x", "<y>") for n in sizes]
    rows += [ROW | {"id": "z", "quality": "B", "bytes": str(n)} for n in sizes] + [ROW | {"id": "one size"}]
    path = write_rows(tmp_path / "a.csv", *rows)
    result = run(str(path), "--svg", str(tmp_path / "a.svg"))
    assert result.exit_code == 0, result.output
    picture = ET.parse(tmp_path / "a.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    panels = [
        group for group in picture.iter(f"{name}g") if group.find(f"{name}path[@class='curve c1 heavy']") is not None
    ]
    assert len(panels) == 2
    circles = list(panels[0].iter(f"{name}circle"))
    assert len(circles) == sum(size >= 1024 for size in sizes)
    # Larger messages have more bandwidth: to the right, and up.
    positions = [(float(circle.get("cx") or 0), -float(circle.get("cy") or 0)) for circle in circles]
    assert positions == sorted(positions) and [x for _, x in positions] == sorted(x for _, x in positions)
    bandwidth = 15 / 8 * sizes[-1] / (50 + sizes[-1] / 2e5) * 1e6
    share = (log10(bandwidth) - 7) / 5
    assert positions[-1][1] == pytest.approx(-132 * (1 - share), abs=0.06)
    refused("no curve has 4 sizes", curve_panels_svg, read_published_curves(path).times[-1:], "none")


def test_a_hierarchy_of_two_hosts_is_as_fast_as_published() -> None:
    """1 GiB on two hosts of eight H100: published runs take 4.3 ms or less; whole steps one after the other take 8."""
    costs = VendorCosts(FabricSpec("NVLink4", 450e9, "RDMA400", 50e9, 8, in_switch_inside=True))
    assert 3.5e-3 < costs.time("all-reduce", 2**30, GroupPlacement(16, 8)).seconds < 5.2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "H9000", "intra_link": "light"}, "row x: gpu 'H9000' with link 'light' is unknown; give a device"),
        ({"collective": "all_swap"}, "row x: collective 'all_swap' is unknown; give one of all-gather"),
        ({"ranks": "15"}, "row x: ranks = 15 are not nodes x gpus_per_node = 2 x 8"),
        ({"time_us": "soon"}, "row x: time_us = 'soon' is not a number"),
        ({"bytes": "-4"}, "row x: bytes = -4 is out of range"),
        ({"inter_link": "some", "nominal_inter_GBps_per_gpu": ""}, "row x: nominal_inter_GBps_per_gpu is empty"),
    ],
)
def test_a_row_of_quality_a_must_be_predicted(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    refused(message.replace("(", r"\("), read_published_curves, write_rows(tmp_path / "a.csv", ROW | changes))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused("cannot read", read_published_curves, tmp_path / "none.csv")
    path = tmp_path / "other.csv"
    path.write_text("id,gpu\n1,H100\n")
    with pytest.raises(InputError, match="has no column source, collective"):
        read_published_curves(path)


@pytest.mark.skipif(not FILE.is_file(), reason=f"no published curves in {FILE.parent}")
def test_published_curves() -> None:
    report = curve_report(read_published_curves(FILE))
    assert report["large"]["median"] < 0.12 and report["middle"]["median"] < 0.2 and report["small"]["median"] < 0.3
    assert report["peaks"]["within_8_percent"] >= 0.8 * report["peaks"]["curves"]
