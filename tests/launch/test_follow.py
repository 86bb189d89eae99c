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


def test_a_log_that_cannot_be_read_is_not_shown_and_one_that_was_emptied_is_shown_from_its_beginning(tmp_path):
    shown: list[str] = []
    follower = Follower(tmp_path, "all", shown.append)
    write(tmp_path, 0, "a first line")
    (tmp_path / "worker-1.log").mkdir()
    follower.poll([0, 1, 2])
    (tmp_path / "worker-0.log").write_text("again\n")
    (tmp_path / "worker-1.log").rmdir()
    write(tmp_path, 1, "a file now")
    follower.poll([0, 1])
    assert shown == ["[rank 0] a first line", "[rank 0] again", "[rank 1] a file now"]


def test_a_line_that_does_not_end_is_shown_and_bytes_of_any_encoding(tmp_path):
    shown: list[str] = []
    follower = Follower(tmp_path, "first", shown.append)
    (tmp_path / "worker-0.log").write_bytes(b"caf\xe9\n" + b"." * 100_000)
    follower.poll([0])
    assert shown[0] == "caf\ufffd" and 0 < len(shown[1]) <= 100_000 and set(shown[1]) == {"."}


def test_a_worker_that_prints_faster_than_is_shown_holds_nothing_up(tmp_path, monkeypatch):
    """For each line that is shown it prints a hundred."""
    for name, value in (("_TURN", 0.0), ("_LAST_TURN", 0.02), ("_BEHIND", 5000)):
        monkeypatch.setattr(f"megatron_recycle.launch.worker_logs.{name}", value)
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        assert len(shown) < 10_000, "it never returns"
        write(tmp_path, 0, *["x" * 99] * 100)

    follower = Follower(tmp_path, "first", show)
    write(tmp_path, 0, *["x" * 99] * 100)
    follower.poll([0])
    assert shown == [f"[recycle: 10000 bytes are left out here, see {tmp_path / 'worker-0.log'}]"]
    follower.poll([0], last=True)
    assert shown[1] == "x" * 99 and "bytes are left out here" in shown[-1]
