"""What a process uses, as the system tells it."""

from __future__ import annotations

import os
from pathlib import Path

from rekindle.worker import usage
from rekindle.worker.usage import NOTHING, usage_of


def test_a_running_process_has_memory_and_cpu_time() -> None:
    found = usage_of(os.getpid())
    assert found.resident_bytes > 1 << 20
    assert found.cpu_s > 0


def test_a_process_that_has_ended_uses_nothing() -> None:
    assert usage_of(2**22 + 1) == NOTHING


def test_the_name_of_a_program_may_contain_spaces_and_parentheses(tmp_path: Path) -> None:
    fields = ["S", *("0" for _ in range(10)), "100", "50", *("0" for _ in range(8)), "7"]
    (tmp_path / "proc/9").mkdir(parents=True)
    (tmp_path / "proc/9/stat").write_text(f"9 (a ) b) {' '.join(fields)} 0")
    found = usage_of(9, tmp_path)
    assert found.resident_bytes == 7 * os.sysconf("SC_PAGE_SIZE")
    assert found.cpu_s == 150 / os.sysconf("SC_CLK_TCK")


def test_ps_writes_times_with_days_and_fractions() -> None:
    assert usage._seconds("2-01:00:01") == 2 * 86_400 + 3601
    assert usage._seconds("0:01.50") == 1.5
