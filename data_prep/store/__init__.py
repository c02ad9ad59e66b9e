"""The hidden-state store: what the target computed, on disk, with proof of where it came from.

`StoreWriter` adds samples, any number of writers at once; `Store` opens, refuses what does not fit, and reads at
random. The format is described in docs/formats.md.
"""

from data_prep.store.manifest import StoreManifest, differing
from data_prep.store.reader import Store
from data_prep.store.writer import StoreWriter

__all__ = ["Store", "StoreManifest", "StoreWriter", "differing"]
