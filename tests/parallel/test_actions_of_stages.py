"""Every row of ZERO_STAGES does with all settings what the definition of its actions asks for, and no changed row does.

A run checks what depends on its model and its ranks. The actions on a unit depend on settings alone, so they are proven
here, by executing them on multisets of contributors (`symbolic_execution.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Literal, NamedTuple, cast
from unittest.mock import patch

import pytest

from motet.core.errors import InputError
from motet.parallel.data_parallel.communication.communication_settings import (
    CommunicationSettings,
    check_communication,
    resolve_communication_groups,
)
from motet.parallel.data_parallel.data_sharding import DataParallelSharding
from motet.parallel.data_parallel.zero import (
    FORWARD_OVERLAP,
    MOMENTS,
    ZERO_STAGES,
    StageAction,
    UnitKind,
    make_unit_schedule,
)
from motet.parallel.layout import parse_layout, resolve_layout
from parallel.step_plan_corruptions import servers
from parallel.symbolic_execution import UnitScheduleError, UnitWork, execute_on_ranks

ROWS = 24  # Of the global batch, which 1 to 4, 6, 8 and 12 ranks share evenly


class Setting(NamedTuple):
    """All that the actions on a unit depend on."""

    sharding: DataParallelSharding
    communication: CommunicationSettings

    def works(self) -> Iterator[UnitWork]:
        """The actions on a unit of each kind."""
        sharding, groups = self.sharding, resolve_communication_groups(self.communication, self.sharding)
        shards, has_owner = len(groups.shard_groups[0]), sharding.bucket_owners is not None
        schedule = make_unit_schedule(self.communication, sharding)
        yield UnitWork(schedule, sharding.ranks if has_owner else shards, "bucket", sharding, has_owner=has_owner)
        kinds: tuple[UnitKind, ...] = ("block", "root") if sharding.zero == 3 and sharding.shards > 1 else ()
        for kind in kinds:
            yield UnitWork(make_unit_schedule(self.communication, sharding, kind), sharding.shards, kind, sharding)


OVERLAPS: tuple[Literal["none", "backward", "forward"], ...] = ("none", "backward", "forward")
ONCE, KEPT = ("", "reduce_gradients=step"), ("", "reshard_after_forward=false")
CODECS: dict[str, dict[str, Any]] = {
    "": {},
    "int8": {"compress_gradients": "int8", "compress_parameters": "int8"},
    "int8 gradients": {"compress_gradients": "int8"},
    "topk over replicas": {"compress_gradients": "topk:keep=0.5", "compress_over": "replicas"},
}


def layouts_of(ranks: int) -> Iterator[str]:
    """The layouts of ranks that hold the same model, as far as actions depend on them."""
    groups = [f"shard_group={size}" for size in range(1, ranks + 1) if ranks % size == 0]
    nears = ["", *(group.replace("shard_group", "secondary_group") for group in groups)]
    yield "zero=0"
    yield from (f"zero=1 {group}" for group in groups)
    yield from (f"zero=2 {group} {once}" for group, once in product(groups, ONCE))
    yield from (f"zero=3 {' '.join(words)}" for words in product(groups, nears, ONCE, KEPT))
    yield from (servers(count) for count in range(1, ranks + 1))


def settings_of(ranks: int, codecs: Iterable[str] = CODECS) -> Iterator[Setting]:
    for words, is_reproducible, codec, overlap in product(layouts_of(ranks), (False, True), codecs, OVERLAPS):
        how = CommunicationSettings(overlap=overlap, **CODECS[codec])
        try:
            layout = resolve_layout(parse_layout(words), ranks, ROWS, reproducible=is_reproducible)
            check_communication(how, layout.sharding)
        except InputError:
            continue
        # parallel/techniques.py refuses this composition
        if not (is_reproducible and overlap == "forward" and layout.sharding.zero == 0):
            yield Setting(layout.sharding, how)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.proof) for n in (6, 8, 12))])
def test_all_settings_train_everything(ranks: int) -> None:
    kinds = Counter[tuple[int, UnitKind]]()
    for setting in settings_of(ranks):
        for work in setting.works():
            execute_on_ranks(work, range(ranks))
            kinds[setting.sharding.zero, work.kind] += 1
    cut_into_rows = {(3, "block"), (3, "root")} if ranks > 1 else set()
    assert set(kinds) == {(zero, "bucket") for zero in range(4)} | cut_into_rows


def changed_rows(row: tuple[StageAction, ...]) -> Iterator[tuple[str, tuple[StageAction, ...]]]:
    """An action left out, doubled, exchanged with the next one of its moment, or with one other field."""
    for i, action in enumerate(row):
        before, after = row[:i], row[i + 1 :]
        yield f"no {action.kind} {action.moment}", before + after
        yield f"{action.kind} {action.moment} twice", (*before, action, action, *after)
        if after and after[0].moment == action.moment:
            yield f"{after[0].kind} before {action.kind}", (*before, after[0], action, *after[1:])
        fields: dict[str, set[Any]] = {"moment": {*MOMENTS}}
        fields |= {"over": {"shards", "replicas"}, "tensor": {"gradients", "parameters"}} if action.over else {}
        for field, values in fields.items():
            for value in sorted(values - {getattr(action, field)}):
                yield f"{action.kind} {action.moment} {value}", (*before, action._replace(**{field: value}), *after)


def verdicts(setting: Setting, stage: int | str) -> Iterator[tuple[str, bool]]:
    """(A change of a row, whether the actions are still right), for each change that alters them."""
    rows, works = cast(dict[int | str, tuple[StageAction, ...]], ZERO_STAGES), [*setting.works()]
    with patch.dict(rows, {stage: ()}):
        is_used = works != [*setting.works()]
    for name, changed in changed_rows(rows[stage]) if is_used else ():
        with patch.dict(rows, {stage: changed}):
            altered = [*setting.works()]
        if altered != works:
            try:
                for work in altered:
                    execute_on_ranks(work, range(work.sharding.ranks))
                yield name, True
            except UnitScheduleError:
                yield name, False


@pytest.mark.parametrize(
    ("ranks", "codecs"), [(4, ("",)), *(pytest.param(n, tuple(CODECS), marks=pytest.mark.proof) for n in (2, 4, 6))]
)
@pytest.mark.parametrize("stage", ZERO_STAGES)
def test_no_change_of_a_row_is_right_with_any_setting(stage: int | str, ranks: int, codecs: tuple[str, ...]) -> None:
    refused = set[str]()
    for setting in settings_of(ranks, codecs):
        for name, is_right in verdicts(setting, stage):
            assert not is_right, (name, setting)
            refused.add(name)
    # All ranks shard sums to gather them, and where all share one copy there are no replicas
    has_replicas = stage != FORWARD_OVERLAP and ranks > 2
    rest = {name for name, _ in changed_rows(ZERO_STAGES[stage])} - refused
    assert all("all_reduce" in name for name in rest) and not (rest and has_replicas), rest
