"""Where a store lies: a local folder, or one on any file system that fsspec knows."""

from eagle3.place import Place, store_place

__all__ = ["Place", "store_place"]
