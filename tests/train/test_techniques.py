"""The table of techniques says what happens: each pair of built ones is put into a job, which is taken or refused."""

from collections.abc import Iterator
from itertools import product

import pytest
from torch import nn

from motet import parallelize, verify
from motet.core.errors import InputError
from motet.parallel.techniques import REFUSALS, TECHNIQUES, AcceptedValues, technique_pairs, used_techniques
from motet.train.config_rules import check_compositions
from motet.train.job import load_job
from motet.train.launch.preflight import check_job
from refusals import refused

RANKS = 8
EXAMPLES = {
    "layout.shard_group": 4,
    "layout.secondary_group": 2,
    "outer.every": 4,
    "run.reproducible": "layout",
    "communication.compress_gradients": "int8",
    "communication.compress_parameters": "int8",
    "monitor.replica_check_every": 2,
    "monitor.numerics_every": 2,
    "layout.tp": 2,
    "layout.sp": "true",
    "layout.pp": 2,
    "layout.cp": 2,
    "precision.moment_dtype": "8bit",
    "memory.device_limit": "64GiB",
    "model.experts": "{count=4, per_token=2, hidden=64}",
}
NEEDED = {"memory.recompute=auto": ["memory.budget=8GiB"]}  # Other settings that a value needs
PAIRS = list(technique_pairs())
UNBUILT = {"expert parallelism"}
Values = dict[str, object]


def choices(key: str, accepted: AcceptedValues) -> tuple[object, ...]:
    return accepted if isinstance(accepted, tuple) else (EXAMPLES[key],)


def ways_to_have(*techniques: str) -> Iterator[Values]:
    """Settings with which a job has all of these techniques, at each stage if they do not say at which."""
    needed = [(key, accepted) for technique in techniques for key, accepted in TECHNIQUES[technique].items()]
    stages = () if {"layout.zero", "layout.data"} & {key for key, _ in needed} else (0, 1, 2, 3)
    options = [[(key, value) for value in choices(key, accepted)] for key, accepted in needed]
    for pairs in product(*options, *([[("layout.zero", stage) for stage in stages]] if stages else [])):
        if all(dict(pairs)[key] == value for key, value in pairs):
            yield dict(pairs)


def refusal(values: Values) -> str:
    """Why a job with these settings is refused; empty if it is not."""
    overrides = [f"{key}={value}" for key, value in values.items() if value is not None]
    overrides += [need for override in overrides for need in NEEDED.get(override, [])]
    overrides += ["memory.folder=/tmp"] * (values.get("memory.optimizer") == "disk")
    try:
        check_job(load_job("tiny", ["data.batch_sequences=8", *overrides]), RANKS)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("technique", "other", "cell"), [p for p in PAIRS if not {p[0], p[1]} & UNBUILT])
def test_the_table_says_what_happens(technique: str, other: str, cell: str) -> None:
    reasons = {why: values for values in ways_to_have(technique, other) if [why := refusal(values)]}
    happens = "=" if not reasons else "+" if "" in reasons else "refused"
    assert happens == ("refused" if cell in REFUSALS else cell), reasons


def test_every_pair_is_in_the_table_once() -> None:
    names = list(TECHNIQUES)
    assert [pair[:2] for pair in PAIRS] == [(a, b) for i, a in enumerate(names) for b in names[: i + 1]]
    assert {cell for _, _, cell in PAIRS} == {"+", "=", *REFUSALS}
    assert {pair[:2] for pair in PAIRS if pair[2] in REFUSALS} >= REFUSED_BY_THE_TABLE.keys()


