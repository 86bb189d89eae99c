"""A worker's borrowed and lendable layers, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from megatron_recycle.runtime.lent.layers import Lending, Neighbours


class Neighbourhood:
    """The `Neighbours` of each of a worker's chunks.

    Args:
        lendings: of the chunks, in order, by their numbers in the model; None: as in `Neighbours`.
        stage_of: the stage of each chunk of the model.
        adopt, draws: as in `Neighbours`.

    Attributes:
        of: by chunk, in order.
        stage_of: the stage of each chunk of the model.
        declined: number of the last offered plan that lends layers which cannot be lent; 0: none.
    """

    def __init__(self, lendings: Mapping[int, Lending | None], stage_of: Sequence[int],
                 adopt: Callable[[nn.Module], None], draws: bool) -> None:
        self.of: Mapping[int, Neighbours] = {
            chunk: Neighbours(lending, adopt, draws, [each for each in lendings.values()
                                                      if each is not None and each is not lending])
            for chunk, lending in lendings.items()}
        self.stage_of = tuple(stage_of)
        self.declined = 0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of all copies."""
        return [parameter for each in self.of.values() for parameter in each.parameters]

    def end(self) -> None:
        """An attempt has ended, in which layers may have changed themselves."""
        for each in self.of.values():
            each.options.end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block beside training in which layers are run, and may change themselves."""
        with ExitStack() as stack:
            for each in self.of.values():
                stack.enter_context(each.options.running())
            yield
