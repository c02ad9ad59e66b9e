"""The programs whose source was read, with the rule that each was seen to follow; `docs/wiring.md` is its prose.

To add one, read what the program does with `eagle_aux_hidden_state_layer_ids`, in which order it joins the states,
and whether it can take layer 0, and write the file and version into `read_from`.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.engine_convention import EngineConvention
from eagle3.id_rules import FirstIdDecides, Hardwired, IdRule, Offset, PatchedFirstIdDecides, PatchedOutputs

# Target families, by the text model's `model_type`: models whose code in one engine shares one rule.
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")
QWEN_DENSE = ("qwen2", "qwen3")
QWEN_MOE = ("qwen2_moe", "qwen3_moe", "qwen3_next")
LLAMA = ("llama", "mistral", "phi3", "internlm3", "apertus", "glm4_moe", "gpt_oss", "minimax_m2", "exaone_moe")
SGLANG_FAMILIES = (*DEEPSEEK, *QWEN_DENSE, *QWEN_MOE, *LLAMA)


def _for(model_types: Sequence[str], rule: IdRule) -> dict[str, IdRule]:
    return dict.fromkeys(model_types, rule)


_GRAPHS = (
    "0.5.6 to 0.5.10 capture their CUDA graphs with the default layers before they set the ids (read in 0.5.6.post2, "
    "0.5.9 and 0.5.10; 0.5.11 sets them first), so ids other than the default hold only with --disable-cuda-graph or "
    "after scripts/sglang_patch.py"
)
_OLD_NOTES = {
    "*": _GRAPHS,
    "kimi_k25": "this build's Kimi-K2.5 wrapper has no EAGLE-3 capture setter (0.5.10 is the first that has one): "
    "without a patch to the wrapper the server stops at start-up; and " + _GRAPHS,
}
_PATCH = "the patch of scripts/sglang_patch.py on "
_PATCH_NEW = (
    ": with -1 among the ids, -1 is the embedding and v >= 0 is layer v + 1; else as unpatched, like other models"
)
_BETWEEN_FAMILIES = tuple(one for one in SGLANG_FAMILIES if one != "glm4_moe_lite")  # its file was not read there
_PATCHABLE = tuple(one for one in DEEPSEEK if one != "glm4_moe_lite")  # it has a setter and a loop of its own there
# Dense Qwen keeps a reference to the embedding, and the first fused norm adds into that very tensor: what is fed is
# the residual stream one half-layer later, without an error.
_OVERWRITTEN = (*LLAMA, *QWEN_DENSE)
_OLD_NO_EMBEDDING = (*DEEPSEEK, *_OVERWRITTEN)
_TWO_PLACES = (
    "one of the two model runners reads only the top-level eagle_aux_hidden_state_layer_ids: write them there; "
    "SGLang reads only the nested eagle_config, so one config can hold both engines' ids"
)

_ALL = (
    EngineConvention(
        name="sglang-0.5.9",
        read_from="sglang 0.5.9 srt/models/{llama,qwen2,qwen2_moe,qwen3,qwen3_moe,qwen3_next,deepseek_v2}.py and "
        "model_executor/model_runner.py; the deepseek_v2 setter is the same in 0.5.6.post2, 0.5.10, 0.5.11 and 0.5.12",
        rule=Offset(1),
        families=SGLANG_FAMILIES,
        no_embedding=_OLD_NO_EMBEDDING,
        notes=_OLD_NOTES,
    ),
    EngineConvention(
        name="sglang-0.5.9-patched",
        read_from=_PATCH + "sglang 0.5.9 srt/models/deepseek_v2.py: -1 sets a flag that captures the embedding before "
        "the layer loop, ids >= 0 are shifted by one as before; other models unpatched",
        rule=Offset(1),
        family_rules=_for(DEEPSEEK, PatchedOutputs()),
        families=SGLANG_FAMILIES,
        no_embedding=_OVERWRITTEN,
    ),
    EngineConvention(
        name="sglang-0.5.13",
        read_from="sglang 0.5.13 srt/models/deepseek_v2.py (setter changed by sglang#25454; the loop still adds an "
        "absent residual at layer 0); other models taken as in 0.5.14",
        rule=Offset(1),
        family_rules=_for(DEEPSEEK, FirstIdDecides()),
        families=_BETWEEN_FAMILIES,
        no_embedding=_OLD_NO_EMBEDDING,
    ),
    EngineConvention(
        name="sglang-0.5.13-patched",
        read_from=_PATCH + "sglang 0.5.13 srt/models/deepseek_v2.py" + _PATCH_NEW,
        rule=Offset(1),
        family_rules=_for(_PATCHABLE, PatchedFirstIdDecides(zero=False)),
        families=_BETWEEN_FAMILIES,
        no_embedding=_OVERWRITTEN,
    ),
    EngineConvention(
        name="sglang-0.5.14",
        read_from="sglang 0.5.14 srt/models/{deepseek_v2,llama,qwen2,qwen2_moe}.py (DeepSeek's layer 0 is captured "
        "after the layer's own residual is set, Llama's is not)",
        rule=Offset(1),
        family_rules=_for(DEEPSEEK, FirstIdDecides()),
        families=_BETWEEN_FAMILIES,
        no_embedding=_OVERWRITTEN,
    ),
    EngineConvention(
        name="sglang-0.5.14-patched",
        read_from=_PATCH + "sglang 0.5.14 srt/models/deepseek_v2.py" + _PATCH_NEW,
        rule=Offset(1),
        family_rules=_for(_PATCHABLE, PatchedFirstIdDecides()),
        families=_BETWEEN_FAMILIES,
        no_embedding=_OVERWRITTEN,
    ),
    EngineConvention(
        name="sglang-0.5.23",
        read_from="sglang 0.5.23 srt/models/{llama,qwen2,qwen2_moe,qwen3,qwen3_moe,deepseek_v2,glm4_moe_lite,kimi_k25,"
        "gpt_oss}.py, layers/{aux_hidden_states,layer_boundary/stage}.py, "
        "model_executor/model_runner_components/spec_aux_hidden_state.py",
        rule=Offset(1),
        family_rules=_for(DEEPSEEK, FirstIdDecides()),
        families=SGLANG_FAMILIES,
    ),
    EngineConvention(
        name="sglang-0.5.23-patched",
        read_from=_PATCH + "sglang 0.5.23 srt/models/deepseek_v2.py" + _PATCH_NEW,
        rule=Offset(1),
        family_rules={**_for(DEEPSEEK, FirstIdDecides()), **_for(_PATCHABLE, PatchedFirstIdDecides())},
        families=SGLANG_FAMILIES,
    ),
    EngineConvention(
        name="vllm",
        read_from="vllm 0.32.0 model_executor/models/{interfaces,llama,qwen2,qwen3_moe,deepseek_v2,kimi_k25}.py, "
        "v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
        rule=Offset(0),
        no_embedding=DEEPSEEK,
        notes={"*": _TWO_PLACES},
    ),
    EngineConvention(
        name="hf",
        read_from="transformers 5.24: index into `hidden_states` of a model's output (the last entry is normed)",
        rule=Offset(0, has_default=False),
        layer_order=False,
    ),
    EngineConvention(
        name="specforge",
        read_from="specforge 0.2.0 algorithms/model_providers.py, application/planning.py, "
        "offline_capture/sglang_backend/capture.py: hands its ids to SGLang's setter; it pins sglang 0.5.14",
        rule=Offset(1, output_default=True),
        family_rules=_for(DEEPSEEK, FirstIdDecides(output_default=True)),
        families=_BETWEEN_FAMILIES,
        no_embedding=(*QWEN_DENSE, *QWEN_MOE, *LLAMA),  # they would need the id -1, and it refuses negatives
        slots=3,
        notes={"*": "its ids mean what the SGLang build that it runs on takes them for"},
    ),
    EngineConvention(
        name="torchspec",
        read_from="TorchSpec models/target/eagle3_target_model.py (HF backend: forward hooks on decoder layers, joined "
        "in the order of the list); its SGLang backend follows that engine",
        rule=Offset(1, output_default=True),
        no_embedding=("*",),
        layer_order=False,
        slots=3,
    ),
    EngineConvention(
        name="model-optimizer",
        read_from="NVIDIA Model-Optimizer torch/speculative/plugins/hf_eagle.py (forward hooks on decoder layers, "
        "joined in the order they fire)",
        rule=Offset(1, output_default=True, squeezes_default=True),
        no_embedding=("*",),
    ),
    EngineConvention(
        name="speculators",
        read_from="speculators 0.9.0 models/utils.py (default and range) and scripts/launch_vllm.py: vLLM captures, so "
        "its order and its limits hold",
        rule=Offset(0),
        no_embedding=DEEPSEEK,
    ),
    EngineConvention(
        name="eagle",
        read_from="SafeAILab/EAGLE eagle/model/modeling_llama_kv.py and traineagle3/modeling_llama_kv.py (cb7e084)",
        rule=Hardwired(),
    ),
)

CONVENTIONS: dict[str, EngineConvention] = {one.name: one for one in _ALL}
