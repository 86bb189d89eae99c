"""What a training script of a shell asks for, read without running it.

Variables are followed from their assignments, one after the other, wherever they stand. Of a branch on the value of one
the right side counts; with another condition both do. What a cluster or a command line would give stays empty.
"""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path
from typing import Any

_ASSIGNED = re.compile(r"""^[ \t]*(?:export[ \t]+)?(\w+)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s;#&|"']*)""", re.M | re.S)
_USED = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_WRITTEN = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)\n[ \t]*\1\b", re.S)
_REPLACED = re.compile(r"sed\s+\"s/(\w+)/([^/]*)/\"")
_TEMPLATE = re.compile(r"[\w./${}-]+\.json")
_BRANCH = re.compile(r"""^[ \t]*if[ \t]+\[+[ \t]*"?\$\{?(\w+)\}?"?[ \t]*"""
                     r"""(==?|!=|-gt|-lt|-ge|-le|-eq|-ne)[ \t]*"?([\w.]+)"?[ \t]*\]+;?[ \t]*\n?[ \t]*"""
                     r"""then\b((?:(?!^[ \t]*(?:if|elif)\b).)*?)"""
                     r"""(?:^[ \t]*else\b((?:(?!^[ \t]*(?:if|elif)\b).)*?))?^[ \t]*fi\b""", re.M | re.S)
_FLAG = re.compile(r"(?<![\w-])--([\w-]+)(?:[ =]+((?!--)[^\s\\'\"]+))?")
_COMPARED = {"-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge, "-le": operator.le, "-eq": operator.eq,
             "-ne": operator.ne}
_DEPTH = 8  # of variables in variables


class ShellScript:
    """One at ``path``.

    Attributes:
        flags: name (with _) -> value, or True for one without.
        settings: JSON objects that it writes or fills in.
    """

    def __init__(self, path: Path) -> None:
        text = re.sub(r"^[ \t]*#.*$|(?<=\s)#\s.*$", "", path.read_text(errors="replace"), flags=re.M)
        text = text.replace("\\\n", " ")
        self._values: dict[str, str] = {}
        self._assign(text)
        while (followed := _BRANCH.sub(self._followed, text)) != text:
            text = followed
        self._values = {}
        self._assign(text)
        whole = self._filled(text)
        self.flags: dict[str, str | bool] = {
            name.replace("-", "_"): value or True for name, value in _FLAG.findall(whole)}
        self.settings = [found for body in self._written(path, whole) if (found := _json(body)) is not None]

    def _assign(self, text: str) -> None:
        for name, value in _ASSIGNED.findall(text):
            value = value.strip("\"'")
            if re.fullmatch(r"\$\{?\d\}?", value):
                continue  # of a command line, where the one before is the default
            before = self._values.get(name, "")  # what is added to a variable comes behind it
            self._values[name] = re.sub(rf"\$\{{?{name}\b\}}?", lambda found, before=before: before, value)
    def _followed(self, branch: re.Match[str]) -> str:
        name, how, other, then, otherwise = branch.groups()
        value = self._filled(self._values.get(name, ""))
        if how in ("=", "==", "!="):
            return then if (value == other) == (how != "!=") else otherwise or ""
        numbers = [int(one) if one.isdigit() else 0 for one in (value, other)]
        return then if _COMPARED[how](*numbers) else otherwise or ""

    def _written(self, path: Path, whole: str) -> list[str]:
        """The JSON that the script at ``path`` writes, has in a variable, or makes of a template."""
        written = [body for _, body in _WRITTEN.findall(whole)]
        written += [self._filled(value) for value in self._values.values() if value.lstrip().startswith("{")]
        names = {name for name in _TEMPLATE.findall(whole) if "$" not in name}
        replaced = dict(_REPLACED.findall(whole))
        for template in (path.parent / found for name in sorted(names) for found in (name, Path(name).name)):
            if template.exists():
                body = template.read_text()
                for name, value in replaced.items():
                    body = body.replace(name, value)
                written.append(body)
        return written

    def value(self, *names: str) -> int | None:
        """The number that the first of these flags has; None: none of them has one."""
        for name in names:
            found = self.flags.get(name)
            if isinstance(found, str) and found.isdigit():
                return int(found)
        return None

    def _filled(self, text: str) -> str:
        for _ in range(_DEPTH):
            filled = _USED.sub(lambda found: self._values.get(found[1] or found[3], found[2] or ""), text)
            if filled == text:
                break
            text = filled
        return text


def _json(body: str) -> dict[str, Any] | None:
    """What ``body`` says; values that are not known here (empty, names, arithmetic) are 1."""
    body = re.sub(r":[ \t]*([^\s\"{\[][^,}\n]*|(?=[,}\n]))", lambda found: ": " + _known(found[1].strip()), body)
    try:
        found = json.loads(re.sub(r",(\s*[}\]])", r"\1", body))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _known(value: str) -> str:
    try:
        json.loads(value)
    except ValueError:
        return "1"
    return value
