"""The kernels of a block, and the bytes that its elementwise kernels read and write, before and after they are fused.

torch's dispatcher names every kernel of a forward and a backward in bfloat16, and its tensors: each is read or written
once. Matmuls and attention are counted separately. Three ways:

- plain: the definitions of norms, rotary positions and gates as PyTorch runs them, operation by operation;
- torch: one kernel of PyTorch for a norm, complex products for rotary positions, a gate with its own backward: what
  motet ran on GPUs before it had kernels, and what it runs where Triton is not installed;
- triton: the kernels of `motet/models/kernels`. Their launches are recorded and not run, so no GPU is needed.

    python benchmarks/block_bytes.py [--tokens 256] [--page]

--page writes docs/benchmarks/block-bytes.md.
"""

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from parts.arguments import parse_arguments
from parts.report.pages import DOCS, fill, table

if TYPE_CHECKING:
    import torch

PAGE = DOCS / "block-bytes.md"
sys.path.insert(0, str(DOCS.parent.parent / "scripts"))
SHAPES = {  # Llama 3.2 1B, 3.1 8B, and Qwen3 4B with norms of queries and keys
    "Llama 1B": {"hidden": 2048, "heads": 32, "kv_heads": 8, "ffn_hidden": 8192},
    "Llama 8B": {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336},
    "Qwen3 4B": {
        "hidden": 2560,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "ffn_hidden": 9728,
        "query_key_norm": True,
    },
}
WAYS: dict[str, Any] = {
    "plain": "plain",
    # A norm of Triton has the bytes of torch's fused one, which a CPU does not have.
    "torch": {"rms_norm": "triton", "add_rms_norm": "plain", "rotary": "torch", "gated_activation": "cpu"},
    "triton": "triton",
}
PRODUCTS = ("mm", "addmm", "bmm", "linear", "matmul")
LIMIT = 0.55


class Counts(NamedTuple):
    """The kernels of a block in forward and backward."""

    products: int
    attention: int
    elementwise: int
    nbytes: int  # The bytes of the elementwise kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parse_arguments(parser, tokens=16)
    rows = []
    for name, sizes in SHAPES.items():
        counts = {way: count_block(sizes, way, options.tokens) for way in WAYS}
        for way, each in counts.items():
            ratios = [f"{each.nbytes / counts[base].nbytes:.2f}x" for base in ("plain", "torch")]
            volume = f"{each.nbytes / options.tokens / 1e3:.1f}"
            rows.append([name, way, str(each.products), str(each.attention), str(each.elementwise), volume, *ratios])
            print(" | ".join(rows[-1]), flush=True)
        assert counts["triton"].nbytes <= LIMIT * counts["plain"].nbytes, f"more than {LIMIT} of the plain bytes"
    head = ["block", "way", "matmuls", "attention", "elementwise kernels", "their kB for each token"]
    text = table([*head, "against plain", "against torch"], rows)
    print(text)
    if options.page:
        fill(PAGE, [f"One row of {options.tokens} tokens, forward and backward, bfloat16.", text])


def count_block(sizes: dict[str, Any], way: str, tokens: int) -> Counts:
    """Run a block forward and backward on a CPU and count."""
    import torch
    from gpu_checks.kernel_patches import kernels_forced, recorded_launches

    from motet.memory.storage_tracker import StorageTracker
    from motet.models.arch.attention_mask import causal_mask
    from motet.models.arch.decoder import CausalDecoder
    from motet.models.settings import DecoderSettings

    settings = DecoderSettings(family="decoder", layers=1, vocab_size=64, context=tokens, **sizes)
    decoder = CausalDecoder(settings).bfloat16()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, tokens, settings.hidden, dtype=torch.bfloat16, requires_grad=True)
    assert decoder.rotary is not None
    rotations, mask = decoder.rotary.rotations_at(torch.arange(tokens), x.dtype), causal_mask(None, None, None)
    kinds, nbytes = Counter[str](), 0

    def on_kernel(kernel: Any, args: Any, *, read: Any, result: Any) -> None:
        nonlocal nbytes
        kind = kind_of(kernel, args, result)
        kinds[kind] += 1
        nbytes += bytes_of(kernel, args, result) if kind == "elementwise" else 0

    gradient, tracker = torch.randn_like(x), StorageTracker(on_kernel=on_kernel)
    with kernels_forced(WAYS[way]), recorded_launches(only_record=True) as launches, tracker:
        decoder.blocks[0](x, mask, rotations).backward(gradient)
    nbytes += sum(launch.nbytes for launch in launches)
    return Counts(kinds["product"], kinds["attention"], kinds["elementwise"] + len(launches), nbytes)


def tensors_in(value: Any) -> "list[torch.Tensor]":
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, list | tuple) else []


def kind_of(kernel: Any, args: Any, result: Any) -> str:
    """`product`, `attention`, `elementwise`, or `none` for views and new tensors without values."""
    name = kernel._schema.name.removeprefix("aten::")
    if name in PRODUCTS:
        return "product"
    if "attention" in name:
        return "attention"
    pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args)}
    outputs = tensors_in(result)
    is_view = not kernel._schema.is_mutable and any(t.untyped_storage().data_ptr() in pointers for t in outputs)
    return "none" if is_view or "empty" in name or not outputs else "elementwise"


def bytes_of(kernel: Any, args: Any, result: Any) -> int:
    """The bytes of the tensors that a kernel reads, and of those that it writes; broadcast ones count once."""
    name = kernel._schema.name.removeprefix("aten::")
    only_writes = name in ("copy_", "fill_", "zero_")
    read = tensors_in(args)[only_writes:]
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*read, *tensors_in(result)))


if __name__ == "__main__":
    main()
