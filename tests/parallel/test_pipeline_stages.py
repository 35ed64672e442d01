"""Stages of models: proven, and then trained as copies of the module, against the whole module."""

import pytest
from modules_to_split import FAMILIES
from staged_models import check_training, huggingface_staged, our_staged, prove

QUICK = [("llama", 3), ("gpt2", 2), ("t5", 4)]


@pytest.mark.parametrize(("name", "stages"), [("tiny", 4), ("gpt2-like", 2), ("bert-like", 3), ("t5-like", 3)])
def test_stages_of_our_models_train_like_the_whole(name: str, stages: int) -> None:
    module, loss = our_staged(name)
    sharding = prove(module, loss, stages)
    check_training(module, loss, sharding)


@pytest.mark.parametrize(("family", "stages"), QUICK)
def test_stages_of_models_of_transformers_train_like_the_whole(family: str, stages: int) -> None:
    module, loss = huggingface_staged(family)
    check_training(module, loss, prove(module, loss, stages))


@pytest.mark.proof
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_all_families_train_like_the_whole(family: str, stages: int) -> None:
    module, loss = huggingface_staged(family)
    check_training(module, loss, prove(module, loss, stages))


@pytest.mark.parametrize("ranks", [(0, 1, 0, 1), (0, 1, 1, 0)], ids=["interleaved", "V"])
@pytest.mark.parametrize("name", ["gpt2-like", "t5-like"])
def test_two_stages_of_a_rank_share_a_module(name: str, ranks: tuple[int, ...]) -> None:
    module, loss = our_staged(name)
    check_training(module, loss, prove(module, loss, 4), ranks)
