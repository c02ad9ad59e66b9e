"""What may be asked of a server on its command line: numbers that fit together, and no flag said twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3.config import require
from eagle3.errors import ConfigError


def tree_size(num_steps: int, topk: int) -> int:
    """Tokens that a draft tree can offer to one verify, the last accepted token included.

    The first step proposes `topk` tokens; each further step extends the `topk` best by `topk` each.
    """
    return 1 + topk + (num_steps - 1) * topk * topk


def draft_tokens(num_steps: int, topk: int, asked: int) -> int:
    """Tokens judged per verify (`asked`; 0 = as many as a chain has), refused where they contradict the rest.

    Some servers mend such contradictions silently, and then measure something else than was asked.

    Raises:
        ConfigError: naming the numbers that contradict one another.
    """
    chain = num_steps + 1
    name = "eval.server.draft_tokens"
    if topk == 1:
        why = f"{chain} (eval.num_steps + 1) or 0, for topk 1 proposes a chain of eval.num_steps={num_steps}"
        require(asked in (0, chain), name, asked, why)
        return chain
    most = tree_size(num_steps, topk)
    require(
        chain <= asked <= most,
        name,
        asked,
        f"{chain} to {most}: at least a whole chain of eval.num_steps={num_steps}, and no more than a tree of "
        f"topk {topk} holds",
    )
    return asked


def sglang_speculation(draft: str | Path, steps: int, topk: int = 1, tokens: int = 0) -> list[str]:
    """SGLang's flags for a draft.

    Args:
        draft: its served folder.
        steps: proposals after one another.
        topk: branches of each.
        tokens: judged per verify; 0 = those of a chain.
    """
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    flags += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)]
    return [*flags, "--speculative-num-draft-tokens", str(tokens or steps + 1)]


def check_extra_args(extra: Sequence[str], managed: dict[str, str]) -> None:
    """Refuse extra flags that repeat one which the configuration sets already, abbreviations included.

    Args:
        extra: the user's further flags.
        managed: flag (with every spelling the engine accepts) -> the setting that decides it.

    Raises:
        ConfigError: naming the flag and the setting to use instead.
    """
    for word in extra:
        if not word.startswith("-"):
            continue
        flag = word.split("=", 1)[0].replace("_", "-")
        setting = managed.get(flag) or next((managed[m] for m in managed if len(flag) > 4 and m.startswith(flag)), "")
        if setting:
            raise ConfigError(
                "a flag said twice",
                where="eval.server.extra_args",
                why=f"{word} is decided by {setting}",
                mend=f"set {setting} and drop the flag",
            )
