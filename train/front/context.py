"""What the stages of one run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.render import Renderer
from data_prep.targets.ensure import ensure_target
from eagle3.errors import RedraftError
from eagle3.place import Place, store_place
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Wiring
from train.front.config import RedraftConfig


@dataclass
class Run:
    """A run's configuration, wiring and folders; the target is opened when first asked for."""

    config: RedraftConfig
    wiring: Wiring
    run_dir: Path
    incomplete: list[str] = field(default_factory=list)  # what stages could not finish, though their results are there

    @classmethod
    def create(cls, config: RedraftConfig, run_dir: Path) -> Run:
        """Build from a validated configuration."""
        return cls(config, config.build_wiring(), run_dir)

    @property
    def prepared(self) -> Path:
        """Folder of tokens and loss masks."""
        return Path(self.config.paths.prepared)

    @property
    def store(self) -> Place:
        """Folder of hidden states, here or on another file system."""
        return store_place(self.config.paths.store)

    @property
    def served(self) -> Path:
        """The draft folder that an engine loads."""
        return self.run_dir / "served"

    @cached_property
    def target_path(self) -> Path:
        """The target's folder, made when the config names a maker."""
        return ensure_target(self.config.target)

    @cached_property
    def weights(self) -> TargetWeights:
        """The target's embedding, final norm and head, read on demand."""
        return TargetWeights(self.target_path)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The target's identity as stores and checkpoints carry it."""
        return self.weights.identity().to_dict()

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, from its folder, never from the network.

        Raises:
            RedraftError: it cannot be loaded, for instance since it ships Python.
        """
        from transformers import AutoTokenizer

        trust = self.config.target.trust_remote_code
        try:
            return AutoTokenizer.from_pretrained(self.target_path, trust_remote_code=trust, local_files_only=True)
        except Exception as err:  # transformers and tokenizers raise a dozen kinds, a bare Exception too
            mend = "put the tokenizer's files there"
            if not trust:
                mend += "; where it ships Python that you trust, set target.trust_remote_code=true"
            where = str(self.target_path)
            raise RedraftError("cannot load the tokenizer", where=where, why=str(err), mend=mend) from None

    @cached_property
    def renderer(self) -> Renderer:
        """Chat template and loss mask for this run's settings."""
        return Renderer.of(self.config.data, self.tokenizer)
