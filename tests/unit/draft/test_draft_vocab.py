"""The draft vocabulary: choice, maps, storage."""

from __future__ import annotations

import pytest
import torch

from eagle3.errors import ConfigError, IntegrityError
from eagle3.vocab import build_draft_vocab, load_vocab, save_vocab, vocab_from_maps, vocab_key

COUNTS = torch.tensor([0, 5, 2, 2, 0, 9, 2, 0])


def test_most_counted_tokens_are_chosen_and_ties_go_to_smaller_ids():
    vocab = build_draft_vocab(COUNTS, 4)
    assert vocab.target_ids.tolist() == [1, 2, 3, 5]
    assert vocab.d2t.tolist() == [1, 1, 1, 2]
    assert vocab.t2d.nonzero()[:, 0].tolist() == [1, 2, 3, 5]
    assert vocab.coverage == pytest.approx(18 / 20) and vocab.filled == 0


def test_too_few_tokens_are_filled_up_with_the_smallest_unused_ids():
    vocab = build_draft_vocab(COUNTS, 7)
    assert vocab.target_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert vocab.filled == 2 and vocab.coverage == 1.0


def test_the_whole_vocabulary_is_the_identity():
    vocab = build_draft_vocab(COUNTS, 8)
    assert vocab.size == len(vocab.t2d) and not vocab.d2t.any() and vocab.t2d.all()


@pytest.mark.parametrize("size", [0, 9])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(ConfigError, match=r"draft\.vocab_size"):
        build_draft_vocab(COUNTS, size)


def test_storage_keeps_everything(tmp_path):
    vocab = build_draft_vocab(COUNTS, 7)
    save_vocab(tmp_path / "vocab.safetensors", vocab)
    back = load_vocab(tmp_path / "vocab.safetensors", key=vocab_key(COUNTS, 7), size=7)
    assert torch.equal(back.d2t, vocab.d2t) and torch.equal(back.t2d, vocab.t2d)
    assert (back.key, back.filled, back.coverage) == (vocab.key, vocab.filled, vocab.coverage)


def test_a_stale_or_broken_vocabulary_is_refused(tmp_path):
    path = tmp_path / "vocab.safetensors"
    save_vocab(path, build_draft_vocab(COUNTS, 4))
    with pytest.raises(IntegrityError, match="another size"):
        load_vocab(path, size=5)
    changed = COUNTS.clone()
    changed[0] += 1
    with pytest.raises(IntegrityError, match="stale"):
        load_vocab(path, key=vocab_key(changed, 4))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(IntegrityError, match="unreadable"):
        load_vocab(path)
    with pytest.raises(IntegrityError, match=r"vocab\.safetensors"):
        load_vocab(tmp_path / "none" / "vocab.safetensors")


def test_maps_of_two_different_vocabularies_are_refused():
    one, other = build_draft_vocab(COUNTS, 4), build_draft_vocab(COUNTS.flip(0), 4)
    assert vocab_from_maps(one.d2t, one.t2d, "here").size == 4
    with pytest.raises(IntegrityError, match="one vocabulary"):
        vocab_from_maps(one.d2t, other.t2d, "here")
    with pytest.raises(IntegrityError, match="one vocabulary"):
        vocab_from_maps(one.d2t + 100, one.t2d, "here")
