"""Miniature SGLang packages for tests: written for them, with the shapes of code that the reader knows.

The model files are runnable: plain torch, layers whose norms add into the residual in place.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

ALWAYS = "self.model.layers_to_capture = [k + 1 for k in ids]"
FIRST = (
    "if ids and ids[0] == 1:\n                self.model.layers_to_capture = [k + 1 for k in ids]\n"
    "            else:\n                self.model.layers_to_capture = list(ids)"
)

_HEAD = '''
class Group:
    is_first_rank = True
    is_last_rank = True


class Collector:
    """Sized when made, like a packed buffer: refuses any other number of states."""

    def __init__(self, room):
        self.room, self.states = room, []

    def append(self, state):
        self.states.append(state.clone())

    def __len__(self):
        return len(self.states)

    def finalize(self):
        if len(self.states) != self.room:
            raise RuntimeError(f"captured {len(self.states)} of {self.room}")
        return self.states


class Layer:
    """x -> 2x + 1 on the residual stream; adds into the residual's storage in place."""

    def __call__(self, hidden, residual, out=None):
        if residual is None:
            residual = hidden
        else:
            residual.add_(hidden)
        if out is not None:
            out.append(residual.clone())
        return residual + 1, residual
'''

_MODEL = """

class DeepseekV2Model:
    def __init__(self, num_layers):
        self.pp_group = Group()
        self.layers = [Layer() for _ in range(num_layers)]
        self.layers_to_capture = []
        self.first_k_dense_replace = 1

    def embed_tokens(self, ids):
        return ids.clone()

    def forward(self, ids, embeds=None):
        if self.pp_group.is_first_rank:
            if embeds is None:
                hidden = self.embed_tokens(ids)
            else:
                hidden = embeds
        residual = None
{loop}
        last = hidden + residual
        if len(aux) == 0:
            return last
        return last, {done}


class DeepseekV2ForCausalLM:
    def __init__(self, config):
        self.pp_group = Group()
        self.config = config
        self.model = DeepseekV2Model(config.num_hidden_layers)
        self.capture_aux_hidden_states = False

    def get_embed_and_head(self):
        return "embed", "head"

    def set_embed_and_head(self, embed, head):
        self.both = (embed, head)

    def set_eagle3_layers_to_capture(self, ids=None):
        if not self.pp_group.is_last_rank:
            return

        if ids is None:
            self.capture_aux_hidden_states = True
            count = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, count // 2, count - 3]
        else:
            self.capture_aux_hidden_states = True
            {rule}


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass


class HeirModel(DeepseekV2Model):
    def __init__(self, num_layers):
        self.pp_group = Group()
        self.layers = [Layer() for _ in range(num_layers)]
        self.layers_to_capture = []


EntryClass = [DeepseekV2ForCausalLM, DeepseekV3ForCausalLM]
"""

_LOOPS = {
    "adds": """        aux = []
        for k in range(len(self.layers)):
            if k in self.layers_to_capture:
                aux.append(hidden + residual)
            hidden, residual = self.layers[k](hidden, residual)""",
    "guarded": """        aux = []
        for k in range(len(self.layers)):
            if k in self.layers_to_capture:
                aux.append(hidden + residual if residual is not None else hidden)
            hidden, residual = self.layers[k](hidden, residual)""",
    "boundary": """        aux = []
        for k in range(len(self.layers)):
            hidden, residual = self.layers[k](
                hidden,
                residual,
                out=aux
                if k in self.layers_to_capture
                else None,
            )""",
    "packer": """        aux = Collector(len(self.layers_to_capture))
        for k in range(len(self.layers)):
            hidden, residual = self.layers[k](
                hidden, residual, out=(aux if k in self.layers_to_capture else None)
            )""",
}

_WRAPPER = """from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM as Language


class KimiK25ForConditionalGeneration:
    def __init__(self, config):
        self.language_model = None
        if config:
            self.language_model = Language(config)
{setter}

EntryClass = [KimiK25ForConditionalGeneration]
"""

_WRAPPER_SETTER = '''
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        """Hands the ids on."""
        self.language_model.set_eagle3_layers_to_capture(layer_ids)

    def get_embed_and_head(self):
        return self.language_model.get_embed_and_head()

    def set_embed_and_head(self, embed, head):
        self.language_model.set_embed_and_head(embed, head)
