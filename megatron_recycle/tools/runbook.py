"""`recycle runbook`: docs/runbook.md on a terminal, section by section, without a web site."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.usage import hint

_PACKAGE = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\([^)\s]+\)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle runbook`."""
    parser.add_argument("section", nargs="?", help="as a message names it; without one all are listed")


def run(args: argparse.Namespace) -> int:
    """Print a section, or the names of all; returns 0. Raises ConfigError for an unknown name."""
    found = sections(text())
    if args.section is None:
        print("\n".join(f"{name:<20} {part.splitlines()[0].removeprefix('## ')}" for name, part in found.items()))
        return 0
    name = args.section.lstrip("#").lower()
    if name not in found:
        raise ConfigError(f"there is no section {name}{hint(name, list(found))}; `recycle runbook` lists all")
    print(_LINK.sub(r"\1", found[name]))
    return 0


def text() -> str:
    """The page: of an installed package, or of the checkout. Raises ConfigError."""
    for path in (_PACKAGE / "examples_data" / "docs" / "runbook.md", _PACKAGE.parent / "docs" / "runbook.md"):
        if path.exists():
            return path.read_text(encoding="utf-8")
    raise ConfigError("this installation has no runbook: install megatron-recycle anew, or see docs/runbook.md")


def sections(page: str) -> dict[str, str]:
    """Anchor -> its section with the heading, of all headings of the second level."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {anchor(part.splitlines()[0]): part.strip() for part in parts}


def anchor(heading: str) -> str:
    """The anchor that the site gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lstrip("#").strip().lower()))
