"""The arguments of `enable()`, for the engine that is built later."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_recycle.config import SECTION, RecycleConfig
from megatron_recycle.runtime.compute.data import Factory
from megatron_recycle.runtime.phases import Observer
from megatron_recycle.runtime.setup_record import SetUp
from megatron_recycle.runtime.start import Embed


@dataclass(frozen=True)
class Options:
    """Settings: ``config`` as it is, or else resolved from the framework's own configuration."""

    config: RecycleConfig | None = None
    flags: argparse.Namespace | None = None
    data: Factory | None = None
    observer: Observer | None = None
    embed: Embed | None = None
    setup: SetUp | None = None

    def resolve(self, framework_config: Mapping[str, Any]) -> RecycleConfig:
        """The settings of a job with the framework configuration ``framework_config``. Raises ConfigError."""
        if self.config is not None:
            return self.config
        return RecycleConfig.resolve(framework_config.get(SECTION), self.flags)

    def stay_off(self) -> None:
        """Training begins without the plugin: nothing more is recorded for joiners, and torch's groups are stock's
        again."""
        if self.setup is not None:
            self.setup.close()
