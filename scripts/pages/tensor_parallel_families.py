"""The page of tensor parallelism on families of models: the splits, how they were found, and the numbers."""

import csv
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.parallel.process.process_group import RankGroup
from motet.parallel.roles_of_tensors import TensorRole
from motet.train.job import Job
from pages import DOCS, commit, import_from_tests, markdown_table

if TYPE_CHECKING:
    from ranks import Ranks
    from train.runs import Trained

DATA = DOCS / "reference/tensor-parallel-families.csv"
LAYOUTS = ("tp=2", "tp=4", "tp=2 sp=true", "tp=2 dp=2 zero=3 sp=true")
COLUMNS = ("family", "commit", "parameters", "split", "found", "whole", *LAYOUTS)
LIMIT = 1e-12
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 260,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
# Type of a model in transformers -> (class, its config, other settings of the job).
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", GROUPED, []),
    "mistral": ("MistralForCausalLM", GROUPED, []),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}, []),
    "qwen3": ("Qwen3ForCausalLM", GROUPED, []),
    "gemma2": ("Gemma2ForCausalLM", GROUPED, []),
    "gemma3_text": ("Gemma3ForCausalLM", GROUPED, []),
    "phi": ("PhiForCausalLM", GROUPED, []),
    "phi3": ("Phi3ForCausalLM", GROUPED, []),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED, []),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, []),
    "cohere": ("CohereForCausalLM", GROUPED, []),
    "granite": ("GraniteForCausalLM", GROUPED, []),
    "stablelm": ("StableLmForCausalLM", GROUPED, []),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL, []),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, []),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}, []),
    "falcon": (
        "FalconForCausalLM",
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        [],
    ),
    "bloom": ("BloomForCausalLM", {**SMALL, "n_head": 4, "n_layer": 2}, []),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, []),
    "bert": ("BertForMaskedLM", SMALL, ["data.objective=masked"]),
    "roberta": ("RobertaForMaskedLM", SMALL, ["data.objective=masked"]),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 359, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2},
        ["data.objective=spans"],
    ),
}


def job_of(family: str, folder: Path, layout: str = "", more_config: Mapping[str, Any] | None = None) -> Job:
    """A job of a small model with random weights, in float64."""
    from train.runs import small_job

    architecture, config, more = FAMILIES[family]
    where = Path(tempfile.mkdtemp(dir=folder))
    config = {"model_type": family, "architectures": [architecture], **config, **(more_config or {})}
    (where / "config.json").write_text(json.dumps(config))
    words = [f"layout.{word}" for word in layout.split()]
    common = ["data.sequence_length=24", "data.batch_sequences=8", f"model={{factory='hf:{where}'}}"]
    return small_job(folder, *common, *more, *words)


def measure(words: list[str]) -> tuple[str, bool]:
    """Train these families, or all, on one device and over ranks of this machine; the data of others stays."""
    measure_families(words, FAMILIES, DATA, columns=COLUMNS, measure_family=_measure_family)
    return page(), all(float(row[layout]) < LIMIT for row in read_rows() for layout in LAYOUTS)


def train_on_rank(group: RankGroup, job: Job) -> "Trained | None":
    """Train on a rank. FSDP2 warns of blocks that return a view, such as those of OPT, and nothing writes into it."""
    from train.tensor_parallel_runs import train_and_reassemble

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    return train_and_reassemble(group, job)


def _measure_family(pool: "Ranks", family: str) -> dict[str, str]:
    from train.runs import worst_difference
    from train.tensor_parallel_runs import roles_on_rank

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (alone,) = pool.run(1, train_on_rank, job_of(family, folder), timeout_s=300)
        roles = pool.run(2, roles_on_rank, job_of(family, folder, LAYOUTS[0]), timeout_s=300)[0]
        parity = {}
        for layout in LAYOUTS:
            job = job_of(family, folder, layout)
            trained = pool.run(job.layout.dims.ranks, train_on_rank, job, timeout_s=300)[0]
            parity[layout] = f"{worst_difference(trained, alone):.1e}"
    return {**describe(roles), **parity}


