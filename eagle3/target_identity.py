"""Which target a store, a checkpoint or a run belongs to: a small value that every stage compares."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eagle3.errors import WiringError


@dataclass(frozen=True)
class TargetIdentity:
    """Names one set of target weights.

    Args:
        name: architecture as config.json has it ("LlamaForCausalLM").
        model_type: outer `model_type`.
        num_layers, hidden_size, vocab_size: the text model's shape.
        config_hash: SHA-256 of config.json without its volatile keys.
        weights_fingerprint: SHA-256 over file headers and sampled bytes, cheap for terabytes.
        dtype: as config.json declares it ("bfloat16").
        quantization: "none", or method and width ("compressed-tensors int4 group 32").
    """

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    config_hash: str
    weights_fingerprint: str
    dtype: str
    quantization: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TargetIdentity:
        """Read the form that `to_dict` writes.

        Raises:
            WiringError: a key is missing or unknown.
        """
        try:
            return cls(**data)
        except TypeError as err:
            raise WiringError(
                "not a target identity", why=str(err), mend="write it with this tool, not by hand"
            ) from None

    def differences(self, found: TargetIdentity) -> list[str]:
        """Say in words how `found` differs from this (expected) identity; empty when equal."""
        want, have = self.to_dict(), found.to_dict()
        return [f"{k} is {_short(have[k])}; expected {_short(want[k])}" for k in want if want[k] != have[k]]

    def check_same(self, found: TargetIdentity, *, where: str, mend: str) -> None:
        """Refuse `found` unless it is this very target.

        Raises:
            WiringError: naming every field that differs, `where` it was found, and `mend`.
        """
        differences = self.differences(found)
        if differences:
            raise WiringError("another target", where=where, why="; ".join(differences), mend=mend)


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) == 64 else repr(value)


def describe_quantization(config: dict[str, Any], text_config: dict[str, Any]) -> str:
    """One phrase for `quantization_config`: method, width and group of its first weight scheme; "none" without one."""
    quant = config.get("quantization_config") or text_config.get("quantization_config")
    if not quant:
        return "none"
    if not isinstance(quant, dict):
        return str(quant)
    method = str(quant.get("quant_method", "unknown"))
    told = quant.get("config_groups")
    groups = list(told.values()) if isinstance(told, dict) else []
    first = groups[0].get("weights") if groups and isinstance(groups[0], dict) else None
    weights = first if isinstance(first, dict) else {}
    bits = weights.get("num_bits", quant.get("bits", quant.get("num_bits")))
    group = weights.get("group_size", quant.get("group_size"))
    kind = weights.get("type", "int")
    return method + (f" {kind}{bits}" if bits else "") + (f" group {group}" if group else "")
