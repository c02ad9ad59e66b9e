"""Read an SGLang tree by its syntax trees: which convention a model's code follows, and whether it is patched."""

from __future__ import annotations

from eagle3.sglang_tree.tree import SglangTree, read_tree
from eagle3.sglang_tree.verdict import TreeVerdict, convention_of_tree, verdict_of

__all__ = ["SglangTree", "TreeVerdict", "convention_of_tree", "read_tree", "verdict_of"]
