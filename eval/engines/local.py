"""The reference engine: chain speculative decoding in this process, batch 1, on any Hugging Face target.

It exists to be right and readable. The draft is fed the sites of the wiring that is *served*, by name, so a draft
can be measured both on its own wiring and on what an engine would feed it by default.

Alignment (the one convention of the project): with the text x[0..], row t of the draft reads the target's features
after x[0..t] and the embedding of x[t+1], stands at rotary position t, and predicts x[t+2].
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle3.draft import DraftCache, Eagle3Draft
from eagle3.errors import DataError
from eagle3.hf_decoder import find_decoder
from eagle3.hf_model import load_target
from eagle3.wiring import Wiring
from eval.engines.base import Generation
from eval.engines.chain import Greedy, Judge, Sampled
from eval.engines.target import TargetSession, check_served, end_tokens


class LocalEngine:
    """A target and a draft, served with `wiring`.

    Args:
        target: folder of the target, or a loaded causal LM (several engines may share one).
        draft: the draft; moved to the target's device, its dtype is kept.
        wiring: which sites are fed to the draft.
        device: where to run, when `target` is a folder.
        dtype: the target's dtype, when `target` is a folder.
        trust_remote_code: run Python shipped in the target's folder.

    Raises:
        WiringError: the wiring's width is not the draft's, or the target has not those layers.
        RedraftError: the target cannot be loaded.
    """

    name = "local"

    def __init__(
        self,
        target: Path | str | nn.Module,
        draft: Eagle3Draft,
        wiring: Wiring,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(target, nn.Module):
            target = load_target(Path(target), str(device), dtype, trust_remote_code, with_head=True)
        check_served(wiring, draft.fc.in_features)
        self.wiring = wiring
        self.target = target
        self.layers = find_decoder(target, wiring.num_layers).layers
        self.device = next(target.parameters()).device
        self.draft = draft.to(self.device).eval()
        self.end_ids = end_tokens(target)
        self._dtype = draft.fc.weight.dtype
        self._draft_ids = torch.arange(draft.d2t.numel(), device=self.device) + draft.d2t  # [Vd] target ids

    @torch.inference_mode()
    def generate(
        self, prompt_ids: list[int], max_new_tokens: int, num_steps: int, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """Decode with the draft: at temperature 0 the tokens are those of `baseline`.

        Raises:
            DataError: the prompt is empty or does not fit the target's context.
        """
        self._check_room(prompt_ids, max_new_tokens + num_steps)
        judge = self._judge(temperature, seed)
        began = time.perf_counter()
        with TargetSession(self.target, self.layers, self.wiring.aux) as session:
            logits, features = session.forward(prompt_ids, keep=1)
            tokens = [judge.first(logits[-1])]
            prefilled = time.perf_counter()
            count = _Count(num_steps)
            cache = DraftCache()
            row, row_ids = 0, [*prompt_ids[1:], tokens[0]]  # draft rows waiting to be read, and their tokens
            while len(tokens) < max_new_tokens and tokens[-1] not in self.end_ids:
                start = time.perf_counter()
                cache.crop(row)  # drop the rows that stood on proposals
                proposals = self._propose(judge, features, row, row_ids, num_steps, cache)
                count.draft_seconds += time.perf_counter() - start
                row += len(row_ids)
                logits, features = session.forward([tokens[-1], *proposals])
                kept, bonus = judge.judge(logits, proposals)
                session.crop(row + 1 + kept)
                row_ids = [*proposals[:kept], bonus]
                features = features[: kept + 1]  # type: ignore[index]
                tokens += count.add(row_ids, kept, self.end_ids)
        return count.generation(tokens[:max_new_tokens], began, prefilled, self.end_ids)

    @torch.inference_mode()
    def baseline(
        self, prompt_ids: list[int], max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """Decode without a draft, one token a forward pass, with the same target, cache and kernels.

        Raises:
            DataError: the prompt is empty or does not fit the target's context.
        """
        self._check_room(prompt_ids, max_new_tokens)
        judge = self._judge(temperature, seed)
        began = time.perf_counter()
        with TargetSession(self.target, None) as session:
            tokens = [judge.first(session.forward(prompt_ids, keep=1)[0][-1])]
            prefilled = time.perf_counter()
            while len(tokens) < max_new_tokens and tokens[-1] not in self.end_ids:
                tokens.append(judge.first(session.forward([tokens[-1]])[0][-1]))
        return _Count(0).generation(tokens, began, prefilled, self.end_ids)

    @torch.inference_mode()
    def top_gap(self, ids: list[int]) -> float:
        """The target's first logit minus its second, after reading `ids`: near 0 where rounding picks the token."""
        with TargetSession(self.target, None) as session:
            first, second = session.forward(ids, keep=1)[0][-1].float().topk(2).values.tolist()
        return first - second

    def _propose(
        self, judge: Judge, features: Tensor | None, row: int, row_ids: list[int], num_steps: int, cache: DraftCache
    ) -> list[int]:
        """Read the waiting rows, then unroll `num_steps` proposals from the last one (target ids)."""
        assert features is not None
        end = row + len(row_ids)
        positions = torch.arange(row, end + num_steps, device=self.device)
        ids = torch.tensor(row_ids, device=self.device)
        fused = self.draft.fuse(features.to(self._dtype))  # [n, H]
        hidden = self.draft.serve_step(fused, ids, positions[: len(row_ids)], cache)[-1:]  # [1, H]
        chain: list[Tensor] = []
        for step in range(num_steps):
            if step:
                place = len(row_ids) + step - 1
                hidden = self.draft.serve_step(hidden, chain[-1], positions[place : place + 1], cache)
            chain.append(self._draft_ids[judge.propose(self.draft.logits(hidden))])  # [1]
        return torch.cat(chain).tolist()

    def _judge(self, temperature: float, seed: int) -> Judge:
        return Greedy() if temperature == 0 else Sampled(temperature, seed, self._draft_ids)

    def _check_room(self, prompt_ids: list[int], extra: int) -> None:
        if not prompt_ids:
            raise DataError("the prompt is empty", mend="give each prompt at least one message")
        limit = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[operator, union-attr]
        if limit and len(prompt_ids) + extra > limit:
            raise DataError(
                "the prompt does not fit the target's context",
                why=f"{len(prompt_ids)} prompt tokens and {extra} to come exceed {limit}",
                mend="shorten the prompt or lower eval.max_new_tokens",
            )


