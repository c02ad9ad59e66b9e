"""What a capture backend hands over: named tensors of one conversation, never a positional list."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class CapturedSample:
    """The target's states on one conversation of T tokens.

    Args:
        record_id: names the conversation in every stage.
        input_ids: [T] int64, the tokens the target read.
        loss_mask: [T] bool, true on the tokens to be learnt (on the token itself, unshifted).
        sites: site name -> [T, H]; row t is the residual stream at that site after reading tokens 0..t.
            Holds the wiring's `stored_sites`: the embedding is looked up from `input_ids` instead.
        final: [T, H], the teacher's state; [0, H] where no teacher was asked for.
        teacher: what `final` is: `final` (before the target's final norm) or `final_normed`.
    """

    record_id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    sites: dict[str, torch.Tensor]
    final: torch.Tensor
    teacher: str

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return int(self.input_ids.numel())

    def alone(self) -> CapturedSample:
        """The same in memory of its own: states are often views of their whole batch's, and keep all of that alive."""
        sites = {name: state.clone() for name, state in self.sites.items()}
        return replace(
            self,
            input_ids=self.input_ids.clone(),
            loss_mask=self.loss_mask.clone(),
            sites=sites,
            final=self.final.clone(),
        )
