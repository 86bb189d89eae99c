"""The verdict on an iteration, known to all workers once every stage holds its gradient, and the resulting step
mode."""

from __future__ import annotations

from megatron_recycle.plan.value import Value

_WINDOW = 8
_MANY = 3


class Verdict(Value, frozen=True):
    """The verdict on an iteration, known to all workers once every stage holds it.

    Attributes:
        iteration: the iteration.
        loss: mean loss of the global batch.
        weight: sum over the global batch of the first number that each micro-batch reports (tokens); 0 for none.
        norm_squares: squared gradient norm of each stage by the framework's count; of each part where workers have
            several, stage by stage.
        guesses: the coefficient of each one's step, or intended step, before it knew the others' norms.
        zeros: elements of the whole gradient that are zero, if the framework counts them.
    """

    iteration: int
    loss: float
    weight: float
    norm_squares: tuple[float, ...]
    guesses: tuple[float, ...]
    zeros: float = 0.0

    def refutes(self, right: float) -> bool:
        """Whether some stage guessed another coefficient than ``right``, which this verdict asks for."""
        return any(differ(guess, right) for guess in self.guesses)


def differ(one: float | None, other: float) -> bool:
    """Whether two coefficients differ. Compared as text: NaN differs from itself as a value, and is right if the guess
    was NaN too."""
    return str(one) != str(other)


class StepMode(Value, frozen=True):
    """Whether stages step at once or wait for the verdict: decided anew for every iteration, alike on all workers.

    A stage that steps before it knows the others' gradient norms is wrong whenever clipping is active, and every wrong
    step throws away the work on the next iteration. So stages wait while guesses are often wrong. The choice depends
    only on the verdicts so far, which are the same everywhere, so all workers switch at the same iteration without
    communication.

    Attributes:
        wanted: whether steps may be staggered at all.
        staggered: whether the next one is.
        wrong: whether some stage guessed wrong, by iteration since the choice changed, the last one last.
    """

    wanted: bool = True
    staggered: bool = True
    wrong: tuple[bool, ...] = ()

    @classmethod
    def of(cls, wanted: bool) -> StepMode:
        """The first mode of a job."""
        return cls(wanted, wanted)

    def after(self, wrong: bool) -> StepMode:
        """The mode of the next iteration; ``wrong``: some guess of this one was."""
        if not self.wanted:
            return self
        known = self.seen(wrong)
        often, never = sum(known) >= _MANY, len(known) == _WINDOW and not any(known)
        if often if self.staggered else never:
            return StepMode(True, not self.staggered)
        return StepMode(True, self.staggered, known)

    def seen(self, wrong: bool) -> tuple[bool, ...]:
        """The facts for the choice after the next verdict, ``wrong`` or not."""
        return (*self.wrong, wrong)[-_WINDOW:]

    def like(self, other: StepMode) -> StepMode:
        """The mode of a joiner, where a peer's is ``other``."""
        return StepMode(self.wanted, other.staggered, other.wrong)
