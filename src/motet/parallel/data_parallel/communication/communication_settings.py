"""The `[communication]` section: overlap, buckets, algorithms and compression, and their values for a layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from motet.cluster.cluster import Cluster, load_cluster_for_ranks
from motet.collectives.algorithms import build, find_algorithm
from motet.collectives.compression.codecs import CODECS, BlockwiseCodec, Codec, RandomKCodec, parse_codec
from motet.collectives.cost.alpha_beta import RankGroups
from motet.collectives.cost.cheapest_algorithm import cheapest
from motet.collectives.program import Program
from motet.core.config_loading import FrozenSettings
from motet.core.errors import InputError, check_input
from motet.parallel.data_parallel.data_sharding import DataParallelSharding

Mebibytes = Annotated[float, Field(gt=0, le=2**20)]

BACKEND, AUTO = "backend", "auto"


class CommunicationSettings(FrozenSettings):
    """The exchange of gradients and parameters between ranks."""

    overlap: Literal["forward", "backward", "none"] = "backward"
    """Computation to overlap: `backward` sends each bucket of gradients once it is complete; `forward` also
    gathers during the next forward, in which each module waits for the parameters that it uses; or `none`."""
    bucket_mib: Mebibytes = 25.0
    """Size of a bucket of gradients, in MiB; a larger parameter has a bucket to itself."""
    first_bucket_mib: Mebibytes = 1.0
    """Size of the bucket that is complete first, so that communication starts early."""
    tp_pieces: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallelism: pieces of an activation that are communicated one after another, each during the matmul
    of the next. One piece is communicated before the matmul or after it; weight gradients are computed during the sum
    of input gradients with any number."""
    slice_activations: bool | None = None
    """Pipelines with tensor parallelism: each rank of `tp` sends its slice of an activation that all of them have, and
    the ranks of the next stage gather the slices. When not given, they do so where stages are on several hosts, and the
    ranks of `tp` on one."""
    all_reduce: str = BACKEND
    """`backend` leaves the choice to the backend; a name of `motet collectives list all-reduce` is executed; `auto`
    executes the cheapest on `cluster` for each size."""
    reduce_scatter: str = BACKEND
    """The same for reduce-scatter."""
    all_gather: str = BACKEND
    """The same for all-gather."""
    cluster: str | None = None
    """The network that `auto` optimises for, and that says which ranks share a host: a TOML file, or a preset such as
    `dgx-h100`. With `layout.tp` it predicts the cost of splitting layers over several hosts."""
    compress_gradients: str | None = None
    """A codec for sums of gradients, such as `int8` or `topk:keep=0.01`; uncompressed when not given."""
    compress_parameters: str | None = None
    """Stages 1 to 3: `int8`, `int4`, `float8` or `sign`, for gathering parameters; uncompressed when not given."""
    compress_over: Literal["all", "shards", "replicas"] = "all"
    """Sums to compress: over the shard group, over replicas, or both."""
    compress_after: Annotated[int, Field(ge=0)] = 0
    """Number of first steps whose gradients are sent uncompressed."""
    error_feedback: bool | None = None
    """Add the part of a gradient that compression lost to the next step's. On when not given, except over the shard
    group of stage 3, where no error is kept."""

    @property
    def has_algorithms(self) -> bool:
        """Whether the backend does not choose all algorithms."""
        return {self.all_reduce, self.reduce_scatter, self.all_gather} != {BACKEND}

    def algorithm(self, collective: str) -> str:
        """The setting of a collective such as `all-reduce`."""
        names = {"all-reduce": self.all_reduce, "reduce-scatter": self.reduce_scatter, "all-gather": self.all_gather}
        return names[collective]


def communication_cluster(source: str, ranks: int) -> Cluster:
    """The first ranks of `communication.cluster`, with more hosts if it has too few ranks."""
    try:
        return load_cluster_for_ranks(source, ranks)
    except InputError as error:
        raise InputError(f"communication.cluster = {source!r}: {error}") from None


@dataclass(frozen=True)
class CommunicationGroups:
    """The ranks of each reduction and gather of a step."""

    shard_groups: RankGroups  # Groups of reduce-scatters and gathers; a rank's position is the index of its shard
    replica_groups: RankGroups  # Ranks with the same shard, which all-reduce its sum
    secondary_shard_groups: RankGroups = ()  # Parts of shard groups that hold a secondary copy
    secondary_replica_groups: RankGroups = ()  # Ranks of a shard group that hold the same secondary shard
    gathers_gradients: bool = False  # Gathers shards of the sums instead of parameters; every rank updates everything