REFUSED_BY_THE_TABLE = {
    (
        "compact moments",
        "parameter server of processes",
    ): "'parameter_server': servers of processes update with torch's",
    ("numerics monitor", "parameter server of processes"): "2 counts tensors of ranks that take a step together",
    ("compression of gradients", "forward overlap at stage 0"): "sends gradients uncompressed; use layout.zero = 1, or",
    (
        "reproducible layouts",
        "forward overlap at stage 0",
    ): "cannot be had with run.reproducible = 'layout', whose sums",
    ("reproducible layouts", "compression of gradients"): "compress_gradients = 'int8': a codec rounds by the elements",
    ("reproducible layouts", "compression of parameters"): "compress_parameters = 'int8': a codec rounds by the",
    ("reproducible layouts", "independent replicas"): "outer.every = 4: another number of independent replicas is",
    ("reproducible layouts", "parameter server of processes"): "'parameter_server': servers add gradients in the order",
    ("reproducible layouts", "parameter server by collectives"): "'parameter_server': servers add gradients in the",
    ("replica checks", "parameter server of processes"): "replica_check_every = 2 compares ranks that take a step",
    **{
        (technique, other): text
        for technique in ("tensor parallelism", "sequence parallelism")
        for other, text in {
            "independent replicas": "does not go with outer.every = 4: independent replicas average whole models",
            "parameter server of processes": "with layout.data = 'parameter_server': servers keep whole tensors",
            "parameter server by collectives": "with layout.data = 'parameter_server': servers keep whole tensors",
            "reproducible layouts": "with run.reproducible = 'layout': the ranks of a split layer add partial sums",
        }.items()
    },
    **{
        ("pipeline parallelism", other): text
        for other, text in {
            "independent replicas": "does not go with outer.every = 4: independent replicas average whole models",
            "parameter server of processes": "with layout.data = 'parameter_server': servers keep whole tensors",
            "parameter server by collectives": "with layout.data = 'parameter_server': servers keep whole tensors",
            "replica checks": "with monitor.replica_check_every = 2: a rank that repeats the work of another has some",
        }.items()
    },
    **{
        ("context parallelism", other): text
        for other, text in {
            "independent replicas": "does not go with outer.every = 4: a replica is one shard group, and ranks of",
            "parameter server of processes": "layout.data = 'parameter_server': workers of a parameter server compute",
            "parameter server by collectives": "'parameter_server': workers of a parameter server compute whole rows",
            "reproducible layouts": "with run.reproducible = 'layout': the ranks that share a row add partial sums",
        }.items()
    },
    **{
        (technique, other): text
        for technique in ("states on the host", "states on disk", "delayed updates")
        for other, text in {
            "forward overlap at stage 0": "with layout.zero = 0 updates all masters on every device as sums arrive",
            "independent replicas": "does not go with outer.every = 4: independent replicas average masters on their",
            "parameter server of processes": "layout.data = 'parameter_server': the states of a parameter server",
            "parameter server by collectives": "layout.data = 'parameter_server': the states of a parameter server lie",
        }.items()
    },
    **{
        (f"parameters on {words}", other): text
        for words, place in (("the host", "host"), ("disk", "disk"))
        for other, text in {
            **dict.fromkeys(("stage 0", "stage 1", "stage 2"), f"memory.parameters = {place!r} needs layout.zero = 3,"),
            "forward overlap at stage 0": "with layout.zero = 0 updates all masters on every device as sums arrive",
            "forward overlap at stages 1 and 2": f"memory.parameters = {place!r} needs layout.zero = 3, at which a",
            "secondary shard groups": "with layout.secondary_group = 2: ranks keep secondary shards of gathered",
            "independent replicas": "does not go with outer.every = 4: independent replicas average masters on their",
            "parameter server of processes": "layout.data = 'parameter_server': the states of a parameter server lie",
            "parameter server by collectives": "layout.data = 'parameter_server': the states of a parameter server lie",
            "reproducible layouts": "with run.reproducible = 'layout': a shard group of one rank exchanges no partial",
        }.items()
    },
    **{
        ("compiled blocks", other): f"does not go with {text}"
        for other, text in {
            "forward overlap at stage 0": "communication.overlap = 'forward': layers wait for their own values",
            "forward overlap at stages 1 and 2": "communication.overlap = 'forward': layers wait for their own values",
            "parameter server of processes": "layout.data = 'parameter_server': workers of a parameter server run",
            "reproducible layouts": "run.reproducible = 'layout': compiled code may add in another order",
            "context parallelism": "layout.cp = 2: attention exchanges keys between ranks while a block runs",
            "activations on the host": "memory.activations = 'host': the tensors that a compiled block keeps",
            "simulated device limit": "memory.device_limit = 68719476736: a setting that follows each kernel",
            "selective recomputation": "memory.recompute = 'selective': a setting that follows each kernel",
            "recomputation within a budget": "memory.recompute = 'auto': a setting that follows each kernel",
            "mixture of experts": "[model.experts]: experts compute with numbers of rows that follow from the data",
        }.items()
    },
    ("parameters on disk", "compact moments"): "'8bit': pieces of a file have one dtype for all parameters",
    ("mixture of experts", "parameter server of processes"): "the loads of experts are sums over the ranks that take",
    (
        "recomputation within a budget",
        "activations on the host",
    ): "recompute = 'auto' chooses by the bytes that blocks keep on the device, and activations = 'host' keeps them",
    ("forward overlap at stage 3", "independent replicas"): "outer.every = 4: independent replicas average masters on",
    ("forward overlap at stage 3", "parameters on disk"): "memory.parameters = 'disk': the host reads rows of the next",
    (
        "activations on the host",
        "parameter server of processes",
    ): "layout.data = 'parameter_server': workers of server processes keep the activations of whole models on their",
    ("parameters on disk", "delayed updates"): "changes masters while a step computes, and memory.parameters = 'disk'",
    ("delayed updates", "parameters on the host"): "changes masters while a step computes, and memory.parameters =",
    ("states on disk", "compact moments"): "precision.moment_dtype = '8bit': pieces of a file have one dtype for all",
    **{
        ("loss scaling", other): text
        for other, text in {
            "compression of gradients": "with communication.compress_gradients = 'int8': the error of a codec",
            "independent replicas": "does not go with outer.every = 4: an overflow would change the loss scale of one",
            "parameter server of processes": "with layout.data = 'parameter_server': servers decide about updates by",
            "parameter server by collectives": "with layout.data = 'parameter_server': servers decide about updates by",
        }.items()
    },
}
"""Pair -> what is said. No other code refuses these; every other pair is refused without the table, too."""


