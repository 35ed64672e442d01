"""Bytes that blocks keep with each policy, as the sizes of the model predict them and as they are measured."""

from typing import Any

import pytest
import torch
from spec_cases import CASES, SMALL, forward, kept_bytes

from live_storages import live_bytes_after
from motet.memory.recompute import Recomputation
from motet.models.arch import logit_slices
from motet.models.arch.attention_and_feed_forward import FeedForward
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings, TransformerSettings
from motet.models.spec.layer_specs import BlockPolicy, MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.models.user_module import find_blocks

SEES_ALL_BYTES = 64  # Which queries of an encoder-decoder see all keys: one for each token of packed rows


@pytest.fixture(autouse=True)
def _as_many_targets_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_slices, "TARGET_COUNT_MULTIPLE", 1)


def live_bytes(model: TransformerSettings, shape: MicroBatchShape, policies: list[Any]) -> int:
    module, loss = forward(model, shape, torch.float32)
    Recomputation(find_blocks(module), policies)
    return live_bytes_after(loss)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(
    ("packed", "dropout"),
    [
        (False, 0.0),
        (True, 0.1),
        *(pytest.param(*each, marks=pytest.mark.proof) for each in ((False, 0.1), (True, 0.0))),
    ],
)
def test_each_policy_keeps_what_is_predicted(kind: type[TransformerSettings], packed: bool, dropout: float) -> None:
    shape = MicroBatchShape(3, 11, 9, packed)
    for index, values in enumerate(CASES[kind]):
        model = kind.model_validate({**SMALL, **values, "dropout": dropout})
        spec = spec_from_settings(model)
        uncounted = SEES_ALL_BYTES if kind is EncoderDecoderSettings else 0
        # Autograd's saved tensors less what is no longer alive
        elsewhere = kept_bytes(model, shape, torch.float32) - live_bytes(model, shape, ["none"] * spec.policy_count)
        mixed: list[BlockPolicy] = (
            ["full", "none", "selective", "none"] if index % 2 else ["selective", "full", "full", "full"]
        )
        if kind is EncoderDecoderSettings and not dropout:  # Without recomputation, torch's attention keeps more
            mixed = ["selective", "full"] * 2
        choices: list[list[BlockPolicy]] = [["full"] * 4, ["selective"] * 4, mixed]
        for policies in (each[: spec.policy_count] for each in choices):
            predicted = spec.saved_bytes(shape, "float32", policies)
            measured = elsewhere + live_bytes(model, shape, policies)
            assert 0 <= measured - predicted <= uncounted, (values, policies, measured, predicted)


def test_the_published_sum_of_a_block() -> None:
    """34 s b h + 5 a s^2 b bytes for a block with dropout in 16 bits, and 2 s b h with full recomputation."""
    s, b, h, a = 64, 3, 48, 4
    plain = {"norm": "layer", "bias": True, "positions": "learned", "gated": False, "activation": "gelu"}
    sizes = {"vocab_size": 100, "context": s, "layers": 2, "hidden": h, "heads": a, "ffn_hidden": 4 * h, "dropout": 0.1}
    for model in (DecoderSettings(**sizes, **plain), EncoderSettings(**sizes)):
        block = next(block for block in spec_from_settings(model).blocks if block.input)
        shape, uncounted = MicroBatchShape(b, s), 0
        for tensor in block.saved():
            if tensor.name.endswith((".statistics", ".causal_mask")):  # Which the sum leaves out
                uncounted += tensor.bytes(shape, "bfloat16")
        assert block.saved_bytes(shape, "bfloat16") - uncounted == 34 * s * b * h + 5 * a * s**2 * b
        assert block.saved_bytes(shape, "bfloat16", "full") == 2 * s * b * h
        # The input, and the products of queries, keys and values, of both outputs, and of the inner layer.
        assert block.saved_bytes(shape, "bfloat16", "selective") == 2 * s * b * h * (1 + 3 + 1 + 4 + 1)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_tensor_that_is_kept_nevertheless_is_seen(policy: BlockPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = DecoderSettings.model_validate(SMALL), MicroBatchShape(3, 11)
    policies = [policy] * model.layers
    right, leak = live_bytes(model, shape, policies), list[torch.Tensor]()
    compute = FeedForward.forward

    def keeping(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        leak.append(torch.relu(x))
        return compute(self, x)

    monkeypatch.setattr(FeedForward, "forward", keeping)
    assert live_bytes(model, shape, policies) == right + model.layers * 3 * 11 * model.hidden * 4
