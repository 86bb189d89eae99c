"""Megatron-Bridge on a CPU: its own loop, model provider and checkpoints, on Transformer Engine's Python (`tests.te`).

Two hundred families of models and what they import are left closed: packages that a GPT does not use are replaced by
`Nothing`, and `megatron.bridge` and its models are packages whose modules are found one by one. Bridge itself is that
of a folder, which MEGATRON_BRIDGE names: an installed package's, or ``src`` of a checkout.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "MEGATRON_BRIDGE"
"""Variable that names the folder with `megatron/bridge`."""
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
_ABSENT = ("av", "comet_ml", "datasets", "diffusers", "huggingface_hub", "hydra", "megatron.energon", "mlflow",
           "modelopt", "nvidia_resiliency_ext", "omegaconf", "peft", "safetensors", "sentencepiece", "tensorboard",
           "tiktoken", "timm", "tokenizers",
           "torch.utils.tensorboard", "transformers", "wandb")
_MODELS = ("gpt_provider", "t5_provider", "gpt.gpt_builder", "hybrid.hybrid_provider", "hybrid.hybrid_builder",
           "model_provider", "transformer_config")
"""Modules of `megatron.bridge.models` that have what is imported from there."""


class Nothing:
    """A name of a package that is absent."""

    def __init__(self, *given: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        return given[0] if len(given) == 1 and not keywords and callable(given[0]) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __getitem__(self, key: Any) -> Any:
        return Nothing()

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class AbsentModule(ModuleType):
    """A module of an absent package: names like classes' are classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() and not name.isupper() else Nothing()
        setattr(self, name, value)
        return value


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the absent packages."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if any(f"{name}.".startswith(f"{absent}.") for absent in _ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Models(ModuleType):
    """`megatron.bridge.models`, without its families."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module in _MODELS:
            found = importlib.import_module(f"{self.__name__}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
        raise AttributeError(name)


def install(folder: Path) -> None:
    """Let this process import Bridge's training from ``folder``; after Transformer Engine's stand-in."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    megatron: Any = importlib.import_module("megatron")
    importlib.import_module("megatron.core")
    megatron.__path__.append(str(folder / "megatron"))
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    cpu: Any = importlib.import_module("megatron_cpu")
    cpu.install(pretend=True)
    cpu._borrow_helpers()
    sys.meta_path.insert(0, Absent())
    for name, kind in (("megatron.bridge", ModuleType), ("megatron.bridge.models", Models)):
        module: Any = kind(name)
        sys.modules[name] = module
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
    importlib.import_module("megatron.bridge.models.conversion.auto_bridge")  # as Bridge does before all else