def describe(roles: list[TensorRole]) -> dict[str, str]:
    """The columns of the page about a family's tensors."""
    total = sum(role.count * prod(role.shape) for role in roles)
    split = sum(role.count * prod(role.shape) for role in roles if role.split != "whole")
    return {
        "parameters": str(total),
        "split": f"{100 * split / total:.1f} %",
        "found": "; ".join(_found(roles)),
        "whole": "; ".join(_whole(roles)),
    }


def _found(roles: list[TensorRole]) -> Iterator[str]:
    """The ways in which splits were found, with numbers of tensors."""
    found = Counter[str]()
    for role in (role for role in roles if role.split != "whole"):
        found["a vocabulary" if role.split == "vocabulary" else role.reason.rpartition("found by ")[2]] += role.count
    yield from (f"{reason} ({count})" for reason, count in found.most_common())


def _whole(roles: list[TensorRole]) -> Iterator[str]:
    """The matrices that each rank holds completely, and the number of vectors."""
    for role in roles:
        if role.split == "whole" and len(role.shape) > 1:
            yield f"`{role.name}`: {role.reason}"
    if vectors := sum(role.count for role in roles if role.split == "whole" and len(role.shape) < 2):
        yield f"{vectors} vectors"


def measure_families(
    words: list[str],
    families: Collection[str],
    data: Path,
    *,
    columns: Sequence[str],
    measure_family: Callable[["Ranks", str], dict[str, str]],
) -> None:
    """Measure these families, or all, and write the row of each into the data, in the order of families."""
    import_from_tests()
    from ranks import Ranks

    if unknown := [family for family in words if family not in families]:
        raise SystemExit(f"{unknown[0]!r} is none of the families {', '.join(families)}")
    pool, order = Ranks(), list(families)
    for family in words or order:
        row = {"family": family, "commit": commit(), **measure_family(pool, family)}
        print(" | ".join(str(row[name]) for name in columns), flush=True)
        rows = [each for each in rows_of_data(data) if each["family"] != family] + [row]
        with data.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda each: order.index(each["family"])))
    pool.close()


def rows_of_data(data: Path) -> list[dict[str, str]]:
    """The row of each family that was measured."""
    if not data.is_file():
        return []
    with data.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def trained_rows_of(data: Path) -> list[dict[str, str]]:
    """The rows of families that are not refused."""
    return [row for row in rows_of_data(data) if not row["refusal"]]


def read_rows() -> list[dict[str, str]]:
    """A row for each family, in the order of FAMILIES."""
    return rows_of_data(DATA)


def page() -> str:
    """The page, from the data."""
    rows = read_rows()
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    head = [
        "family",
        "parameters that are split",
        "how the splits were found (tensors)",
        "whole on every rank, and why",
    ]
    head += [f"`{layout}`" for layout in LAYOUTS]
    cells = [
        [row["family"], row["split"], row["found"], row["whole"], *(_parity(row[layout]) for layout in LAYOUTS)]
        for row in rows
    ]
    worst = max(float(row[layout]) for row in rows for layout in LAYOUTS)
    return f"""# Tensor parallelism, on families of models

Each of these {len(rows)} families of transformers, a small model with random weights, was trained for ten steps in
float64 on one device and over tensor-parallel ranks; motet knows none of them by name. It proposed the splits and
proved them by running. The columns of the layouts have the largest relative difference of any loss, norm, gradient or
parameter; the worst of all is {worst:.1e}, and {LIMIT:.0e} is the limit. Gradients are compared with their share of the
norm of all, and parameters with what updates could do. Counts and reasons are those of `tp=2`. Made by
`python scripts/docs.py reference/tensor-parallel-families.md` at commit{"s" * (len(commits) > 1)} {", ".join(commits)}.

{markdown_table(head, cells)}"""


def _parity(value: str) -> str:
    return value if float(value) < LIMIT else f"**{value}**"
