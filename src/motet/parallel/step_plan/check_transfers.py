"""The rule of a step plan about transfers between a device and its host, which updates masters.

Where all parameters lie on the device, sums travel to the host once a step, and values to the device after the update.
Where rows of stage 3 lie on the host, they travel before each gather, and sums after each reduction.
"""

from collections.abc import Iterator

from motet.parallel.data_parallel.comm_units import CommUnit, SyncGroupPlan
from motet.parallel.data_parallel.zero import ActionKind
from motet.parallel.step_plan.plan import StepPlan


def transfer_mistakes(plan: StepPlan) -> Iterator[tuple[SyncGroupPlan, CommUnit, str]]:
    """Each unit whose transfers are wrong, with a sentence about it."""
    for group, unit in ((each, unit) for each in plan.groups for unit in each.units):
        has_rows = unit.kind != "bucket" and plan.parameters != "device"
        wanted = int(plan.states != "device" and bool(unit.members))
        mistakes = [*_fetch_mistakes(group, unit)] if has_rows else []
        if unit.members or has_rows:
            mistakes += _count_mistakes(unit, down=wanted, up=0 if has_rows else wanted)
        if wanted:
            mistakes += _order_mistakes(unit)
        yield from ((group, unit, mistake) for mistake in mistakes)


def _count_mistakes(unit: CommUnit, *, down: int, up: int) -> Iterator[str]:
    """Mistakes in the number of transfers, without those before gathers of forwards and backwards."""
    kinds = [action.kind for action in unit.schedule if action.moment not in ("forward", "backward")]
    wanted: tuple[tuple[ActionKind, int], ...] = ("to_host", down), ("to_device", up)
    for kind, times in wanted:
        if kinds.count(kind) != times:
            yield f"{kind} happens {kinds.count(kind)} times, not {times}"


def _order_mistakes(unit: CommUnit) -> Iterator[str]:
    """Mistakes in the order of the transfers around an update."""
    kinds = [action.kind for action in unit.schedule]
    if kinds.count("to_host") != 1 or "update" not in kinds:
        return
    update = kinds.index("update")
    sums = [i for i, action in enumerate(unit.schedule) if action.over and action.tensor == "gradients"]
    if not max(sums, default=-1) < kinds.index("to_host") < update:
        yield "the host updates with sums that have not arrived, or are not complete"
    steps = [(i, action) for i, action in enumerate(unit.schedule) if action.moment == "step"]
    gathers = [i for i, action in steps if action.is_gather]
    for up in (i for i, action in steps if action.kind == "to_device"):
        if not update < up < min(gathers, default=len(kinds)):
            yield "ranks compute with or gather values that have not arrived from the host"


def _fetch_mistakes(group: SyncGroupPlan, unit: CommUnit) -> Iterator[str]:
    """Mistakes in the transfers of rows that lie on the host, and of their sums."""
    sharding = group.group.sharding
    gathers_again = unit.kind == "block" and sharding.reshard_after_forward
    for moment, wanted in (("forward", 1), ("backward", int(gathers_again))):
        kinds = [action.kind for action in unit.schedule if action.moment == moment]
        if kinds.count("to_device") != wanted:
            yield f"rows travel to the device {kinds.count('to_device')} times in {moment}, not {wanted}"
        elif wanted and kinds[0] != "to_device":
            yield f"ranks gather rows in {moment} that have not arrived from the host"
    reduced = "last_microbatch" if sharding.reduces_once else "microbatch"
    if wrong := {action.moment for action in unit.schedule if action.kind == "to_host"} - {reduced}:
        yield f"sums are reduced at the moment {reduced!r}, and travel to the host at another ({wrong.pop()})"
