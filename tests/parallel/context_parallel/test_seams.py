"""The seams through which attention of any module comes to the one core, while it runs on a part of each row."""

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_modules import AttentionDecoder, batch_of_rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from motet.models.arch.attention_core import ScoreOptions, attend, attention_exchange
from motet.models.arch.attention_marker import marked_mask, mask_marker
from motet.models.arch.attention_mask import AttentionMask
from motet.models.attention_seams import AttentionSeams
from motet.models.hf.attention_function import attend_for_transformers
from motet.models.layout_invariant_dropout import LayoutInvariantDropoutMode
from motet.models.user_module import make_logits_function
from refusals import refused

transformers: Any = pytest.importorskip("transformers")
_DEVICE = torch.device("cpu")


@dataclass
class CallRecorder:
    """An exchange that keeps calls, and computes what this rank can alone."""

    calls: list[tuple[Tensor, Tensor, AttentionMask, ScoreOptions]] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, options: ScoreOptions) -> Tensor:
        self.calls.append((q, k, mask, options))
        return attend(q, k, v, mask=mask, options=replace(options, dropout=0.0))


def model_of(kind: str, **config: Any) -> nn.Module:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    values = transformers.AutoConfig.for_model(kind, **{**sizes, **heads, **config})
    return transformers.AutoModelForCausalLM.from_config(values)  # type: ignore[no-any-return]  # untyped


def test_a_call_of_torch_reaches_the_exchange_with_its_mask_scale_and_dropout() -> None:
    module, recorder = AttentionDecoder("dropout"), CallRecorder()
    with (
        LayoutInvariantDropoutMode(0, module).for_rows(0, torch.arange(2)),
        AttentionSeams(module).exchanging(recorder),
    ):
        module(batch_of_rows(5).tokens)
    (q, k, mask, options), _ = recorder.calls
    assert q.shape == k.shape == (2, 2, 5, 8)
    assert (mask.causal, mask.window, options.scale, options.dropout) == (True, None, 1 / sqrt(8), 0.1)
    assert attention_exchange.get() is None


def test_recomputation_reaches_the_exchange_and_draws_the_masks_of_the_forward() -> None:
    module, masks, recorder = AttentionDecoder("dropout", blocks=1), [], CallRecorder()
    block, mode = module.blocks[0], LayoutInvariantDropoutMode(0, module)
    mode.on_mask = lambda site, mask, _: masks.append((site, mask))
    mode.on_recomputed_mask = lambda site, mask: masks.append((site, mask))
    x = torch.randn(2, 5, 16, requires_grad=True)
    with mode.for_rows(0, torch.arange(2)), AttentionSeams(module).exchanging(recorder):
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(recorder.calls) == 2 and len(masks) == 2
    assert masks[0][0] == masks[1][0] and torch.equal(masks[0][1], masks[1][1])


def test_a_marker_stands_for_its_mask_and_a_mask_of_pairs_is_refused() -> None:
    marker = mask_marker(causal=True, device=_DEVICE)
    seen = marked_mask(marker[:, :, :, :3])
    assert seen.causal and marker.shape == (1, 1, 1, 1)
    refused(r"a mask of shape \[1, 1, 1, 1\]", marked_mask, marker.float())
    q = torch.randn(1, 1, 3, 4)
    with AttentionSeams(AttentionDecoder()).exchanging(CallRecorder()):
        refused(r"a mask of shape \[3, 3\]", F.scaled_dot_product_attention, q, q, q, torch.ones(3, 3).bool())
        refused(r"keys of the same tokens", F.scaled_dot_product_attention, q[0], q[0], q[0])
        refused(r"keys of the same tokens", F.scaled_dot_product_attention, q, q[:, :, :2], q[:, :, :2])


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("llama", {}, (None, None, None)),
        ("mistral", {"sliding_window": 3}, (3, None, None)),
        ("gemma2", {"sliding_window": 3, "query_pre_attn_scalar": 4}, (3, 50.0, None)),
        ("gpt_oss", {"sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1}, (3, None, (2,))),
    ],
)
def test_transformers_hands_its_options_over_and_keys_in_their_own_heads(
    kind: str, config: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    module, recorder = model_of(kind, **config), CallRecorder()
    before = {id(vars(part)["config"]) for part in module.modules() if "config" in vars(part)}
    own = module(input_ids=batch_of_rows(9).tokens, use_cache=False).logits
    with AttentionSeams(module).exchanging(recorder):
        logits = module(input_ids=batch_of_rows(9).tokens, use_cache=False).logits
    q, k, mask, options = recorder.calls[0]
    sinks = None if options.sinks is None else tuple(options.sinks.shape)
    assert (mask.window, options.softcap, sinks) == expected and mask.causal
    assert (q.shape[1], k.shape[1], len(recorder.calls)) == (2, 1, 2)
    torch.testing.assert_close(logits, own)
    assert {id(vars(part)["config"]) for part in module.modules() if "config" in vars(part)} == before
    assert module.config._attn_implementation != "motet"


def test_an_argument_that_the_core_does_not_know_is_refused_by_name() -> None:
    q = torch.randn(1, 1, 3, 4)
    refused("it gives attention position_bias", attend_for_transformers, nn.Identity(), q, q, q, None, position_bias=q)


def test_a_part_of_a_users_module_gets_the_places_of_its_tokens_as_positions() -> None:
    module, batch = AttentionDecoder(), batch_of_rows(8)
    logits, part = make_logits_function(module), batch.at_places(((1, 3), (6, 8)))
    refused("does not ask for its places", logits, part)
    seen: list[Tensor] = []
    module.positions.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with AttentionSeams(module).exchanging(CallRecorder()):
        logits(part)
    assert seen[0].tolist() == [[1, 2, 6, 7]] * 2
