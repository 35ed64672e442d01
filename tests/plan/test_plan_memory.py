"""Memory of planned steps: states and activations by their definitions, peaks, and what does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.models.settings import DecoderSettings, LatentAttentionSettings, MixtureOfExpertsSettings
from motet.plan.frameworks import CONSTANT_ORIGINS, MEMORY_CONSTANTS, STACKS, MemoryConstants
from motet.plan.memory.step_memory import PlannedMemory, RankMemory, estimate_memory, fits
from motet.plan.planned_step import PlannedStep
from motet.precision.recipe import RECIPES
from plan.sized_layouts import sized

MODEL = DecoderSettings(
    vocab_size=32000, context=1024, layers=8, hidden=1024, heads=16, kv_heads=8, ffn_hidden=4096, tied=False
)
# GPT of Korthikanti et al. 2022 (arXiv:2205.05198), for which the paper counts bytes
GPT = MODEL.model_copy(
    update={"kv_heads": 16, "gated": False, "activation": "gelu_tanh", "norm": "layer", "positions": "learned"}
)
TOKENS, HIDDEN, PAIRS = 1024 * 64, 1024, 64 * 16 * 1024**2  # Of 64 rows of 1024 tokens, with 16 heads
STATISTICS = 2 * 2 * 4  # Bytes of a token that the paper leaves out: mean and deviation of two norms


def step_of(stack: str = "motet", model: DecoderSettings = MODEL, **sizes: object) -> PlannedStep:
    return PlannedStep(model, 1024, 64, **sized(**sizes), stack=STACKS[stack])


def memory_of(stack: str = "motet", model: DecoderSettings = MODEL, **sizes: object):
    return estimate_memory(step_of(stack, model, **sizes))


def saved_by_a_block(stack: str, model: DecoderSettings = GPT, *, has_dropout: bool = False, **sizes: object) -> float:
    """Bytes that one more block adds to the saved activations."""
    deep = model.model_copy(update={"layers": model.layers + 1})
    steps = (replace(step_of(stack, each, **sizes), has_dropout=has_dropout) for each in (model, deep))
    less, more = (estimate_memory(step).worst.bytes["saved activations"] for step in steps)
    return more - less


@pytest.mark.parametrize(("zero", "parts"), [(0, 18.0), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 12 / 8)])
def test_states_of_the_stages_of_zero(zero: int, parts: float) -> None:
    count = PlannedStep(MODEL, 1024, 64, **sized()).spec.parameter_count
    worst = memory_of(dp=8, zero=zero).worst
    assert worst.state == pytest.approx(
        parts * count
    )  # bf16 with AdamW: 2 + 4 + 4 + 8 bytes; stage 3 has no gradient in forward


def test_gradients_that_are_reduced_once_are_whole() -> None:
    count = PlannedStep(MODEL, 1024, 64, **sized()).spec.parameter_count
    each, once = (
        memory_of(dp=8, zero=2, microbatches=2, reduce_gradients=when).worst.bytes["gradients"]
        for when in ("microbatch", "step")
    )
    assert (each, once) == (4 * count / 8, 4 * count)


def test_whole_sums_of_stage_3_are_kept_until_they_are_reduced() -> None:
    """All parameters in the dtype of reductions, wherever the stages of a rank are."""
    count = PlannedStep(MODEL, 1024, 64, **sized()).spec.parameter_count
    sizes = {"dp": 8, "zero": 3, "microbatches": 4}
    for pipeline in ({}, {"pp": 2}, {"pp": 2, "chunks": 2, "schedule": "interleaved"}):
        each, once = (
            [rank.bytes["gradients"] for rank in memory_of(**sizes, **pipeline, reduce_gradients=when).ranks]
            for when in ("microbatch", "step")
        )
        assert sum(once) == pytest.approx(4 * count, rel=0.001), pipeline
        assert sum(each) == pytest.approx(4 * count / 8, rel=0.001), pipeline


def test_saved_activations_are_those_of_the_model() -> None:
    step = PlannedStep(MODEL, 1024, 64, **sized(dp=8, microbatches=4))
    assert memory_of(dp=8, microbatches=4).worst.bytes["saved activations"] == step.spec.saved_bytes(
        step.shape, "bfloat16"
    )
    full = memory_of(dp=8, microbatches=4, recompute="full").worst.bytes
    assert full["saved activations"] < 0.2 * step.spec.saved_bytes(step.shape, "bfloat16")


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, False), (4, True)])
def test_a_block_of_megatron_keeps_what_its_paper_counts(tp: int, sp: bool) -> None:
    """Fused softmax keeps s b h (10 + 24 / t) + 5 a s^2 b / t; sequence parallelism divides the 10 too, and
    recomputation of attention leaves out its matrices: equations 2 and 4, and section 5."""
    both = {"tp": tp, "sp": sp}
    split = tp if sp else 1
    statistics = STATISTICS * TOKENS / split
    plain = TOKENS * HIDDEN * (10 / split + 24 / tp) + statistics
    unfused = saved_by_a_block("megatron-2021", has_dropout=True, **both)
    assert unfused == pytest.approx(plain + 5 * PAIRS / tp, rel=1e-12)
    selective = saved_by_a_block("megatron-2021", has_dropout=True, recompute="attention", **both)
    assert selective == pytest.approx(plain, rel=1e-12)
    full = saved_by_a_block("megatron-2021", has_dropout=True, recompute="full", **both)
    assert full == pytest.approx(2 * TOKENS * HIDDEN / split, rel=1e-12)


def test_dropout_of_fused_attention_adds_two_masks() -> None:
    without, with_masks = (saved_by_a_block("megatron", has_dropout=each) for each in (False, True))
    assert with_masks - without == 2 * TOKENS * HIDDEN
    without_masks = saved_by_a_block("megatron", GPT.model_copy(update={"dropout": 0.1}))
    assert without_masks == with_masks
    assert saved_by_a_block("megatron-unfused") - without == pytest.approx(2 * PAIRS, rel=0.01)  # Softmax alone
    deep = replace(step_of("motet"), has_dropout=True)  # motet's own masks are those of the model
    assert estimate_memory(deep) == memory_of("motet")


def test_experts_keep_the_tokens_that_they_get() -> None:
    experts = MixtureOfExpertsSettings(count=8, per_token=2, hidden=512)
    model = MODEL.model_copy(update={"experts": experts})
    balanced, uneven = (
        estimate_memory(replace(step_of("megatron", model, dp=8, ep=8), expert_imbalance=each)).worst
        for each in (1.0, 1.5)
    )
    tokens, layers, widths = 8 * 1024 * 2, 8, 1024 + 3 * 512  # Input, gate and up, and their product
    grown = uneven.bytes["saved activations"] - balanced.bytes["saved activations"]
    assert grown == pytest.approx(0.5 * 2 * tokens * layers * widths)
    local = (replace(step_of("megatron", model, dp=8), expert_imbalance=each) for each in (1.0, 1.5))
    assert len({estimate_memory(step).worst.allocated for step in local}) == 1  # A rank with all experts is balanced


def test_split_experts_keep_whole_inputs_and_weighted_activations() -> None:
    """Without a gate, a separate kernel weights activations: the product, the activation and its weighted copy."""
    experts = MixtureOfExpertsSettings(count=8, per_token=2, hidden=512)
    models = {"gated": MODEL, "plain": GPT}
    saved = {}
    for name, model in models.items():
        for expert_tp in (1, 2):
            sizes = {"dp": 4, "tp": 2, "sp": True, "ep": 4, "expert_tp": expert_tp}
            step = step_of("megatron", model.model_copy(update={"experts": experts}), **sizes)
            balanced, uneven = (estimate_memory(replace(step, expert_imbalance=each)).worst for each in (1.0, 2.0))
            saved[name, expert_tp] = uneven.bytes["saved activations"] - balanced.bytes["saved activations"]
    tokens = 8 * 2 * 16 * 1024 / 2 * 2  # Layers, bytes, tokens of a rank, experts of a token
    assert saved == {(name, split): tokens * (1024 * split + 3 * 512) for name in models for split in (1, 2)}


def test_torchtitan_keeps_every_second_product() -> None:
    """q, v, gate and, eager, down; the input of the block, the result of attention and its sums."""
    kept = 2 * (1024 + 1024 + 512 + 4096 + 1024) + 4 * 16  # Bytes of a token: 16 heads of 64, and 8 of keys and values
    compiled = saved_by_a_block("torchtitan-compiled", MODEL, recompute="selective")
    assert compiled == pytest.approx(TOKENS * kept)
    eager = saved_by_a_block("torchtitan-eager", MODEL, recompute="selective")
    assert eager - compiled == pytest.approx(2 * TOKENS * 1024)


def test_a_pipeline_keeps_what_is_in_flight() -> None:
    ranks = memory_of(dp=1, pp=4, microbatches=16).ranks
    inner = [rank.bytes["saved activations"] for rank in ranks[:3]]
    assert inner[0] > inner[1] > inner[2]
    gpipe = memory_of(dp=1, pp=4, microbatches=16, schedule="gpipe").ranks[1].bytes["saved activations"]
    assert gpipe == pytest.approx(16 / 3 * inner[1], rel=0.05)  # All micro-batches, not three


def test_chunks_in_flight_are_counted_by_stage() -> None:
    """The last of two ranks with the output head alone as its second chunk keeps two micro-batches of the block in
    front of the first backward, and one of the head."""
    model = GPT.model_copy(update={"layers": 3})
    step = step_of("megatron", model, pp=2, chunks=2, schedule="interleaved", microbatches=4)
    last = estimate_memory(step).ranks[1].bytes["saved activations"]
    block = saved_by_a_block("megatron") / 4  # 16 of 64 rows
    head = 16 * 1024 * HIDDEN * 2 * 2 + 16 * 1024 * 2 * 4  # Inputs of the norm and of the head, statistics of the norm
    assert step.stage_ranges[-1] == range(3, 3)
    assert last == pytest.approx(2 * block + head, rel=1e-12)


def test_inputs_of_stages_are_split_with_sequence_parallelism() -> None:
    """motet splits the stream inside of blocks alone, so that the first block of a stage has its whole input."""
    sizes = {"dp": 1, "tp": 4, "sp": True, "pp": 4, "microbatches": 4, "recompute": "full"}
    inputs = 3 * 2 * 16 * 1024 * HIDDEN  # In flight on the second of four ranks, bytes, tokens of 16 rows
    megatron, motet = (
        memory_of(stack, GPT, **sizes).ranks[1].bytes["saved activations"] for stack in ("megatron", "motet")
    )
    assert megatron == inputs * 2 / 4  # Two blocks
    assert motet == inputs * (1 + 1 / 4 + 1 / 4)  # And the output of the stage, until it is sent back


@pytest.mark.parametrize(
    ("stack", "messages"),
    [("megatron", 4), ("megatron-deepspeed", 4 + 3 / 2), ("torchtitan-compiled", 4 + 2 * 8)],
)
def test_messages_that_frameworks_keep(stack: str, messages: float) -> None:
    """Two sent and two received; outputs of three micro-batches in flight over two ranks; outputs and gradients of all
    eight."""
    ranks = memory_of(stack, dp=1, tp=2, pp=4, microbatches=8).ranks
    assert ranks[1].bytes["communication buffers"] == messages * 2 * 8 * 1024 * HIDDEN


def test_gathered_parameters_of_stage_3() -> None:
    spec = step_of().spec
    block = next(block for block in spec.blocks if block.input).parameter_count
    root = spec.parameter_count - 8 * block
    loss = memory_of("torchtitan-compiled", dp=8, zero=3).worst.bytes["gathered parameters"]
    assert loss == 2 * (root + block)  # The root's and the last block's
    narrow = MODEL.model_copy(update={"vocab_size": 256})
    backward = memory_of("torchtitan-compiled", narrow, dp=8, zero=3).worst.bytes["gathered parameters"]
    assert backward == 2 * (step_of(model=narrow).spec.parameter_count - 6 * block) + (2 + 4) * block
    kept = {"reshard_after_forward": False, "reduce_gradients": "step"}
    stage = memory_of("torchtitan-compiled", dp=2, pp=4, zero=3, microbatches=4, **kept).ranks[1].bytes
    assert stage["gathered parameters"] == (2 + 4) * 2 * block + (2 + 4) * block  # Two blocks, and one in its backward
    largest = 32000 * HIDDEN
    assert memory_of("deepspeed", dp=8, zero=3).worst.bytes["gathered parameters"] == 2 * (
        spec.parameter_count + largest
    )


@pytest.mark.parametrize(("per_token", "products"), [(1, 3), (2, 7)])
def test_workspaces_of_megatron(per_token: int, products: int) -> None:
    model = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=8, per_token=per_token, hidden=512)})
    assert memory_of("megatron", model, dp=8).worst.bytes["workspace"] == products * 2**25


def test_a_tied_head_on_another_rank_is_a_copy() -> None:
    tied = GPT.model_copy(update={"tied": True})
    copies, once = (
        sum(rank.bytes["parameters"] for rank in memory_of("megatron", tied, dp=1, pp=pp, microbatches=4).ranks)
        for pp in (2, 1)
    )
    assert copies - once == 2 * 32000 * HIDDEN


def test_tensor_parallelism_and_experts_divide() -> None:
    whole, split = memory_of(dp=2, tp=1).worst, memory_of(dp=1, tp=2, sp=True, microbatches=2).worst
    assert split.bytes["parameters"] == pytest.approx(whole.bytes["parameters"] / 2, rel=0.01)
    experts = MODEL.model_copy(update={"experts": MixtureOfExpertsSettings(count=8, per_token=2, hidden=2048)})
    all_here, spread = (memory_of(model=experts, dp=8, ep=ep).worst.bytes["parameters"] for ep in (1, 8))
    expert_bytes = 2.0 * 8 * 8 * 3 * 1024 * 2048  # bytes x layers x experts x matrices
    assert all_here - spread == pytest.approx(7 / 8 * expert_bytes)


def test_logits_are_those_of_the_loss() -> None:
    fused, kept = memory_of("motet", dp=8).worst.bytes, memory_of("megatron", dp=8).worst.bytes
    assert "logits" not in fused and kept["logits"] == 8 * 1024 * 32000 * (2 + 4)
    assert memory_of("torchtitan-compiled", dp=8).worst.bytes["logits"] == 8 * 1024 * 32000 * 3 * 4
    assert memory_of("torchtitan-compiled", tp=2, dp=4).worst.bytes["logits"] == 16 * 1024 * 16000 * 4 * 4


def test_more_outputs_add_a_block_and_a_softmax() -> None:
    plain, more = (replace(step_of("megatron", dp=8), extra_outputs=count) for count in (0, 1))
    less, greater = (estimate_memory(step).worst.bytes for step in (plain, more))
    block = next(block for block in plain.spec.blocks if block.input).parameter_count
    assert greater["parameters"] - less["parameters"] == 2 * block
    assert greater["logits"] - less["logits"] == 8 * 1024 * 32000 * 4
    saved = saved_by_a_block("megatron", MODEL, dp=8)
    assert greater["saved activations"] - less["saved activations"] == pytest.approx(saved)


def test_a_peak_has_logits_or_a_recomputed_block() -> None:
    large_head = MODEL.model_copy(update={"vocab_size": 256000})
    assert "recomputed activations" not in memory_of("megatron", large_head, dp=8, recompute="full").worst.bytes
    small_head = MODEL.model_copy(update={"vocab_size": 256})
    backward = memory_of("megatron", small_head, dp=8, recompute="full").worst.bytes
    assert "logits" not in backward
    every = saved_by_a_block("megatron", small_head, dp=8)
    kept = saved_by_a_block("megatron", small_head, dp=8, recompute="full")
    assert backward["recomputed activations"] == pytest.approx(every - kept)


@pytest.mark.parametrize(("recipe", "each"), [("fp16", 6.0), ("bf16", 0.0)])
def test_deepspeed_copies_gradients(recipe: str, each: float) -> None:
    """Buckets of 5e8 elements; float16 widens the part of each rank, and bfloat16 narrows all wide sums."""
    recipes = {"bf16": RECIPES["bf16"], "fp16": replace(RECIPES["fp16"], reduce="float16")}
    step = replace(step_of("megatron-deepspeed", dp=8, zero=1), recipe=recipes[recipe])
    count, flat = step.spec.parameter_count, estimate_memory(step).worst.bytes["flat copies"]
    reduced_bytes = 2 * 5e8 if recipe == "fp16" else 2 * count
    assert flat == pytest.approx(2 * 5e8 + reduced_bytes + each * count / 8)


def test_outside_counts_the_context_and_communicators() -> None:
    constants = MEMORY_CONSTANTS["megatron"]
    rank = RankMemory(0, {"parameters": 10e9, "saved activations": 5e9}, constants, communicators=3)
    assert rank.reserved == 15e9 + constants.fragmentation * 5e9
    assert rank.outside == rank.reserved + constants.context_bytes + 3 * constants.communicator_bytes
    one, four = memory_of("megatron", dp=1), memory_of("megatron", dp=2, tp=2, pp=2, microbatches=2)
    assert (one.worst.communicators, four.worst.communicators) == (1, 4)  # All ranks, and each dimension


def test_an_allocator_gives_back_half_of_its_gaps_before_it_fails() -> None:
    rank = RankMemory(0, {"parameters": 10e9, "saved activations": 50e9}, MEMORY_CONSTANTS["fsdp"], communicators=1)
    gaps, beyond = 0.17 * 50e9, rank.outside - rank.reserved
    for usable, left in ((100e9, gaps), (60e9 + beyond + 0.7 * gaps, 0.7 * gaps), (60e9 + beyond, 0.5 * gaps)):
        limited = rank.on_device(usable)
        assert limited.reserved - limited.allocated == pytest.approx(left)
        assert limited.on_device(usable) == limited and limited.on_device(1e12) == rank
        memory = PlannedMemory((rank,))
        assert (fits(memory, usable) is None) == (fits(memory.on_device(usable), usable) is None) == (left > 0.5 * gaps)
    fuller = replace(rank, pipeline_rank=1, bytes={**rank.bytes, "saved activations": 50.2e9})
    for ranks in ((fuller, rank), (rank, fuller)):
        assert PlannedMemory(ranks).on_device(60e9 + beyond + 0.7 * gaps).worst.pipeline_rank == 1
    assert fits(PlannedMemory((rank,)), 60e9 + beyond + 0.51 * gaps) is None
    assert fits(PlannedMemory((rank,)), 60e9 + beyond + 0.49 * gaps) is not None


def test_what_does_not_fit_is_one_line() -> None:
    memory = memory_of(dp=8)
    assert fits(memory, 1e12) is None
    line = fits(memory, 1e9)
    assert line is not None and line.startswith("stage 0: activations ") and "GiB" in line and "\n" not in line
    assert memory.worst.allocated < memory.worst.reserved < memory.worst.outside


def test_the_states_of_all_stages_are_those_of_the_model() -> None:
    count = PlannedStep(MODEL, 1024, 64, **sized()).spec.parameter_count
    for chunks, schedule in ((1, "1f1b"), (2, "interleaved")):
        ranks = memory_of(dp=1, pp=4, chunks=chunks, schedule=schedule, microbatches=8).ranks
        assert sum(rank.bytes["parameters"] for rank in ranks) == 2 * count
        assert ranks[0].bytes["parameters"] > ranks[1].bytes["parameters"]  # The embedding


SIZES = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 4]),
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "zero": st.sampled_from([0, 1, 2, 3]),
        "microbatches": st.just(4),
    }
)
STACK_NAMES = st.sampled_from(["motet", "megatron", "megatron-2021", "torchtitan-eager", "megatron-deepspeed"])


@settings(max_examples=60)
@given(SIZES, STACK_NAMES, st.sampled_from(["dp", "tp", "pp"]))
def test_more_shards_never_need_more_state(sizes: dict[str, int], stack: str, dimension: str) -> None:
    less, more = (memory_of(stack, **each) for each in (sizes, {**sizes, dimension: 2 * sizes[dimension]}))
    states = [max(rank.state for rank in memory.ranks) for memory in (less, more)]
    assert states[1] <= states[0]


@settings(max_examples=60)
@given(SIZES, STACK_NAMES, st.booleans(), st.booleans())
def test_more_recomputation_never_keeps_more(
    sizes: dict[str, int], stack: str, has_experts: bool, has_latent: bool
) -> None:
    latent = LatentAttentionSettings(
        query_rank=256, key_value_rank=128, rotary_head_dim=32, plain_head_dim=64, value_head_dim=64
    )
    experts = MixtureOfExpertsSettings(count=8, per_token=2, hidden=512)
    model = MODEL.model_copy(
        update={"latent_attention": latent if has_latent else None, "experts": experts if has_experts else None}
    )
    saved = {
        policy: max(
            rank.bytes.get("saved activations", 0.0)
            for rank in memory_of(stack, model, recompute=policy, **sizes).ranks
        )
        for policy in ("none", "attention", "activations", "activations and up-projections", "selective", "full")
    }
    assert saved["full"] <= saved["selective"] <= saved["none"]
    assert saved["full"] <= saved["activations and up-projections"] <= saved["activations"] <= saved["none"]
    assert saved["full"] <= saved["attention"] <= saved["none"]


def test_every_number_of_a_framework_has_an_origin() -> None:
    numbers = {
        name
        for constants in MEMORY_CONSTANTS.values()
        for name in MemoryConstants.__dataclass_fields__
        if type(getattr(constants, name)) is float
    }
    assert numbers | {"expert_imbalance"} == set(CONSTANT_ORIGINS)
