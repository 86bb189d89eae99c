"""The plugin's only logger, in DeepSpeed's line format.

The coordinator and the launcher must not import DeepSpeed (seconds of start-up), so the format is repeated
here instead of borrowing its logger.
"""

from __future__ import annotations

import logging
import sys

from megatron_recycle.observe.runbook import section, with_section

NAME = "megatron_recycle"
FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
"""DeepSpeed's format (deepspeed/utils/logging.py)."""


class _Formatter(logging.Formatter):
    """Adds the runbook section to warnings and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = with_section(record.message, section(str(record.msg)))
        return super().formatMessage(record)


class _Handler(logging.StreamHandler):
    """Writes to the current `sys.stdout`, so that redirection keeps working."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_Formatter(FORMAT))

    @property
    def stream(self):
        return sys.stdout


def get_logger() -> logging.Logger:
    """The plugin's logger: INFO and above to standard output, unless the user has configured it before."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        logger.addHandler(_Handler())
        logger.propagate = False
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger
