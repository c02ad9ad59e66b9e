"""The store's identity: which wiring, target, tokenizer and template its states were computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3.atomic import sha256_json
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import IntegrityError, RedraftError
from eagle3.place import Place, exists
from eagle3.shard_file import mend_of
from eagle3.state_codec import CODECS, state_bytes
from eagle3.wiring import Wiring

FORMAT = "redraft-store"
OLD, VERSION = 1, 2  # 1 had no codec: its states are raw
TOKEN_BYTES = 5  # int32 id and uint8 mask
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class StoreManifest:
    """Everything that must agree for two stages to speak of the same tensors; fixed when the store is made.

    Args:
        wiring: sites and teacher; the store holds `wiring.stored_sites` and the teacher.
        target: the target's identity as a JSON-able dict, compared key by key.
        tokenizer_hash: of the tokenizer that made the tokens.
        template_hash: of the chat template that rendered the conversations.
        dtype: dtype of the states as captured and read: `bfloat16`, `float16` or `float32`.
        codec: how they lie on disk: a name in `eagle3.state_codec.CODECS`; a store is not continued with another.
        capture: how the states were computed (backend, compute dtype); a store is not continued with another.
    """

    wiring: Wiring
    target: dict[str, Any]
    tokenizer_hash: str
    template_hash: str = ""
    dtype: str = "bfloat16"
    codec: str = "raw"
    capture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.tokenizer_hash, self.template_hash, self.dtype, self.codec)):
            raise TypeError("a hash, dtype or codec that is no text")
        if self.dtype not in DTYPES:
            raise RedraftError(
                "unknown store dtype", why=f"found {self.dtype!r}", mend=f"use one of {', '.join(DTYPES)}"
            )
        if self.codec not in CODECS:
            raise RedraftError(
                "unknown store codec", why=f"found {self.codec!r}", mend=f"use one of {', '.join(CODECS)}"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes a stored token takes at most: its states, its id, its mask. That of `lossless` is what `raw` takes."""
        states = len(self.wiring.stored_sites) + 1
        return states * state_bytes(self.codec, self.dtype, self.wiring.hidden_size) + TOKEN_BYTES

    @property
    def key(self) -> str:
        """SHA-256 over all of it; every shard carries that of the store it was written for."""
        return sha256_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; `from_dict` reads it back."""
        sites = [site.name for site in self.wiring.stored_sites]
        return {
            "format": FORMAT,
            "version": VERSION,
            **{key: value for key, value in asdict(self).items() if key != "wiring"},
            "wiring": self.wiring.to_dict(),
            "sites": sites,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> StoreManifest:
        """Read the form that `to_dict` writes.

        Raises:
            IntegrityError: another format or version, or a key is missing.
        """
        kind, version = data.get("format"), data.get("version")
        if kind != FORMAT or version not in (OLD, VERSION):
            raise IntegrityError(
                "not a hidden-state store of this version",
                where=where,
                why=f"found format {kind!r} version {version!r}, expected {FORMAT!r} {OLD} or {VERSION}",
                mend="point at a store that this version wrote, or extract again",
                page="formats",
            )
        try:
            return cls(
                wiring=Wiring.from_dict(data["wiring"]),
                target=dict(data["target"]),
                tokenizer_hash=data["tokenizer_hash"],
                template_hash=data["template_hash"],
                dtype=data["dtype"],
                codec="raw" if version == OLD else data["codec"],
                capture=dict(data["capture"]),
            )
        except KeyError as err:
            raise IntegrityError(
                "store manifest lacks a key", where=where, why=str(err), mend="extract again"
            ) from None
        except (TypeError, ValueError) as err:
            raise IntegrityError(
                "store manifest with a value of another kind", where=where, why=str(err), mend="extract again"
            ) from None
        except RedraftError as err:
            raise IntegrityError(err.what, where=where, why=err.why, mend=err.mend) from None

    @classmethod
    def read(cls, store: Place) -> StoreManifest:
        """Read the manifest of the store in folder `store`.

        Raises:
            IntegrityError: there is no store, or its manifest is not readable.
        """
        path = store / "manifest.json"
        mend = "run the extract stage to make the store" if not exists(path) else mend_of(store)
        return cls.from_dict(read_checked(path, mend=mend), where=str(path))

    def write(self, store: Place) -> None:
        """Write the manifest atomically into folder `store`."""
        write_checked(store / "manifest.json", self.to_dict())

    def check_same(self, found: StoreManifest, where: str) -> None:
        """Refuse to continue the store of manifest `found` with this one.

        Raises:
            WiringError: another wiring.
            RedraftError: anything else differs; every differing key is named.
        """
        mend = "extract into another store folder, or delete this one to extract anew"
        self.wiring.check_same(found.wiring, where=where, mend=mend)
        want, have = self.to_dict(), found.to_dict()
        refuse_difference("the store was made with other settings", want, have, where, mend)


def refuse_difference(what: str, want: Mapping[str, Any], have: Mapping[str, Any], where: str, mend: str) -> None:
    """Raise a RedraftError that names every key in which `have` differs from `want`, if any does."""
    problems = differing(want, have)
    if problems:
        raise RedraftError(what, where=where, why="; ".join(problems), mend=mend)


def differing(want: Mapping[str, Any], have: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Name the keys in which `have` differs from `want`, nested dicts included, as `key is X; expected Y`."""
    out = []
    for key in sorted({*want, *have}):
        a, b = want.get(key), have.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += differing(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key} is {b!r}, expected {a!r}")
    return out
