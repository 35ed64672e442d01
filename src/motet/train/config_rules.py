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
class SettingRequirement:
    """A setting, and what another one, or one of several, must be for it to do anything."""

    setting: str
    depends_on: str  # `section.name`, or several with ` or ` between them
    accepted: tuple[str | int, ...] | Literal["given", "absent"]

    def is_met(self, value: object) -> bool:
        """Whether the setting does something when its key has this value."""
        if self.accepted == "given":
            return bool(value)
        return not value if self.accepted == "absent" else value in self.accepted

    def remedy(self, value: object) -> str:
        match self.accepted:
            case "given":
                return f"without {self.depends_on}; leave it out, or set {self.depends_on}"
            case "absent":
                return f"beside {self.depends_on}; leave one of them out"
            case values:
                return f"with {self.depends_on} = {value!r}; leave it out, or set {self.depends_on}={' or '.join(map(str, values))}"


def _requirements(
    section: str, settings: str, depends_on: str, accepted: tuple[str | int, ...] | Literal["given", "absent"]
) -> Iterable[SettingRequirement]:
    """`key` is of the same section, or says its own."""
    depends_on = depends_on if "." in depends_on else f"{section}.{depends_on}"
    return (SettingRequirement(f"{section}.{name}", depends_on, accepted) for name in settings.split())


_ALL_REDUCE_SETTINGS = (
    "overlap bucket_mib first_bucket_mib all_reduce reduce_scatter all_gather cluster compress_gradients "
    "compress_parameters compress_over compress_after error_feedback"
)

_MESSAGES_TRANSPORT = ("point-to-point",)

SETTING_REQUIREMENTS: tuple[SettingRequirement, ...] = (
    *_requirements("model", "rope_theta rotary_fraction rope_scaling", "positions", ("rotary",)),
    *_requirements("model", "norm_bias", "norm", ("layer",)),
    *_requirements("model", "classes", "head", ("classify",)),
    *_requirements("data", "source", "mixture", "absent"),
    *_requirements("data", "mask_fraction", "objective", ("masked", "spans")),
    *_requirements("data", "restart_documents", "objective", ("causal", "masked", "spans")),
    *_requirements("optimizer", "betas eps", "name", ("adamw",)),
    *_requirements("optimizer", "momentum nesterov", "name", ("sgd",)),
    *_requirements("optimizer.schedule", "decay_steps", "kind", ("warmup-stable-decay",)),
    *_requirements("optimizer.schedule", "final_fraction", "kind", ("linear", "cosine", "warmup-stable-decay")),
    *_requirements("layout", "zero", "data", ("all_reduce",)),
    *_requirements("layout", "shard_group", "zero", "given"),
    *_requirements("layout", "reshard_after_forward min_shard_numel secondary_group", "zero", (3,)),
    *_requirements("layout", "secondary_group", "outer.every", "absent"),
    *_requirements("layout", "server", "data", ("parameter_server",)),
    *_requirements(
        "layout.server",
        "mode send_order copies work_items_per_step compress_pushes compress_pulls placement",
        "transport",
        _MESSAGES_TRANSPORT,
    ),
    *_requirements(
        "layout.server",
        "error_feedback snapshot_every listen eviction_timeout_s max_process_restarts",
        "transport",
        _MESSAGES_TRANSPORT,
    ),
    *_requirements(
        "layout.server", "error_feedback", "layout.server.compress_pushes or layout.server.compress_pulls", "given"
    ),
    *_requirements("layout.server", "reduce_algorithm broadcast_algorithm", "transport", ("collectives",)),
    *_requirements("layout.server", "first_k", "mode", ("first-k",)),
    *_requirements("layout.server", "staleness", "mode", ("bounded",)),
    *_requirements("layout.server", "learning_rate_scaling", "mode", ("bounded", "async")),
    *_requirements("layout.server", "delay_compensation", "mode", ("bounded", "async")),
    *_requirements("layout.server", "snapshot_every", "copies", (1,)),
    *_requirements("communication", _ALL_REDUCE_SETTINGS, "layout.data", ("all_reduce",)),
    *_requirements("outer", "every", "layout.data", ("all_reduce",)),
    *_requirements("communication", "overlap bucket_mib first_bucket_mib", "layout.zero", (0, 1, 2)),
    *_requirements("communication", "compress_over compress_after error_feedback", "compress_gradients", "given"),
    *_requirements("communication", "compress_parameters", "layout.zero", (1, 2, 3)),
    *_requirements("layout", "microbatches", "run.reproducible", "absent"),
    *_requirements("communication", "all_reduce reduce_scatter", "run.reproducible", "absent"),
    *_requirements("outer", "optimizer learning_rate momentum fragments delay mixing_factor", "every", "given"),
    *_requirements("outer", "learning_rate momentum", "optimizer", ("nesterov",)),
    *_requirements("outer", "mixing_factor", "delay", "given"),
    *_requirements("monitor", "replica_check_action", "replica_check_every", "given"),
    *_requirements("monitor", "wandb_project", "wandb", ("online", "offline")),
    *_requirements("monitor", "profile_steps", "profile_from", "given"),
    *_requirements("monitor", "sample_prompt sample_temperature", "sample_tokens", "given"),
    *_requirements("run", "existing", "folder", "given"),
    *_requirements("run", "cpu_backend", "device", ("auto", "cpu")),
    *_requirements("run", "max_skips", "on_nan", ("skip",)),
)


