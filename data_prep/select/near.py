"""Near-duplicates by MinHash: of prompts that resemble each other, the first in a seeded shuffle stays.

Memory for N prompts with P permutations and B bands: signatures 4 P N bytes in a file that is mapped, not loaded
(10**6 prompts, P = 128: 512 MB), group numbers 4 B N bytes in memory (B = 18: 72 MB), one band's hashes and order
24 N bytes (24 MB). `datasketch.MinHashLSH` holds the same in dicts of sets of tuples, about 10 kB a prompt: 10 GB.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

CHUNK = 1024  # shingles hashed at a time: [1024, 128] uint32 stay in the cache
FALSE_NEGATIVES = 0.99  # weight of a missed pair when bands are chosen; found pairs are judged again by all values


class Signatures:
    """MinHash signatures of prompts, appended to a file and mapped for reading.

    Args:
        path: the file; it belongs to one run.
        permutations: values a signature.
    """

    def __init__(self, path: Path, permutations: int) -> None:
        from datasketch import MinHash

        self.path, self.permutations = path, permutations
        self._handle = open(path, "wb")  # noqa: SIM115  (closed by `read`)
        self._empty = MinHash(permutations, seed=1, hashfunc=int, scheme="affine32")

    def append(self, hashes: np.ndarray) -> None:
        """Add the signature of shingle hashes [S] uint32; prompts are numbered in the order of their coming."""
        one = self._empty.copy()
        for start in range(0, len(hashes), CHUNK):
            one.update_batch(hashes[start : start + CHUNK].tolist())
        self._handle.write(one.hashvalues.astype("<u4").tobytes())

    def read(self) -> np.ndarray:
        """All signatures, [N, permutations] uint32, mapped."""
        self.close()
        if not self.path.stat().st_size:
            return np.zeros((0, self.permutations), dtype=np.uint32)
        return np.memmap(self.path, dtype="<u4", mode="r").reshape(-1, self.permutations)

    def close(self) -> None:
        """Flush and close the file."""
        self._handle.close()


def bands_for(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands, rows a band) with which few pairs of at least `threshold` are missed, by datasketch's own integral."""
    from datasketch import MinHashLSH

    lsh = MinHashLSH(
        threshold=min(threshold, 0.99), num_perm=permutations, weights=(1 - FALSE_NEGATIVES, FALSE_NEGATIVES)
    )
    return lsh.b, lsh.r


def representatives(signatures: np.ndarray, order: np.ndarray, threshold: float) -> np.ndarray:
    """Which prompt stands for each prompt.

    Prompts are taken in `order`. One that resembles a prompt already kept (share of equal values at least `threshold`,
    the estimate of the Jaccard similarity; standard error 0.035 at 0.8 with 128 values) is represented by the most
    similar such one; else it is kept. So a dropped prompt always has a kept one that it resembles itself, and no chain
    of small steps joins what differs. The outcome depends on `order` alone, not on how prompts are numbered.

    Args:
        signatures: [N, P] uint32.
        order: [N] the numbers of the prompts, first to keep first.
        threshold: similarity from which two prompts count as one.

    Returns:
        [N] int64: a kept prompt's own number, or its representative's.
    """
    groups = _band_groups(signatures, *bands_for(threshold, signatures.shape[1]))  # [B, N]
    leader = np.arange(len(signatures))
    place = np.empty(len(signatures), dtype=np.int64)
    place[order] = np.arange(len(signatures))
    kept: dict[int, list[int]] = defaultdict(list)
    in_play = np.zeros(len(signatures), dtype=bool)
    for band in groups:
        in_play |= band >= 0
    for number in order[in_play[order]].tolist():
        own = [group for group in groups[:, number].tolist() if group >= 0]
        rivals = np.unique(np.array([rival for group in own for rival in kept[group]], dtype=np.int64))
        same = (signatures[rivals] == signatures[number]).mean(axis=1)  # [rivals]
        if len(rivals) and same.max() >= threshold:
            closest = rivals[same == same.max()]
            leader[number] = closest[place[closest].argmin()]
            continue
        for group in own:
            kept[group].append(number)
    return leader


def _band_groups(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """[bands, N] int32: the same number for prompts that agree in a whole band; -1 where a prompt agrees with none."""
    groups = np.full((bands, len(signatures)), -1, dtype=np.int32)
    used = 0
    for band in range(bands):
        keys = np.zeros(len(signatures), dtype=np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            keys = (keys ^ signatures[:, column]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(32)
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        shared = counts > 1
        numbers = np.where(shared, used + np.cumsum(shared) - 1, -1).astype(np.int32)
        groups[band] = numbers[inverse]
        used += int(shared.sum())
    return groups
