"""Nothing that a foreign file holds is run, no code of a model is run unasked, and no server listens to all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.config import CaptureConfig
from eagle3.config import TargetConfig
from eval.engines.server_config import ServerConfig

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("eagle3", "data_prep", "train", "eval", "scripts", "benchmarks")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "pandas"}
FORBIDDEN = {
    "eval": "runs a text",
    "exec": "runs a text",
    "os.system": "starts a shell",
    "os.popen": "starts a shell",
    "yaml.load": "builds objects; yaml.safe_load does not",
    "yaml.unsafe_load": "builds objects; yaml.safe_load does not",
    "pd.read_pickle": "unpickles",
    "shutil.unpack_archive": "writes where the archive says",
    "tarfile.open": "an archive's names may lead anywhere",
}
ARGUMENTS = {
    "shell": "starts a shell",
    "allow_pickle": "unpickles",
    "trust_remote_code": "runs a model's code unasked",
}


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Line and reason of each call or import that the product may not have."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, f"imports {name}") for name in names if name.split(".")[0] in PICKLES)
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, why) for why in call_faults(node))
        elif isinstance(node, ast.FunctionDef):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            arguments = [*node.args.args[len(node.args.args) - len(node.args.defaults) :], *node.args.kwonlyargs]
            for argument, default in zip(arguments, defaults, strict=True):
                if argument.arg == "trust_remote_code" and default is not None and ast.unparse(default) != "False":
                    yield node.lineno, "trusts a model's code by default"


def call_faults(node: ast.Call) -> Iterator[str]:
    """Why a call may not stand here."""
    name = ast.unparse(node.func)
    given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
    if name in FORBIDDEN:
        yield f"{name} {FORBIDDEN[name]}"
    if name.endswith("torch.load") and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True runs code"
    for argument, why in ARGUMENTS.items():
        if given.get(argument) == "True":
            yield f"{argument}=True {why}"
    if name.endswith("from_pretrained") and "Tokenizer" in name and "trust_remote_code" not in given:
        yield "a tokenizer is loaded without saying whether its code is trusted"
    if any(isinstance(word, ast.Constant) and word.value == "--trust-remote-code" for word in node.args) and not (
        name.endswith("add_argument") or name.endswith("append")
    ):
        yield "--trust-remote-code is given unasked"


def test_no_file_of_the_product_runs_what_it_reads() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, why in faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "yaml.load(text)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(path)",
        "def load(path, trust_remote_code=True): ...",
        "def load(path, *, trust_remote_code=True): ...",
    ],
)
def test_each_rule_finds_its_line(line: str) -> None:
    assert [number for number, _ in faults(f"\n{line}\n")] == [2]


def test_code_of_a_model_is_not_trusted_and_servers_hear_this_machine_alone_unless_set() -> None:
    assert TargetConfig().trust_remote_code is False
    assert ServerConfig().host == "127.0.0.1"
    assert not CaptureConfig().sglang.extra_args


def test_presets_trust_no_code_and_open_no_server() -> None:
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        assert "0.0.0.0" not in text and "host: ::" not in text, path
        assert "trust_remote_code: true" not in text, path


def test_ruff_keeps_the_rules_too() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    selected = text.partition("[tool.ruff.lint]")[2].partition("]")[0]
    assert '"S"' in selected
    for rule in ("S301", "S302", "S307", "S501", "S506", "S602", "S604", "S605", "S614"):
        assert rule not in text.partition('"tests/**"')[0].replace("(S602, S604, S605)", "")
