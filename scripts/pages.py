"""A hook of mkdocs: README is the first page, and links that lead out of docs/ become the name of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_README = Path(__file__).resolve().parent.parent / "README.md"
_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")
_LINK = re.compile(r"\]\((?!\w+:|#)(?:(docs/)|)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the first page."""
    text = _LINK.sub(lambda link: "](" if link[1] else "](../", _README.read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text, with links that lead out of docs/ replaced by their text and the file's path."""
    return _OUT.sub(lambda link: _named(link[1], link[2].partition("#")[0]), markdown)


def _named(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`").endswith(path.rpartition("/")[2]) else f"{text} (`{path}`)"