def resolve_communication_groups(
    settings: CommunicationSettings, sharding: DataParallelSharding
) -> CommunicationGroups:
    """The groups of a layout."""
    # Every rank holds everything, and sums are sharded over all ranks, to be gathered during the next forward.
    if settings.overlap == "forward" and sharding.zero == 0 and sharding.ranks > 1:
        return CommunicationGroups(sharding.replica_groups, sharding.shard_groups, gathers_gradients=True)
    return CommunicationGroups(
        sharding.shard_groups,
        sharding.replica_groups,
        sharding.secondary_shard_groups,
        sharding.secondary_replica_groups,
    )


@dataclass(frozen=True)
class CommunicationCodecs:
    """The codecs of a layout; None is uncompressed."""

    shard_gradients: Codec | None = None  # Sums over the shard group
    replica_gradients: Codec | None = None  # Sums over replicas
    parameters: BlockwiseCodec | None = None
    has_shard_error_feedback: bool = False
    has_replica_error_feedback: bool = False


def resolve_codecs(settings: CommunicationSettings, sharding: DataParallelSharding) -> CommunicationCodecs:
    """The codecs of settings that `check_communication` accepts."""
    gradients, parameters = _parse_codec(settings, "compress_gradients"), _parse_codec(settings, "compress_parameters")
    shards = gradients if settings.compress_over != "replicas" and sharding.shards > 1 else None
    replicas = gradients if settings.compress_over != "shards" and sharding.ranks > sharding.shards else None
    has_error_feedback = settings.error_feedback is not False
    return CommunicationCodecs(
        shards,
        replicas,
        parameters if isinstance(parameters, BlockwiseCodec) and sharding.shards > 1 else None,
        has_shard_error_feedback=has_error_feedback and shards is not None and sharding.zero < 3,
        has_replica_error_feedback=has_error_feedback and replicas is not None,
    )


def without_forward_overlap(settings: CommunicationSettings) -> CommunicationSettings:
    """Settings for independent replicas, whose outer steps always all-reduce."""
    return settings.model_copy(update={"overlap": "backward"})


def check_communication(
    settings: CommunicationSettings,
    sharding: DataParallelSharding,
    *,
    independent_replicas: bool = False,
    uses_cluster: bool = False,
) -> None:
    """Raise if an algorithm or codec does not exist, or does not work for the groups of the layout.

    With `uses_cluster` a cluster is of use where the backend chooses all algorithms, too: it says which ranks share a
    host where ranks split layers, and has the figures of hosts that keep states.
    """
    settings = without_forward_overlap(settings) if independent_replicas else settings
    _check_codecs(settings, sharding)
    _check_cluster(settings, sharding, uses_cluster=uses_cluster)
    shards = len(resolve_communication_groups(settings, sharding).shard_groups[0])
    shard_codec = resolve_codecs(settings, sharding).shard_gradients
    is_dense = shard_codec is None or isinstance(shard_codec, BlockwiseCodec)
    for collective, sizes in {
        "all-reduce": (sharding.ranks // shards, 1 if is_dense else sharding.shards),
        "reduce-scatter": (shards,),
        "all-gather": (shards, sharding.secondary_shards or 1),
    }.items():
        _check_algorithm(collective, settings.algorithm(collective), sizes)


def _check_algorithm(collective: str, name: str, group_sizes: Sequence[int]) -> None:
    if name in (BACKEND, AUTO):
        return
    key = f"communication.{collective.replace('-', '_')} = {name!r}"
    try:
        algorithm = find_algorithm(collective, name)
        for ranks in (size for size in group_sizes if size > 1):
            algorithm.check_ranks(ranks)
    except InputError as error:
        raise InputError(f"{key}: {error}; or leave it to the backend") from None
    check_input(
        algorithm.same_bits,
        f"{key} adds in another order on each rank, so that replicas would drift; take one that `motet collectives "
        "list` marks as giving all ranks the same bits",
    )


def _check_cluster(settings: CommunicationSettings, sharding: DataParallelSharding, *, uses_cluster: bool) -> None:
    algorithms = {field: getattr(settings, field) for field in ("all_reduce", "reduce_scatter", "all_gather")}
    if settings.cluster is None:
        automatic = next((field for field, name in algorithms.items() if name == AUTO), None)
        check_input(
            automatic is None,
            f"communication.{automatic} = 'auto' takes the cheapest algorithm of a network that is not given; set "
            "communication.cluster to a TOML file or a preset such as dgx-h100, or leave it to the backend",
        )
        return
    check_input(
        settings.has_algorithms or uses_cluster,
        f"communication.cluster = {settings.cluster!r} has no effect where the backend chooses; leave it out, or "
        "set communication.all_reduce, reduce_scatter or all_gather to 'auto' or the name of an algorithm",
    )
    communication_cluster(settings.cluster, sharding.ranks)


_BLOCKWISE_CODECS = ", ".join(name for name, kind in CODECS.items() if issubclass(kind, BlockwiseCodec))


def _parse_codec(settings: CommunicationSettings, field: str) -> Codec | None:
    text = getattr(settings, field)
    try:
        return None if text is None else parse_codec(text)
    except InputError as error:
        raise InputError(f"communication.{field} = {text!r}: {error}") from None


def _check_codecs(settings: CommunicationSettings, sharding: DataParallelSharding) -> None:
    parameters, gradients = _parse_codec(settings, "compress_parameters"), _parse_codec(settings, "compress_gradients")
    parameters_key = f"communication.compress_parameters = {settings.compress_parameters!r}"
    key = f"communication.compress_gradients = {settings.compress_gradients!r}"
    over = f"communication.compress_over = {settings.compress_over!r}"
    shards_stage3 = gradients and sharding.zero == 3 and resolve_codecs(settings, sharding).shard_gradients
    for applies, message in (
        (
            parameters and not isinstance(parameters, BlockwiseCodec),
            f"{parameters_key} would leave most of a parameter out; use one of {_BLOCKWISE_CODECS}",
        ),
        (
            parameters and sharding.zero == 0,
            f"{parameters_key} has no effect with layout.zero = 0, where no parameters are gathered; leave it out, or "
            "set layout.zero=1",
        ),
        (
            isinstance(gradients, RandomKCodec) and gradients.unbiased and settings.error_feedback is not False,
            f"{key}: error feedback would make its errors grow; use randomk:unbiased=false, or "
            "communication.error_feedback=false",
        ),
        (
            gradients and settings.compress_over == "replicas" and sharding.ranks == sharding.shards > 1,
            f"{over}, but all {sharding.ranks} ranks share one copy, so there are no replicas; set layout.shard_group, "
            "or leave communication.compress_over out",
        ),
        (
            gradients and settings.compress_over == "shards" and sharding.shards == 1 < sharding.ranks,
            f"{over}, but each of the {sharding.ranks} ranks holds a full copy; set layout.zero and layout.shard_group "
            "so that ranks share one, or leave communication.compress_over out",
        ),
        (
            shards_stage3 and not isinstance(gradients, BlockwiseCodec),
            f"{key} cannot sum over the ranks that share the parameters of stage 3; use one of {_BLOCKWISE_CODECS}, or "
            "communication.compress_over=replicas",
        ),
        (
            shards_stage3 and settings.error_feedback,
            "communication.error_feedback = true, but at stage 3 the errors over the shard group would be as large as "
            "all gradients; leave it out, or use layout.zero=2 or communication.compress_over=replicas",
        ),
    ):
        check_input(not applies, message)


GroupName = Literal["shards", "replicas", "near"]  # Shard groups, replica groups, secondary shard groups


class CollectiveAlgorithmSelector:
    """Algorithms of one layout. On a cluster, all groups communicate in parallel and share its links in the cost."""

    def __init__(self, settings: CommunicationSettings, sharding: DataParallelSharding) -> None:
        self._settings = settings
        self._cluster = None if settings.cluster is None else communication_cluster(settings.cluster, sharding.ranks)
        groups = resolve_communication_groups(settings, sharding)
        self._rank_groups: dict[GroupName, RankGroups] = {
            "shards": groups.shard_groups,
            "replicas": groups.replica_groups,
            "near": groups.secondary_shard_groups,
        }
        # (collective, group, bytes of the unsharded buffer) -> a Program, or None for the backend's choice.
        self.program: Callable[[str, GroupName, int], Program | None] = cache(self._select_program)

    def group_size(self, group_name: GroupName) -> int:
        return len(self._rank_groups[group_name][0]) if self._rank_groups[group_name] else 1

    def group_of(self, group_name: GroupName, rank: int) -> Sequence[int]:
        """The ranks of a rank's group."""
        return next(ranks for ranks in self._rank_groups[group_name] if rank in ranks)

    def _select_program(self, collective: str, group_name: GroupName, size: int) -> Program | None:
        name, ranks = self._settings.algorithm(collective), self.group_size(group_name)
        if name == BACKEND or ranks == 1:
            return None
        if self._cluster is None:
            return build(collective, name, ranks)
        names = None if name == AUTO else (name,)
        best = cheapest(collective, max(size, 1), self._cluster, names, self._rank_groups[group_name]).program
        assert best is not None
        return best
