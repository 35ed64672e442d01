"""Writes the generated pages and pictures of docs/.

python scripts/docs.py                                        # all that take seconds
python scripts/docs.py reference/cli.md pictures/ring.svg     # these
python scripts/docs.py --check                                # writes nothing, and names outdated pages
python scripts/docs.py reference/verify-matrix.md llama gpt2  # measures again: minutes to hours, so only when named

Words after a measured page choose the measurements: families of models, layouts, modes of the protocol or `small`.
"""

import sys
from collections.abc import Callable
from functools import partial

from pages import (
    DOCS,
    code_of_one_step,
    collectives,
    command_outputs,
    commands,
    compositions,
    context_parallel_families,
    data_parallelism,
    job_settings,
    kernels,
    mixture_families,
    package_picture,
    pipeline_parallelism,
    planning_constants,
    planning_devices,
    planning_memory,
    planted_mistakes,
    run_events,
    server_protocol,
    tensor_parallel_families,
    tensor_parallelism,
    verify_matrix,
)

PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": commands.commands_page,
    "reference/exit-codes.md": commands.exit_codes_page,
    "reference/job.md": job_settings.page,
    "reference/compositions.md": compositions.page,
    kernels.PAGE: kernels.page,
    "reference/events.md": run_events.page,
    "reference/verify-matrix.md": verify_matrix.page,
    planning_devices.PAGE: planning_devices.page,
    "reference/tensor-parallel-families.md": tensor_parallel_families.page,
    context_parallel_families.PAGE: context_parallel_families.page,
    mixture_families.PAGE: mixture_families.page,
    "guide/data-parallelism.md": data_parallelism.page,
    tensor_parallelism.PAGE: tensor_parallelism.page,
    "pictures/tensor-parallel-block.svg": tensor_parallelism.picture,
    pipeline_parallelism.PAGE: pipeline_parallelism.page,
    **{f"pictures/{name}": draw for name, draw in pipeline_parallelism.PICTURES.items()},
    **{page: partial(collectives.page, page) for page in collectives.BLOCKS},
    **{f"pictures/{name}": draw for name, draw in collectives.PICTURES.items()},
    **{
        f"pictures/step-{overlap}.svg": partial(data_parallelism.picture, overlap)
        for overlap in data_parallelism.OVERLAPS
    },
    "pictures/plan-stages.svg": command_outputs.stages_picture,
    "pictures/packages.svg": package_picture.picture,
    code_of_one_step.PAGE: code_of_one_step.page,
    **{page: partial(command_outputs.page, page) for page in command_outputs.PAGES},
}


# Words of the command line -> (text, whether all measurements are right)
MEASURED: dict[str, Callable[[list[str]], tuple[str, bool]]] = {
    "reference/verify-matrix.md": verify_matrix.measure,
    "reference/tensor-parallel-families.md": tensor_parallel_families.measure,
    context_parallel_families.PAGE: context_parallel_families.measure,
    mixture_families.PAGE: mixture_families.measure,
    "reference/planted-mistakes.md": planted_mistakes.measure,
    "reference/server-protocol.md": server_protocol.measure,
    planning_constants.PAGE: planning_constants.measure,
    planning_memory.PAGE: planning_memory.measure,
    **{page: partial(command_outputs.measure, page) for page in command_outputs.PAGES},
}


def is_current(page: str) -> bool:
    """Whether a page equals the output of its generator."""
    path = DOCS / page
    return path.is_file() and path.read_text(encoding="utf-8") == PAGES[page]()


def main(words: list[str]) -> int:
    """Write or check pages; the exit code is 1 if one is out of date, or if a measurement is wrong."""
    if words == ["--check"]:
        stale = [page for page in PAGES if not is_current(page)]
        for page in stale:
            print(f"docs/{page} is out of date; run: python scripts/docs.py")
        return int(bool(stale))
    words_by_page: dict[str, list[str]] = {}
    for word in words:
        if word in PAGES or word in MEASURED:
            words_by_page[word] = []
        elif words_by_page and (last := list(words_by_page)[-1]) in MEASURED:
            words_by_page[last].append(word)
        else:
            print(f"{word!r} is none of the pages {', '.join({**PAGES, **MEASURED})}")
            return 2
    all_right = True
    for page in words_by_page or PAGES:
        if page in words_by_page and page in MEASURED:
            text, is_right = MEASURED[page](words_by_page[page])
            all_right = all_right and is_right
        else:
            text = PAGES[page]()
        (DOCS / page).write_text(text, encoding="utf-8")
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
