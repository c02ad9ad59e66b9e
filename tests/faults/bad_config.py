"""Bad configurations: wrong keys, types, values and contradictions on the command line or in a preset's file."""

from __future__ import annotations

from collections.abc import Callable

from bad_bench import front_door_line, settled_line, shared
from planted_bench import Bench, Fault

STAGE = "configuration"
Row = tuple[str, tuple[str, ...], tuple[str, ...]]  # what is wrong, settings, words of the line


def plan_line(*settings: str) -> str:
    """`stages=[plan]` of a preset: composes and checks all, touches nothing."""
    return front_door_line("conf=smollm2", "stages=[plan]", *settings)


def _given(settings: tuple[str, ...]) -> Callable[[Bench, bool], str]:
    return shared("plan", lambda _bench: plan_line(*settings), lambda _bench: plan_line())


def _valued(settings: tuple[str, ...]) -> Callable[[Bench, bool], str]:
    """Settings whose types are right: Hydra has taken them, and the front door checks them."""
    preset = ("conf=smollm2", "stages=[plan]")
    return shared("plan", lambda _bench: settled_line(preset, *settings), lambda _bench: plan_line())


def _preset(content: bytes) -> Callable[[Bench, bool], str]:
    """A configuration file of the user's own: that of a run folder, edited by hand."""

    def bad(bench: Bench) -> str:
        folder = bench.folder("conf")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_bytes(content)
        return front_door_line("--config-name", "config", folder=folder)

    return shared("plan", bad, lambda _bench: plan_line())


def _run_dir_is_a_file(bench: Bench, planted: bool) -> str:
    place = bench.folder("run")
    place.parent.mkdir(parents=True)
    if planted:
        place.write_text("a file", encoding="utf-8")
        return front_door_line("conf=tiny_kimi", *bench.settings(place), "stages=[prepare]")
    return bench.once("plan", plan_line)


GIVEN: list[Row] = [
    ("a key that is none", ("train.lrr=1e-3",), ("train.lrr", "--cfg job")),
    ("... forced in with ++", ("++train.lrr=1e-3",), ("train.lrr", "no such setting")),
    ("a section that is none, forced in", ("++trian.lr=1e-3",), ("[trian]", "no such setting")),
    ("a flag that is none", ("--resume",), ("--resume", "--help")),
    ("a setting without a value", ("train.lr",), ("[train.lr]", "KEY=VALUE")),
    ("a list left open", ("stages=[train",), ("stages=[train", "KEY=[A,B]")),
    ("a preset that is none", ("+size=huge",), ("size/huge", "mini")),
    ("a word for a number", ("train.lr=fast",), ("[train.lr]", "'fast'")),
    ("a fraction for a count", ("train.epochs=1.5",), ("[train.epochs]", "1.5")),
    ("one value for a list", ("data.sources=chats.jsonl",), ("[data.sources]", "list")),
    ("null for a section", ("train=null",), ("[train]", "not Optional")),
    ("a value that must be given, left open", ("target.path=???",), ("[target.path]", "missing")),
    ("a reference to nothing", ("paths.store=${scratch}/store",), ("[paths.store]", "scratch")),
    ("a stage that is none", ("stages=[prepare,fly]",), ("[stages]", "'fly'", "regenerate")),
    ("no stage", ("stages=[]",), ("[stages]", "at least one")),
]
VALUES: list[Row] = [
    ("an infinite learning rate", ("train.lr=inf",), ("[train.lr]", "inf", "finite")),
    ("a number past all counting", ("train.max_steps=99999999999999999999",), ("[train.max_steps]", "2^53")),
    ("momentum of 1", ("train.betas=[0.9,1.0]",), ("[train.betas]", "[0, 1)")),
    ("an empty path to the target", ("target.path=''",), ("[target.path]", "a text")),
    ("an unknown device", ("capture.device=gpu",), ("[capture.device]", "cuda:N")),
    ("a port that does not exist", ("regenerate.url=http://gpu7:99999",), ("[regenerate.url]", "http://host:port")),
    ("a server without http", ("eval.server.url=gpu7:30000",), ("[eval.server.url]", "http://host:port")),
    ("a key in place of its variable's name", ("regenerate.api_key_env=sk-1",), ("api_key_env", "(not shown)", "NAME")),
    ("a password in the store's URL", ("paths.store=s3://me:secret@bucket/x",), ("[paths.store]", "password")),
    ("a file system that is none", ("paths.store=gopher://x",), ("gopher", "local path")),
    ("a disk budget without a unit", ("disk_budget=200",), ("[disk_budget]", "2TB")),
    ("a draft with more words than its target", ("draft.vocab_size=64000",), ("[draft.vocab_size]", "49152")),
    ("a batch that the processes cannot share", ("train.processes=3",), ("[train.global_batch_size]", "multiple")),
    ("batches on the local engine", ("eval.batch_sizes=[1,4]",), ("[eval.batch_sizes]", "local engine")),
    ("quotas that sum to 1.2", ("++select.quotas_domain={a: 0.6, b: 0.6}",), ("quotas_domain", "sum 1.2")),
    (
        "two sources of one name",
        ("select.sources=[{path: a.jsonl, name: a}, {path: b.jsonl, name: a}]",),
        ("[select.sources]", "one name a source"),
    ),
    ("a latent size with grouped heads", ("draft.kv_lora_rank=64",), ("[draft.kv_lora_rank]", "draft.kind=llama")),
    ("step weights of another number", ("train.step_weights=[1,1]",), ("[train.step_weights]", "numbers")),
    (
        "thinking asked for twice",
        ("regenerate.thinking=true", "++regenerate.template_kwargs.thinking=false"),
        ("regenerate.template_kwargs.thinking", "regenerate.thinking sets it"),
    ),
]
PRESETS: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("a run's config.yaml that is not YAML", b"name: [demo\n", ("config.yaml", "not YAML", "line 2")),
    ("a run's config.yaml that is not UTF-8", b"name: caf\xe9\n", ("UTF-8", "conf]")),
    ("... that is a list", b"- name\n", ("config", "ListConfig")),
    ("... with a key twice", b"name: a\nname: b\n", ("duplicate key name", "line 2")),
    ("... that asks for a Python call", b"name: !!python/object/apply:os.getcwd []\n", ("config.yaml", "python")),
]
FAULTS = [
    *(Fault(name, STAGE, _given(settings), words) for name, settings, words in GIVEN),
    *(Fault(name, STAGE, _valued(settings), words) for name, settings, words in VALUES),
    *(Fault(name, STAGE, _preset(content), words) for name, content, words in PRESETS),
    Fault("a run folder that is a file", "before the first stage", _run_dir_is_a_file, ("run_dir", "cannot write")),
]
