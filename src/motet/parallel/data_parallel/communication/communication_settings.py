"""The `[communication]` section: when gradients travel, in what portions, by which algorithms, and how compressed."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from motet.cluster.cluster import Cluster
from motet.cluster.cluster_toml import load_cluster_for_ranks
from motet.collectives.algorithms import find_algorithm
from motet.collectives.compression.codec_base import BlockwiseCodec, Codec
from motet.collectives.compression.codec_registry import CODECS, parse_codec
from motet.collectives.compression.random_k import RandomKCodec
from motet.collectives.cost.alpha_beta import RankGroups
from motet.core.base_settings import FrozenSettings
from motet.core.errors import InputError
from motet.parallel.layout import Layout

Mebibytes = Annotated[float, Field(gt=0, le=2**20)]


BACKEND, AUTO = "backend", "auto"


class CommunicationSettings(FrozenSettings):
    """How ranks exchange gradients and parameters."""

    overlap: Literal["forward", "backward", "none"] = "backward"
    """What runs beside communication: `backward`, each bucket of gradients being sent as soon as all of it is there;
    `forward`, which is this and the next forward, each module waiting for what it uses; or `none`."""
    bucket_mib: Mebibytes = 25.0
    """Gradients that travel together, in MiB; a larger parameter has a bucket to itself."""
    first_bucket_mib: Mebibytes = 1.0
    """The same for the bucket that is complete first, so that sending begins early."""
    all_reduce: str = BACKEND
    """`backend` leaves the choice to the backend; a name of `motet collectives list all-reduce` is carried out; `auto`
    carries out what is cheapest on `cluster` for each size."""
    reduce_scatter: str = BACKEND
    """The same for reduce-scatter."""
    all_gather: str = BACKEND
    """The same for all-gather."""
    cluster: str | None = None
    """The network that `auto` looks at, and that says which ranks share a host: a TOML file, or a preset such as
    `dgx-h100`."""
    compress_gradients: str | None = None
    """A codec for sums of gradients, such as `int8` or `topk:keep=0.01`; as they are when not given."""
    compress_parameters: str | None = None
    """Stages 1 to 3: `int8`, `int4`, `float8` or `sign`, for gathering parameters; as they are when not given."""
    compress_over: Literal["all", "shards", "replicas"] = "all"
    """Which sums are compressed: those over the ranks that share a copy, those over replicas, or both."""
    compress_after: Annotated[int, Field(ge=0)] = 0
    """The first so many steps send gradients uncompressed."""
    error_feedback: bool | None = None
    """Give what compression lost of a gradient again in the next step. It is done when not given, except over the
    ranks that share the parameters of stage 3, where nothing is kept."""

    def algorithm(self, collective: str) -> str:
        """`all-reduce` and so on, as the settings say."""
        names = {"all-reduce": self.all_reduce, "reduce-scatter": self.reduce_scatter, "all-gather": self.all_gather}
        return names[collective]


def communication_cluster(source: str, ranks: int) -> Cluster:
    """The first so many ranks of `communication.cluster`, with more hosts if it has fewer."""
    try:
        return load_cluster_for_ranks(source, ranks)
    except InputError as error:
        raise InputError(f"communication.cluster = {source!r}: {error}") from None


def uses_gradient_gather(settings: CommunicationSettings, layout: Layout) -> bool:
    """Whether sums are scattered, and gathered beside the next forward, instead of all-reduced."""
    return settings.overlap == "forward" and layout.zero == 0 and layout.dp > 1


@dataclass(frozen=True)
class CommunicationGroups:
    """Which ranks do the sums and gathers of a step together."""

    # Sums are scattered over these, and gathered from them; the place of a rank among its own is that of its shard.
    shard_groups: RankGroups
    replica_groups: RankGroups  # Those that have the same shard, whose sums are all-reduced
    gathers_gradients: bool  # It is shards of the sums that are gathered, and then every rank updates everything
    secondary_shard_groups: RankGroups = ()  # Of `shares`, those that share a second copy
    secondary_replica_groups: RankGroups = ()  # Of `shares`, those that have the same part of a second copy


def resolve_communication_groups(settings: CommunicationSettings, layout: Layout) -> CommunicationGroups:
    """The ranks of a layout."""
    if uses_gradient_gather(settings, layout):  # every rank keeps everything, and sums are cut over all of them
        return CommunicationGroups(layout.replica_groups, layout.shard_groups, gathers_gradients=True)
    return CommunicationGroups(
        layout.shard_groups,
        layout.replica_groups,
        gathers_gradients=False,
        secondary_shard_groups=layout.secondary_shard_groups,
        secondary_replica_groups=layout.secondary_replica_groups,
    )


@dataclass(frozen=True)
class CommunicationCodecs:
    """What is compressed in a layout, and how."""

    shard_gradients: Codec | None = None  # Sums over the ranks that share a copy
    replica_gradients: Codec | None = None  # Sums over replicas
    parameters: BlockwiseCodec | None = None  # Gathering of parameters
    has_shard_error_feedback: bool = False
    has_replica_error_feedback: bool = False


def resolve_codecs(settings: CommunicationSettings, layout: Layout) -> CommunicationCodecs:
    """Of settings that `check_communication` lets pass."""
    gradients = _parse_codec(settings, "compress_gradients")
    parameters = _parse_codec(settings, "compress_parameters")
    reduced_groups = {"all": ("shards", "replicas")}.get(settings.compress_over, (settings.compress_over,))
    shards = gradients if "shards" in reduced_groups and layout.shards > 1 else None
    replicas = gradients if "replicas" in reduced_groups and layout.dp > layout.shards else None
    has_error_feedback = settings.error_feedback is not False
    return CommunicationCodecs(
        shards,
        replicas,
        parameters if isinstance(parameters, BlockwiseCodec) and layout.shards > 1 else None,
        has_shard_error_feedback=has_error_feedback and shards is not None and layout.zero < 3,
        has_replica_error_feedback=has_error_feedback and replicas is not None,
    )


def without_forward_overlap(settings: CommunicationSettings) -> CommunicationSettings:
    """For replicas that train apart: what they tell each other is an all-reduce whatever runs beside it."""
    return settings.model_copy(update={"overlap": "backward"})


def check_communication(settings: CommunicationSettings, layout: Layout, independent_replicas: bool = False) -> None:
    """Refuse algorithms and codecs that do not exist, or do not do for the ranks that they are to join.

    `apart`: replicas train apart.
    """
    settings = without_forward_overlap(settings) if independent_replicas else settings
    if layout.reproducible_batch_size and uses_gradient_gather(settings, layout):
        raise InputError(
            "communication.overlap = 'forward' with layout.zero = 0 cannot be had with run.reproducible = 'layout', "
            "whose sums come all at once; use layout.zero = 1, or leave communication.overlap out"
        )
    _check_codecs(settings, layout)
    _check_cluster(settings, layout)
    shard_codec = resolve_codecs(settings, layout).shard_gradients
    if uses_gradient_gather(settings, layout) and settings.compress_gradients is not None:
        raise InputError(
            "communication.overlap = 'forward' with layout.zero = 0 sends gradients as they are; use layout.zero = 1, "
            "or leave communication.compress_gradients out"
        )
    shards = len(resolve_communication_groups(settings, layout).shard_groups[0])
    all_reduce_sizes = [layout.dp // shards]
    if shard_codec is not None and not isinstance(shard_codec, BlockwiseCodec):
        all_reduce_sizes.append(layout.shards)
    all_gather_sizes = [shards, *([layout.secondary_shards] if layout.secondary_shards else ())]
    for collective, name, sizes in (
        ("all-reduce", settings.all_reduce, all_reduce_sizes),
        ("reduce-scatter", settings.reduce_scatter, [shards]),
        ("all-gather", settings.all_gather, all_gather_sizes),
    ):
        if name in (BACKEND, AUTO):
            continue
        key = f"communication.{collective.replace('-', '_')}"
        try:
            algorithm = find_algorithm(collective, name)
            for ranks in sizes:
                if ranks > 1:
                    algorithm.check_ranks(ranks)
        except InputError as error:
            raise InputError(f"{key} = {name!r}: {error}; or leave it to the backend") from None
        if not algorithm.same_bits:
            raise InputError(
                f"{key} = {name!r} adds in another order on each rank, so that replicas would drift apart; "
                "take one that `motet collectives list` marks as giving all ranks the same bits"
            )


def _check_cluster(settings: CommunicationSettings, layout: Layout) -> None:
    algorithms = {field: getattr(settings, field) for field in ("all_reduce", "reduce_scatter", "all_gather")}
    if settings.cluster is None:
        for field, name in algorithms.items():
            if name == AUTO:
                raise InputError(
                    f"communication.{field} = 'auto' takes what is cheapest on a network that is not given; set "
                    "communication.cluster to a TOML file or a preset such as dgx-h100, or leave it to the backend"
                )
    elif set(algorithms.values()) == {BACKEND}:
        raise InputError(
            f"communication.cluster = {settings.cluster!r} has no effect where the backend chooses; leave it out, or "
            "set communication.all_reduce, reduce_scatter or all_gather to 'auto' or the name of an algorithm"
        )
    else:
        communication_cluster(settings.cluster, layout.dp)


_BLOCKWISE_CODECS = ", ".join(name for name, kind in CODECS.items() if issubclass(kind, BlockwiseCodec))


def _parse_codec(
    settings: CommunicationSettings, field: Literal["compress_gradients", "compress_parameters"]
) -> Codec | None:
    text = settings.compress_gradients if field == "compress_gradients" else settings.compress_parameters
    if text is None:
        return None
    try:
        return parse_codec(text)
    except InputError as error:
        raise InputError(f"communication.{field} = {text!r}: {error}") from None


def _check_codecs(settings: CommunicationSettings, layout: Layout) -> None:
    parameters, gradients = _parse_codec(settings, "compress_parameters"), _parse_codec(settings, "compress_gradients")
    if parameters is not None and not isinstance(parameters, BlockwiseCodec):
        raise InputError(
            f"communication.compress_parameters = {settings.compress_parameters!r} would leave most of a parameter "
            f"out; use one of {_BLOCKWISE_CODECS}"
        )
    if parameters is not None and layout.zero == 0:
        raise InputError(
            f"communication.compress_parameters = {settings.compress_parameters!r} has no effect with layout.zero = 0, "
            "where no parameters are gathered; leave it out, or set layout.zero=1"
        )
    if gradients is None:
        return
    key = f"communication.compress_gradients = {settings.compress_gradients!r}"
    over = f"communication.compress_over = {settings.compress_over!r}"
    if isinstance(gradients, RandomKCodec) and gradients.unbiased and settings.error_feedback is not False:
        raise InputError(
            f"{key}: error feedback would make its errors grow; use randomk:unbiased=false, or "
            "communication.error_feedback=false"
        )
    if settings.compress_over == "replicas" and layout.dp == layout.shards > 1:
        raise InputError(
            f"{over}, but all {layout.dp} ranks share one copy, so there are no replicas; set layout.shard_group, or "
            "leave communication.compress_over out"
        )
    if settings.compress_over == "shards" and layout.shards == 1 < layout.dp:
        raise InputError(
            f"{over}, but each of the {layout.dp} ranks has a copy of its own; set layout.zero and layout.shard_group "
            "so that ranks share one, or leave communication.compress_over out"
        )
    if layout.zero == 3 and resolve_codecs(settings, layout).shard_gradients is not None:
        _check_stage3_codec(settings, gradients, key)


def _check_stage3_codec(settings: CommunicationSettings, gradients: Codec, key: str) -> None:
    """What stage 3 cannot do over the ranks that share a copy."""
    if not isinstance(gradients, BlockwiseCodec):
        raise InputError(
            f"{key} cannot sum over the ranks that share the parameters of stage 3; use one of {_BLOCKWISE_CODECS}, or "
            "communication.compress_over=replicas"
        )
    if settings.error_feedback:
        raise InputError(
            "communication.error_feedback = true, but at stage 3 the errors over the ranks that share a copy would "
            "be as large as all gradients; leave it out, or use layout.zero=2 or communication.compress_over=replicas"
        )
