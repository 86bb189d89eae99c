"""A setting: its name in every source, its parsing, its check and its display.

Key `x_y` of the JSON section `"recycle"` is flag `--recycle-x-y` and variable `RECYCLE_X_Y`; a flag beats a variable, a
variable beats JSON, JSON beats the default. The list of settings is in `config`.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_recycle.environment import HANDED_OVER
from megatron_recycle.errors import ConfigError

SECTION = "recycle"
"""Name of the section in the DeepSpeed JSON file."""
_PREFIX = "RECYCLE_"
_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NOUNS = {"": "", "s": "a time in seconds, ", "GiB": "a size in GiB, ", "iterations": "a number of iterations, "}
AUTO = "auto"
"""Word for `None` in flags and variables (in JSON: `null` or `"auto"`)."""


def flag(name: str) -> str:
    """Flag of setting `name`: `x_y` is `--recycle-x-y`."""
    return "--recycle-" + name.replace("_", "-")


def attribute(name: str) -> str:
    """Attribute of setting `name` in the parsed namespace: `x_y` is `recycle_x_y`."""
    return "recycle_" + name


def variable(name: str) -> str:
    """Environment variable of setting `name`: `x_y` is `RECYCLE_X_Y`."""
    return _PREFIX + name.upper()


def shown(value: Any) -> str:
    """A setting's value in the form that people write."""
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Option:
    """One setting, for flags, messages and documentation."""

    name: str
    kind: type
    """bool, int, float or str."""
    optional: bool
    """Whether None (`auto`) is allowed."""
    default: Any
    help: str
    choices: tuple[str, ...]
    """The allowed values; of an integer, words for 0."""
    unit: str
    """"s", "GiB", "iterations" or none."""
    least: int | None = None
    """The smallest allowed number; None: seconds and sizes are above 0."""

    def parse(self, text: Any, source: str) -> Any:
        """The value of a flag's or variable's text. Raises ConfigError, which names `source`."""
        if not isinstance(text, str):
            return self.check(text, source)
        word = text.strip()
        if self.optional and word.lower() in (AUTO, "none", ""):
            return None
        value: Any = text
        if self.kind is str or word in self.choices:
            value = word
        elif self.kind is bool:
            value = _TRUTHS.get(word.lower(), text)
        else:
            with suppress(ValueError):  # refused below with the allowed values
                value = self.kind(word)
        return self.check(value, source)

    def check(self, value: Any, source: str) -> Any:
        """`value`, an integer widened where a float is wanted. Raises ConfigError for a wrong type, choice or range."""
        if self.optional and (value is None or value == AUTO):
            return None
        if self.kind is int and value in self.choices:
            return 0
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        fits = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        if not fits or (self.choices and self.kind is str and value not in self.choices):
            near = difflib.get_close_matches(str(value), self.choices, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{source} is {value!r}; give {self._wanted()}{hint}")
        if self.kind in (int, float) and not self._in_range(value):
            limit = "above 0" if self.least is None else f"{self.least} or more"
            raise ConfigError(f"{source} is {value:g}; give {_NOUNS[self.unit]}{limit}")
        return value

    def _in_range(self, value: float) -> bool:
        if self.least is not None:
            return self.least <= value < math.inf
        return not self.unit or 0 < value < math.inf

    def values(self) -> str:
        """The allowed values in one word, as `--help` and the documentation show them."""
        kinds = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
        words = () if self.kind is str and self.choices else ("SECONDS" if self.unit == "s" else kinds[self.kind],)
        values = "|".join((*words, *self.choices))
        return values + (f"|{AUTO}" if self.optional else "")

    def _wanted(self) -> str:
        """The allowed values in words, for a message."""
        kinds = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        plain = kinds[self.kind] + (" of seconds" if self.unit == "s" else "")
        values = " or ".join((*(() if self.kind is str and self.choices else (plain,)), *self.choices))
        return values + (f" or {AUTO}" if self.optional else "")


def nearest(name: str, names: Sequence[str]) -> str:
    """The name that was probably meant."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]


def resolved(options: Sequence[Option], section: Mapping[str, Any] | None, flags: argparse.Namespace | None,
             environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The given values, and the source of each. Raises ConfigError for a bad value."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in options:
        name = option.name
        by_flag = getattr(flags, attribute(name), None)
        if by_flag is not None:
            sources[name] = flag(name)
            values[name] = option.parse(by_flag, sources[name])
        elif variable(name) in environ:
            sources[name] = variable(name)
            values[name] = option.parse(environ[sources[name]], sources[name])
        elif section is not None and name in section:
            sources[name] = f'"{name}" in the JSON section "{SECTION}"'
            values[name] = option.check(section[name], sources[name])
    return values, sources


def refuse_unknown(options: Sequence[Option], section: Mapping[str, Any] | None, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a key or a variable that is no setting's; the message names the nearest one."""
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f'the JSON section "{SECTION}" is {section!r}; give an object: {{"enabled": true}}')
    names = [option.name for option in options]
    for key in section or ():
        if key not in names:
            raise ConfigError(f'unknown key "{key}" in the JSON section "{SECTION}"; the nearest known key is '
                              f'"{nearest(str(key), names)}" (docs/configuration.md has all)')
    known = [variable(name) for name in names]
    for key in environ:
        if not key.startswith(_PREFIX) or key in known or key in HANDED_OVER:
            continue
        # The prefix is not ours alone: only likely slips of our names are refused.
        close = difflib.get_close_matches(key[len(_PREFIX):].lower(), names, n=1, cutoff=0.7)
        if close:
            raise ConfigError(f"unknown environment variable {key}; the nearest known one is {variable(close[0])}")


def add_flags(group: argparse._ActionsContainer, options: Sequence[Option]) -> None:
    """Add one flag per setting. Its text is kept until `resolved`: a bad value gets the same message from every
    source."""
    for option in options:
        group.add_argument(flag(option.name), dest=attribute(option.name), default=None, metavar=option.values(),
                           help=f"{option.help} (default {shown(option.default)})".replace("%", "%%"))
