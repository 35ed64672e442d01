"""Cluster files: presets, sizes, figures with their origin, and a sentence for whatever is wrong."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from motet.cluster.cluster import TorusNetwork, cluster_from_dict, cluster_presets, load_cluster
from motet.cluster.cluster_settings import ClusterSettings, expected_max_load
from motet.cluster.device_specs import HardwareNumberWithOrigin as Number
from motet.cluster.device_specs import match_device
from motet.core.config_loading import _settings_classes_in
from motet.core.errors import InputError
from refusals import refused

PRESETS = dict.fromkeys(("laptop", "a100-pcie", "dgx-a100", "dgx-h100", "mi300x-8"), (8, 1))
PRESETS |= {"tpu-v4": (64, 1), "tpu-v5p": (64, 1), "gb200-nvl72": (72, 1)}
_EIGHT = ("rtx-2080-ti", "rtx-4090", "rtx-6000d", "rtx-pro-6000", "l40s", "h20", "mi250x", "mi325x", "mi350x", "gaudi2")
PRESETS |= dict.fromkeys((*_EIGHT, "v100-16gb"), (8, 1))
PRESETS |= {"gb10": (2, 2), "gh200": (4, 1), "dgx-2": (16, 1), "tpu-v5e": (256, 1), "tpu-v6e": (256, 1)}
_EIGHT = ("p100", "v100", "a100-40gb", "a800", "h100-500w", "h100-pcie", "h800", "h200", "b200", "b300")
PRESETS |= dict.fromkeys((*_EIGHT, "a100", "h100", "mi300x", "cpu"), (8, 1))
PRESETS |= dict.fromkeys(("gb300-nvl72", "gb200", "gb300"), (72, 1))
PRESETS |= {"two-hosts-200mbit": (4, 2), "ethernet-100g": (128, 32), "cpu-hosts": (32, 4)}


def tree_of(preset: str, **changes: Any) -> dict[str, Any]:
    """The values of a preset, changed: `inside__kind="mesh"`; None takes a key away."""
    tree = tomllib.loads(cluster_presets()[preset])
    for path, value in changes.items():
        *sections, key = path.split("__")
        node = tree
        for section in sections:
            node = node[section]
        node.pop(key, None)
        if value is not None:
            node[key] = value
    return tree


def test_presets_and_their_sizes() -> None:
    assert set(cluster_presets()) == set(PRESETS) and load_cluster("laptop").ranks == 8
    cluster = load_cluster("tpu-v4", dims=(8, 8, 16))
    assert isinstance(cluster.network, TorusNetwork)
    assert (cluster.network.dims, cluster.ranks, cluster.devices_per_host) == ((8, 8, 16), 1024, 1024)
    assert cluster.network.wrap == (True, True, True)
    refused("laptop: hosts = 2 need a section", load_cluster, "laptop", hosts=2)
    refused(r"laptop: dims = \[2, 2\] resizes a torus, and this cluster has none", load_cluster, "laptop", dims=(2, 2))
    refused("tpu-v4: devices_per_host = 0 must be at least 1", load_cluster, "tpu-v4", dims=(0, 8))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_cluster(name: str) -> None:
    cluster = load_cluster(name)
    assert (cluster.name, cluster.ranks, cluster.hosts) == (name, *PRESETS[name])
    links = [cluster.link(name) for dst in range(1, cluster.ranks) for name in cluster.route(0, dst)]
    # Mistaken units would be off by a thousand, or by eight.
    assert all(link.alpha_s.value <= 200e-6 for link in links)
    assert all(20e6 <= link.bandwidth_Bps.value <= 2e12 for link in links)
    assert 1e-13 < cluster.gamma_s_per_byte.value < 1e-9
    assert match_device(cluster.device) is not None


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"laptop", "cpu", "tpu-v4", "tpu-v5p"}))
def test_a_preset_grows_by_hosts(name: str) -> None:
    cluster = load_cluster(name, hosts=3)
    assert (cluster.ranks, cluster.hosts) == (3 * cluster.devices_per_host, 3)
    assert cluster.route(0, cluster.ranks - 1)[0] == "net/0.out"


def test_numbers_know_where_they_come_from() -> None:
    cluster = load_cluster("dgx-h100", hosts=64)
    assert cluster.link("host3/0.out").bandwidth_Bps == Number(450e9, "datasheet")
    assert cluster.link("net/0.out").alpha_s == Number(4e-6, "assumed")
    assert cluster.link("net/nic0.up").bandwidth_Bps == Number(50e9, "datasheet")
    assert cluster.link("net/leaf0.up").bandwidth_Bps == Number(32 * 50e9, "assumed")  # a sum over NICs
    # Adding reads two bytes and writes one.
    assert cluster.gamma_s_per_byte == Number(3 / 3350e9, "assumed")
    assert load_cluster("laptop").gamma_s_per_byte == Number(3e-10, "assumed")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = """hosts = 4
        devices_per_host = 2
        gamma_s_per_byte = { value = 1e-12, origin = "measured" }
        inside = { kind = "torus", dims = [2], wrap = false, alpha_s = 0, bandwidth_Bps = 1e9 }
        [between]
        kind = "torus"
        dims = [2, 2]
        wrap = [true, false]
        alpha_s = 1e-6
        bandwidth_Bps = 1e9
        hop_s = 1e-7"""
    path.write_text(text, encoding="utf-8-sig")
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.ranks) == ("mine", 8) and cluster.gamma_s_per_byte == Number(1e-12, "measured")
    assert cluster.route(0, 1) == ("host0/0.out+0", "host0/0+0", "host0/1.in+0") and cluster.latency_s(0, 7) == 2e-7


WRONG: list[tuple[str, Any, str]] = [
    ("dgx-h100 inside__bandwidth_Bps", 0, "inside.bandwidth_Bps.value = 0 must be at least 1.0"),
    ("dgx-h100 between__bandwidth_Bps", float("inf"), "between.bandwidth_Bps.value = inf must be"),
    ("dgx-h100 inside__alpha_s", -1, "inside.alpha_s.value = -1 must be at least 0.0"),
    ("dgx-h100 inside__alpha_s", "fast", "inside.alpha_s.value = 'fast' must be a number"),
    ("dgx-h100 inside__alpha_s", [1], "inside.alpha_s = [1] must be a section with keys"),
    (
        "dgx-h100 inside__alpha_s",
        {"value": 1, "origin": "guess"},
        "inside.alpha_s.origin = 'guess' must be 'datasheet', 'measured' or 'assumed'",
    ),
    ("dgx-h100 inside__bandwith_Bps", 1, "unknown key 'inside.bandwith_Bps'; did you mean 'bandwidth_Bps'?"),
    (
        "dgx-h100 hosts",
        10**8,
        "hosts = 100000000 times devices_per_host = 8 are more than the 131072 ranks that a cluster may have;",
    ),
    ("dgx-h100 between__nics", 3, "nics = 3 cannot be shared evenly by 8 devices per host;"),
    ("dgx-h100 device", "H10", "device = 'H10' is not in the table of devices; give gamma_s_per_byte, or"),
    ("laptop nodes", 2, "unknown key 'nodes'; valid here: between, datasheet, device,"),
    ("laptop inside", None, "inside is missing; give it a value, e.g. inside=..."),
    ("laptop hosts", 2, "hosts = 2 need a section [between] that joins them;"),
    ("laptop hosts", 0, "hosts = 0 must be at least 1"),
    ("laptop hosts", 2.5, "hosts = 2.5 must be a whole number"),
    ("tpu-v4 devices_per_host", 6, "a torus of dims 4 x 4 x 4 = 64 does not fit devices_per_host = 6; make them equal"),
    ("tpu-v4 inside__dims", [], "inside.dims = [] must have at least 1 entries"),
    ("tpu-v4 inside__wrap", [True, False], "wrap has 2 values for 3 dims;"),
    ("tpu-v4 inside__wrap", 3, "inside.wrap = 3 must be a list, [...]"),
]


@pytest.mark.parametrize(("place", "value", "words"), WRONG)
def test_a_sentence_for_what_is_wrong(place: str, value: Any, words: str) -> None:
    preset, key = place.split()
    with pytest.raises(InputError) as caught:
        cluster_from_dict(tree_of(preset, **{key: value}), "c.toml")
    assert str(caught.value).startswith(f"c.toml: {words}") and "\n" not in str(caught.value)


def test_unknown_clusters(tmp_path: Path) -> None:
    refused(r"^no cluster 'dgx-h10': did you mean 'dgx-h100'\? it is neither a file nor", load_cluster, "dgx-h10")
    refused(
        r"neither a file nor one of a100, a100-40gb, a100-pcie, .*, two-hosts-200mbit, v100, v100-16gb$",
        load_cluster,
        str(tmp_path),
    )
    refused("neither a file nor one of", load_cluster, "with\0zero")
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"hosts = \xff")
    refused(r"bad.toml is not UTF-8 text: byte 0xff in line 1; save it as UTF-8$", load_cluster, str(bad))
    bad.write_text("hosts = ")
    refused(r"bad.toml is not valid TOML: .*; fix it there$", load_cluster, str(bad))


def test_a_torus_between_hosts(tmp_path: Path) -> None:
    between = {"kind": "torus", "dims": [3], "alpha_s": 1e-6, "bandwidth_Bps": 1e9}
    with pytest.raises(InputError, match="a torus of dims 3 = 3 does not fit hosts = 4; make them equal"):
        cluster_from_dict(tree_of("laptop", between=between, hosts=4))
    path = tmp_path / "grid.toml"
    text = '[between]\nkind = "torus"\ndims = [1]\nalpha_s = 0\nbandwidth_Bps = 1\n'
    path.write_text(cluster_presets()["laptop"] + text)
    assert load_cluster(str(path)).hosts == 1
    cluster = load_cluster(str(path), dims=(3, 3))
    assert (cluster.hosts, cluster.ranks, cluster.devices_per_host) == (9, 72, 8)


def keys_of(kind: type[BaseModel]) -> set[str]:
    found = set(kind.model_fields)
    for field in kind.model_fields.values():
        for inner in _settings_classes_in(field.annotation):
            found |= keys_of(inner)
    return found


def test_the_page_names_every_preset_key_and_kind() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/cluster.md").read_text(encoding="utf-8")
    devices = (Path(__file__).parents[2] / "docs/reference/planning-devices.md").read_text(encoding="utf-8")
    assert {name for name in PRESETS if f"`{name}`" not in devices} == set()
    assert {key for key in keys_of(ClusterSettings) if f"`{key}`" not in page} == set()
    kinds = {"switch", "mesh", "pcie", "bus", "torus", "spine_leaf"}
    assert {kind for kind in kinds if f'`"{kind}"`' not in page} == set()
    rows = (line for line in page.splitlines() if line.startswith(("| messages", "| E(", "| imb")))
    messages, *table = [row.split("|")[2:-1] for row in rows]
    fullest = [expected_max_load(int(count), 16) for count in messages]
    assert [float(text) for text in table[0]] == [round(balls, 2) for balls in fullest]
    even = [int(count) / 16 for count in messages]
    assert [float(text) for text in table[1]] == [round(a / b, 2) for a, b in zip(fullest, even, strict=True)]
