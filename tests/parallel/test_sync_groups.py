"""Each row of the table of partial sums, by hand; stages, aliases, and the ranks that report a number."""

from dataclasses import replace

import pytest
from sharded_inventory import LAYOUTS, STAGES, inventory, make_layout

from motet.core.errors import InputError
from motet.parallel.data_parallel.comm_units import make_group_plan
from motet.parallel.data_parallel.communication.communication_settings import CommunicationSettings
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.layout import Layout, LayoutSettings, microbatches_of_rank, resolve_layout
from motet.parallel.model_sharding import BoundaryComm, DimensionSplit, ModelInventory, ModelSharding, TensorInfo
from motet.parallel.parallel_dims import ParallelDims
from motet.parallel.pipeline.stage_wires import StageWire
from motet.parallel.step_plan.check import prove_step_plan
from motet.parallel.step_plan.plan import make_step_plan
from motet.parallel.sync_groups import METRIC_REPORTERS, SyncGroup, make_sync_groups, module_part_groups, reports
from motet.precision.recipe import RECIPES

Groups = tuple[tuple[int, ...], ...]
EACH = tuple((rank,) for rank in range(8))

# (layout, tensor, sum groups, copy groups). Ranks of "pp=2 dp=2 tp=2": rank = 4 pp + 2 dp + tp; stage 0 has block 0.
TABLE: list[tuple[str, str, Groups, Groups]] = [
    ("tp=2 dp=2", "blocks.0.attn.q.weight", ((0, 2), (1, 3)), EACH[:4]),  # column
    ("tp=2 dp=2", "blocks.0.attn.out.weight", ((0, 2), (1, 3)), EACH[:4]),  # row
    ("tp=2 dp=2", "embed.weight", ((0, 2), (1, 3)), EACH[:4]),  # vocabulary
    ("tp=2 dp=2", "blocks.0.norm.weight", ((0, 2), (1, 3)), ((0, 1), (2, 3))),
    ("tp=2 dp=2", "blocks.0.attn.out.bias", ((0, 2), (1, 3)), ((0, 1), (2, 3))),  # row bias
    ("tp=2 dp=2", "blocks.0.attn.kv.weight", ((0, 2), (1, 3)), EACH[:4]),  # as many heads as ranks: nothing is shared
    ("tp=2 dp=2", "blocks.0.attn.q_norm.weight", ((0, 1, 2, 3),), EACH[:4]),  # norm of each head
    ("tp=4 sequence", "blocks.0.norm.weight", ((0, 1, 2, 3),), EACH[:4]),
    ("tp=4 sequence", "blocks.0.attn.out.bias", EACH[:4], ((0, 1, 2, 3),)),  # added after the sum
    ("tp=4 sequence", "blocks.0.mix.weight", EACH[:4], ((0, 1, 2, 3),)),  # gets the whole sequence
    ("tp=4 sequence", "norm.weight", EACH[:4], ((0, 1, 2, 3),)),
    ("tp=4 sequence", "blocks.0.attn.kv.weight", ((0, 1), (2, 3)), EACH[:4]),  # two ranks share a head
    ("tp=4 sequence", "blocks.0.mlp.up.weight", EACH[:4], EACH[:4]),
    ("pp=2 dp=2", "embed.weight", ((0, 1, 2, 3),), EACH[:4]),  # tied, on both stages
    ("pp=2 dp=2", "blocks.0.norm.weight", ((0, 1),), EACH[:2]),
    ("pp=2 dp=2", "norm.weight", ((2, 3),), EACH[2:4]),
    ("pp=2 dp=2 tp=2", "embed.weight", ((0, 2, 4, 6), (1, 3, 5, 7)), EACH),
    ("pp=2 dp=2 tp=2", "blocks.2.attn.q_norm.weight", ((4, 5, 6, 7),), EACH[4:]),
    ("pp=2 dp=2 tp=2", "blocks.1.norm.weight", ((4, 6), (5, 7)), ((4, 5), (6, 7))),
    ("dp=4", "embed.weight", ((0, 1, 2, 3),), EACH[:4]),  # unsplit
]


def groups_by_name(groups: tuple[SyncGroup, ...]) -> dict[str, SyncGroup]:
    return {name: group for group in groups for name in group.names}


def sync_groups(layout: str, sharding: ModelSharding | None = None) -> tuple[SyncGroup, ...]:
    sizes, zero, usual = LAYOUTS[layout]
    return make_sync_groups(inventory(), sharding or usual, make_layout(sizes, zero))


