"""Hooks of ``make docs``: the README is the start page, and links work on the site as they do in the repository."""

import os
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# A link or an image in Markdown, or the source of an HTML image: what stands before the address, and the address.
ADDRESS = re.compile(r"""(\]\(|src="|href=")(?!https?:|#|mailto:)([^)"#\s]+)""")


class ExamplesInDocstrings(griffe.Extension):
    """Show the section ``Example:`` of a docstring as the code that it is."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the start page, and under ``repository/`` whatever the pages link to outside of docs."""
    texts = [(Path(page.abs_src_path), page) for page in files.documentation_pages()]
    start = File.generated(config, "index.md", content="")
    files.append(start)
    texts.append((ROOT / "README.md", start))
    for path, page in texts:  # grows while it runs
        page.content_string = _on_site(path)
        for name in re.findall(r"repository/([^)\"#\s]+)", page.content_string):
            if files.get_file_from_path(f"repository/{name}"):
                continue
            copied = File.generated(config, f"repository/{name}", abs_src_path=str(ROOT / name))
            files.append(copied)
            if name.endswith(".md"):
                texts.append((ROOT / name, copied))
    return files


def _on_site(path: Path) -> str:
    """The text of a page whose links point to where their files lie on the site."""
    page = _place(path)

    def moved(match: re.Match) -> str:
        target = _place((path.parent / match[2]).resolve())
        return match[1] + Path(os.path.relpath(target, page.parent)).as_posix()

    return ADDRESS.sub(moved, path.read_text(encoding="utf-8"))


def _place(path: Path) -> Path:
    """Where a file of the repository lies on the site."""
    inside = path.relative_to(ROOT)
    if inside == Path("README.md"):
        return Path("index.md")
    return inside.relative_to("docs") if inside.parts[0] == "docs" else "repository" / inside
