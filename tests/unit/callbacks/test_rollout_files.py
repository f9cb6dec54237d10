"""Files of rollouts give back what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_rlhf.callbacks.rollout_files import dump_path, read_rows, write_rows


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c", "\r", "\n"], ids=ascii)
def test_a_response_may_hold_what_python_takes_for_the_end_of_a_line(tmp_path: Path, separator: str) -> None:
    rows = [{"reward": 1.0, "response": f"a{separator}b"}, {"reward": 0.0, "response": ""}]
    path = dump_path(tmp_path, 1)
    write_rows(path, rows)
    assert read_rows(path) == rows


def test_rows_that_cannot_be_written_leave_nothing_beside_the_file(tmp_path: Path) -> None:
    path = dump_path(tmp_path, 1)
    write_rows(path, [{"reward": 1.0}])
    with pytest.raises(UnicodeEncodeError):
        write_rows(path, [{"reward": 1.0, "response": "\ud800"}])
    assert read_rows(path) == [{"reward": 1.0}]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_no_rows(tmp_path: Path) -> None:
    path = dump_path(tmp_path, 1)
    write_rows(path, [])
    assert read_rows(path) == []