@pytest.mark.parametrize(("layout", "name", "sums", "copies"), TABLE, ids=lambda value: str(value)[:30])
def test_the_table_of_partial_sums(layout: str, name: str, sums: Groups, copies: Groups) -> None:
    group = groups_by_name(sync_groups(layout))[name]
    assert (set(group.sum_groups), set(group.copy_groups[name])) == (set(sums), set(copies))
    sharding = make_layout(*LAYOUTS[layout][:2]).sharding
    zero = min(sharding.zero, 1) if len(group.stages) > 1 else sharding.zero  # Reduced once, after all stages
    assert group.sharding == replace(sharding, ranks=len(sums[0]), zero=zero)


def test_groups_are_ordered_by_stage_and_rows_come_before_buckets() -> None:
    assert [(g.stages, g.unit_kind) for g in sync_groups("dp=4")] == [((0,), "rows"), ((0,), "bucket")]
    groups = sync_groups("pp=2 dp=2 tp=2")
    assert [g.stages for g in groups] == sorted(g.stages for g in groups)
    assert {g.stages for g in groups} == {(0,), (0, 1), (1,)}
    rows, buckets = sync_groups("dp=4")
    assert list(rows.names) == [t.name for t in inventory().trained if t.name in rows.names]
    assert buckets.names[-1] == "norm.weight" and all("weight" in name for name in rows.names)


def test_a_model_without_stages_is_copied_over_pipeline_ranks() -> None:
    layout = make_layout({"pp": 2, "dp": 2}, 0)
    (whole,) = make_sync_groups(inventory(), ModelSharding(), layout)
    assert whole.sum_groups == ((0, 1), (2, 3)) and {*whole.copy_groups.values()} == {((0, 2), (1, 3))}
    (last,) = make_sync_groups(inventory(), ModelSharding(stages=(range(0), range(3))), layout)
    assert (last.sum_groups, last.stages) == (((2, 3),), (1,)) and {*last.copy_groups.values()} == {((2,), (3,))}


def test_interleaved_stages_and_context_parallel_ranks() -> None:
    """Stage s is on pipeline rank s % pp; ranks of context parallelism have other positions of the same rows."""
    layout = make_layout({"pp": 2, "dp": 1, "cp": 2}, 0)
    groups = groups_by_name(
        make_sync_groups(inventory(), ModelSharding(stages=(range(1), range(1, 2), range(2, 3))), layout)
    )
    assert [groups[f"blocks.{block}.norm.weight"].stages for block in range(3)] == [(0,), (1,), (2,)]
    assert groups["blocks.2.norm.weight"].sum_groups == ((0, 1),)  # stages 0 and 2 are on ranks 0 and 1
    assert (groups["embed.weight"].stages, groups["embed.weight"].sum_groups) == ((0, 2), ((0, 1),))


def test_stages_of_a_v_and_tensors_whose_stages_do_not_follow_from_blocks() -> None:
    """Three stages on ranks 0, 1, 1; the norm after the blocks is also used before them."""
    layout, stages = make_layout({"pp": 2, "dp": 2}, 0), (range(1), range(1, 2), range(2, 3))
    sharding = ModelSharding(stages=stages, stage_ranks=(0, 1, 1), stage_tensors={"norm.weight": (0, 2)})
    groups = groups_by_name(make_sync_groups(inventory(), sharding, layout))
    assert [groups[f"blocks.{block}.norm.weight"].sum_groups for block in range(3)] == [((0, 1),), ((2, 3),), ((2, 3),)]
    assert (groups["norm.weight"].stages, groups["norm.weight"].sum_groups) == ((0, 2), ((0, 1, 2, 3),))
    assert groups["embed.weight"].sum_groups == ((0, 1, 2, 3),)  # tied, of the first and the last block


def test_the_shape_of_a_wire() -> None:
    wire = StageWire("hidden_states", ("rows", "2 * tokens + 1", 8, "rows * source tokens"), "float32")
    assert wire.shape({"rows": 3, "tokens": 5, "source tokens": 7}) == (3, 11, 8, 21)


def test_names_outside_of_blocks_belong_to_the_first_and_the_last_block() -> None:
    def info(name: str, block: int | None, *aliases: str) -> TensorInfo:
        return TensorInfo(name, (2,), "float32", "trained", aliases=aliases, block=block)

    shared = replace(info("shared", None, "encoder.embed", "head"), needed_with_blocks=(0, 1))
    tensors = [info("embed", None, "head"), shared, info("a", 0), info("middle", None), info("b", 1), info("end", None)]
    made = ModelInventory(tuple(tensors))
    assert [t.needed_with_blocks for t in made.tensors] == [(0, -1), (0, 1), (0,), (-1,), (1,), (-1,)]
    stages = (range(0), range(1), range(1, 2))
    assert [ModelSharding(stages=stages).stages_of(t) for t in made.tensors] == [(1, 2), (1, 2), (1,), (2,), (2,), (2,)]


