"""The usual model factory: a fresh or warm-started draft for a target on disk, and that target's end as teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3.checkpoint import warm_start
from eagle3.config import DraftConfig
from eagle3.draft import DraftShape
from eagle3.draft_init import fresh_draft
from eagle3.target_weights import TargetWeights
from eagle3.vocab import load_vocab
from train.losses import TeacherHead
from train.model import TrainParts


def open_parts(
    *, target: str, shape: dict[str, Any], vocab: str, draft: dict[str, Any], teacher: str, seed: int
) -> TrainParts:
    """Build what training starts from; every argument is JSON-able, so that worker processes can call it.

    Args:
        target: folder of the target; only its embedding, final norm and head are read.
        shape: `DraftShape.to_dict()`.
        vocab: file of the draft vocabulary; unused by a warm start, which brings its own.
        draft: `DraftConfig` as a dict (initialization, warm start).
        teacher: the wiring's teacher site, "final" or "final_normed".
        seed: of the random matrices.

    Raises:
        RedraftError: the target, vocabulary or warm start does not fit the shape.
    """
    config, sizes, weights = DraftConfig(**draft), DraftShape(**shape), TargetWeights(Path(target))
    norm, head, embedding = weights.final_norm(), weights.head(), weights.embedding()
    if config.warm_start:
        model, *_ = warm_start(Path(config.warm_start), sizes, embedding)
    else:
        words = load_vocab(Path(vocab), size=sizes.draft_vocab_size)
        layer = None if config.init_layer == "random" else weights.last_layer()
        ends = {"embedding": embedding, "head": head, "final_norm": norm}
        model = fresh_draft(sizes, words, config, **ends, seed=seed, layer=layer)
    end = TeacherHead(norm, head, weights.rms_norm_eps, normed=teacher == "final_normed")
    fitted = config.init_fc == "fitted" and not config.warm_start
    return TrainParts(model, end, config.fit_rows if fitted else 0)
