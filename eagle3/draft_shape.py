"""Sizes and switches of a draft: everything its modules are built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle3.config import require
from eagle3.rope import latent_scaling, served_scaling

KINDS = ("llama", "mla")
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft, and which of the published variants it is.

    Args:
        hidden_size: width H of the target and the draft.
        intermediate_size: width of the MLP.
        num_attention_heads, num_key_value_heads, head_dim: attention sizes; the first a multiple of the second.
            `head_dim` is the width of a query and a key: with latent attention the sum of its two parts.
        vocab_size: the target's vocabulary V.
        draft_vocab_size: rows of the draft's head; V = no `d2t`.
        num_aux: aux sites A; `fc` reads A * H.
        rms_norm_eps: epsilon of every norm.
        rope: `{"rope_theta": float, "rope_scaling": dict | None}`.
        max_position_embeddings: positions that the served config announces.
        kind: "llama" (grouped heads) or "mla" (DeepSeek's latent attention: a small cache).
        q_lora_rank, kv_lora_rank: "mla" only, widths of the compressed queries, and keys with values.
        qk_nope_head_dim, qk_rope_head_dim: "mla" only, the plain and the rotated part of a query and a key.
        v_head_dim: "mla" only, width of a value.
        fc_norm: a norm of its own over each aux state before `fc` (EAGLE 3.1).
        norm_before_fc: one norm over the joined aux states before `fc`; "llama" only.
        norm_output: what feeds the next step is normed, as the head reads it (EAGLE 3.1).

    Raises:
        ConfigError: a size that is not positive or does not divide, or a switch that no engine has for this kind.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    kind: str = "llama"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        counts = [name for name, value in vars(self).items() if self.__annotations__[name] == "int"]
        for name in counts:
            require(type(getattr(self, name)) is int, f"draft.{name}", getattr(self, name), "a whole number")
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_aux"):
            require(getattr(self, name) > 0, f"draft.{name}", getattr(self, name), "a positive integer")
        groups = self.num_attention_heads % self.num_key_value_heads == 0
        require(groups, "draft.num_key_value_heads", self.num_key_value_heads, "a divisor of num_attention_heads")
        require(self.kind in KINDS, "draft.kind", self.kind, " or ".join(KINDS))
        if self.kind == "mla":
            self._check_latent()
        else:
            require(self.head_dim > 0 and self.head_dim % 2 == 0, "draft.head_dim", self.head_dim, "an even number")
            for name in LATENT_SIZES:
                require(getattr(self, name) == 0, f"draft.{name}", getattr(self, name), "0 with draft.kind=llama")
        fits = 0 < self.draft_vocab_size <= self.vocab_size
        require(fits, "draft.vocab_size", self.draft_vocab_size, f"1 to the target's {self.vocab_size}")
        clean = latent_scaling if self.kind == "mla" else served_scaling
        theta, scaling = float(self.rope["rope_theta"]), clean(self.rope.get("rope_scaling"))
        object.__setattr__(self, "rope", {"rope_theta": theta, "rope_scaling": scaling})

    def _check_latent(self) -> None:
        for name in LATENT_SIZES:
            require(getattr(self, name) > 0, f"draft.{name}", getattr(self, name), "a positive integer")
        even = self.qk_rope_head_dim % 2 == 0
        require(even, "draft.qk_rope_head_dim", self.qk_rope_head_dim, "an even number")
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        require(self.head_dim == whole, "draft.head_dim", self.head_dim, f"{whole}, the two parts of a key together")
        heads = self.num_attention_heads
        alike = self.num_key_value_heads == heads
        require(alike, "draft.num_key_value_heads", self.num_key_value_heads, f"{heads}: latent keys are not grouped")
        require(not self.norm_before_fc, "draft.norm_before_fc", True, "false with draft.kind=mla: no engine has it")

    @property
    def full_vocab(self) -> bool:
        """Whether the draft's head covers the target's whole vocabulary."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def rotary_dim(self) -> int:
        """How much of a query and a key is rotated."""
        return self.qk_rope_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value."""
        return self.v_head_dim or self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; `DraftShape(**d)` reads it back."""
        return asdict(self)
