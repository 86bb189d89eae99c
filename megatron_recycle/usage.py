"""Parser of the `recycle` command: one line that says what is wrong, with the nearest name, and a status."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

USAGE_ERROR = 2
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_CHOICE = re.compile(r"(?:argument (.+?): )?invalid choice: '?(.*?)'? \(choose from (.*)\)")

ELSEWHERE = {
    "--log-dir": "logs go to the run folder: --run-dir",
    "--tee": "all output is in the run folder; --show all shows it, too",
    "--redirects": "all output is in the run folder; --show none shows nothing",
    "--hostfile": "start `recycle run` once on each host, or under srun",
    "--include": "give the devices in CUDA_VISIBLE_DEVICES",
    "--exclude": "give the devices in CUDA_VISIBLE_DEVICES",
    "--monitor-interval": "ends of processes are seen at once; leave it out",
    "--start-method": "workers are always processes of their own; leave it out",
    "--rdzv-conf": "settings are the way to change timeouts: --set connect_timeout=60",
    "--local-addr": "give --master-addr",
    "--role": "leave it out",
}
"""Options of torchrun and of DeepSpeed's launcher that have no counterpart -> the remedy."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line.

    Attributes:
        behind: the name in the namespace for the words behind ``--``, which are not parsed; None: argparse's own way.
        folded: title of a group that `--help` leaves out; its options are taken all the same.
        status: the exit status of an error.
    """

    behind: str | None = None
    folded: str | None = None
    status: int = USAGE_ERROR

    def format_help(self) -> str:
        """As argparse's, without the group that is `folded`."""
        groups = self._action_groups
        self._action_groups = [group for group in groups if self.folded is None or group.title != self.folded]
        try:
            return super().format_help()
        finally:
            self._action_groups = groups

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but for the words `behind`."""
        if self.behind is None:
            return super().parse_known_args(args, namespace)
        given = list(sys.argv[1:] if args is None else args)
        dashes = given.index("--") if "--" in given else len(given)
        found, unknown = super().parse_known_args(given[:dashes], namespace)
        setattr(found, self.behind, given[dashes + 1:])
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print one line, with the nearest known name if there is one, and exit with `status`."""
        print(f"{self.prog}: {self._plain(message)}; `{self.prog} --help` lists the arguments", file=sys.stderr)
        sys.exit(self.status)

    def _plain(self, message: str) -> str:
        if (unknown := _UNKNOWN.fullmatch(message)) is not None:
            given = next((word for word in unknown[1].split() if word.startswith("-")), unknown[1])
            name = given.partition("=")[0]
            if (advice := ELSEWHERE.get(name.replace("_", "-"))) is not None:
                return f"there is no {name} here: {advice}"
            kind = "option" if name.startswith("-") else "argument"
            return f"there is no {kind} {name}" + hint(name, self.known())
        if (choice := _CHOICE.fullmatch(message)) is not None:
            names = re.findall(r"[^\s',]+", choice[3])
            where = f"{choice[1]} is " if choice[1] else ""
            return f"{where}{choice[2]!r}; give {', '.join(names)}" + hint(choice[2], names)
        message = re.sub(r"^argument (-[^:]*): ", r"\1: ", message)
        return message.replace(", arguments", "")  # a catch-all argument may be empty

    def known(self) -> list[str]:
        """The options that `--help` shows."""
        return [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]


def hint(given: str, names: Sequence[str]) -> str:
    """`; did you mean ...?`, or nothing if no name is near."""
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def number(wanted: str, fits: Callable[[Any], bool], kind: type = float) -> Callable[[str], Any]:
    """Type of an option: a number that ``fits``. Others are refused with the ``wanted`` form."""
    def read(text: str) -> Any:
        with suppress(ValueError):
            if fits(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"it is {text!r}; give {wanted}")

    return read


seconds = number("seconds, 0 or more", lambda found: 0 <= found < math.inf)
some_seconds = number("seconds, more than 0", lambda found: 0 < found < math.inf)
count = number("a whole number, 0 or more", lambda found: found >= 0, int)


def also(parser: Any, dest: str, *names: str, **options: Any) -> None:
    """Add an option under other launchers' names as well; `--help` does not show them."""
    parser.add_argument(*names, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
