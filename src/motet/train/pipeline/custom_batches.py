"""Batches of a custom loop in a pipeline: their sizes, and smaller ones with which stages are proven."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet.collectives.execute.api import all_reduce, copy_scalars_to_host
from motet.core.errors import InputError, check_input
from motet.parallel.pipeline.stages.stage_proof import SizedForward
from motet.parallel.process.process_group import RankGroup
from motet.parallel.torch_private import tree_leaves, tree_map_only

# Length of sequences -> the most tokens, and the number that is missing in each of three batches.
_PROOF_LENGTHS = ((7, 0, 2, 1), (6, 1, 0, 2), (5, 2, 1, 0), (8, 0, 1, 2))
_FINGERPRINT_WEIGHTS = 65_537  # Weights of the elements of a tensor, in turn

# (module, batch) -> the sum of the losses and their count; or their mean, and then every batch has the same weight.
LossFunction = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | float]]


def sizes_of_batch(batch: Any) -> dict[str, int]:
    """The rows of a batch, from the first dimension of its first tensor, and the second dimension of each tensor."""
    tensors = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.ndim]
    check_input(
        tensors,
        f"a batch of a pipeline is {type(batch).__name__}, in which no tensor with rows was seen, so the shapes "
        "between stages are not known; give a tensor, or a tuple, list or dictionary of tensors",
    )
    lengths = [each.shape[1] for each in tensors if each.ndim > 1]
    return {"rows": len(tensors[0])} | {f"tokens {i}" if i else "tokens": length for i, length in enumerate(lengths)}


def batch_fingerprint(batches: Sequence[Any]) -> float:
    """A number that almost certainly differs between different batches."""
    total = 0.0
    for number, tensor in enumerate(each for each in tree_leaves(list(batches)) if isinstance(each, Tensor)):
        values = tensor.detach().reshape(-1).to(torch.float64)
        weights = torch.arange(1, len(values) + 1, device=values.device) % _FINGERPRINT_WEIGHTS
        total += (number + 1) * float(values @ weights.to(torch.float64))
    return total


def proof_forwards(module: nn.Module, run: Callable[[Any], Tensor], example: Any) -> list[SizedForward]:
    """Forwards of several sizes, from a list of batches or from the first rows and tokens of one."""
    batches = example if isinstance(example, list) and len(example) > 1 else list(_smaller_batches(example, run))
    return [SizedForward(partial(_run_like_parameters, module, run, each), sizes_of_batch(each)) for each in batches]


def _smaller_batches(example: Any, run: Callable[[Any], Tensor]) -> Iterator[Any]:
    batch = example[0] if isinstance(example, list) else example
    sizes = sizes_of_batch(batch)
    rows, problem = sizes.pop("rows"), ""
    check_input(
        rows > 1,
        "layout.pp: example=... has one row, so rows cannot be recognised in the shapes between stages; give a batch "
        "of two rows or more",
    )
    lengths = sorted(set(sizes.values()), reverse=True)
    for choices in (tuple(zip(lengths, _PROOF_LENGTHS, strict=False)), ()):
        smaller = []
        for number in range(3 if choices else 2):
            # Lengths differ between batches, and change in other orders.
            wanted = {length: max(1, min(length, most[0]) - most[1 + number]) for length, most in choices}
            smaller.append(_first(batch, {rows: 1 if number == 1 else min(rows, 2)}, wanted))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                for each in smaller:
                    run(each)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # a module that needs all of a batch may raise anything
            problem = f"{type(error).__name__}: {error}"
            continue
        yield from smaller
        return
    raise InputError(
        f"layout.pp: the loss fails on the first rows of example=... ({problem}), so the shapes between stages cannot "
        "be learned from it; give a list of two batches with other numbers of rows and tokens"
    )


def _first(batch: Any, rows: Mapping[int, int], lengths: Mapping[int, int]) -> Any:
    """The first rows of a batch, and the first tokens where a later dimension is as long as sequences."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            tensor = tensor.narrow(dim, 0, (lengths if dim else rows).get(size, size))
        return tensor

    return tree_map_only(Tensor, cut, batch)


def _run_like_parameters(module: nn.Module, run: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """Run a batch on the CPU, in the dtype that parameters have there while the module is proven."""
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)

    return run(tree_map_only(Tensor, convert, batch))


def loss_and_count(loss_output: Any, caller: str = "step") -> tuple[Tensor, float]:
    """Split the output of a loss function; the count is 1 where it returns none."""
    value, count = loss_output if isinstance(loss_output, tuple) and len(loss_output) == 2 else (loss_output, 1.0)
    counted = ("count that goes with the loss", count, Tensor | float | int)
    for name, item, allowed_types in (("loss", value, Tensor), counted):
        if not isinstance(item, allowed_types) or (isinstance(item, Tensor) and item.numel() != 1):
            kind = f"of shape {list(item.shape)}" if isinstance(item, Tensor) else f"a {type(item).__name__}"
            remedy = "give a tensor of one number, such as a sum, and how many losses are in it"
            raise InputError(f"{caller}: the {name} is {kind}; {remedy}")
    remedy = "(it was detached, or made under no_grad); return a loss with a gradient"
    check_input(value.requires_grad, f"{caller}: the loss depends on no parameter that is trained {remedy}")
    return value, float(count)


def check_same_loss(total: Tensor, group: RankGroup) -> None:
    """Refuse ranks that split layers of one model and have different losses, so different batches."""
    bounds = torch.stack([total, -total])
    all_reduce(bounds, group, op="max")
    largest, opposite_of_smallest = copy_scalars_to_host(bounds)
    smallest = -opposite_of_smallest
    check_input(
        not largest - smallest > 1e-3 * max(abs(largest), abs(smallest)),
        f"step: ranks that split layers of one model have losses from {smallest} to {largest}; give ranks with "
        "the same engine.data_rank the same batches",
    )


def check_same_batches(batches: Sequence[Any], group: RankGroup) -> None:
    """Refuse ranks of one pipeline, or that share rows, with different batches: all of them compute with them."""
    fingerprint = batch_fingerprint(batches)
    bounds = torch.tensor([fingerprint, -fingerprint], dtype=torch.float64, device=group.device)
    all_reduce(bounds, group, op="max")
    check_input(
        not bounds.isfinite().all() or bounds[0] == -bounds[1],
        "step: ranks that share rows, or the blocks of a module, have different batches; give ranks with the same "
        "engine.data_rank the same batches",
    )
