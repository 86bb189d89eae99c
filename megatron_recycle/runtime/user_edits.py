"""The script's edits between two iterations, which training has to follow: modes, state, new random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.compute.edits import Edits
from megatron_recycle.runtime.compute.modes import Modes
from megatron_recycle.runtime.shards import put_back
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Stepper

_HABIT, _NAMED = 5, 3


class UserEdits:
    """The script's own code between two iterations of ``stepper``'s."""

    def __init__(self, site: Site, stepper: Stepper) -> None:
        self._site, self._stepper = site, stepper
        self._modes = Modes(site.stage.module)
        self._edits = Edits(site.stage)
        self._again = True
        self._edited: bool | None = None  # while the job evaluates: whether the script had changed something before
        self._in_a_row = 0  # iterations before which the script has changed something
        self.find_generators()

    def find_generators(self) -> None:
        """Raises UnsupportedError."""
        self._site.framework.generators.adopt("the model", self._site.stage.module)
        self._site.framework.generators.adopt_trackers()

    def take_in(self, settle: Callable[[], None]) -> None:
        """Pick up the script's edits since the last iteration, before the next one is trained; ``settle`` makes the
        last step final."""
        stage, trainable = self._site.stage, self._site.trainable
        if trainable.initial_state is not None:  # this script has run its loop since; its peers' scripts had before
            stage.load_state(*trainable.initial_state)
            put_back(stage, trainable.shards)
            trainable.shards = {}
        changed = self._modes.look()
        if changed and self._modes.gone():
            self._edits.refuse_loss(self._stepper.standing.stepped)
        # A copy to go back to is from before any change, final or not.
        final = self._stepper.confirmed and not trainable.guard.returns
        if edited := changed or self._edits.found(final):
            self._tell_habit()
            settle()
        else:
            self._in_a_row = 0
        if looked := stage.look() or changed:
            trainable.lay_out()
        if edited or looked:
            self._void()
        self._modes.remember()

    def _tell_habit(self) -> None:
        """Warn, once, that a script which edits something before every iteration waits every time."""
        self._in_a_row += 1
        if self._in_a_row == _HABIT and self._site.place.me.pipeline == 0:
            named = self._edits.named()
            names = ", ".join(named[:_NAMED]) + (" and more" if named[_NAMED:] else "") or "something"
            get_logger().warning(
                "megatron-recycle: before every iteration the script changes %s, which a step changes too or is made "
                "with: each iteration waits for the commit of the last, as with step: barrier "
                "(docs/between-iterations.md)", names)

    def trained(self) -> bool:
        """An iteration is trained. Returns whether to look for generators again: after the first iteration, since some
        are made in the first forward."""
        again, self._again = self._again, False
        return again

    def look_back(self) -> None:
        """A failure between two iterations: to go back to before them would lose the script's edits since the last
        one."""
        edited = self._edited
        if edited is None:
            edited = self._site.trainable.guard.returns and self._edits.found()
        if edited:
            self._void()

    def _void(self) -> None:
        """Void the guard's copies: to go back to them would lose edits that the script makes once."""
        if self._site.trainable.guard.void(self._stepper.standing.stepped):
            get_logger().warning("megatron-recycle: what the script changes between iterations voids the copies of "
                                 "guard: a stage that is lost before the next ones (guard_interval) does not come back")

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which iterations are run again after which training had returned to the script already, which has
        changed nothing since."""
        self._edits.forget()
        with self._modes.of_training():
            yield
        self.leave()

    def leave(self) -> None:
        """Training returns to the script."""
        standing = self._stepper.standing
        self._edits.leave(standing.committed < standing.stepped, self._site.trainable.guard.returns)

    @contextmanager
    def apart(self, iteration: int) -> Iterator[None]:
        """A block that makes the step of ``iteration`` final, with everything as training has left it."""
        self.look_back()
        with self._modes.of_training(), self._edits.apart(iteration, self._stepper.remake):
            yield
        self._watch_on()

    @contextmanager
    def saved(self) -> Iterator[None]:
        """A block in which the script's state is saved as it is now, which need not be the state that training goes on
        with: averages of the parameters, say, for the checkpoint only. Differences afterwards are found."""
        self.look_back()
        yield
        self._watch_on()

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """A block in which the job evaluates: the traces of that are no edits of the script's."""
        self._edited = self._site.trainable.guard.returns and self._edits.found()
        try:
            with self._edits.aside():
                yield
        finally:
            self._edited = None

    def _watch_on(self) -> None:
        """Find the edits that the script makes from here on, too."""
        if self._site.trainable.initial_state is None:  # else its present state does not count
            self.leave()
