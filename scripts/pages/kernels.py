"""The page of the kernels of a model's layers: which there are, and when each implementation runs."""

from motet.models.kernels.choice import ROWS
from pages import markdown_table

PAGE = "reference/kernels.md"
_INTRODUCTION = """# Kernels

Norms, rotary positions, gates, dropout, losses and updates stream memory. Their time is that of the bytes that they
read and write. Each has a *plain* definition in ordinary operations, and implementations that equal it. A table
chooses one for the kernel, the type of device, the dtype and the number of elements. The code of a model is
the same for all devices.

| implementation | what it is |
| --- | --- |
| `plain` | the definition, which `torch.compile` fuses; inside of a compiled block always this one |
| `cpu` | few passes over memory, with a backward written for them |
| `torch` | operators of PyTorch that take few kernels on any device |
| `triton` | a kernel in Triton, forward and backward |

The first row that matches decides. Rows of `triton` need Triton, which CUDA builds of PyTorch bring. They also need
the C compiler that Triton calls at its first launch. It is the one that the variable `CC` names, or else `gcc` or
`clang` on the `PATH`. On a GPU this compiler must also make Triton's driver, which needs the headers of Python and a
`libcuda.so.1` that `ldconfig -p` lists. Without one of these the next row decides; a driver that
cannot be made gives a warning.

"""
_REST = """
## Kernels in Triton

| kernel | what it computes | what backward keeps |
| --- | --- | --- |
| `rms_norm` | an RMS norm with statistics in float32 at least | input, weight, one factor for each row |
| `add_rms_norm` | x + y and the RMS norm of the sum, in one pass | the sum, weight, one factor for each row |
| `rotary` | pairs of components turned by their position; any strides | nothing but the rotations |
| `gated_activation` | act(gate) * up for silu, gelu, gelu_tanh, relu and relu_squared | its input |
| `dropout` | the [masks of any layout](../guide/models.md#dropout), bit by bit | no mask: backward draws it again |
| `cross_entropy`, `adamw` | [losses of logits, and updates](../guide/precision.md#cross-entropy-and-adamw-on-gpus) | |

An addition and its norm stay two steps where a hook is on the norm, as sequence parallelism has them, and for layer
norms. A sum that the norm reads is rounded first, as in the plain definition. Where `motet verify`
records masks, a kernel before the dropout draws the mask. Gradients of weights are summed in a fixed order.

## Updates as a CUDA graph

The kernel of `adamw` starts once for each master: hundreds of launches in a step. The second update captures them in a
CUDA graph, which later updates launch. The graph keeps the addresses of gradients, masters, moments, counts and
parameters. An update whose tensors lie elsewhere, or have other shapes, strides or dtypes, launches its kernels one by
one. The next update is captured again. No bit changes, and no setting is needed. Learning rates, decay, betas, epsilon
and the factor of gradients are in a buffer of the device, which the host fills before each launch.

| stage | gradients | updates by a graph |
| --- | --- | --- |
| 0, 1, 2 | flat buffers, which stay | all after the first |
| 3 | FSDP2 allocates them in each step | where all gradients get the addresses of the step before |

On CPU ranks, gradients of stage 3 move in nearly all steps. motet copies none for a graph. At stage 3, parameters in
buckets have another graph than the rows of FSDP2. With `communication.overlap = "forward"` at stage 0 each bucket has
one. If tensors move 8 times in a row, each time after fewer than 4 replays, motet captures no more graphs for these
masters. After a capture that fails, motet warns, launches the kernels one by one, and uses no graph in the rest of
the run.

motet captures on a side stream, in the mode `thread_local`. It does not empty the caches of PyTorch's allocators, as
`torch.cuda.graph` does. The captured kernels allocate no memory. On CPU ranks, tests replay updates at every stage with
a stand-in for the capture. `scripts/gpu.py` compares the time and the bits of 300 masters with and without a graph.
**No GPU has run it yet.**

## Measured rows

Rows that name a GPU are assumed. `python scripts/gpu.py` times each kernel against `torch`, `plain` and its compiled
form, and compares its values. It keeps the fastest implementation that needs no `torch.compile` for each size. A kernel
that fails, or differs by more than rounding, is never kept. Kernels that are not measured at both sizes keep the rows
above. Calls of fewer elements than the smallest measured size run the implementation of that size. The file is
`motet/kernels.json` of the user's cache folder (`~/.cache`, or `XDG_CACHE_HOME`). Runs on a GPU of the same name read
these rows first. A file that is damaged or another user's counts as empty.

## What is checked

Under Triton's interpreter on a CPU, every kernel of this page and its gradients equal formulas in float64 to 1e-12. The
sizes and strides are odd ones. A step of the built-in `tiny` with all of them equals the plain one. A test compiles
every launch for Hopper. [Kernels and bytes of a block](../benchmarks/block-bytes.md) counts what they save.
**No GPU has run them yet**: their speed is not checked, nor the rounding of bfloat16, which the interpreter truncates.
The planned memory of dropout on a GPU counts a mask of one byte for each element, which these kernels do not keep.
That of the loss assumes that Triton runs: without it, the loss takes more than the plan says.
"""


def page() -> str:
    """The content of the page."""
    head = ["kernel", "device", "dtypes", "elements from", "implementation", "origin"]
    rows = [
        [
            *(f"`{row.kernel}`", row.device, ", ".join(row.dtypes) or "any", str(row.least_elements)),
            *(f"`{row.implementation}`", row.origin),
        ]
        for row in ROWS
    ]
    return f"{_INTRODUCTION}{markdown_table(head, rows)}{_REST}"
