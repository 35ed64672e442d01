"""Two tables of rules between settings: the values with which a setting has an effect, and values that rule it out.

A setting that is silently ignored looks as if it worked. Only settings that somebody wrote are checked, never defaults.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from motet.core.errors import InputError
from motet.parallel.techniques import AcceptedValues, check_techniques, conflict_with, is_accepted, nested_value
from motet.precision.recipe import PrecisionSettings

UNCOMPILED_DTYPES = ("float64",)
COMPARES_IN_FLOAT64 = "float64 is for comparisons of numbers, which compiled code rounds in another order"
DRAWS_MASKS = "masks of dropout must not depend on the layout, and are drawn outside of graphs"


@dataclass(frozen=True)
class SettingRequirement:
    """A setting, and the values of another one, or of one of several, with which it has an effect."""

    setting: str
    depends_on: str  # `section.name`, or several with ` or ` between them
    accepted: AcceptedValues

    def remedy(self, value: object, settable: Mapping[str, Sequence[object]]) -> str:
        """The end of a message. `value` is that of the first setting in `depends_on`, of which each can have the
        accepted values in `settable`."""
        key = self.depends_on
        if isinstance(self.accepted, str):
            return {
                "set": f"without {key}; leave it out, or set {key}",
                "unset": f"together with {key}; leave one of them out",
                "above 1": f"with {key} = {value!r}; leave it out, or set {key}=2 or more",
            }[self.accepted]
        keys = key.split(" or ")
        remedies = [f"{each}={' or '.join(map(str, settable[each]))}" for each in keys if settable.get(each)]
        key, others = keys[0], " or ".join(map(str, self.accepted))
        return f"with {key} = {value!r}; leave it out, or set {', or '.join(remedies) or f'{key}={others}'}"


# (section, its settings, the setting that they depend on, its accepted values). A name without a section is of the
# same section.
_REQUIREMENTS: tuple[tuple[str, str, str, AcceptedValues], ...] = (
    ("model", "rope_theta rotary_fraction rope_scaling", "positions", ("rotary",)),
    ("model", "norm_bias", "norm", ("layer",)),
    ("model", "classes", "head", ("classify",)),
    ("model.balance", "weight", "kind", ("row", "bias")),
    ("model.balance", "speed", "kind", ("bias",)),
    ("data", "source", "mixture", "unset"),
    ("data", "mask_fraction", "objective", ("masked", "spans")),
    ("data", "prefetch", "layout.data or layout.server.transport", ("all_reduce", "collectives")),
    ("data", "restart_documents", "objective", ("causal", "masked", "spans")),
    ("precision", "reduce_dtype master_dtype moment_dtype exceptions", "recipe", ("fp32", "tf32", "bf16", "fp16")),
    ("precision", "exceptions", "layout.data", ("all_reduce",)),
    ("precision", "emulate", "recipe", ("bf16", "fp16")),
    ("precision", "attention", "layout.cp", (1,)),  # Ranks that share rows call kernels that give the log-sum-exp
    ("precision", "loss_scale loss_scale_initial loss_scale_growth_steps", "recipe", ("fp16",)),
    ("precision", "loss_scale_initial loss_scale_growth_steps", "loss_scale", ("dynamic",)),
    ("memory", "every", "recompute", ("every-k",)),
    ("memory", "budget", "recompute", ("auto",)),
    ("memory", "device_limit", "layout.data", ("all_reduce",)),
    ("optimizer", "betas eps", "name", ("adamw",)),
    ("optimizer", "momentum nesterov", "name", ("sgd",)),
    ("optimizer.schedule", "decay_steps", "kind", ("warmup-stable-decay",)),
    ("optimizer.schedule", "final_fraction", "kind", ("linear", "cosine", "warmup-stable-decay")),
    ("layout", "zero", "data", ("all_reduce",)),
    ("layout", "shard_group", "zero", "set"),
    ("layout", "reshard_after_forward min_shard_numel secondary_group", "zero", (3,)),
    ("layout", "secondary_group", "outer.every", "unset"),
    ("layout", "reduce_gradients", "zero", (2, 3)),
    ("layout", "server", "data", ("parameter_server",)),
    ("layout", "sp rules", "tp", "above 1"),
    ("communication", "tp_pieces slice_activations", "layout.tp", "above 1"),
    ("communication", "slice_activations", "layout.pp", "above 1"),
    ("layout", "cp_kind cp_order cp_inner", "cp", "above 1"),
    ("layout", "cp_inner", "cp_kind", ("ring",)),
    ("layout", "chunks schedule stages", "pp", "above 1"),
    (
        "layout.server",
        "mode send_order copies work_items_per_step compress_pushes compress_pulls placement error_feedback "
        "snapshot_every listen eviction_timeout_s max_process_restarts",
        "transport",
        ("point-to-point",),
    ),
    ("layout.server", "error_feedback", "layout.server.compress_pushes or layout.server.compress_pulls", "set"),
    ("layout.server", "reduce_algorithm broadcast_algorithm", "transport", ("collectives",)),
    ("layout.server", "first_k", "mode", ("first-k",)),
    ("layout.server", "staleness", "mode", ("bounded",)),
    ("layout.server", "learning_rate_scaling delay_compensation", "mode", ("bounded", "async")),
    ("layout.server", "snapshot_every", "copies", (1,)),
    (
        "communication",
        "overlap bucket_mib first_bucket_mib all_reduce reduce_scatter all_gather cluster compress_gradients "
        "compress_parameters compress_over compress_after error_feedback",
        "layout.data",
        ("all_reduce",),
    ),
    ("outer", "every", "layout.data", ("all_reduce",)),
    ("communication", "bucket_mib first_bucket_mib", "layout.zero", (0, 1, 2)),
    ("communication", "overlap", "layout.zero or memory.optimizer or memory.tiers", (0, 1, 2, "host", "disk", "auto")),
    ("memory", "window", "parameters", ("disk",)),
    ("memory", "update", "memory.optimizer or memory.tiers", ("host", "disk", "auto")),
    ("memory", "folder", "memory.optimizer or memory.tiers", ("disk", "auto")),
    ("communication", "compress_over compress_after error_feedback", "compress_gradients", "set"),
    ("communication", "compress_parameters", "layout.zero", (1, 2, 3)),
    ("layout", "microbatches", "run.reproducible", "unset"),
    ("communication", "all_reduce reduce_scatter", "run.reproducible", "unset"),
    ("outer", "optimizer learning_rate momentum fragments delay mixing_factor", "every", "set"),
    ("outer", "learning_rate momentum", "optimizer", ("nesterov",)),
    ("outer", "mixing_factor", "delay", "set"),
    ("checkpoint", "staging", "mode", ("async",)),
    ("monitor", "replica_check_action", "replica_check_every", "set"),
    ("monitor", "wandb_project", "wandb", ("online", "offline")),
    ("monitor", "profile_steps", "profile_from", "set"),
    ("monitor", "sample_prompt sample_temperature", "sample_tokens", "set"),
    ("run", "existing", "folder", "set"),
    ("run", "cpu_backend", "device", ("auto", "cpu")),
    ("run", "max_skips", "on_nan", ("skip",)),
)
SETTING_REQUIREMENTS = tuple(
    SettingRequirement(f"{section}.{name}", key if "." in key else f"{section}.{key}", accepted)
    for section, names, key, accepted in _REQUIREMENTS
    for name in names.split()
)


def check_no_unused_settings(job: object, source: str) -> None:
    """Refuse a job, read from `source`, in which a setting has no effect; whole sections may be missing."""
    for rule in SETTING_REQUIREMENTS:
        path, _, name = rule.setting.rpartition(".")
        section = _section_at(job, path)
        if section is None or name not in section.model_fields_set:
            continue
        keys = [key for key in rule.depends_on.split(" or ") if hasattr(job, key.partition(".")[0])]
        values = [attrgetter(key)(job) for key in keys]
        if values and not any(is_accepted(value, rule.accepted) for value in values):
            setting = f"{rule.setting}{_format_value(getattr(section, name))}"
            settable = {key: _settable_values(job, key, rule.accepted) for key in keys}
            raise InputError(f"{source}: {setting} has no effect {rule.remedy(values[0], settable)}")


def _section_at(job: object, path: str) -> Any:
    """The section at a path; None where a job has none, such as that of another kind of model."""
    section: Any = job
    for name in path.split("."):
        section = getattr(section, name, None)
    return section


def _settable_values(job: object, key: str, accepted: AcceptedValues) -> list[object]:
    """The accepted values that a setting can have: some of its choices, or values of the type that it has."""
    path, _, name = key.rpartition(".")
    section = attrgetter(path)(job)
    annotation = type(section).model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return [value for value in accepted if value in get_args(annotation)]
    return [value for value in accepted if isinstance(value, type(getattr(section, name)))]


def drop_unused_settings(tree: dict[str, Any], rules: Iterable[SettingRequirement] = SETTING_REQUIREMENTS) -> None:
    """Remove settings without effect from a complete job, as plain nested values."""
    for rule in rules:
        keys = [key for key in rule.depends_on.split(" or ") if nested_value(tree, key.rpartition(".")[0]) is not None]
        has_effect = not keys or any(is_accepted(nested_value(tree, key), rule.accepted) for key in keys)
        if not has_effect:
            _drop(tree, rule.setting)


def _drop(tree: dict[str, Any], key: str) -> None:
    path, _, name = key.rpartition(".")
    if isinstance(section := nested_value(tree, path), dict):
        section.pop(name, None)


def drop_replaced_settings(tree: dict[str, Any], overridden: Collection[str]) -> None:
    """Remove settings that had an effect only with the value that an override has replaced."""

    def is_overridden(key: str) -> bool:
        return any(f"{key}.".startswith(f"{path}.") or path.startswith(f"{key}.") for path in overridden)

    for rule in SETTING_REQUIREMENTS:
        if any(map(is_overridden, rule.depends_on.split(" or "))) and not is_overridden(rule.setting):
            drop_unused_settings(tree, [rule])


def check_compositions(sections: Mapping[str, object]) -> None:
    """Refuse sections of a job whose techniques do not work together; settings without effect do not count."""
    check_techniques(effective_settings(sections))


def effective_settings(sections: Mapping[str, object]) -> dict[str, Any]:
    """Sections of a job as nested values, without settings that have no effect."""
    tree = {name: section.model_dump() for name, section in sections.items() if isinstance(section, BaseModel)}
    drop_unused_settings(tree)
    return tree


def reason_against_compiling(sections: Mapping[str, object], *, without: Iterable[str] = ()) -> str | None:
    """Why `run.compile` would compile no block of a job, as far as its settings say; those of `without` are ignored."""
    tree, precision = effective_settings(sections), sections.get("precision")
    if isinstance(precision, PrecisionSettings) and precision.resolved.compute in UNCOMPILED_DTYPES:
        return COMPARES_IN_FLOAT64
    if nested_value(tree, "precision.emulate"):
        return "precision.emulate = true rounds the products of kernels that it watches, and a graph has its own"
    if dropout := nested_value(tree, "model.dropout"):
        return f"model.dropout = {dropout}: {DRAWS_MASKS}"
    if (pieces := nested_value(tree, "communication.tp_pieces") or 1) > 1:
        return (
            f"communication.tp_pieces = {pieces} sends pieces of an activation between products, which a graph does not"
        )
    for key in without:
        _drop(tree, key)
    return conflict_with("compiled blocks", tree)


def environment_against_compiling() -> str | None:
    """The variable of torch that switches its compiler off, in a sentence; None where none does."""
    names = "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"
    name = next((name for name in names if os.environ.get(name) == "1"), None)  # noqa: TID251  (variables of torch)
    return name and f"the variable {name} = 1 switches torch.compile off"


def _format_value(value: object) -> str:
    if isinstance(value, bool | BaseModel):
        return f" = {str(value).lower()}" if isinstance(value, bool) else ""
    return f" = {list(value) if isinstance(value, tuple) else value!r}"
