"""The first tensor that differs, and what the reference knows that it could be made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from motet.train.optimizer.sharded_optimizer import group_parameters
from motet.verify.causes import NOT_UPDATED, Case, cause
from motet.verify.compare import Reference, compare, sites_of
from motet.verify.equations import fits
from motet.verify.numbers import cause_of_loss, cause_of_norm, cause_of_number, other_counts, other_losses
from motet.verify.parts import Site, UnfitError, by_row, parts_of
from motet.verify.record import Seen
from motet.verify.runs import FREE, Referred
from motet.verify.shares import WhatIf
from motet.verify.sums import Share, counted
from motet.verify.trial import IN_TRAINING
from motet.verify.updates import Update, cause_of_update
from motet.verify.verdict import Found, Verdict, judge, wrong
from motet.verify.where import Where


def explain(what_if: WhatIf, ranks: Sequence[Sequence[Seen]], found: Found) -> str:
    """A likely cause in words; empty where there is none."""
    site, reference = found.difference.site, what_if.referred.of(found.phase, found.step)
    whole, given = reference.wholes.get(site), sites_of(ranks).get(site, [])
    if whole is None or not given or found.difference.what:
        return found.difference.what
    try:
        parts = parts_of(whole, given)
    except UnfitError as error:
        return str(error)
    explaining = Explaining(what_if, ranks, found, reference, whole, parts)
    return explaining.cause() or _of_another(what_if, ranks, found) or explaining.otherwise()


def _of_another(what_if: WhatIf, ranks: Sequence[Sequence[Seen]], found: Found) -> str:
    """Of what was folded nobody can tell where its elements are: the next one of its kind may say."""
    reference, site = what_if.referred.of(found.phase, found.step), found.difference.site
    if not any(each.folded for _, each in sites_of(ranks)[site]):
        return ""
    for other in compare(reference, ranks):
        given = sites_of(ranks).get(other.site, [])
        if other.site[0] != site[0] or other.is_rounding or any(each.folded for _, each in given):
            continue
        said = explain(what_if, ranks, replace(found, difference=other))
        return f"as {other.site[1]}: {said}" if said else ""
    return ""


def verdict_on(
    layout: str,
    what_if: Callable[[int], WhatIf],
    referred: Referred,
    walked: Sequence[tuple[str, int]],
    seen: Callable[[str, int], Sequence[Sequence[Seen]]],
) -> Verdict:
    """`what_if`: of a step. `walked`: phases and steps, in their order. `seen`: of these, what each rank has seen."""
    worst, first, unjudged = judge(referred.of, walked, seen)
    if first is None:
        return Verdict(layout, True, worst.difference.relative, str(worst), unjudged=unjudged)
    return wrong(layout, worst, first, lambda: explain(what_if(first.step), seen(first.phase, first.step), first))


class Explaining(Where):
    """What it could be made of."""

    def cause(self) -> str:
        kind, name = self.whole.site
        if kind in ("sum", "norm", "evaluation"):
            return self._of_number(kind, name)
        if kind == "loss":
            given = sites_of(self.ranks).get(self.whole.site, [])
            return cause_of_loss(given, self.what_if.computed, self.sizes, self._tokens)
        said = self._of_tensor(kind, name)
        return said and f"{said}{self._where()}"

    def otherwise(self) -> str:
        """What is known if it is made of nothing that was tried."""
        said = {
            "gradient": "no sum of what ranks and micro-batches have gives it: it was changed while it was summed, or "
            "after",
            "norm": "gradients are right, and no sum of their squares gives it: it has others in it, or was "
            "changed after",
            "random mask": "it is no mask of any of these rows and steps: drawn with another seed, or by a generator "
            "that goes on",
            "sample": self._of_sample(),
        }.get(self.whole.site[0], "")
        return said and f"{said}{self._where()}"

    def _of_sample(self) -> str:
        value, expected = self._worst.value, self._worst.expected
        others = int((value != expected).sum()) if value.shape == expected.shape else value.numel()
        if others < value.numel() / 2:
            return f"its rows are the right ones, but {others} of their {value.numel()} numbers are others"
        return (
            f"it is of no row of the {len(self.what_if.referred.single)} steps that were compared: rows are read in "
            "another order (another seed, say), or from another place"
        )

    def _of_tensor(self, kind: str, name: str) -> str:
        if (kind, name) == ("state", "step"):
            value, expected = float(self._worst.value), float(self._worst.expected)
            return f"it counts {value:g} steps, where one device has {expected:g}"
        if kind == "clipped gradient":
            return self._of_clipped(name)
        if kind == "starting parameter":
            return cause(self._case()) or self._of_start()
        if kind == "parameter" and (said := cause(self._case())) == NOT_UPDATED:
            return f"{said}{self._though_master()}"
        if kind == "state" and "/" in name:
            return self._of_update(*name.split("/", 1)) or cause(self._case())
        if kind in ("activation", "activation gradient"):
            return cause(self._of_rows()) or self._if_cut() or self._of_buffer()
        return cause(self._of_rows() if kind in ("sample", "random mask") else self._case())

    def _of_start(self) -> str:
        if self.found.phase == FREE and self.found.step == 0:
            return "its initial values are others than on one device"
        return "it is not what was stored before this step" if self.found.phase != FREE else ""

    def _though_master(self) -> str:
        """The optimizer's is right, the model's is not."""
        master: Site = ("state", f"master/{self.whole.site[1]}")
        found = {each.site: each for each in compare(self.reference, self.ranks)}.get(master)
        return ", though its master was: the model keeps the old" if found is not None and found.is_rounding else ""

    def _of_buffer(self) -> str:
        """A buffer that is another on the rank, too."""
        wrong = [each for each in compare(self.reference, self.ranks) if not each.is_rounding]
        for each in wrong:
            if each.site[0] == "buffer" and each.rank == self._worst.rank:
                return f"on this rank buffer {each.site[1]} is another after the step, too"
        return ""

    def _case(self) -> Case:
        kind, name = self.whole.site
        region = self._region or slice(None)
        shares = self._shares(name, 1.0) if kind == "gradient" else []
        pool = {
            f"{other[0]} {other[1]}": each.value
            for other, each in self.reference.wholes.items()
            if other[0] == kind and each.seen.shape is not None
        }
        value, expected = self._worst.value, self._worst.expected
        if self._worst.seen is not None and self._worst.seen.shape is not None:
            value, expected = value[region], expected[region]
        own = self.found.difference.rank if self._wrong and len(self._wrong) < len(self.parts) else self._worst.rank
        older = self._shares(name, 1.0, 1) if kind == "gradient" and self.found.step else []
        return Case(value, expected, own, self.sizes, shares, self._others(), self._before(), pool=pool, older=older)

    def _shares(self, name: str, scale: float, ago: int = 0) -> list[Share]:
        what_if = replace(self.what_if, step=self.found.step - ago) if ago else self.what_if
        return [
            Share(c.rank, c.part, scale * self._cut(c.gradients[name]), c.targets)
            for c in what_if.computed
            if name in c.gradients
        ]

    def _others(self) -> dict[str, Tensor]:
        """Of the same kind and shape."""
        kind, name = self.whole.site
        found = {}
        if kind == "gradient" and self.found.step:
            before = self.what_if.referred.single[self.found.step - 1].tensor(("clipped gradient", name))
            if before is not None:
                found["the clipped gradient of the step before"] = self._cut(before)
        for words, reference in self._steps().items():
            tensor = reference.tensor(self.whole.site)
            if kind not in ("state", "parameter", "buffer") and tensor is not None:
                found[f"what it was in {words}"] = self._cut(tensor)
        for other, each in self.reference.wholes.items():
            if other[0] == kind and other != self.whole.site and each.value.shape == self.whole.value.shape:
                found[f"that of {other[1]}"] = self._cut(each.value)
        return {words: tensor for words, tensor in found.items() if tensor.ndim}

    def _steps(self) -> dict[str, Reference]:
        """The other ones, the nearest first."""
        at, all_steps = self.found.step, self.what_if.referred.single
        words = {at - 1: "the step before", at + 1: "the step after"}
        order = sorted((n for n in range(len(all_steps)) if n != at), key=lambda n: abs(n - at + 0.1))
        return {words.get(n, f"step {n + 1}"): all_steps[n] for n in order}

    def _before(self) -> Tensor | None:
        kind, name = self.whole.site
        key = {"parameter": f"master/{name}", "state": name, "buffer": f"buffer/{name}"}.get(kind, "")
        before = self.what_if.before.get(key)
        return None if before is None or before.ndim == 0 else self._cut(before)

    def _of_rows(self) -> Case:
        """Of a micro-batch: rows that it might have instead, of this step and of others, and as it would be if the
        parameters were those of the step before."""
        kind, name = self.whole.site
        seen = self._worst.seen
        batches: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        if seen is not None and self._worst.value.ndim == 2:
            same = {
                "the batch": self.reference.wholes,
                **{f"the batch of {w}": r.wholes for w, r in self._steps().items()},
            }
            for words, wholes in same.items():
                for site, each in wholes.items():
                    if site[0] == kind and (site[1] == name or kind == "random mask"):
                        label = words if site[1] == name else f"{words}, {site[1]}"
                        batches |= self._rowed({label: each.value})
            if kind == "sample":
                alike = {f"what {s[1]} should be": w.value for s, w in self.reference.wholes.items() if s[0] == kind}
                others = self._rowed(alike, seen.rows)
                others.pop(f"what {name} should be", None)
            elif kind != "random mask" and self.found.step > 0:
                others = self._rowed(self._stale(), seen.rows)
        worst = self._worst
        return Case(worst.value, worst.expected, worst.rank, self.sizes, others=others, batches=batches)

    def _rowed(self, tensors: Mapping[str, Tensor], rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """[rows, numbers of each] of what has the shape of the tensor; some of the rows."""
        places = [place for place, row in enumerate(self.whole.rows) if rows is None or row in rows]
        return {
            words: by_row(tensor, 0, False, len(self.whole.rows))[places]
            for words, tensor in tensors.items()
            if tensor.ndim and tensor.shape == self.whole.value.shape and tensor.shape[0] % len(self.whole.rows) == 0
        }

    def _stale(self) -> dict[str, Tensor]:
        """With parameters of the step before: all of them, or those of the module; or in backward alone, those of all
        or of a block that the module is in."""
        module = self.whole.site[1].partition("[")[0].partition(" (")[0]
        words = "what parameters that are those of the step before give: they were used before they were updated"
        fresh = {
            seen.name.removeprefix("master/"): slice(seen.start, seen.start + seen.numel)
            for seen in self.ranks[self._worst.rank or 0]
            if seen.kind == "state" and seen.name.startswith("master/")
        }
        but = ", but for those that this rank updates itself"
        tries: list[tuple[str, str, dict[str, slice], bool]] = [
            (words, "", {}, False),
            (f"{words} (those of {module} alone)", f"{module}.", {}, False),
            (f"{words}{but}", "", fresh, False),
        ]
        if self.whole.site[0] == "activation gradient":
            late = "what backward gives with parameters that are those of the step before"
            tries += [(f"{late}{but * bool(kept)}", "", kept, True) for kept in ({}, fresh)]
            blocks = [module[:place] for place, letter in enumerate(module) if letter == "."]
            tries += [(f"{late} (those of {block} alone)", f"{block}.", {}, True) for block in reversed(blocks)]
        found = {}
        for said, prefix, kept, backward in tries:
            stale = self.what_if.with_stale(self.found.step - 1, prefix, kept, backward).get(self.whole.site)
            if stale is not None:
                found[said] = stale.value
        return found

    def _if_cut(self) -> str:
        """One device that cuts the batch in the same way has it, too."""
        seen = self._worst.seen
        if seen is None:
            return ""
        for each in self.what_if.cut_alike.get(self.whole.site, []):
            if each.rows == seen.rows and each.value.shape == seen.value.shape and fits(seen.value, each.value):
                return (
                    "its rows depend on the other rows of their micro-batch, or on how many there are (statistics over "
                    "the batch, say, or numbers that are drawn for all at once): one device that cuts the batch in the "
                    "same way has the same"
                )
        return ""

    # --- gradients and updates -----------------------------------------------------------------

    def _of_clipped(self, name: str) -> str:
        case = self._case()
        summed = sum(share.value for share in self._shares(name, 1.0))
        others = dict(case.others)
        if isinstance(summed, Tensor) and summed.numel():
            mean = summed / self._count
            others = {"the gradient before clipping": mean, "the sum, not divided or clipped": summed, **others}
            others |= self._clippings(mean)
        shares = self._shares(name, self._scale)
        return cause(Case(case.value, case.expected, case.rank, self.sizes, shares, others, pool=case.pool))

    def _clippings(self, mean: Tensor) -> dict[str, Tensor]:
        """Of a gradient, by something else than the norm of all gradients."""
        limit, norm = self.what_if.trial.optimizer.clip_norm, _norm_of(self.reference)
        if limit is None:
            return {}
        norms = {
            "clipped by its own norm, instead of that of all gradients": float(torch.linalg.vector_norm(mean)),
            "clipped twice": norm * max(1.0, norm / limit),
            "clipped by the square of the norm": norm**2,
            "clipped by the norm of the sums, not divided": norm * self._count,
            **{f"clipped by the norm of {words}": _norm_of(each) for words, each in self._steps().items()},
        }
        found = {words: mean * (limit / own) for words, own in norms.items() if own > limit}
        return found | {"cut element by element, instead of by the norm": mean.clamp(-limit, limit)}

    def _of_update(self, state: str, name: str) -> str:
        """Of a moment or a master."""
        reference = self.reference
        gradient = reference.tensor(("clipped gradient", name))
        before = self.what_if.before
        if gradient is None or f"master/{name}" not in before or (self._worst.seen and self._worst.seen.folded):
            return ""
        settings = self.what_if.trial.optimizer
        named = {n: p for n, p in self.what_if.module.named_parameters() if p.requires_grad}
        groups = group_parameters(named, settings)
        scale, decay = next(key for key, members in groups.items() if name in members)
        master = self._cut(before[f"master/{name}"])
        known = {n.split("/")[0]: self._cut(t) for n, t in before.items() if n.endswith(f"/{name}")}
        moments = {n: known.get(n, torch.zeros_like(master)) for n in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
        update = Update(
            settings, reference.learning_rate * scale, decay, float(before.get("step", torch.zeros(()))) + 1,
            master, moments, self._cut(gradient),
            {words: each.learning_rate * scale for words, each in self._steps().items()}
            | {f"parameters whose scale is {other:g}": reference.learning_rate * other for other, _ in groups},
        )  # fmt: skip
        case = self._case()
        pool = {f"{n} before the step": t for n, t in before.items() if n.startswith(f"{state}/") or n.endswith(name)}
        case = Case(case.value, case.expected, case.rank, self.sizes, before=self._before(), pool=pool)
        shares = self._shares(name, self._scale)
        summed = sum(share.value for share in shares)
        others = {}
        for words, each in self._steps().items():
            if (t := each.tensor(("clipped gradient", name))) is not None:
                others[f"that of {words}"] = self._cut(t)
        if isinstance(summed, Tensor):
            others["the one before clipping"] = summed / self._scale / self._count
            others["the sum, not divided or clipped"] = summed / self._scale
        gradients = Case(case.value, case.expected, case.rank, self.sizes, shares, others)
        return cause_of_update(case, update, state, gradients, self._strangers(name))

    def _strangers(self, name: str) -> dict[str, Tensor]:
        """Gradients of some other parameters of this shape."""
        alike = [
            (other, each.value)
            for (kind, other), each in self.reference.wholes.items()
            if kind == "clipped gradient" and other != name and each.value.shape == self.whole.value.shape
        ]
        return {f"the gradient of {other}": self._cut(value) for other, value in alike[:8]}

    @property
    def _count(self) -> float:
        count = self.reference.tensor(("sum", "target tokens"))
        return 1.0 if count is None else float(count) or 1.0

    @property
    def _tokens(self) -> int:
        """Of the batch, targets or not."""
        tokens = self.reference.tensor(("sample", "targets"))
        return 0 if tokens is None else tokens.numel()

    # --- numbers -------------------------------------------------------------------------------

    def _of_number(self, kind: str, name: str) -> str:
        value, expected = float(self._worst.value), float(self._worst.expected)
        computed = self.what_if.computed
        if name == IN_TRAINING:
            return f"{value:g} calls are made in the state of training, where the model is judged{self._where()}"
        if kind == "norm":
            said = cause_of_norm(value, expected, self.ranks, self._count, self.sizes)
        else:
            judged = self.what_if.evaluated if kind == "evaluation" else computed
            shares = [Share(c.rank, c.part, c.loss, c.targets) for c in judged]
            if name in COUNTS:
                others = other_counts(judged, 0 if kind == "evaluation" else self._tokens)
                said = cause_of_number(value, expected, others, self.sizes) or self._counted(name, shares)
            else:
                said = cause_of_number(value, expected, other_losses(judged), self.sizes, shares)
        return said and f"{said}{self._where()}"

    def _counted(self, name: str, shares: Sequence[Share]) -> str:
        """Whose targets are in a count: those whose losses are in the sum. Counts alone are small numbers."""
        seen = self.ranks[self._worst.rank or 0]
        mean = next((each.value for each in seen if each.name == COUNTS[name]), None)
        return counted(mean * self._worst.value, shares, "the share of ") if mean is not None else ""


COUNTS = {"target tokens": "mean loss", "evaluation targets": "evaluation loss"}
"""And the mean over as many."""


def _norm_of(reference: Reference) -> float:
    norm = reference.tensor(("norm", "gradient norm"))
    return 0.0 if norm is None else float(norm)
