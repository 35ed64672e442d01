"""Products, attention and the tensors that autograd keeps in a forward pass at one size of the batch, by block.

A forward pass on the meta device, in which everything that does not depend on a parameter keeps its values.
Positions, masks and indices are computed on the CPU, so that code which looks at them runs as usual. A tensor that
depends on a parameter has no memory. Choices by value, such as the experts of a token, are spread evenly.

The keys that a mask or a module lets each query see.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.core.errors import InputError
from motet.core.units import dtype_name
from motet.models.torch_private import (
    COPY_TO,
    GROUPED_PRODUCT,
    READ_NUMBER,
    InterceptedFunctions,
    TorchDispatchMode,
    aliases_input,
    storage_key,
    tree_leaves,
    tree_map,
    written_arguments,
)
from motet.models.trace.meta_kernels import MetaKernels
from motet.models.trace.record_reader import AttentionRecord, BlockRecord, ProductRecord, SavedRecord, VisibleKeys
from motet.models.user_module import find_blocks

MOST_KNOWN_ELEMENTS = 1 << 24  # Larger constants have no values: they would take memory
_ATEN: Any = torch.ops.aten
_CHOICES = {_ATEN.topk.default, _ATEN.sort.default, _ATEN.sort.stable, _ATEN.argsort.default, _ATEN.argmax.default}
_MADE_WITHOUT_VALUES = ("empty", "rand", "normal")  # Names of operators, by their beginning


class KnownValuesMode(TorchDispatchMode):
    """A mode around the building and the forward of a module whose parameters are on the meta device."""

    def __init__(self, observe: Callable[..., None] | None = None) -> None:
        """`observe(operator, (args, kwargs), result)` is called with each operator."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._observe = observe
        self._kernels = MetaKernels()
        self._lost = dict[int, Any]()  # Storages on the processor that an unknown value was written to

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor has its values."""
        return not tensor.is_meta and storage_key(tensor) not in self._lost

    def __torch_dispatch__(self, func: Any, types: Any, *call: Any, **named: Any) -> Any:
        """Compute with values, or without; `call` is the positional arguments and those by name."""
        args, kwargs = call[0] if call else (), dict(call[1] or {}) if len(call) > 1 else {}
        result = self._compute(func, args, kwargs)
        if self._observe is not None:
            self._observe(func, (args, kwargs), result)
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            return _make(func, args, kwargs)
        is_known = all(map(self.is_known, tensors))
        if is_known and _is_meta(kwargs.get("device")):
            kwargs.pop("device")  # A copy to the device of activations
        if func is _ATEN.histc.default and not args[0].is_floating_point():  # Only accelerators have it for integers
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        if is_known or (aliases_input(func) and not any(tensor.is_meta for tensor in tensors)):
            return func(*args, **kwargs)
        return self._without_values(func, args, kwargs, tensors=tensors)

    def _without_values(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, tensors: Sequence[Tensor]
    ) -> Any:
        if func is READ_NUMBER:
            if args[0].dtype == torch.bool:
                return False  # `isinf().any()`, say: nothing unusual happens
            raise InputError(
                "the module reads the value of a number that depends on its parameters; let its code depend on sizes, "
                "not on values"
            )
        on_meta = dict[int, Tensor]()

        def to_meta(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                return leaf
            return on_meta.setdefault(id(leaf), leaf.to("meta"))

        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if func is GROUPED_PRODUCT and args[1].ndim == 3:  # Kernels demand sizes that are multiples of 16 bytes
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1], device="meta")
        if all(tensor.is_meta for tensor in tensors):
            result = self._kernels.call(func, args, kwargs)
            return _spread_evenly(func, args, result) if func in _CHOICES else result
        result = self._kernels.call(func, tree_map(to_meta, args), tree_map(to_meta, kwargs))
        written = [each for each in written_arguments(func, args, kwargs) if not each.is_meta]
        for tensor in written:
            self._lost[storage_key(tensor)] = tensor.untyped_storage()
        originals = {id(on_meta[id(tensor)]): tensor for tensor in written}
        result = tree_map(lambda leaf: originals.get(id(leaf), leaf), result)
        return _spread_evenly(func, args, result) if func in _CHOICES else result


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _make(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without tensors as arguments, with values where it is small."""
    result = func(*args, **kwargs)
    name = func.name().removeprefix("aten::")
    is_small = isinstance(result, Tensor) and result.is_meta and result.numel() <= MOST_KNOWN_ELEMENTS
    if is_small and not name.startswith(_MADE_WITHOUT_VALUES):
        return func(*args, **{**kwargs, "device": torch.device("cpu")})
    return result


