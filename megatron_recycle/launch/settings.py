"""Settings on the command line of `recycle run`: --set KEY=VALUE and --config FILE, as variables of the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_recycle.config import SECTION, Option, options, variable
from megatron_recycle.errors import ConfigError
from megatron_recycle.option import nearest, shown


@contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for as long as the block lasts: workers, coordinator and settings read them there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def settings(texts: Sequence[str], file: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for what the options give. A variable that is set beats the file, and --set beats both.

    Args:
        texts: KEY=VALUE each.
        file: JSON, either an object of settings or one with a section "recycle", as DeepSpeed's.

    Raises:
        ConfigError: an unknown key, a bad value, a file that is no such JSON.
    """
    found = {} if file is None else {name: text for name, text in _of_file(file).items() if name not in environ}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set {text}: give KEY=VALUE, for example --set max_restarts=3")
        _setting(key, f"--set {text}").parse(value, f"--set {key}")
        found[variable(key)] = value
    return found


def _of_file(file: Path) -> dict[str, str]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {file} is no JSON: {error}") from error
    section = content.get(SECTION, content) if isinstance(content, Mapping) else content
    if not isinstance(section, Mapping):
        raise ConfigError(f'--config {file}: give an object of settings, or one with a section "{SECTION}"')
    for key, value in section.items():
        _setting(key, f"--config {file}").parse(value, f"{key} in {file}")
    return {variable(key): shown(value) for key, value in section.items()}


def _setting(key: str, source: str) -> Option:
    """The setting of this name. Raises ConfigError."""
    known = {option.name: option for option in options()}
    if key not in known:
        raise ConfigError(f"{source}: there is no setting {key}; the nearest is {nearest(key, list(known))}")
    return known[key]
