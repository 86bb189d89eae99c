"""Whose output the launcher shows."""

from __future__ import annotations

from pathlib import Path

from megatron_recycle.launch.worker_logs import Follower


def write(folder: Path, rank: int, *lines: str) -> int:
    """Append to a worker's log; returns its size."""
    path = folder / f"worker-{rank}.log"
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path.stat().st_size


def test_the_first_rank_is_shown_and_the_next_one_when_it_has_ended(tmp_path):
    shown: list[str] = []
    follower = Follower(tmp_path, "first", shown.append)
    for rank in range(2):
        write(tmp_path, rank, f"start {rank}")
    follower.poll([0, 1])
    write(tmp_path, 0, "last words")
    follower.poll([1])
    write(tmp_path, 1, "goes on")
    follower.poll([1])
    assert shown == ["start 0", "last words", "goes on"]


def test_who_writes_the_log_lines_is_shown_too_and_who_does_so_after_its_death(tmp_path):
    shown: list[str] = []
    follower = Follower(tmp_path, "first", shown.append)
    sizes = [write(tmp_path, rank, f"start {rank}") for rank in range(4)]
    follower.poll([0, 1, 2, 3])
    write(tmp_path, 3, "loss 1")
    follower.logs_from(3, sizes[3])  # it comes later than the line
    write(tmp_path, 3, "loss 2")
    follower.poll([0, 1, 2, 3])
    write(tmp_path, 3, "last words")
    write(tmp_path, 2, "loss 3")
    follower.poll([0, 1, 2])
    follower.logs_from(2, sizes[2])
    follower.poll([0, 1, 2])
    write(tmp_path, 2, "loss 4")
    follower.poll([2])  # it is the first that lives as well
    assert shown == ["start 0", "loss 1", "loss 2", "last words", "loss 3", "loss 4"]


def test_who_speaks_makes_no_difference_where_all_are_shown_or_none(tmp_path):
    for show, expected in (("all", ["[rank 0] one", "[rank 1] two"]), ("none", [])):
        shown: list[str] = []
        follower = Follower(tmp_path, show, shown.append)
        for rank, line in enumerate(("one", "two")):
            (tmp_path / f"worker-{rank}.log").write_text(f"{line}\n")
        follower.logs_from(1, 4)
        follower.poll([0, 1])
        assert shown == expected
