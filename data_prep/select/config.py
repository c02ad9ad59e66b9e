"""Configuration of the selection of training samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle3.config import require

EVERYTHING_ELSE = "*"  # quota key that pools all domains or languages without a quota of their own
SLACK = 1e-6  # how far shares may sum from 1


@dataclass
class SourceConfig:
    """One source of conversations and what is known about it."""

    path: str = "???"  # JSONL or JSON file, folder of them, folder of HF `datasets`, or a hub name
    name: str = "???"  # short name in ids, provenance and reports; the same selection needs the same name
    domain: str = ""  # domain of its records; "" = its name (or what `domain_key` finds)
    domain_key: str = ""  # key of a record that holds its domain; records without it take `domain`
    language: str = "auto"  # language code of its records, or "auto" = detected
    language_key: str = ""  # key of a record that holds its language; records without it take `language`
    weight: float = 1.0  # a record of weight 2 is as likely to be drawn as two records of weight 1
    limit: int = 0  # records of this source that may be chosen at most; 0 = all
    split: str = "train"  # split read from HF datasets
    license: str = ""  # written into the provenance; "" = the record's own `license`, where it has one

    def validate(self, where: str) -> None:
        """Raise ConfigError on the first bad field; `where` names the entry."""
        for name in ("path", "name"):
            value = getattr(self, name)
            require(bool(value) and value != "???", f"{where}.{name}", value, "a text")
        require("/" not in self.name, f"{where}.name", self.name, "a name without a slash")
        require(self.weight > 0, f"{where}.weight", self.weight, "a number above 0")
        require(self.limit >= 0, f"{where}.limit", self.limit, "0 or a positive integer")
        require(bool(self.language), f"{where}.language", self.language, "a language code or auto")


@dataclass
class SelectConfig:
    """Which conversations are answered and trained on."""

    sources: list[SourceConfig] = field(default_factory=list)
    total: int = 100_000  # conversations wanted
    # Quotas: shares that sum to 1, or counts that sum to `total`; "*" pools what is not named; empty = no quota.
    quotas_domain: dict[str, float] = field(default_factory=dict)
    quotas_language: dict[str, float] = field(default_factory=dict)
    length_buckets: dict[int, float] = field(default_factory=dict)  # upper edge in tokens: share; longer is left out
    shortfall: str = "refuse"  # a quota that cannot be filled: "refuse", or "report" (filled up from other quotas)
    answers: str = "strip"  # "strip": the last answer goes, the target writes its own; "keep": train on what is there
    dedupe: str = "near"  # "exact" (same user turns), "near" (MinHash as well), "none"
    near_threshold: float = 0.8  # Jaccard similarity of shingles from which two prompts count as one
    shingle: int = 5  # characters a shingle
    permutations: int = 128  # MinHash values a prompt; 4 bytes each on disk while the stage runs
    exclude: list[str] = field(default_factory=list)  # JSONL files (or folders) of evaluation prompts to keep out
    exclude_threshold: float = 0.7  # Jaccard similarity to an evaluation prompt from which a prompt is kept out
    min_chars: int = 4  # characters that the user turns need
    max_tokens: int = 0  # longer conversations are left out; 0 = the last edge of length_buckets, or no bound
    detect_languages: list[str] = field(default_factory=list)  # languages that detection may choose from; empty = all
    language_confidence: float = 0.2  # detected with less confidence: "und" (undetermined)
    on_bad_record: str = "skip"  # "skip" (counted and named) or "refuse"
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # chat template arguments for measuring lengths
    min_coverage: float = 0.95  # warn when the draft vocabulary covers less of a domain's or language's tokens
    seed: int = 0

    def validate(self) -> None:
        """Raise ConfigError on the first bad field. No sources are fine until the stage runs."""
        require(self.total > 0, "select.total", self.total, "a positive integer")
        for i, source in enumerate(self.sources):
            source.validate(f"select.sources[{i}]")
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, "select.sources", twice, "one name a source")
        for name in ("quotas_domain", "quotas_language", "length_buckets"):
            self._check_quota(f"select.{name}", getattr(self, name))
        require(all(int(e) > 0 for e in self.length_buckets), "select.length_buckets", self.length_buckets, "edges > 0")
        self._check_choices()
        self._check_numbers()

    def _check_quota(self, where: str, quota: dict[Any, float]) -> None:
        require(all(value >= 0 for value in quota.values()), where, dict(quota), "shares or counts of at least 0")
        good = not quota or is_shares(quota) or is_counts(quota, self.total)
        found = f"{dict(quota)} (sum {sum(quota.values()):g})"
        require(good, where, found, f"shares that sum to 1, or counts that sum to select.total = {self.total}")

    def _check_choices(self) -> None:
        choices = {
            "shortfall": ("refuse", "report"),
            "answers": ("strip", "keep"),
            "dedupe": ("exact", "near", "none"),
            "on_bad_record": ("skip", "refuse"),
        }
        for name, known in choices.items():
            require(getattr(self, name) in known, f"select.{name}", getattr(self, name), " or ".join(known))

    def _check_numbers(self) -> None:
        for name in ("near_threshold", "exclude_threshold"):
            value = getattr(self, name)
            require(0.0 < value <= 1.0, f"select.{name}", value, "a similarity above 0, at most 1")
        for name in ("language_confidence", "min_coverage"):
            require(0.0 <= getattr(self, name) <= 1.0, f"select.{name}", getattr(self, name), "a share from 0 to 1")
        require(self.shingle >= 1, "select.shingle", self.shingle, "at least 1 character")
        require(self.permutations >= 16, "select.permutations", self.permutations, "at least 16")
        for name in ("min_chars", "max_tokens"):
            require(getattr(self, name) >= 0, f"select.{name}", getattr(self, name), "0 or a positive integer")

    @property
    def token_bound(self) -> int:
        """Tokens a conversation may have at most; 0 = any number."""
        last = max((int(edge) for edge in self.length_buckets), default=0)
        bounds = [bound for bound in (last, self.max_tokens) if bound]
        return min(bounds, default=0)


def is_shares(quota: dict[Any, float]) -> bool:
    """Whether a quota is given as shares of the total."""
    return abs(sum(quota.values()) - 1.0) <= SLACK


def is_counts(quota: dict[Any, float], total: int) -> bool:
    """Whether a quota is given as counts that make up `total`."""
    return all(value == int(value) for value in quota.values()) and sum(quota.values()) == total
