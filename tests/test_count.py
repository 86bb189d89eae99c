"""The figures of scripts/count.py, on packages so small that a reader counts them himself."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

COUNT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "count.py")))


def test_comments_docstrings_and_blanks_are_no_code():
    source = '"""Doc,\nof two lines."""\n\n# a comment\nx = 1  # counts\n"""of x"""\ntext = """two\nlines"""\n'
    assert COUNT.code_lines(source) == 3


def test_the_longest_name_decides_which_part_a_module_is_of():
    assert COUNT.part_of("runtime.attempt") == "core"
    assert COUNT.part_of("runtime.lent.layers") == "lent layers"
    assert COUNT.part_of("runtime.lentil") == "core"
    assert COUNT.part_of("extensions.bad_data.worker") == "bad data"
    assert COUNT.part_of("surprise") == "not named in scripts/count.py"


def test_every_module_has_a_part():
    code = COUNT.Code.read(COUNT.ROOT / COUNT.PACKAGE)
    assert [name for name in code.sources if "not named" in COUNT.part_of(name)] == []


SMALL = {
    "": "",
    "a": "from megatron_recycle.b import other, Kept\ndef first(site):\n    second(1, site)\n"
         "    other(given=site.agent)\n    Kept(site).keep()\n    unknown(site)\n    third()\n"
         "def second(number, name):\n    name.stop()\ndef third():\n    other(1)\n",
    "b": "from .c import tell\ndef other(given):\n    tell(given)\nclass Kept:\n    def __init__(self, site):\n"
         "        self.site = site\n",
    "c": "def tell(whom):\n    pass\nclass Agent:\n    def stop(self):\n        pass\n",
}


def test_a_parameter_is_followed_through_the_calls_that_it_is_passed_on_to():
    """Also under another name, as an attribute, into methods and constructors; not what it is not passed to."""
    met = COUNT.Code(SMALL).walk(("a", "first"), "site")
    assert list(dict.fromkeys(met)) == [
        ("a", "first"), ("a", "second"), ("c", "Agent.stop"), ("b", "other"), ("c", "tell"), ("b", "Kept.__init__")]


def test_a_return_is_a_way_back_to_a_file_that_was_left():
    met = COUNT.Code(SMALL).walk(("a", "first"), "site")
    assert [where for where, _ in met] == ["a", "a", "c", "a", "a", "b", "c", "b", "a", "b", "a"]
    assert COUNT.returns(met) == 6  # to a, c, b, a, b, a


@pytest.mark.parametrize("late", ["from megatron_recycle.one import x", "def f():\n    from .one import x",
                                  "if TYPE_CHECKING:\n    import megatron_recycle.one"])
def test_a_circle_of_imports_is_found(late: str):
    package = {"": "", "one": "from .two import y", "two": late}
    assert set(COUNT.Code(package).circle()) == {"one", "two"}
    assert COUNT.Code({**package, "two": ""}).circle() == []


def test_reads_of_messages_by_a_text_are_found():
    source = ("def f(message, environ, key):\n    message['a'], message.get('b', 0), message.go.pop('c')\n"
              "    message['d'] = message[key]\n    environ['e'], message.read('f')\n")
    assert [text for _, _, text in COUNT.Code({"control.agent": source, "plan.grid": source}).string_keys()] == [
        "message['a']", "message.get('b', 0)", "message.go.pop('c')"]


def test_the_files_of_a_failure_are_those_of_all_tables():
    page = "| 1 | L | `a.py` | `f` | x |\n| 1a | C | `b.py`, `c.py` | `g` | x |\n| 2 | L | `a.py` | `h` | x |\n"
    assert COUNT.files_of_failure(page) == {"a.py", "c.py"}


def test_names_that_several_folders_have_are_counted():
    assert COUNT.shared_names({"a.x": "", "b.x": "", "x": "", "b.y": ""}) == {"x": 3}