@pytest.mark.parametrize(("technique", "other"), [pair[:2] for pair in PAIRS if pair[2] in {*REFUSALS} - {"n"}])
def test_a_refusal_says_why(technique: str, other: str) -> None:
    says = {refusal(values) for values in ways_to_have(technique, other)}
    part = REFUSED_BY_THE_TABLE.get((technique, other), " has no effect ")
    assert any(part in sentence for sentence in says), says


@pytest.mark.parametrize("technique", sorted(UNBUILT))
def test_what_is_not_built_is_refused_wherever_a_layout_is_given(technique: str) -> None:
    word = f"{next(iter(TECHNIQUES[technique])).removeprefix('layout.')}=2"
    setting = f"layout.{word.removesuffix('=2')}"
    sentence = rf"^{setting} = 2: {technique} is not built yet; leave {setting} out$"
    refused(sentence, check_job, load_job("tiny", [f"layout.{word}"]), RANKS)
    refused(sentence, parallelize, nn.Linear(2, 2), word)
    refused(sentence, verify, lambda: nn.Linear(2, 2), [f"dp=1 {word}"], lambda step: None)


def test_a_setting_without_effect_is_no_technique() -> None:
    """The stage of a job is a default where servers keep the parameters."""
    check_compositions(dict(load_job("tiny", ["layout.data=parameter_server"])))
    assert used_techniques({"layout": {"zero": 2, "tp": 1, "sp": False}}) == {"stage 2": "layout.zero = 2"}
    assert used_techniques({"layout": {"sp": True}}) == {}
    both = {"tensor parallelism": "layout.tp = 2", "sequence parallelism": "layout.sp = true"}
    assert used_techniques({"layout": {"tp": 2, "sp": True}}) == both
