"""The picture and tables of docs/guide/tensor-parallelism.md: the sharding of the job `tiny`, and sizes by specs."""

from collections.abc import Iterator, Sequence
from functools import partial

from motet.core.svg import MARGIN, element, labelled_box, svg_page, text
from motet.models.spec.layer_specs import BlockSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec, spec_from_settings
from motet.parallel.model_sharding import (
    BOUNDARY_OPERATIONS,
    TENSOR_DIMENSION,
    BoundaryComm,
    ModelInventory,
    ModelSharding,
    TensorInfo,
    inventory_of_spec,
)
from motet.parallel.parallel_dims import ParallelDims
from motet.train.job import load_job
from pages import fill_blocks, markdown_table

PAGE = "guide/tensor-parallelism.md"
RANKS = 2
DIMS = ParallelDims(((TENSOR_DIMENSION, RANKS),))
BLOCK = "blocks.0."
FEW = ["model.layers=2", "model.vocab_size=64"]
PANEL, LANE, GAP, TOP, ROW, BOX = 460, 200, 16, 60, 46, 32
STREAMS = {
    "same": "[R, T, {hidden}], the same on both ranks",
    "split": "[R, T / 2, {hidden}], other tokens on each rank",
}
TITLES = {False: "layout.tp = 2", True: "layout.tp = 2, layout.sp = true"}


def page() -> str:
    """The text of the page with its tables."""
    return fill_blocks(PAGE, {"saved": saved_table(), "textbook": textbook_table()})


def saved_table() -> str:
    """Saved activations of a block of llama3-8b on each of several ranks, by the dimension that splits them."""
    spec, shape = spec_from_settings(load_job("llama3-8b").model), MicroBatchShape(1, 8192)
    rows = []
    for ranks, sequence in ((1, False), *((n, sp) for n in (2, 4, 8) for sp in (False, True))):
        whole, local = (
            block_named(each, "block").layer.saved for each in (spec, spec.on_rank(ranks, sequence=sequence))
        )
        sizes = dict.fromkeys(("stream", "heads", "inner"), 0)
        for tensor, kept in zip(whole, local, strict=True):
            sizes[tensor.split.split_by] += kept.bytes(shape, "bfloat16")
        mib = [f"{size / 2**20:,.1f}" for size in (*sizes.values(), sum(sizes.values()))]
        rows.append([f"tp={ranks}{' sp=true' * sequence}", *mib])
    head = ("MiB on a rank", "residual stream", "attention", "feed-forward network", "together")
    return markdown_table(head, rows)


def textbook_table() -> str:
    """The formulas of Korthikanti et al. for a block of GPT-3, beside its spec."""
    spec = spec_from_settings(load_job("gpt3-175b", ["model.dropout=0.1"]).model)
    s, b, h, a, shape = 2048, 1, 12288, 96, MicroBatchShape(1, 2048)
    rows = []
    for t, sequence in ((1, False), *((n, sp) for n in (2, 8) for sp in (False, True))):
        stream = 10 * s * b * h // t if sequence else 10 * s * b * h
        formula = stream + (24 * s * b * h + 5 * a * s * s * b) // t
        saved = block_named(spec.on_rank(t, sequence=sequence), "block").saved_bytes(shape, "bfloat16")
        rows.append([f"tp={t}{' sp=true' * sequence}", *(f"{n:,}" for n in (formula, saved, saved - formula))])
    return markdown_table(("bytes on a rank", "formula", "`ModelSpec`", "norms' statistics and mask"), rows)


def block_named(spec: ModelSpec, name: str) -> BlockSpec:
    """The run of equal blocks with a name."""
    return next(block for block in spec.blocks if block.name == name)


def picture() -> str:
    """One block without and with sequence parallelism, side by side, with a lane for each rank."""
    inventory = inventory_of_spec(spec_from_settings(load_job("tiny").model))
    panels = [list(_steps(sharding_of_tiny(sequence), inventory, sequence)) for sequence in TITLES]
    body = [
        element("g", "", *_panel(steps, TITLES[bool(number)]), transform=f"translate({MARGIN + PANEL * number} 0)")
        for number, steps in enumerate(panels)
    ]
    title = "A block of the job tiny over two tensor-parallel ranks, without and with sequence parallelism"
    return svg_page(title, "", body, width=2 * PANEL + MARGIN, height=TOP + ROW * max(map(len, panels)) - ROW + BOX)


