"""Animated pages of collectives: they are large, so mkdocs makes them with the site."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from motet.collectives import build
from motet.collectives.draw.program_drawing import program_html


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; mkdocs calls this by its name."""
    for name, ranks in (("ring", 4), ("halving-doubling", 8)):
        content = program_html(build("all-reduce", name, ranks))
        files.append(File.generated(config, f"pictures/{name}.html", content=content))
    return files
