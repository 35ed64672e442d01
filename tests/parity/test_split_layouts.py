"""Layouts that split layers and sequences rightly are not called wrong, and all that is known is compared."""

import re

import pytest

from parity.planted_splits import GPT2_LIKE
from parity.run_planted import reference, verified
from ranks import Ranks

UNEVEN = ("model.vocab_size=261", "model.ffn_hidden=51", "model.dropout=0.1")
MIXTURES = ("mixtral", "deepseek_v3", "gpt_oss")
LIMITED = (
    "model.experts={count=4, per_token=2, hidden=16, shared=1, capacity=1.1, drop='lowest'}",
    "model.balance={kind='bias', weight=0.1, z_weight=0.01}",
)
SHORT_VECTORS = (
    "model.latent_attention={query_rank=24, key_value_rank=16, rotary_head_dim=4, plain_head_dim=8, value_head_dim=6}",
    "model.kv_heads=4",
    "model.dropout=0.1",
)
MODELS = {
    "decoder": ("decoder", UNEVEN),
    "GPT-2-like": ("decoder", (*GPT2_LIKE, "model.dropout=0.1")),
    "norms of heads": ("decoder", ("model.query_key_norm=true", "model.tied=false")),
    "head in a module": ("bert of transformers", ("data.objective=masked",)),
    "layers that stay whole": ("decoder", ("layout.require_split=0.3",)),  # 51 features over four ranks
    **{name: (name, ()) for name in ("bert", "t5", "llama", "gpt2", "qwen2", "classify", "adapters")},
    **{name: (name, ()) for name in MIXTURES},
    "limited experts": ("decoder", LIMITED),
    "latent attention": ("decoder", SHORT_VECTORS),
    # Rows of short vectors are so large that one device has sketches of them
    "wide latent attention": ("decoder", (SHORT_VECTORS[0].replace("_rank=16", "_rank=160"), *SHORT_VECTORS[1:])),
}
STAGES = ("tp=2 zero=0", "tp=2 dp=2 zero=1", "tp=2 dp=2 zero=2", "tp=2 dp=2 zero=3 microbatches=2")
LAYOUTS = [f"{stage}{sequence}" for sequence in ("", " sp=true") for stage in STAGES]
QUICK = "decoder", "tp=2 zero=0 sp=true"
CASES = [
    QUICK,
    ("head in a module", "tp=2 zero=0"),
    *(
        (model, layout)
        for model in MODELS
        if model not in (*MIXTURES, "limited experts", "layers that stay whole") and "latent" not in model
        for layout in LAYOUTS
    ),
    *((model, f"{split} sp=true zero=0") for model in MIXTURES for split in ("tp=2", "tp=2 cp=2")),
    *(("latent attention", f"{split} zero=0") for split in ("tp=2 sp=true", "tp=2 cp=2")),
    ("wide latent attention", "tp=2 cp=2 sp=true zero=0"),
    *(("limited experts", f"{split} zero=0") for split in ("cp=2", "tp=2 sp=true", "tp=2 cp=2 sp=true", "pp=2")),
    *((model, "cp=2 zero=0") for model in ("llama", "gpt2", "qwen2", *MIXTURES)),
    ("layers that stay whole", "tp=4"),
    ("llama", "tp=4 sp=true"),
]
# Outputs of which nothing says how they lie: those of modules without a weight between split layers, second outputs of
# routers, attention and mixtures, and a key whose gradients on ranks are summands.
BETWEEN = (
    r"activation (gradient )?(.*(act|act_fn|dropout|activation|_norm|intermediate|self\[0\])( \(call \d\))?|"
    r".*((gate|router|self_attn|mlp)\[1\]|shared_key)|transform|transform_norm|whole model.*)$"
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.proof) for case in dict.fromkeys(CASES)],
)
def test_a_right_split_is_not_called_wrong(ranks: Ranks, model: str, layout: str) -> None:
    verdict = verified(ranks, reference(*MODELS[model]), layout)
    assert verdict.ok, verdict
    assert 0 < verdict.worst_relative < 1e-12
    assert not [name for name in verdict.unplaced if not re.match(BETWEEN, name)]
