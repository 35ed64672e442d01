"""The page of context parallelism on families of models: the numbers of each kind, or the reason of a refusal."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.errors import InputError
from motet.parallel.layout import resolve_layout
from motet.train.job import Job
from motet.train.proof.proposed_sharding import sharding_of_job
from pages import DOCS, markdown_table
from pages.tensor_parallel_families import (
    GROUPED,
    LIMIT,
    SMALL,
    measure_families,
    rows_of_data,
    train_on_rank,
    trained_rows_of,
)

if TYPE_CHECKING:
    from ranks import Ranks

PAGE = "reference/context-parallel-families.md"
DATA = DOCS / "reference/context-parallel-families.csv"
LAYOUTS = ("dp=1 cp=2", "dp=1 cp=2 cp_kind=ring", "dp=1 cp=2 cp_kind=all-to-all")
COLUMNS = ("family", "commit", "attention", "refusal", *LAYOUTS)
TOKENS = 31  # Two ranks have 15 and 16 of them
WINDOW = {**GROUPED, "sliding_window": 7}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CHOSEN = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {
    **GROUPED,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **EXPERTS,
    **GROUPS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GPT = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LINEAR = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 4))}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
# Type of a model in transformers -> its config.
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": WINDOW,
    "ministral": WINDOW,
    "qwen2": CHOSEN,
    "qwen3": CHOSEN,
    "gemma": GROUPED,
    "gemma2": WINDOW,
    "gemma3_text": MIXED,
    "vaultgemma": MIXED,
    "phi": GROUPED,
    "phi3": WINDOW,
    "starcoder2": WINDOW,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmo3": MIXED,
    "cohere": GROUPED,
    "cohere2": MIXED,
    "granite": GROUPED,
    "stablelm": GROUPED,
    "glm": GROUPED,
    "glm4": GROUPED,
    "ernie4_5": GROUPED,
    "exaone4": {**MIXED, "sliding_window_pattern": 2},
    "hunyuan_v1_dense": GROUPED,
    "smollm3": GROUPED,
    "helium": GROUPED,
    "nemotron": GROUPED,
    # A bias of keys behind their norm has no gradient but rounding, which Adam enlarges: dp=2 differs by 1.7e-12, too
    "persimmon": {**SMALL, "qk_layernorm": False},
    "seed_oss": GROUPED,
    "arcee": GROUPED,
    "apertus": GROUPED,
    "diffllama": GROUPED,
    "gpt_neox": SMALL,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "biogpt": SMALL,
    "falcon": {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "mixtral": {**EXPERTS, "sliding_window": 7},
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "granitemoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, **MIXED},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": {**EXPERTS, **GROUPS, "n_group": 1},
    "dots1": {**EXPERTS, **GROUPS, "n_group": 1, "n_shared_experts": 1},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "minimax_m2": {**EXPERTS, "rotary_dim": 8},
    "jetmoe": {**EXPERTS, "kv_channels": 8},
    "phimoe": {**EXPERTS, "sliding_window": 7},
    "bloom": {**SMALL, "n_head": 4, "n_layer": 2},
    "xglm": {**SMALL, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "mpt": {"vocab_size": 260, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_neo": {**SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 7},
    "doge": GROUPED,
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "minimax": {**EXPERTS, "block_size": 8},
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "qwen3_next": {**EXPERTS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {**GROUPED, "lru_width": 32, "block_types": ["recurrent", "attention"]},
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "electra": {**SMALL, "embedding_size": 32},
    "albert": {**SMALL, "embedding_size": 32},
    "distilbert": {"vocab_size": 260, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "roberta": {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {**SMALL, "global_attn_every_n_layers": 2, "local_attention": 6},
}
FAMILIES = {**CAUSAL, **MASKED}


def job_of(family: str, folder: Path, layout: str = "") -> Job:
    """A job of a small model with random weights, in float64, whose rows pack several documents."""
    from train.runs import TEXT, small_job

    where = Path(tempfile.mkdtemp(dir=folder))
    (where / "config.json").write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    documents = where / "documents.jsonl"
    lines = [json.dumps({"text": line[:18]}) for line in TEXT.read_text("utf-8").splitlines() if line.strip()]
    documents.write_text("\n".join(lines))
    words = [f"data.source={documents}", f"data.sequence_length={TOKENS}", "data.batch_sequences=8"]
    objective = ["data.objective=masked"] if family in MASKED else []
    return small_job(
        folder, *words, *objective, f"model={{factory='hf:{where}'}}", *(f"layout.{word}" for word in layout.split())
    )


def measure(words: list[str]) -> tuple[str, bool]:
    """Prove these families, or all, and train them on one device and over two ranks; the data of others stays."""
    measure_families(words, FAMILIES, DATA, columns=COLUMNS, measure_family=_measure_family)
    return page(), all(float(row[layout]) < LIMIT for row in trained_rows() for layout in LAYOUTS)


def _measure_family(pool: "Ranks", family: str) -> dict[str, str]:
    from train.runs import worst_difference

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = job_of(family, folder, LAYOUTS[0])
        try:
            attention = describe_attention(job)
        except InputError as error:
            return {"attention": "", "refusal": str(error), **dict.fromkeys(LAYOUTS, "")}
        (alone,) = pool.run(1, train_on_rank, job_of(family, folder), timeout_s=300)
        parity = {}
        for layout in LAYOUTS:
            trained = pool.run(2, train_on_rank, job_of(family, folder, layout), timeout_s=300)[0]
            parity[layout] = f"{worst_difference(trained, alone):.1e}"
    return {"attention": attention, "refusal": "", **parity}


def describe_attention(job: Job) -> str:
    """The heads and the windows of the calls of attention of a job that is proven; others are an InputError."""
    _, sharding = sharding_of_job(job, resolve_layout(job.layout, job.layout.dims.ranks, job.data.batch_sequences))
    texts = []
    for call in sharding.attention:
        seen = "both directions" if not call.causal else "causal"
        seen += f", window of {call.window}" if call.window is not None else ""
        texts.append(f"{call.query_heads} / {call.key_heads} heads, {seen}")
    return "; ".join(dict.fromkeys(texts))


read_rows, trained_rows = partial(rows_of_data, DATA), partial(trained_rows_of, DATA)


def page() -> str:
    """The page, from the data."""
    rows, trained = read_rows(), trained_rows()
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    cells = [[row["family"], row["attention"], *(_parity(row[layout]) for layout in LAYOUTS)] for row in trained]
    refusals = [[row["family"], _reason(row["refusal"])] for row in rows if row["refusal"]]
    worst = max(float(row[layout]) for row in trained for layout in LAYOUTS)
    return f"""# Context parallelism, on families of models

Each of these {len(rows)} families of transformers is a small model with random weights. motet knows none of them by
name: it hands their attention to its own, proves by running that tokens meet nowhere else, and refuses the others.
Rows of {TOKENS} tokens pack several documents, windows are shorter than rows, and dropout is that of the family.

## Trained

{len(trained)} families were trained for ten steps in float64 on one device and over two ranks. The columns of the
layouts have the largest relative difference of any loss, norm, gradient or parameter; the worst of all is {worst:.1e},
and {LIMIT:.0e} is the limit. Gradients are compared with their share of the norm of all, and parameters with what
updates could do. Made by `python scripts/docs.py {PAGE}` at commit{"s" * (len(commits) > 1)} {", ".join(commits)}.

{markdown_table(["family", "attention (query heads / key heads)", *(f"`{layout}`" for layout in LAYOUTS)], cells)}
## Refused

{markdown_table(["family", "reason"], refusals)}"""


def _parity(value: str) -> str:
    return value if float(value) < LIMIT else f"**{value}**"


def _reason(refusal: str) -> str:
    """The part of a message that differs between families."""
    text = refusal.partition("F.scaled_dot_product_attention: ")[2] or refusal
    return text.partition("; leave layout.cp out")[0].replace("|", "\\|")
