"""Initial values depend on seed, name and index alone."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SIZES, built
from torch import nn

from motet.models.parameter_values import DrawnValues, whole_box
from motet.models.settings import DecoderSettings, EncoderDecoderSettings, EncoderSettings
from motet.models.weight_init import VALUES_PER_CHUNK, init_rule_for, standard_normal_values


@given(st.integers(0, 3 * VALUES_PER_CHUNK), st.integers(0, 2 * VALUES_PER_CHUNK))
@settings(max_examples=30, deadline=None)
def test_any_stretch_is_a_part_of_the_whole(start: int, length: int) -> None:
    whole = standard_normal_values(1, "up.weight", 0, 5 * VALUES_PER_CHUNK)
    assert np.array_equal(standard_normal_values(1, "up.weight", start, start + length), whole[start : start + length])


def test_values_are_standard_normal_and_differ_by_seed_name_and_chunk() -> None:
    drawn = standard_normal_values(1, "a", 0, 4 * VALUES_PER_CHUNK)
    assert drawn.dtype == np.float32
    n = drawn.size
    assert abs(drawn.mean()) < 5 / n**0.5 and abs(drawn.var() - 1) < 5 * (2 / n) ** 0.5
    cases = product((1, 2), "ab", (0, VALUES_PER_CHUNK))
    assert len({float(standard_normal_values(seed, name, at, at + 1)[0]) for seed, name, at in cases}) == 8


def test_these_very_values_are_drawn() -> None:
    """A change here means that no earlier run can be repeated."""
    golden = [-0.4413715600967407, 0.6043145656585693, -0.45760712027549744]
    assert standard_normal_values(0, "embedding.weight", 65_535, 65_538).tolist() == golden


def test_values_do_not_depend_on_the_order_of_construction() -> None:
    settings = DecoderSettings(**SIZES, norm="layer", bias=True)
    model = built(settings, 7).module
    # Parameters of the same names, made in another order and without the others.
    alone = nn.Module()
    alone.blocks = nn.ModuleList([nn.Identity(), copy.deepcopy(model.get_submodule("blocks.1"))])
    values = DrawnValues(settings, 7, {name: tuple(parameter.shape) for name, parameter in alone.named_parameters()})
    for name, parameter in alone.named_parameters():
        assert torch.equal(values.open(name)(whole_box(tuple(parameter.shape))), model.get_parameter(name)), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_hold_the_same_values(dtype: torch.dtype) -> None:
    settings = DecoderSettings(**SIZES)
    single, other = (built(settings, 7, d).module for d in (torch.float32, dtype))
    for name, parameter in single.named_parameters():
        assert torch.equal(parameter.to(dtype), other.get_parameter(name)), name


def test_table() -> None:
    decoder = DecoderSettings(**SIZES, init_std=0.1)
    for norm in ("blocks.0.attention_norm", "norm", "blocks.1.attention.query_norm"):
        assert init_rule_for(decoder, f"{norm}.weight").value == 1
    assert init_rule_for(decoder, "blocks.0.ffn.up.bias") == init_rule_for(decoder, "head.bias")
    assert init_rule_for(decoder, "head.bias").std == 0
    assert init_rule_for(decoder, "blocks.0.attention.qkv.weight").std == 0.1
    assert init_rule_for(decoder, "blocks.0.attention.output.weight").std == 0.1 / 2
    assert init_rule_for(decoder, "blocks.0.ffn.down.weight").std == 0.1 / 2
    assert init_rule_for(EncoderSettings(**SIZES, init_std=0.1), "blocks.0.ffn.down.weight").std == 0.1
    both = EncoderDecoderSettings(**SIZES, init_std=0.1, decoder_layers=3)
    assert init_rule_for(both, "embedding.weight").std == pytest.approx(0.4)
    assert init_rule_for(both, "encoder.blocks.0.ffn.down.weight").std == 0.1 / 2
    assert init_rule_for(both, "decoder.blocks.0.cross.output.weight").std == 0.1 / 3


def test_every_parameter_is_set() -> None:
    ours = (DecoderSettings(**SIZES), EncoderSettings(**SIZES), EncoderDecoderSettings(**SIZES, tied=False))
    for kind in ours:
        for name, parameter in built(kind).module.named_parameters():
            rule = init_rule_for(kind, name)
            assert parameter.isfinite().all()
            if rule.std == 0:
                assert (parameter == rule.value).all()
            else:
                assert abs(parameter.std() / rule.std - 1) < 5 / parameter.numel() ** 0.5
