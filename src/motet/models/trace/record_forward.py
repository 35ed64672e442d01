"""Products, attention and the tensors that autograd keeps in a forward pass at one size of the batch, by block."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.dtypes import dtype_name
from motet.models.blocks import find_blocks
from motet.models.torch_private import COPY_TO, GROUPED_PRODUCT, InterceptedFunctions, storage_key, tree_leaves
from motet.models.trace.attention_masks import declared_window, visible_keys
from motet.models.trace.known_values import KnownValuesMode
from motet.models.trace.records import AttentionRecord, BlockRecord, ProductRecord, SavedRecord, VisibleKeys

_aten: Any = torch.ops.aten
_OPERANDS = {  # The positions of both factors
    _aten.mm.default: (0, 1),
    _aten.mm.out: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.addbmm.default: (1, 2),
    GROUPED_PRODUCT: (0, 1),
}
_COPIES = {COPY_TO, _aten.clone.default}


@dataclass
class _Storage:
    """A storage that an operator made, or that was there before."""

    held: Any  # So that its key is not given to another
    segment: int | None
    path: str  # The module and the operator that made it
    operator: int


@dataclass
class _Segment:
    """A block, or a stretch outside of blocks."""

    name: str | None  # Of the block
    record: BlockRecord = field(default_factory=BlockRecord)


class ForwardRecorder:
    """Records a forward: `with recorder.of(): loss(batch)`."""

    def __init__(self, module: nn.Module) -> None:
        self._values = KnownValuesMode(self.observe)
        self._names = {inner: name for name, inner in module.named_modules()}
        self._blocks = {block: self._names[block] for block in find_blocks(module)}
        self._parameters = {storage_key(p): name for name, p in module.named_parameters()}  # Copies are added
        self._weights = {*self._parameters}
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self._segments, self._stack = [_Segment(None)], list[nn.Module]()
        self._segment_of_block = dict[str, int]()
        self._current = 0
        self._running = list[tuple[nn.Module, int]]()
        self._storages = dict[int, _Storage]()
        self._kept = dict[int, tuple[Tensor, list[int]]]()  # Tensor, and the segments that keep it
        self._first_use = dict[str, int]()
        self._inputs = dict[int, str]()  # Storage -> the parameter that it is multiplied with first
        self._visible = dict[int, VisibleKeys]()  # Scores -> the keys that each query sees
        self._operators = 0

    @contextmanager
    def of(self) -> Iterator[None]:
        """Record what runs inside."""
        hooks = nn.modules.module
        with ExitStack() as stack, InterceptedFunctions(self._call_function):
            enter, leave = partial(self._enter), partial(self._leave)
            stack.callback(hooks.register_module_forward_pre_hook(enter).remove)
            stack.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
            for block in self._blocks:
                stack.callback(block.register_forward_pre_hook(self._note_arguments, with_kwargs=True).remove)
            with self._values, torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
                yield

    def records(self) -> list[BlockRecord]:
        """The blocks and the stretches outside of them, in the order of the forward."""
        for key, (tensor, segments) in self._kept.items():
            self._add_saved(key, tensor, segments)
        owners = sorted(((name, index) for name, index in self._segment_of_block.items()), key=lambda e: -len(e[0]))
        for name, shape in self._shapes.items():
            of_block = next((index for block, index in owners if name.startswith(f"{block}.")), None)
            segment = self._first_use.get(name, len(self._segments) - 1) if of_block is None else of_block
            self._segments[segment].record.parameters[self._local(name, segment)] = shape
        for each in self._segments:
            each.record.name = each.name
        return [each.record for each in self._segments if not each.record.is_empty]

    # --- the place in the module ---

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(module)
        if module not in self._blocks:
            return
        name = self._blocks[module]
        if name not in self._segment_of_block:
            self._segment_of_block[name] = len(self._segments)
            self._segments.append(_Segment(name))
        self._running.append((module, self._current))
        self._current = self._segment_of_block[name]

    def _leave(self, module: nn.Module, *_: Any) -> None:
        self._stack.pop()
        if self._running and self._running[-1][0] is module:
            self._running.pop()
            self._current = len(self._segments)  # A stretch outside
            self._segments.append(_Segment(None))

    def _note_arguments(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = self._record
        if record.arguments:
            return
        for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            record.arguments.append((storage_key(tensor), _saved("input", tensor), tensor.requires_grad))

    @property
    def _record(self) -> BlockRecord:
        return self._segments[self._current].record

    def _path(self, last: str) -> str:
        inner = self._names.get(self._stack[-1], "") if self._stack else ""
        return f"{self._local(inner, self._current)}.{last}".lstrip(".")

    def _local(self, name: str, segment: int) -> str:
        block = self._segments[segment].name if segment < len(self._segments) else None
        return name.removeprefix(block).removeprefix(".") if block else name

    # --- operators ---

    def observe(self, func: Any, call: tuple[tuple[Any, ...], dict[str, Any]], result: Any) -> None:
        """Record an operator."""
        args, _ = call
        self._operators += 1
        inputs = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            if (name := self._parameters.get(storage_key(tensor))) is not None:
                self._first_use.setdefault(name, self._current)
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self._note_storage(func, tensor)
            self._inherit(func, inputs, tensor)
        if func in _OPERANDS or "grouped_mm" in func.name():
            first, second = _OPERANDS.get(func, (0, 1))
            self._note_product(args[first], args[second])
        elif func is _aten.convolution.default:
            count = result.numel() // result.shape[1]
            weight, name = args[1], self._parameters.get(storage_key(args[1]), self._path("convolution"))
            self._inputs.setdefault(storage_key(args[0]), name)
            self._add_product(name, (weight.numel() // weight.shape[0], weight.shape[0]), count)

    def _note_storage(self, func: Any, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._storages:
            operator = func.name().partition("::")[2].partition(".")[0]
            path = self._path("statistics" if operator.startswith("empty") else operator)  # Of a kernel
            self._storages[key] = _Storage(tensor.untyped_storage(), self._current, path, self._operators)

    def _inherit(self, func: Any, inputs: list[Tensor], result: Tensor) -> None:
        key = storage_key(result)
        if func in _COPIES and inputs and (name := self._parameters.get(storage_key(inputs[0]))):
            self._parameters[key] = name
        if result.ndim < 2 or not result.is_meta or key in self._visible:
            return
        for tensor in (each for each in inputs if each.ndim >= 2 and each.shape[-2] == result.shape[-2]):
            # A column more or less is that of an attention sink
            if abs(tensor.shape[-1] - result.shape[-1]) <= 1:
                seen = visible_keys(tensor) if self._values.is_known(tensor) else self._visible.get(storage_key(tensor))
                self._visible |= {} if seen is None else {key: seen}

    def _note_product(self, a: Tensor, b: Tensor) -> None:
        of_a, of_b = (self._parameters.get(storage_key(each)) for each in (a, b))
        depth = a.shape[-1]
        if of_b is not None:
            self._inputs.setdefault(storage_key(a), of_b)
            self._add_product(of_b, (depth, b.shape[-1]), a.numel() // depth)
        elif of_a is not None:
            self._inputs.setdefault(storage_key(b), of_a)
            self._add_product(of_a, (depth, a.shape[-2]), b.numel() // depth)
        elif a.ndim == 3 and b.ndim == 3:
            sizes = (a.shape[0], a.shape[1], depth, b.shape[2])
            seen = self._visible.get(storage_key(a))
            if seen is not None and seen.causal and seen.window is None:
                seen = VisibleKeys(True, declared_window(self._stack))
            self._record.unweighted.append((self._path("product"), sizes, seen, self._operators))
        else:
            self._add_product(self._path("product"), (depth, b.shape[-1]), a.numel() // depth)

    def _add_product(self, name: str, features: tuple[int, int], count: int) -> None:
        local = self._local(name, self._current)
        key = local, *features
        products = self._record.products
        if key not in products:
            products[key] = ProductRecord(local, *features, operator=self._operators)
        products[key].count += count

    def add_linear(self, hidden: Tensor, weight: Tensor) -> None:
        """Record a product whose operators are not called, of a head that is fused with its loss."""
        self._operators += 1
        name = self._parameters.get(storage_key(weight), self._path("head"))
        self._first_use.setdefault(name, self._current)
        self._add_product(name, (weight.shape[1], weight.shape[0]), hidden.numel() // weight.shape[1])

    def add_attention(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool) -> None:
        """Record attention that a kernel computes."""
        self._operators += 1
        seen = VisibleKeys(causal)
        if mask is not None and mask.ndim >= 2:
            known = visible_keys(mask) if self._values.is_known(mask) else self._visible.get(storage_key(mask))
            seen = known or seen
        window = seen.window or (declared_window(self._stack) if seen.causal else None)
        sizes = q.shape[-3], k.shape[-3], q.shape[-1], v.shape[-1]
        lengths = q.shape[-2], k.shape[-2]
        self._record.attention.append(
            AttentionRecord(self._path("attention"), *sizes, lengths, seen.causal, window, self._operators)
        )

    def _call_function(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Replace attention and RMS norms by operators that keep what fused kernels keep."""
        if function is F.scaled_dot_product_attention:
            return self._attend(**_by_name("query key value attn_mask dropout_p is_causal", args, kwargs))
        if function in (F.rms_norm, torch.rms_norm):
            return _normalize(**_by_name("input normalized_shape weight", args, kwargs))
        return function(*args, **kwargs)

    def _attend(
        self, *, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False, **_: Any
    ) -> Tensor:
        self.add_attention(query, key, value, mask=attn_mask, causal=is_causal)
        return cast(Tensor, _FusedAttention.apply(query, key, value, attn_mask))  # type: ignore[no-untyped-call]  # untyped in torch

    # --- tensors that autograd keeps ---

    def _keep(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key in self._weights:
            return tensor
        _, segments = self._kept.setdefault(key, (tensor, []))
        if self._current not in segments:
            segments.append(self._current)
        if key not in self._storages:
            self._storages[key] = _Storage(tensor.untyped_storage(), None, self._path("constant"), 0)
        return tensor

    def _add_saved(self, key: int, tensor: Tensor, segments: list[int]) -> None:
        made = self._storages[key]
        segment = segments[0]
        origin = 0 if made.segment is None else made.segment
        is_shared = len(segments) > 1 or not tensor.requires_grad
        if is_shared and origin < segment and (self._segments[origin].name is None or len(segments) > 1):
            segment = origin
        product = self._inputs.get(key)
        name = f"{product.removesuffix('.weight')}.input" if product else made.path
        if product is None and made.segment not in (segment, None):
            name = "input"  # Made by another block
        saved = _saved(self._local(name, segment), tensor)
        saved.operator, saved.key = made.operator, key
        saved.kernel = "other" if product is None else "product"
        self._segments[segment].record.saved.append(saved)


def _saved(name: str, tensor: Tensor) -> SavedRecord:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return SavedRecord(name, elements, dtype_name(tensor.dtype))


# --- operators that are one kernel on every device but this one -----------------------------------


def _by_name(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def _normalize(*, input: Tensor, normalized_shape: Any, weight: Any = None, **_: Any) -> Tensor:
    return cast(Tensor, _FusedNorm.apply(input, weight, len(normalized_shape)))  # type: ignore[no-untyped-call]  # untyped in torch


class _FusedNorm(torch.autograd.Function):
    """An RMS norm keeps its input, and a factor for each vector."""

    @staticmethod
    def forward(ctx: Any, *tensors_and_dims: Any) -> Tensor:
        input, weight, dims = tensors_and_dims
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(input, weight, torch.empty(input.shape[:-dims], dtype=wide, device="meta"))
        return cast(Tensor, input * weight if weight is not None else input.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("a trace has no backward")


class _FusedAttention(torch.autograd.Function):
    """A fused kernel keeps queries, keys, values, the mask, the result, and a sum for each query."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        query, _, value, _ = tensors
        *rows, heads, length, _ = query.shape
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        sums = torch.empty(*rows, heads, length, dtype=wide, device="meta")
        # In the order in which the output projection reads it
        output = torch.empty(*rows, length, heads, value.shape[-1], dtype=query.dtype, device="meta").transpose(-3, -2)
        ctx.save_for_backward(*tensors, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("a trace has no backward")
