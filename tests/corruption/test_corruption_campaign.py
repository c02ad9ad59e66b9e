"""A short campaign finds every damage, and would tell if it did not."""

from __future__ import annotations

from pathlib import Path

import corruption_subjects
import pytest
from corruption_campaign import MISSED, campaign, judge
from corruption_damage import FLIP, Damage
from corruption_subjects import VocabSubject, digest

from eagle3 import vocab


def test_every_damage_of_a_short_campaign_is_found_and_mended(tmp_path: Path) -> None:
    table = campaign(60, 7, tmp_path, mended_every=3)
    assert sum(table.counts.values()) == 60
    assert {subject for subject, *_ in table.counts} >= {"prepared set", "checkpoints", "served folder"}
    assert len({subject for subject, *_ in table.counts}) == len(corruption_subjects.SUBJECTS)
    assert not table.missed, "\n".join(table.lines())
    assert table.mended >= 10


def test_a_damage_that_nothing_finds_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = VocabSubject(tmp_path / "vocab")
    sound = digest(subject.read(subject.open()))
    monkeypatch.setattr(vocab, "_checksum", lambda _vocab: subject_checksum(tmp_path))
    path = tmp_path / "vocab" / "draft_vocab.safetensors"
    at = path.read_bytes().index(b'"filled":"') + len(b'"filled":"')
    damage = Damage(FLIP, path.name, 8 * at)  # another number of filled ids
    damage.plant(subject.folder)
    assert judge(subject, sound, damage).verdict == MISSED


def subject_checksum(folder: Path) -> str:
    """What the file says, whatever it holds."""
    data = (folder / "vocab" / "draft_vocab.safetensors").read_bytes()
    begin = data.index(b'"checksum":"') + len(b'"checksum":"')
    return data[begin : begin + 64].decode()
