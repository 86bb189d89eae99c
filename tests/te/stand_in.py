"""Transformer Engine's own Python layers on a CPU: its compiled module is replaced by `kernels`.

Its Python is that of its public package, in a folder that `found` tells (scripts/setup.sh fetches it); nothing of it is
in this project. `install` comes before anything of Megatron, which asks once whether there is a Transformer Engine.

    python tests/te/stand_in.py FOLDER SCRIPT ARGUMENTS    # a script, on the Transformer Engine in a folder
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import runpy
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "TRANSFORMER_ENGINES"
"""Variable that names folders with a Transformer Engine each, instead of those of the environment."""


def found() -> dict[str, Path]:
    """Folders that have Transformer Engine's Python, by version, oldest first: those that the variable names, else
    what scripts/setup.sh has put into the environment."""
    named = os.environ.get(FOLDERS)
    folders = [Path(name) for name in named.split(os.pathsep)] if named else sorted(
        (Path(sys.prefix) / "transformer_engine").glob("[0-9]*"))
    versions = {version_in(folder): folder for folder in folders if (folder / "transformer_engine").is_dir()}
    return dict(sorted(versions.items(), key=lambda item: [int(part) for part in item[0].split(".")[:3]]))


def version_in(folder: Path) -> str:
    """Of the Transformer Engine in ``folder``: a package's, or a checkout's."""
    for metadata in folder.glob("transformer_engine-*.dist-info"):
        return metadata.name.removesuffix(".dist-info").rpartition("-")[2]
    return (folder / "build_tools" / "VERSION.txt").read_text().strip()


class _Kernels(types.ModuleType):
    """`kernels`, under the compiled module's name; what is missing there is something that cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Missing(name, (), {})
        setattr(self, name, value)
        return value


class _Value(str):
    """One of a missing list of values: a name, and for tables some number."""

    def __int__(self) -> int:
        return zlib.crc32(self.encode())


class _Missing(type):
    """A name of the compiled module that `kernels` lacks: Python files name it in annotations and tables."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Value(f"{cls.__name__}.{name}")

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"tests/te/kernels.py has no {cls.__name__}")


class _Nothing(types.ModuleType):
    """A package that is imported for decorators and annotations, and not used."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator


def _decorator(*arguments: Any, **keywords: Any) -> Any:
    """What it decorates, whether it is called with options first or not."""
    if len(arguments) == 1 and not keywords and inspect.isfunction(arguments[0]):
        return arguments[0]
    return lambda function: function


@contextlib.contextmanager
def _in_place(names: Iterator[str] | tuple[str, ...]) -> Iterator[None]:
    """Inside the block the packages with these names, where they are missing, are `_Nothing`."""
    made = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in made:
        parent, _, child = name.rpartition(".")
        sys.modules[name] = _Nothing(name)
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def install(folder: Path) -> None:
    """Let this process import the Transformer Engine in ``folder``; raises ImportError if anything of Megatron is there
    already."""
    if any(name.partition(".")[0] in ("megatron", "transformer_engine") for name in sys.modules):
        raise ImportError("tests/te: too late, Megatron or Transformer Engine is imported already")
    version = version_in(folder)
    importlib.import_module("torch._dynamo")  # it looks for the packages that are missing here
    _pretend(torch.cuda)
    _tell(version)
    from tests.te import kernels, quantised

    compiled = _Kernels("transformer_engine_torch")
    for module in (kernels, quantised):
        vars(compiled).update({name: value for name, value in vars(module).items()
                               if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__})
    sys.modules["transformer_engine_torch"] = sys.modules["fused_weight_gradient_mlp_cuda"] = compiled  # apex's too
    os.environ.update({
        "NVTE_PROJECT_BUILDING": "1",  # its package loads no libraries
        "NVTE_FRAMEWORK": "pytorch"})
    # The package itself imports PyTorch's part at once, which would load the compiled module. Its folder is not where
    # Python looks, so that processes that are spawned by a checkpoint's writer have none of it.
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    vars(package)["__version__"] = version
    sys.modules["transformer_engine"] = package
    with _in_place(("triton", "triton.language", "triton.language.core", "triton.language.standard", "onnxscript",
                    "onnxscript.onnx_opset", "onnx_ir")):
        common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda name: None
        vars(package)["common"] = common
        exports = "transformer_engine.pytorch.onnx_extensions"
        sys.modules[exports] = _Kernels(exports)
        vars(package)["pytorch"] = importlib.import_module("transformer_engine.pytorch")
    _replace()


def _tell(version: str) -> None:
    """Whoever asks for the version of the package gets that of the folder."""
    stock = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        version if name.replace("_", "-") == "transformer-engine" else stock(name))


def _replace() -> None:
    """What Transformer Engine's Python makes on a GPU by itself."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformer_engine.pytorch"):
            continue
        if hasattr(module, "_empty_tensor"):
            vars(module)["_empty_tensor"] = torch.Tensor
        if hasattr(module, "get_dummy_wgrad"):
            vars(module)["get_dummy_wgrad"] = _unread
        if hasattr(module, "get_cudnn_version"):
            vars(module)["get_cudnn_version"] = lambda: (9, 10, 0)
        if hasattr(module, "_get_cuda_rng_state"):  # as scripts/megatron_cpu.py has Megatron's
            vars(module)["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
            vars(module)["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
        for kind in ("fp8", "mxfp8", "fp8_block_scaling"):  # a GPU that can each of these has not been built
            if hasattr(module, f"check_{kind}_support"):
                vars(module)[f"check_{kind}_support"] = lambda: (True, "")


def _unread(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """The gradient that is left of a weight whose own was added to `main_grad`: not a number, so that whoever reads it
    is seen."""
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)


def _pretend(cuda: Any) -> None:
    """Tensors say that they are on a GPU, which Transformer Engine insists on; their device stays the CPU."""
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda tensor: True)
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):  # also in a backward, where no mode is asked
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda.is_current_stream_capturing = lambda: False
    cuda.device = lambda device=None: contextlib.nullcontext()
    cuda.nvtx = SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None,
                                range=lambda *_, **__: contextlib.nullcontext())


def _on_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def made(*arguments: Any, device: Any = None, **keywords: Any) -> Any:
        return make(*arguments, device="cpu" if str(device).startswith("cuda") else device, **keywords)

    return made


def main(arguments: list[str]) -> None:
    """Run a script on the Transformer Engine in a folder."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.te.stand_in").install(Path(arguments[0]))
    sys.argv = arguments[1:]
    sys.path[1:1] = [os.path.dirname(os.path.realpath(arguments[1]))]
    runpy.run_path(arguments[1], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