def _spread_evenly(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The same result with indices that all appear equally often."""
    name = func.name().partition(".")[0]
    indices = result if isinstance(result, Tensor) else result[1]
    dim = args[2 if name == "aten::topk" else 1] if len(args) > (2 if name == "aten::topk" else 1) else -1
    scores: Tensor = args[0]
    if indices.ndim == 0 or not isinstance(dim, int) or isinstance(dim, bool) or scores.ndim != indices.ndim:
        known = torch.zeros(indices.shape, dtype=torch.int64)
    else:
        order = torch.arange(indices.numel()) % scores.shape[dim]
        moved = indices.movedim(dim, -1).shape
        known = order.view(moved).movedim(-1, dim).contiguous()
    return known if isinstance(result, Tensor) else (result[0], known)


_HIDDEN = -1e3  # The bias of hidden keys is below this


def visible_keys(mask: Tensor) -> VisibleKeys | None:
    """Whether a mask with values hides later keys and those before a window; None if it is not a mask of pairs.
    A mask of truth values may name the visible pairs or the hidden ones."""
    if mask.ndim < 2 or mask.shape[-2] != mask.shape[-1] or mask.shape[-1] < 2:
        return None
    pairs = mask[(0,) * (mask.ndim - 2)]
    if mask.dtype != torch.bool:
        if not mask.is_floating_point() or bool((pairs.min() > _HIDDEN).item()):
            return None
        pairs = pairs > _HIDDEN
    visible = pairs if bool(pairs.diagonal().all()) else ~pairs
    distances = torch.arange(len(visible))[:, None] - torch.arange(len(visible))
    is_causal = bool((distances[visible] >= 0).all())
    if not is_causal:
        return VisibleKeys(False)
    window = int(distances[visible].max()) + 1
    is_band = bool((visible == ((distances >= 0) & (distances < window))).all())
    return VisibleKeys(True, window if is_band and window < len(visible) else None)


def declared_window(modules: Sequence[nn.Module]) -> int | None:
    """The window of attention that the innermost module declares: a trace is shorter than most windows."""
    for module in reversed(modules):
        attributes = vars(module)
        if "sliding_window" in attributes:
            window = attributes["sliding_window"]
            return window if isinstance(window, int) and window > 0 else None
        config: Any = attributes.get("config")
        kinds, index = getattr(config, "layer_types", None), attributes.get("layer_idx")
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int) and getattr(config, "use_sliding_window", True):
            is_sliding = not kinds or (isinstance(index, int) and kinds[index] == "sliding_attention")
            return window if is_sliding else None
    return None


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

    held: Any  # Held so that no other storage gets its key
    segment: int | None
    path: str  # The module and the operator that made it
    operator: int


@dataclass
class _Segment:
    """A block, or a stretch outside of blocks."""

    name: str | None  # The name of the block
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
        self._frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
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
        """Record the code of a block."""
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
            owner = next((index for block, index in owners if name.startswith(f"{block}.")), None)
            segment = self._first_use.get(name, len(self._segments) - 1) if owner is None else owner
            record, local = self._segments[segment].record, self._local(name, segment)
            record.parameters[local] = shape
            record.frozen |= {local} if name in self._frozen else set()
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
            self._current = len(self._segments)  # A stretch outside of blocks
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
            self._add_product(name, (weight.numel() // weight.shape[0], weight.shape[0]), count, x=args[0])

    def _note_storage(self, func: Any, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._storages:
            operator = func.name().partition("::")[2].partition(".")[0]
            path = self._path("statistics" if operator.startswith("empty") else operator)  # A kernel makes these
            self._storages[key] = _Storage(tensor.untyped_storage(), self._current, path, self._operators)

    def _inherit(self, func: Any, inputs: list[Tensor], result: Tensor) -> None:
        key = storage_key(result)
        if func in _COPIES and inputs and (name := self._parameters.get(storage_key(inputs[0]))):
            self._parameters[key] = name
        if result.ndim < 2 or not result.is_meta or key in self._visible:
            return
        for tensor in (each for each in inputs if each.ndim >= 2 and each.shape[-2] == result.shape[-2]):
            # An attention sink adds or removes a column
            if abs(tensor.shape[-1] - result.shape[-1]) <= 1:
                seen = visible_keys(tensor) if self._values.is_known(tensor) else self._visible.get(storage_key(tensor))
                self._visible |= {} if seen is None else {key: seen}

    def _note_product(self, a: Tensor, b: Tensor) -> None:
        parameter_a, parameter_b = (self._parameters.get(storage_key(each)) for each in (a, b))
        depth = a.shape[-1]
        if parameter_b is not None:
            self._inputs.setdefault(storage_key(a), parameter_b)
            self._add_product(parameter_b, (depth, b.shape[-1]), a.numel() // depth, x=a)
        elif parameter_a is not None:
            self._inputs.setdefault(storage_key(b), parameter_a)
            self._add_product(parameter_a, (depth, a.shape[-2]), b.numel() // depth, x=b)
        elif a.ndim == 3 and b.ndim == 3:
            sizes = (a.shape[0], a.shape[1], depth, b.shape[2])
            seen = self._visible.get(storage_key(a))
            if seen is not None and seen.causal and seen.window is None:
                seen = VisibleKeys(True, declared_window(self._stack))
            self._record.unweighted.append((self._path("product"), sizes, seen, self._operators))
        else:
            self._add_product(self._path("product"), (depth, b.shape[-1]), a.numel() // depth, x=a)

    def _add_product(self, name: str, features: tuple[int, int], count: int, *, x: Tensor) -> None:
        local = self._local(name, self._current)
        key = local, *features
        products = self._record.products
        if key not in products:
            dtype, is_trained = str(x.dtype).removeprefix("torch."), name not in self._frozen
            products[key] = ProductRecord(local, *features, self._operators, dtype, weight_gradient=is_trained)
        products[key].count += count
        products[key].input_gradient |= x.requires_grad

    def add_linear(self, hidden: Tensor, weight: Tensor) -> None:
        """Record a product whose operators are not called, of a head that is fused with its loss."""
        self._operators += 1
        name = self._parameters.get(storage_key(weight), self._path("head"))
        self._first_use.setdefault(name, self._current)
        self._add_product(name, (weight.shape[1], weight.shape[0]), hidden.numel() // weight.shape[1], x=hidden)

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
        """Replace attention and RMS norms by operators that keep the tensors of fused kernels."""
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


# --- operators that are one kernel on every device but meta -----------------------------------


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
        # The order in which the output projection reads it
        output = torch.empty(*rows, length, heads, value.shape[-1], dtype=query.dtype, device="meta").transpose(-3, -2)
        ctx.save_for_backward(*tensors, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("a trace has no backward")