@pytest.mark.parametrize(
    ("split", "length", "ranks", "spans"),
    [
        (DimensionSplit(0, "tp"), 8, 2, [(((0, 4),), 0), (((4, 8),), 0)]),
        (DimensionSplit(0, "tp", (4, 2, 2)), 8, 2, [(((0, 2), (4, 5), (6, 7)), 0), (((2, 4), (5, 6), (7, 8)), 0)]),
        (DimensionSplit(0, "tp"), 5, 4, [(((0, 2),), 0), (((2, 4),), 0), (((4, 5),), 1), (((5, 5),), 2)]),
        (DimensionSplit(0, "tp", unit=3), 6, 4, [(((0, 3),), 0)] * 2 + [(((3, 6),), 0)] * 2),
    ],
)
def test_spans_of_a_split(split: DimensionSplit, length: int, ranks: int, spans: list[object]) -> None:
    assert [split.local_spans(length, ranks=ranks, index=i) for i in range(ranks)] == spans


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(InputError, match="3 units of 4 elements cannot be split over tp = 2; use a divisor or"):
        DimensionSplit(0, "tp", (12, 12), unit=4).local_spans(24, ranks=2, index=0)
    with pytest.raises(InputError, match="2 units of 4 elements cannot be split over tp = 3"):
        DimensionSplit(0, "tp", unit=4).local_spans(8, ranks=3, index=0)


def test_each_operation_has_a_conjugate() -> None:
    assert BoundaryComm("a", "input", 0, "copy", "tp").conjugate == "sum"
    assert BoundaryComm("a", "output", 0, "sum", "tp").conjugate == "copy"
    assert BoundaryComm("a", "input", 0, "gather", "tp").conjugate == "scatter"
    assert BoundaryComm("a", "output", 0, "gather", "tp").conjugate == "split"  # its gradient is the same on all ranks


def test_ranks_of_a_replica_and_of_a_part_of_the_module() -> None:
    layout = make_layout({"pp": 2, "dp": 4, "tp": 2}, 1)
    assert module_part_groups(layout.dims) == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    replicas = replace(layout, sharding=replace(layout.sharding, shards=2)).replica_layout()
    assert replicas.dims.ranks == replicas.sharding.ranks == 2


