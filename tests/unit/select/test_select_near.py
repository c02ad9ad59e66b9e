"""Near-duplicates: what is planted is found, what differs is kept, and numbering does not matter."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from select_sources import WORDS, sentence

from data_prep.select.near import Signatures, representatives
from data_prep.select.prints import normalize, shingles


def signed(texts: list[str], folder: Path, permutations: int = 128) -> np.ndarray:
    file = Signatures(folder / "signatures", permutations)
    for text in texts:
        file.append(shingles(normalize(text), 5))
    return file.read()


def jaccard(a: str, b: str) -> float:
    """By sets of strings: the plain reference."""
    one, two = ({t[i : i + 5] for i in range(max(len(t) - 4, 1))} for t in (normalize(a), normalize(b)))
    return len(one & two) / len(one | two)


def changed(rng: random.Random, text: str, words: int) -> str:
    parts = text.split()
    for place in rng.sample(range(len(parts)), words):
        parts[place] = rng.choice(WORDS) + "x"
    return " ".join(parts)


def test_shingles_are_the_distinct_runs_of_characters() -> None:
    assert len(shingles("abcdef", 5)) == 2 and len(shingles("aaaaaaaa", 5)) == 1
    assert len(shingles("abc", 5)) == 1 and len(shingles("", 5)) == 0
    assert not np.array_equal(shingles("abc", 5), shingles("abd", 5))
    assert not np.array_equal(shingles("aaa", 5), shingles("aaaa", 5))  # short texts of one letter are not one
    shared = np.intersect1d(shingles("种树的空间再安排", 5), shingles("再种树的空间", 5))
    assert len(shared) == 1


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
@settings(max_examples=40, deadline=None)
def test_hashed_shingles_have_the_jaccard_similarity_of_the_texts(a: str, b: str) -> None:
    a, b = normalize(a), normalize(b)
    if a and b and min(len(a), len(b)) >= 5:
        one, two = shingles(a, 5), shingles(b, 5)
        common = len(np.intersect1d(one, two))
        assert common / (len(one) + len(two) - common) == pytest.approx(jaccard(a, b))


def test_signatures_estimate_the_jaccard_similarity(tmp_path: Path) -> None:
    rng = random.Random(0)
    firsts = [sentence(rng, 40) for _ in range(60)]
    seconds = [changed(rng, text, 1 + i % 12) for i, text in enumerate(firsts)]
    signatures = signed(firsts + seconds, tmp_path)
    estimated = (signatures[:60] == signatures[60:]).mean(axis=1)
    true = np.array([jaccard(a, b) for a, b in zip(firsts, seconds, strict=True)])
    assert np.abs(estimated - true).mean() < 0.04 and abs((estimated - true).mean()) < 0.02


def test_planted_pairs_are_found_and_others_kept(tmp_path: Path) -> None:
    """Recall at least 99 % on pairs of similarity 0.87 and above, precision 100 % on pairs below 0.7."""
    rng = random.Random(1)
    bases = [sentence(rng, 40) for _ in range(400)]
    close = [changed(rng, text, 1) for text in bases[:200]]
    far = [changed(rng, text, 14) for text in bases[200:]]
    near = [jaccard(a, b) for a, b in zip(bases[:200], close, strict=True)]
    apart = [jaccard(a, b) for a, b in zip(bases[200:], far, strict=True)]
    assert min(near) > 0.87 and 0.3 < max(apart) < 0.7
    signatures = signed(bases + close + far, tmp_path)
    leader = representatives(signatures, np.arange(800), 0.8)
    assert (leader[400:600] == np.arange(200)).mean() >= 0.99
    others = np.r_[0:400, 600:800]
    assert (leader[others] == others).all()


def test_no_chain_of_small_steps_joins_what_differs(tmp_path: Path) -> None:
    rng = random.Random(2)
    text = sentence(rng, 40)
    chain = [text]
    for step in range(12):
        parts = chain[-1].split()
        parts[3 * step] = "changed"
        chain.append(" ".join(parts))
    signatures = signed(chain, tmp_path)
    leader = representatives(signatures, np.arange(len(chain)), 0.8)
    assert 1 < len(set(leader.tolist())) < len(chain)
    for number, stands in enumerate(leader.tolist()):
        assert leader[stands] == stands  # a kept one
        assert jaccard(chain[number], chain[stands]) > 0.68


@given(st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_numbering_does_not_change_who_stays(rng: random.Random) -> None:
    bases = [sentence(random.Random(i), 20) for i in range(12)]
    chosen = random.Random(7)
    pool = bases + [changed(chosen, text, n) for text in bases for n in (1, 2, 3)]
    signatures = np.stack([_signature(text) for text in pool])
    straight = representatives(signatures, np.arange(len(pool)), 0.8)
    numbers = list(range(len(pool)))
    rng.shuffle(numbers)
    mixed = np.array(numbers)  # mixed[i] = the text that now has number i
    back = np.argsort(mixed)
    again = representatives(signatures[mixed], back, 0.8)
    assert 12 <= len(set(straight.tolist())) < len(pool)
    assert mixed[again][back].tolist() == straight.tolist()


_CACHE: dict[str, np.ndarray] = {}


def _signature(text: str) -> np.ndarray:
    if text not in _CACHE:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _CACHE[text] = np.array(signed([text], Path(folder))[0])
    return _CACHE[text]


def test_no_prompts_have_no_representatives(tmp_path: Path) -> None:
    assert representatives(signed([], tmp_path), np.arange(0), 0.8).tolist() == []