def check_no_unused_settings(job: object, source: str) -> None:
    """A sentence about the first setting that a job, read from `source`, has in vain; it may lack whole sections."""
    for requirement in SETTING_REQUIREMENTS:
        path, _, name = requirement.setting.rpartition(".")
        if not hasattr(job, path.partition(".")[0]):
            continue
        section: Any = attrgetter(path)(job)
        if name not in section.model_fields_set:
            continue
        values = [
            attrgetter(key)(job) for key in requirement.depends_on.split(" or ") if hasattr(job, key.partition(".")[0])
        ]
        if values and not any(map(requirement.is_met, values)):
            value_text = _format_value(getattr(section, name))
            raise InputError(
                f"{source}: {requirement.setting}{value_text} has no effect {requirement.remedy(values[0])}"
            )


def drop_unused_settings(tree: dict[str, Any]) -> None:
    """Leave out of a whole job, as plain nested values, what does nothing in it."""
    for requirement in SETTING_REQUIREMENTS:
        _drop_unless_met(tree, requirement)


def drop_replaced_settings(tree: dict[str, Any], overridden: Collection[str]) -> None:
    """Leave out what only the value did something with that an override has replaced."""

    def is_overridden(*keys: str) -> bool:
        return any(key == path or key.startswith(f"{path}.") for path in overridden for key in keys)

    for requirement in SETTING_REQUIREMENTS:
        if is_overridden(*requirement.depends_on.split(" or ")) and not is_overridden(requirement.setting):
            _drop_unless_met(tree, requirement)


def _drop_unless_met(tree: dict[str, Any], requirement: SettingRequirement) -> None:
    path, _, name = requirement.setting.rpartition(".")
    section = _section(tree, path)
    keys = [key.rpartition(".") for key in requirement.depends_on.split(" or ")]
    key_sections = [(other, key) for beside, _, key in keys if (other := _section(tree, beside)) is not None]
    if (
        section is not None
        and key_sections
        and not any(requirement.is_met(other.get(key)) for other, key in key_sections)
    ):
        section.pop(name, None)


def _section(tree: dict[str, Any], path: str) -> dict[str, Any] | None:
    section: Any = tree
    for part in path.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _format_value(value: object) -> str:
    match value:
        case BaseModel():
            return ""
        case bool():
            return f" = {str(value).lower()}"
        case tuple():
            return f" = {list(value)}"
        case _:
            return f" = {value!r}"