def test_who_reports_a_number() -> None:
    dims = ParallelDims((("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2)))
    who = {m: [r for r in range(16) if reports(m, dims.coordinates(r), dims)] for m in METRIC_REPORTERS}
    assert who["loss"] == who["targets"] == [8, 10, 12, 14]  # the last stage, each of dp x cp its positions
    assert who["tokens"] == who["rows"] == [0, 4] and who["stop"] == list(range(16))


def test_rows_of_split_and_whole_tensors_are_one_group_and_partial_sums_over_other_ranks_are_in_buckets() -> None:
    """FSDP2 shards a module once, over one mesh; the norm counts each tensor of it by its own copies."""
    layout = make_layout({"dp": 2, "tp": 2}, 3)
    layout = replace(layout, sharding=replace(layout.sharding, min_shard_numel=0))
    groups = make_sync_groups(inventory(), LAYOUTS["tp=2 dp=2"][2], layout)
    assert [(each.unit_kind, each.sum_groups) for each in groups] == [
        ("rows", ((0, 2), (1, 3))),
        ("bucket", ((0, 1, 2, 3),)),
    ]
    assert set(groups[1].names) == {f"blocks.{block}.attn.q_norm.weight" for block in range(3)}
    copies = {name.removeprefix("blocks.0."): copies for name, copies in groups[0].copy_groups.items()}
    assert copies["attn.q.weight"] == EACH[:4] and copies["norm.weight"] == ((0, 1), (2, 3))
    plan = make_group_plan(groups[0], local_shapes(layout), RECIPES["fp32"], settings=CommunicationSettings())
    counted = [plan.counted_names(rank) for rank in range(4)]
    split = {name for name in groups[0].names if groups[0].copy_groups[name] == EACH[:4]}
    assert counted[0] == counted[2] == set(groups[0].names) > split
    assert counted[1] == counted[3] == split


def local_shapes(layout: Layout) -> dict[str, tuple[TensorInfo, tuple[int, ...]]]:
    sharding = LAYOUTS["tp=2 dp=2"][2]
    specs = {tensor: sharding.spec(tensor, {"dp": 0, "tp": 0}, layout.dims) for tensor in inventory().trained}
    return {tensor.name: (tensor, spec.local_shape) for tensor, spec in specs.items() if spec is not None}


def test_frozen_tensors_are_cut_into_rows_whatever_ranks_would_add_their_gradients() -> None:
    frozen = [replace(tensor, kind="frozen") if "q_norm" in tensor.name else tensor for tensor in inventory().tensors]
    layout = make_layout({"dp": 2, "tp": 2}, 3)
    layout = replace(layout, sharding=replace(layout.sharding, min_shard_numel=0))
    (rows,) = make_sync_groups(ModelInventory(tuple(frozen)), LAYOUTS["tp=2 dp=2"][2], layout)
    assert rows.frozen == tuple(f"blocks.{block}.attn.q_norm.weight" for block in range(3))
    assert rows.sum_groups == ((0, 2), (1, 3))


def test_a_codec_rounds_whole_tensors_without_split_ones() -> None:
    layout = make_layout({"dp": 2, "tp": 2}, 3)
    layout = replace(layout, sharding=replace(layout.sharding, min_shard_numel=0))
    split, unsplit = LAYOUTS["tp=2 dp=2"][2], ModelSharding()
    rows, *buckets = make_sync_groups(inventory(), split, layout, is_compressed=True)
    assert {*rows.copy_groups.values()} == {EACH[:4]}
    assert {name for each in buckets for name in each.names} >= {"norm.weight", "blocks.0.norm.weight"}
    assert make_sync_groups(inventory(), unsplit, layout, is_compressed=True) == make_sync_groups(
        inventory(), unsplit, layout
    )


@pytest.mark.parametrize(("shard_group", "shards"), [(None, 4), (2, 2)])
def test_state_is_sharded_over_data_and_context_parallelism(shard_group: int | None, shards: int) -> None:
    """Ranks of context parallelism read the same rows, and shard as ranks of data parallelism do."""
    words = LayoutSettings(dp=2, cp=2, tp=2, pp=2, zero=3, shard_group=shard_group, microbatches=2)
    layout = resolve_layout(words, 16, 8)
    assert (layout.dp, layout.sharding.ranks, layout.shards) == (2, 4, shards)
    assert len({tuple(rows.rows for rows in microbatches_of_rank(layout, rank, 8)) for rank in range(16)}) == 2
    split = replace(LAYOUTS["tp=2 dp=2"][2], stages=STAGES)
    sizes = {(group.sharding.ranks, group.sharding.shards) for group in make_sync_groups(inventory(), split, layout)}
    assert sizes == {(4, shards), (8, shards)}  # A tensor that tp or pp shares has two replicas
    rows, *_ = make_sync_groups(inventory(), split, layout)
    assert rows.sharding.shard_groups[0] == (tuple(range(4)) if shards == 4 else (0, 1))
    plan = make_step_plan(
        *(inventory(), layout, RECIPES["fp32"]),
        settings=CommunicationSettings(),
        batch_sequences=8,
        model_sharding=split,
    )
    assert prove_step_plan(plan).rows == 8


def test_the_sharding_of_another_number_of_ranks() -> None:
    sharding = DataParallelSharding(8, 1, 3, 8, secondary_shards=4)
    assert sharding.for_ranks(8) == sharding and sharding.for_ranks(16) == replace(sharding, ranks=16)
    assert sharding.for_ranks(4) == DataParallelSharding(4, 1, 3, 4)  # Shard groups need no secondary copy
    assert sharding.for_ranks(6) == DataParallelSharding(6, 1, 3, 2)
    assert replace(sharding, secondary_shards=2).for_ranks(12) == DataParallelSharding(12, 1, 3, 4, secondary_shards=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_of_several_sync_groups_have_unique_names(layout: str) -> None:
    """Units are told from one another by their names."""
    sizes, zero, sharding = LAYOUTS[layout]
    made = make_layout(sizes, zero)
    rows = made.dp * made.sharding.microbatches
    plan = make_step_plan(
        inventory(),
        made,
        RECIPES["fp32"],
        settings=CommunicationSettings(bucket_mib=1e-3),
        batch_sequences=rows,
        model_sharding=sharding,
    )
    names = [unit.name for unit in plan.comm_units]
    assert len(set(names)) == len(names) > 1
