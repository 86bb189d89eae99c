"""Pictures in the documentation: for light and dark pages, with what the numbers are, of the numbers that are there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from megatron_recycle.tools.picture_style import COLOURS, KINDS, figure

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = sorted(DOCS.rglob("*.svg"))
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
DRAWING = runpy.run_path(str(ROOT / "scripts" / "figures" / "draw.py"), run_name="draw")


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_for_light_and_dark_pages_and_says_what_its_numbers_are(path: Path):
    content = path.read_text(encoding="utf-8")
    ground = re.search(r'<g id="patch_1">.*?</g>', content, re.DOTALL)
    assert ground is None or "fill: none" in ground[0] or "opacity: 0" in ground[0], "it has a ground"
    assert any(text.startswith(KINDS) for text in texts(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_alternative_text_of_a_picture_gives_the_result(page: Path):
    for text, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert target.endswith(".svg"), f"{target} is no picture for dark pages"
        assert text.startswith(KINDS) and re.search(r"\d", text), f"{target}: {text!r} names no result"


def test_every_picture_is_shown_somewhere():
    shown = {name for page in PAGES
             for name in re.findall(r"\]\([^)\s]*?([\w-]+\.svg)\)", page.read_text(encoding="utf-8"))}
    assert {path.name for path in PICTURES} == shown
    assert not [*DOCS.rglob("*.png")]


@pytest.mark.parametrize("name", sorted(DRAWING["DRAWN"]))
def test_a_picture_is_of_the_numbers_beside_it(name: str, tmp_path: Path):
    drawn = DRAWING["draw"](name, tmp_path)
    assert texts(drawn) == texts(DOCS / "figures" / f"{name}.svg"), f"python scripts/figures/draw.py {name}"


def test_a_title_has_to_say_whether_it_was_measured():
    with pytest.raises(ValueError, match="begins with one of 'Measured: '"):
        figure("Throughput", 3.0)
    assert len(set(COLOURS)) == 7
