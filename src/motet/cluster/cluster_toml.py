"""Reads a `Cluster` from a TOML file or a preset; a mistake in it is an `InputError`."""

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from motet.cluster.cluster import Cluster, cluster_for_ranks
from motet.cluster.cluster_from_settings import build_cluster
from motet.cluster.cluster_settings import ClusterSettings
from motet.core.config_loading import builtin_texts, read_toml, settings_from_dict
from motet.core.errors import InputError


def cluster_presets() -> dict[str, str]:
    """Name -> TOML text of the clusters that come with motet."""
    return builtin_texts("motet.cluster", "presets")


def load_cluster(
    source: str,
    *,
    hosts: int | None = None,
    devices_per_host: int | None = None,
    dims: Sequence[int] | None = None,
) -> Cluster:
    """The cluster of a TOML file or preset, with other sizes if they are given: `load_cluster("dgx-h100", hosts=16)`.

    `dims` resizes a torus and the number of its devices (or hosts).
    """
    values = read_toml("cluster", source, cluster_presets())
    if dims is not None:
        _resize_torus(values, list(dims), source)
    sizes = {"hosts": hosts, "devices_per_host": devices_per_host}
    values |= {key: value for key, value in sizes.items() if value is not None}
    return cluster_from_dict(values, source)


def load_cluster_for_ranks(source: str, ranks: int) -> Cluster:
    """The first ranks of a file or preset, with more hosts if it has fewer ranks and can have more."""
    cluster = load_cluster(source)
    if ranks > cluster.ranks:
        with suppress(InputError):  # if the cluster cannot have more hosts, the error below is clearer
            cluster = load_cluster(source, hosts=-(-ranks // cluster.devices_per_host))
    return cluster_for_ranks(cluster, ranks)


def cluster_from_dict(values: dict[str, Any], source: str = "cluster") -> Cluster:
    """The cluster of nested values as TOML gives them."""
    settings = settings_from_dict(ClusterSettings, values, source)
    try:
        return build_cluster(settings, Path(source).stem)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _resize_torus(values: dict[str, Any], dims: list[int], source: str) -> None:
    for section, size in (("inside", "devices_per_host"), ("between", "hosts")):
        network = values.get(section)
        if isinstance(network, dict) and network.get("kind") == "torus":
            values |= {section: {**network, "dims": dims}, size: prod(dims)}
            return
    raise InputError(
        f"{source}: dims = {dims} is for a torus, and this cluster has none; give --hosts, or hosts= in Python"
    )
