"""Settings that do nothing beside some value of another one: one table, by which a job that sets one is refused.

A setting that is silently passed over looks as if it worked. Only what somebody has set counts, never a default.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from pydantic import BaseModel

from motet.core.errors import InputError


@dataclass(frozen=True)
class Needs:
    """A setting, and what another one, or one of several, must be for it to do anything."""

    setting: str
    key: str
    """`section.name`, or several with ` or ` between them."""
    be: tuple[str | int, ...] | Literal["given", "absent"]

    def met(self, value: object) -> bool:
        """Whether the setting does something when its key has this value."""
        if self.be == "given":
            return bool(value)
        return not value if self.be == "absent" else value in self.be

    def remedy(self, value: object) -> str:
        match self.be:
            case "given":
                return f"without {self.key}; leave it out, or set {self.key}"
            case "absent":
                return f"beside {self.key}; leave one of them out"
            case values:
                return f"with {self.key} = {value!r}; leave it out, or set {self.key}={' or '.join(map(str, values))}"


def _rows(
    section: str, names: str, key: str, be: tuple[str | int, ...] | Literal["given", "absent"]
) -> Iterable[Needs]:
    """`key` is of the same section, or says its own."""
    key = key if "." in key else f"{section}.{key}"
    return (Needs(f"{section}.{name}", key, be) for name in names.split())


_COMMUNICATION = (
    "overlap bucket_mib first_bucket_mib all_reduce reduce_scatter all_gather cluster compress_gradients "
    "compress_parameters compress_over compress_after error_feedback"
)

_SENT = ("messages",)

NEEDS: tuple[Needs, ...] = (
    *_rows("model", "rope_theta rotary_fraction rope_scaling", "positions", ("rotary",)),
    *_rows("model", "norm_bias", "norm", ("layer",)),
    *_rows("model", "classes", "head", ("classify",)),
    *_rows("data", "source", "mixture", "absent"),
    *_rows("data", "mask_fraction", "objective", ("masked", "spans")),
    *_rows("data", "restart_documents", "objective", ("causal", "masked", "spans")),
    *_rows("optimizer", "betas eps", "name", ("adamw",)),
    *_rows("optimizer", "momentum nesterov", "name", ("sgd",)),
    *_rows("optimizer.schedule", "decay_steps", "kind", ("warmup-stable-decay",)),
    *_rows("optimizer.schedule", "final_fraction", "kind", ("linear", "cosine", "warmup-stable-decay")),
    *_rows("layout", "zero", "data", ("all_reduce",)),
    *_rows("layout", "shard_group", "zero", "given"),
    *_rows("layout", "regather whole_below secondary_group", "zero", (3,)),
    *_rows("layout", "secondary_group", "outer.every", "absent"),
    *_rows("layout", "server", "data", ("parameter_server",)),
    *_rows("layout.server", "mode order copies shares compress compress_pulls place", "transport", _SENT),
    *_rows("layout.server", "error_feedback snapshot_every listen patience_s spares", "transport", _SENT),
    *_rows("layout.server", "error_feedback", "layout.server.compress or layout.server.compress_pulls", "given"),
    *_rows("layout.server", "reduce broadcast", "transport", ("programs",)),
    *_rows("layout.server", "first", "mode", ("first-k",)),
    *_rows("layout.server", "staleness", "mode", ("bounded",)),
    *_rows("layout.server", "rate", "mode", ("bounded", "async")),
    *_rows("layout.server", "delay_compensation", "mode", ("bounded", "async")),
    *_rows("layout.server", "snapshot_every", "copies", (1,)),
    *_rows("communication", _COMMUNICATION, "layout.data", ("all_reduce",)),
    *_rows("outer", "every", "layout.data", ("all_reduce",)),
    *_rows("communication", "overlap bucket_mib first_bucket_mib", "layout.zero", (0, 1, 2)),
    *_rows("communication", "compress_over compress_after error_feedback", "compress_gradients", "given"),
    *_rows("communication", "compress_parameters", "layout.zero", (1, 2, 3)),
    *_rows("layout", "microbatches", "run.reproducible", "absent"),
    *_rows("communication", "all_reduce reduce_scatter", "run.reproducible", "absent"),
    *_rows("outer", "optimizer learning_rate momentum fragments delay mix", "every", "given"),
    *_rows("outer", "learning_rate momentum", "optimizer", ("nesterov",)),
    *_rows("outer", "mix", "delay", "given"),
    *_rows("monitor", "watch", "watch_every", "given"),
    *_rows("monitor", "wandb_project", "wandb", ("online", "offline")),
    *_rows("monitor", "profile_steps", "profile_from", "given"),
    *_rows("monitor", "sample_prompt sample_temperature", "sample_tokens", "given"),
    *_rows("run", "existing", "folder", "given"),
    *_rows("run", "cpu_backend", "device", ("auto", "cpu")),
    *_rows("run", "max_skips", "on_nan", ("skip",)),
)


def refuse_idle(job: object, source: str) -> None:
    """A sentence about the first setting that a job, read from `source`, has in vain; it may lack whole sections."""
    for needs in NEEDS:
        path, _, name = needs.setting.rpartition(".")
        if not hasattr(job, path.partition(".")[0]):
            continue
        section: Any = attrgetter(path)(job)
        if name not in section.model_fields_set:
            continue
        keys = [attrgetter(key)(job) for key in needs.key.split(" or ") if hasattr(job, key.partition(".")[0])]
        if keys and not any(map(needs.met, keys)):
            shown = _shown(getattr(section, name))
            raise InputError(f"{source}: {needs.setting}{shown} has no effect {needs.remedy(keys[0])}")


def drop_idle(tree: dict[str, Any]) -> None:
    """Leave out of a whole job, as plain nested values, what does nothing in it."""
    for needs in NEEDS:
        _drop_unless_met(tree, needs)


def drop_replaced(tree: dict[str, Any], overridden: Collection[str]) -> None:
    """Leave out what only the value did something with that an override has replaced."""

    def is_given(*keys: str) -> bool:
        return any(key == path or key.startswith(f"{path}.") for path in overridden for key in keys)

    for needs in NEEDS:
        if is_given(*needs.key.split(" or ")) and not is_given(needs.setting):
            _drop_unless_met(tree, needs)


def _drop_unless_met(tree: dict[str, Any], needs: Needs) -> None:
    path, _, name = needs.setting.rpartition(".")
    section = _section(tree, path)
    keys = [key.rpartition(".") for key in needs.key.split(" or ")]
    others = [(other, key) for beside, _, key in keys if (other := _section(tree, beside)) is not None]
    if section is not None and others and not any(needs.met(other.get(key)) for other, key in others):
        section.pop(name, None)


def _section(tree: dict[str, Any], path: str) -> dict[str, Any] | None:
    section: Any = tree
    for part in path.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _shown(value: object) -> str:
    match value:
        case BaseModel():
            return ""
        case bool():
            return f" = {str(value).lower()}"
        case tuple():
            return f" = {list(value)}"
        case _:
            return f" = {value!r}"