'''

_LATE_RUNNER = """class ModelRunner:
    def initialize(self):
        self.log = ["memory"]
        if self.device == "cuda":
            self.init_device_graphs()
        else:
            self.graphs = None

        if self.eagle_use_aux_hidden_state:
            self.model.set_eagle3_layers_to_capture(
                self.ids
            )

        self.log.append("done")

    def init_device_graphs(self):
        GraphRunner(self)

    def warm(self):
        if self.eagle_use_aux_hidden_state:
            self.model.set_eagle3_layers_to_capture()
"""

_EARLY_RUNNER = """class ModelRunner:
    def initialize(self):
        self.configure()
        self.init_device_graphs()

    def configure(self):
        if self.eagle_use_aux_hidden_state:
            self.model.set_eagle3_layers_to_capture(self.ids)
"""

_LATE_GRAPHS = """class GraphRunner:
    def __init__(self, model_runner):
        self.model_runner = model_runner
        if model_runner.eagle_use_aux_hidden_state:
            self.model_runner.model.set_eagle3_layers_to_capture()
        model_runner.captured = list(model_runner.model.model.layers_to_capture)
"""


def deepseek_source(rule: str = ALWAYS, loop: str = "adds") -> str:
    """A DeepSeek-like model file."""
    done = "aux.finalize()" if loop == "packer" else "aux"
    return _HEAD + _MODEL.format(rule=rule, loop=_LOOPS[loop], done=done)


def mini_tree(
    where: Path,
    *,
    rule: str = ALWAYS,
    loop: str = "adds",
    version: str = "0.5.9",
    wrapper_setter: bool = True,
    graphs: str = "early",
) -> Path:
    """Write a package under `where/sglang`; `graphs` is `late`, `early` or `` (no runners)."""
    root = where / "sglang"
    (root / "srt" / "models").mkdir(parents=True)
    models = root / "srt" / "models"
    (root / "version.py").write_text(f'__version__ = "{version}"\n')
    (models / "deepseek_v2.py").write_text(deepseek_source(rule, loop))
    (models / "kimi_k25.py").write_text(_WRAPPER.format(setter=_WRAPPER_SETTER if wrapper_setter else ""))
    llama = deepseek_source(ALWAYS, "boundary").replace("DeepseekV3ForCausalLM", "LlamaForCausalLM")
    (models / "llama.py").write_text(llama.replace("DeepseekV2", "MiniLlama"))
    if graphs:
        runners = root / "srt" / "model_executor"
        runners.mkdir()
        (runners / "model_runner.py").write_text(_LATE_RUNNER if graphs == "late" else _EARLY_RUNNER)
        if graphs == "late":
            (runners / "cuda_graph_runner.py").write_text(_LATE_GRAPHS)
    return root


def model_file(root: Path) -> Path:
    """The DeepSeek file of a miniature."""
    return root / "srt" / "models" / "deepseek_v2.py"


def load(path: Path) -> ModuleType:
    """Import a file of a miniature by itself."""
    spec = importlib.util.spec_from_file_location(f"mini_{abs(hash(str(path)))}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def states(path: Path, ids: list[int] | None, num_layers: int = 8) -> list[float]:
    """What the model file captures for `ids` on the input 1.0: layer k's input is 2^(k+1) - 1."""
    model = load(path).DeepseekV3ForCausalLM(SimpleNamespace(num_hidden_layers=num_layers))
    model.set_eagle3_layers_to_capture(ids)
    answer = model.model.forward(torch.ones(1))
    return [float(one) for one in answer[1]] if isinstance(answer, tuple) else []


def entering(*layers: int) -> list[float]:
    """What enters these layers, for the input 1.0."""
    return [2.0 ** (k + 1) - 1 for k in layers]