class _Count:
    """What the verify steps of one text did."""

    def __init__(self, num_steps: int) -> None:
        self.histogram = [0] * (num_steps + 1)
        self.tried, self.right = [0] * num_steps, [0] * num_steps
        self.draft_seconds = 0.0

    def add(self, row_ids: list[int], kept: int, end_ids: frozenset[int]) -> list[int]:
        """Record a verify that kept `kept` proposals, and return its tokens up to the first end token.

        What stands after an end token belongs to no text: it is neither kept nor held against the draft.
        """
        ended = next((place for place, token in enumerate(row_ids[:kept]) if token in end_ids), None)
        tried = min(kept + 1, len(self.tried))
        if ended is not None:
            kept = tried = ended + 1
            row_ids = row_ids[:kept]
        self.histogram[kept] += 1
        for place in range(tried):
            self.tried[place] += 1
            self.right[place] += place < kept
        return row_ids

    def generation(self, tokens: list[int], began: float, prefilled: float, end_ids: frozenset[int]) -> Generation:
        """Close the count."""
        verifies = sum(self.histogram)
        return Generation(
            tokens=tokens,
            verifies=verifies,
            correct=sum(c * n for c, n in enumerate(self.histogram)),
            proposed=verifies * len(self.tried),
            correct_histogram=self.histogram,
            tried=self.tried,
            right=self.right,
            seconds=time.perf_counter() - began,
            prefill_seconds=prefilled - began,
            draft_seconds=self.draft_seconds,
            ended=bool(tokens) and tokens[-1] in end_ids,
        )
