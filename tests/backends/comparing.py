"""Runs of a job and the bits they end with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy

from tests.harness import Job, Result


def arrays(result: Result) -> Iterator[tuple[str, numpy.ndarray]]:
    yield "losses", numpy.array(result.value["losses"])
    yield from result.value["parameters"].items()
    for index, state in enumerate(result.value["state"]):
        for key, value in state.items():
            yield f"state {index} {key}", value


def differences(one: Result, other: Result) -> dict[str, float]:
    """Largest absolute difference of everything that is not bit for bit the same."""
    pairs = zip(arrays(one), arrays(other), strict=True)
    return {name: float(numpy.abs(a - b).max()) for (name, a), (_, b) in pairs if a.tobytes() != b.tobytes()}


def check_survivors(job: Job, victims: set[str], reference: Mapping[int, Result], within: float = 0.0) -> None:
    """Everybody but the victims ended well with the reference's bits, and no iteration was lost or made twice."""
    results = job.wait()
    survivors = [rank for rank, result in results.items() if result.status == 0]
    # The last iteration is the others' as soon as its commit is under way: they may be through before it is missed.
    late = {hold.worker for hold in job.holds
            if hold.iteration == job.arguments["iterations"] - 1 and hold.phase in ("step", "stepped")}
    assert len(survivors) == job.size - len(victims), job.where()
    for rank in survivors:
        found = differences(results[rank], reference[rank])
        assert max(found.values(), default=0.0) <= within, (rank, found)
        if not within:
            assert not found, (rank, found)
        assert not (victims - late) & set(results[rank].value["members"])
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(job.arguments["iterations"]))
