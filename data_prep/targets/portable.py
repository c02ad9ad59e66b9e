"""Make a saved folder readable beyond the library that saved it.

transformers 5 writes `rope_parameters`, `dtype` and its own tokenizer class. Older releases, and engines built on
them, read `rope_theta` + `rope_scaling`, `torch_dtype` and `PreTrainedTokenizerFast`; without these they fall back to
defaults silently. Both spellings are written: they say the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3.target_weights import rope_parameters


def make_portable(folder: Path, extra: dict[str, Any] | None = None) -> None:
    """Complete config.json and tokenizer_config.json in `folder`, which nobody else reads yet.

    Args:
        folder: a folder still being built.
        extra: further keys for config.json, e.g. those that transformers drops and engines need.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = rope_parameters(config)
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": config["dtype"], **(extra or {})}
    if rope["rope_scaling"]:
        config["rope_scaling"] = rope["rope_scaling"]
    config.pop("_model_name_or_path", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = {key: value for key, value in tokenizer.items() if key not in ("is_local", "local_files_only")}
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(tokenizer, indent=2) + "\n", encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)