def sharding_of_tiny(sequence: bool) -> ModelSharding:
    """The split of the job `tiny`, found and proven as for two ranks that train it, with fewer layers and tokens."""
    import torch

    from motet.core.batch import Batch
    from motet.models.build import build_trainable_model
    from motet.parallel.tensor_parallel.sharding_proposal import ProofForwards, proof_lengths, propose_sharding

    model = build_trainable_model(load_job("tiny", FEW).model, 0, torch.float32, torch.device("cpu"))
    tokens = [torch.arange(length).repeat(2, 1) for length in proof_lengths(DIMS, 64)]
    batches = [Batch(t, t, torch.ones(t.shape), torch.arange(2)) for t in tokens]
    forwards, logits = ([partial(run, batch) for batch in batches] for run in (model.loss_sum, model.logits))
    examples = ProofForwards(forwards, 2, logits)
    return propose_sharding(model.module, examples, DIMS, splits_sequence=sequence)


# A step is a line of text, or boxes: one over both lanes for communication, one in each lane for a module.
Step = tuple[str, tuple[str, ...]]


def _steps(sharding: ModelSharding, inventory: ModelInventory, sequence: bool) -> Iterator[Step]:
    """Modules with parameters in the order of a block, with the communication before and after them."""
    tensors = [tensor for tensor in inventory.tensors if tensor.name.startswith(BLOCK)]
    state, hidden = "split" if sequence else "same", tensors[0].shape[-1]
    yield "stream", (STREAMS[state].format(hidden=hidden),)
    for module in dict.fromkeys(tensor.name.rpartition(".")[0] for tensor in tensors):
        comms = {comm.side: comm for comm in sharding.boundary_comms if module in (comm.module, *comm.shared_by)}
        if "input" in comms:
            yield "f", (_words(comms["input"]),)
            state = "parallel"
        name = f"{module}.weight"
        (tensor,) = (tensor for tensor in tensors if tensor.name == name)
        if "output" in comms and state == "parallel":
            yield "inside", (_inside(sharding, module),) * RANKS
        yield _kind(sharding, name), tuple(_module_words(sharding, tensor, rank) for rank in range(RANKS))
        if "output" in comms:
            yield "g", (_words(comms["output"]),)
            state = BOUNDARY_OPERATIONS[comms["output"].operation, "output"][1]
            yield "stream", (f"+ the input of the norm: {STREAMS[state].format(hidden=hidden)}",)


def _inside(sharding: ModelSharding, row: str) -> str:
    """The local attributes with which a rank computes between column and row layers."""
    region = row.rpartition(".")[0]
    values = [f"{name} = {value}" for module, name, value in sharding.attributes if module == region]
    return ", ".join(values) or "its part of the inner width"


def _module_words(sharding: ModelSharding, tensor: TensorInfo, rank: int) -> str:
    spec = sharding.spec(tensor, {"tp": rank}, DIMS)
    assert spec is not None
    shape = " x ".join(map(str, spec.local_shape))
    return f"{tensor.name.removeprefix(BLOCK).removesuffix('.weight')}: {shape}"


def _kind(sharding: ModelSharding, name: str) -> str:
    splits = sharding.rule(name).splits
    return "whole" if not splits else "rows" if splits[0].dim else "columns"


def _words(comm: BoundaryComm) -> str:
    letter = "f" if comm.side == "input" else "g"
    return f"{letter}: {comm.operation}, in backward {comm.conjugate}"


FILL = {"f": "k1", "g": "k2", "columns": "k0", "rows": "k3", "whole": "k7"}


def _panel(steps: Sequence[Step], title: str) -> Iterator[str]:
    yield text((0, 16), title, "head")
    for rank in range(RANKS):
        yield text((LANE * (rank + 0.5) + GAP * rank, 44), f"rank {rank}", "head middle")
    for number, (kind, texts) in enumerate(steps):
        y, width = TOP + ROW * number, LANE if len(texts) > 1 else RANKS * LANE + GAP
        for lane, words in enumerate(texts):
            x = (LANE + GAP) * lane
            if kind in ("stream", "inside"):
                yield text((x + width / 2, y + BOX / 2 + 5), words, "quiet middle")
                continue
            corners = BOX // 2 if kind in "fg" else 4
            yield labelled_box(FILL[kind], [words], "", x=x, y=y, width=width, height=BOX, rx=corners)
    yield from _arrows(steps)


def _arrows(steps: Sequence[Step]) -> Iterator[str]:
    """An arrow from each box to the next, in both lanes."""
    for number in range(len(steps) - 1):
        y = TOP + ROW * number + BOX
        for lane in range(RANKS):
            x = LANE * (lane + 0.5) + GAP * lane
            if {"stream", "inside"}.isdisjoint((steps[number][0], steps[number + 1][0])):
                yield element("path", "arrow", d=f"M{x:g} {y} v{ROW - BOX}")
