"""A damaged answer is found before it is prepared, and is the only one that is asked for again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_chat import FakeChat, serving

from data_prep.conversations import read_conversations
from data_prep.regenerate.config import RegenerateConfig
from data_prep.regenerate.run import regenerate
from eagle3.errors import DataError, IntegrityError

Quick = Callable[..., RegenerateConfig]


def test_one_changed_answer_is_refused_by_name_and_alone_asked_again(
    tmp_path: Path, source: Path, quick: Quick
) -> None:
    answers = tmp_path / "out" / "answers.jsonl"
    with serving(FakeChat()) as fake:
        regenerate(quick(), source, tmp_path / "out", fake.url)
        whole = answers.read_bytes()
        assert len(list(read_conversations([str(answers)]))) == 24
        place = whole.index(b"question 7") + len(b"question ")
        for damaged in (whole[:place] + b"8" + whole[place + 1 :], whole[:place] + b"\0" + whole[place + 1 :]):
            answers.write_bytes(damaged)
            with pytest.raises(DataError, match=r"answers.jsonl, record 8"):
                list(read_conversations([str(answers)]))
            before = len(fake.requests)
            regenerate(quick(), source, tmp_path / "out", fake.url)
            assert len(fake.requests) - before == 1
            assert answers.read_bytes() == whole and not (tmp_path / "out" / "answers.part.jsonl").exists()


def test_lost_lines_are_noticed_and_asked_again(tmp_path: Path, source: Path, quick: Quick) -> None:
    answers = tmp_path / "out" / "answers.jsonl"
    with serving(FakeChat()) as fake:
        regenerate(quick(), source, tmp_path / "out", fake.url)
        whole = answers.read_bytes()
        answers.write_bytes(b"".join(whole.splitlines(keepends=True)[:20]))
        with pytest.raises(DataError, match=r"answers are missing.*20 lines of 24.*To mend: run the regenerate"):
            list(read_conversations([str(answers)]))
        before = len(fake.requests)
        regenerate(quick(), source, tmp_path / "out", fake.url)
        assert len(fake.requests) - before == 4 and answers.read_bytes() == whole


def test_a_report_that_was_changed_is_refused(tmp_path: Path, source: Path, quick: Quick) -> None:
    report = tmp_path / "out" / "report.json"
    with serving(FakeChat()) as fake:
        regenerate(quick(), source, tmp_path / "out", fake.url)
        report.write_text(report.read_text().replace('"answers": 24', '"answers": 14'))
        with pytest.raises(IntegrityError, match=r"not what was written.*report\.json"):
            regenerate(quick(), source, tmp_path / "out", fake.url)
