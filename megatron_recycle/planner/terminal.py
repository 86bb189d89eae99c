"""A plan for the terminal: a table of its figures, and its schedule drawn in characters where it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..plan import Plan, Worker, peak, replay
from .lending_gain import lent_layers

_LETTERS = {"FB": "D"}
#: letters of a stage's later chunks: each is one before F, B, W and D per chunk
_LATER = {"F": "E", "B": "A", "W": "V", "D": "C"}
_COLOURS = {"F": "44;97", "B": "42;30", "W": "43;30", "D": "46;30", "S": "45;97",
            "E": "104;30", "A": "102;30", "V": "103;30", "C": "106;30"}
#: a schedule with more rows than this is not drawn
ROWS = 40


def table(plan: Plan, extra: Mapping[str, str]) -> str:
    """The figures of a plan, one per line; ``extra`` lines come last."""
    stages, moves = range(plan.problem.grid.stages), _moves(plan)
    peaks = ", ".join(f"{s}: {max((peak(plan, w) for w in plan.problem.live(s)), default=0)}" for s in stages)
    if plan.problem.placement:
        peaks += ", those of each chunk counted apart"
    rows = {
        "period": _number(plan.period),
        "makespan": _number(plan.makespan),
        f"bound ({plan.problem.objective})": _number(plan.lower_bound),
        "gap": f"{plan.gap:.1%}",
        "bubbles": f"{bubbles(plan):.1%} of the workers' time",
        "peak activations": f"per stage {peaks}",
        "guests": str(guest_count(plan)),
        **({"done before": f"{sum(plan.done.values())} actions; the figures are of the rest"} if plan.done else {}),
        "moves": ", ".join(f"{mover} takes the place of {to}" for mover, to in moves.items()) or "none",
        **({"lent": f"{lent_layers(plan)}, for {len(plan.crossings)} of {plan.problem.grid.total} micro-batches"}
           if plan.crossings else {}),
        "source": plan.source,
        **extra,
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def _moves(plan: Plan) -> Mapping[str, str]:
    """Moved workers and their current positions. A file of unknown origin may hold any value there."""
    moves = plan.stats.get("moves")
    return moves if isinstance(moves, dict) else {}


def bubbles(plan: Plan) -> float:
    """Share of the live workers' time in a steady iteration in which they neither compute nor step."""
    problem = plan.problem
    length = plan.period if problem.objective == "period" else plan.makespan
    if not length or not plan.workers:
        return 0.0
    busy = sum(plan.duration(w, a) for w in plan.workers for a in plan.rest(w))
    return max(0.0, 1 - busy / (length * len(plan.workers)))


def guest_count(plan: Plan) -> int:
    """Micro-batch visits to a worker whose home is another pipeline or stage."""
    stage_of = plan.problem.stage_of
    return sum(1 for (d, _, chunk), worker in plan.route().items() if worker != Worker(d, stage_of(chunk)))


def drawing(plan: Plan, width: int, colour: bool) -> str | None:
    """The schedule from a cold start, one row per worker, guests in small letters; None if it does not fit. Actions
    done before the plan begins are left out.

    One column is one unit of time where that fits, else several: a column shows the action that runs for most of it.
    """
    workers = plan.problem.grid.workers()
    timeline = replay(plan)
    room = width - 8
    if len(workers) > ROWS or room < 20 or timeline.makespan == 0:
        return None
    scale = max(1, -(-timeline.makespan // room))
    shortest = min((end - start for spans in timeline.times.values() for start, end in spans if end > start),
                   default=0)
    if scale > shortest:
        return None
    lines = []
    for worker in workers:
        if worker not in plan.workers:
            to = _moves(plan).get(str(worker))
            lines.append(f"{worker!s:>6}  " + ("failed" if to is None else f"moved to {to}"))
            continue
        letters = []
        for action in plan.workers[worker]:
            home = action.kind == "S" or worker.pipeline == action.pipeline
            letter = _LETTERS.get(action.kind, action.kind)
            letter = _LATER.get(letter, letter) if action.chunk else letter
            letters.append(letter if home else letter.lower())
        lines.append(f"{worker!s:>6}  {_row(letters, timeline.times[worker], scale, colour)}")
    unit = "unit" if scale == 1 else f"{scale} units"
    full = "; D is a full backward, B and W in one" if any(
        action.kind == "FB" for actions in plan.workers.values() for action in actions) else ""
    chunks = "; E, A, V (and C) are F, B, W (and D) of a stage's later chunks" if plan.problem.placement else ""
    return "\n".join([*lines, f"        one column is {unit}; small letters are guests{full}{chunks}"])


def _row(letters: Sequence[str], spans: Sequence[tuple[int, int]], scale: int, colour: bool) -> str:
    end = spans[-1][1]
    cells = []
    at = 0
    for column in range(-(-end // scale)):
        low, high = column * scale, (column + 1) * scale
        best, share = "·", scale / 2
        while at < len(spans) and spans[at][1] <= low:
            at += 1
        i = at
        while i < len(spans) and spans[i][0] < high:
            overlap = min(high, spans[i][1]) - max(low, spans[i][0])
            if overlap >= share and overlap > 0:
                best, share = letters[i], overlap
            i += 1
        cells.append(best)
    if not colour:
        return "".join(cells)
    return "".join(f"\033[{_COLOURS[c.upper()]}m{c}\033[0m" if c != "·" else c for c in cells)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.2f}"
