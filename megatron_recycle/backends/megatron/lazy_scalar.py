"""Numbers of a step (the gradient norm) that are read now and then, and known a little later."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any


class LazyScalar:
    """A real number of an iteration that is not committed yet; the first read waits for it.

    With staggered steps a stage steps before it knows the others' norms. Megatron's loop takes the global norm after
    every step, but writes it only now and then: so only a reader waits. It computes, compares, rounds and hashes as the
    float that it will be, and results of arithmetic are floats. It is no subclass of `float`, whose value would have to
    be known: `json` and `torch.tensor` refuse it by its name and take `float(number)`.

    Args:
        find: waits for the number.
    """

    def __init__(self, find: Callable[[], float]) -> None:
        self._find = find
        self._value: float | None = None

    def settle(self) -> LazyScalar:
        """Find the number now, without waiting if it is known."""
        float(self)
        return self

    def __float__(self) -> float:
        if self._value is None:
            self._value = self._find()
        return self._value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)  # copies and pickles hold the number only


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, LazyScalar) else value


def _unary(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: compute(float(self), *map(_plain, others))


def _reflected(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: compute(_plain(other), float(self))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(LazyScalar, f"__{_name}__", _unary(getattr(operator, _name)))
    setattr(LazyScalar, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs"):
    setattr(LazyScalar, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _compute in (("divmod", divmod), ("bool", bool), ("int", int), ("trunc", int), ("round", round),
                        ("floor", math.floor), ("ceil", math.ceil), ("hash", hash), ("repr", repr), ("str", str)):
    setattr(LazyScalar, f"__{_name}__", _unary(_compute))
LazyScalar.__rdivmod__ = _reflected(divmod)  # type: ignore[attr-defined]
for _name in ("as_integer_ratio", "is_integer", "hex", "conjugate"):
    setattr(LazyScalar, _name, _unary(getattr(float, _name)))
for _name in ("real", "imag"):
    setattr(LazyScalar, _name, property(_unary(operator.attrgetter(_name))))
numbers.Real.register(LazyScalar)
