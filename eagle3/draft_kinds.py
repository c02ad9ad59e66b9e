"""Switches of a draft's `config.json` that make an engine run another computation than the one trained here."""

from __future__ import annotations

from typing import Any

from eagle3.errors import IntegrityError

# SGLang 0.5.23, srt/models/llama_eagle3.py: norms before `fc`, on each aux state, or on the state that is fed on.
NORMS = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")


def refuse_other_kinds(config: dict[str, Any], where: str) -> None:
    """Refuse a draft that an engine would compute otherwise: its weights' names and shapes may be the very same.

    Raises:
        IntegrityError: naming each switch with its value.
    """
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    found = {name: eagle.get(name) or config.get(name) for name in NORMS}
    wrong = [f"{name} is {value!r}" for name, value in found.items() if value]
    if config.get("num_hidden_layers", 1) != 1:
        wrong.append(f"num_hidden_layers is {config['num_hidden_layers']!r}")
    if eagle.get("use_aux_hidden_state") is False:
        wrong.append("eagle_config.use_aux_hidden_state is False, so only the last state would be fed")
    if "target_hidden_size" in config and config["target_hidden_size"] != config.get("hidden_size"):
        # eagle_utils.py: a draft of another width keeps an embedding of its own; null counts as another width.
        wrong.append(
            f"target_hidden_size is {config['target_hidden_size']!r} beside hidden_size {config.get('hidden_size')!r}, "
            "so the target's embedding would not be shared"
        )
    if wrong:
        raise IntegrityError(
            "an engine would compute another draft than the one trained",
            where=f"{where}/config.json",
            why="; ".join(wrong),
            mend="export the draft again; drafts with these norms, layers or widths are not trained here",
        )
