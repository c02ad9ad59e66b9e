"""Parsers under a fuzzer that follows the code: `python tests/fuzz/atheris_parsers.py all -runs=20000`.

A parser's name instead of `all` runs that one, with any flag of libFuzzer (`-help=1` lists them); a file instead of
flags repeats one input. atheris is an extra of its own: `pip install -e .[fuzz]`, on Linux with Python 3.11 or newer.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fuzz"), str(ROOT / "tests" / "unit" / "targets")]

try:
    import atheris
except ImportError:
    print("atheris is not installed: pip install -e .[fuzz]; the hypothesis tests do without")
    sys.exit(0)

with atheris.instrument_imports(include=["eagle3", "data_prep", "eval"]):
    from data_prep.conversations import read_conversations
    from data_prep.regenerate.source import read_source
    from data_prep.store import StoreManifest
    from eagle3.errors import RedraftError
    from eagle3.gguf_weights import GGUFTensors, read_gguf_config
    from eagle3.safetensors_files import SafetensorsTensors, read_all
    from eagle3.shard_file import Shard
    from eval.prompts import read_prompt_set
    from eval.results import AcceptResult

Parser = Callable[[Path], object]


def _gguf(path: Path) -> None:
    files = GGUFTensors(path)
    read_gguf_config(files)
    for name in files.names:
        files.read(name)


def _tensors(path: Path) -> None:
    read_all(path)
    SafetensorsTensors(path.parent).fingerprint()


PARSERS: dict[str, tuple[str, Parser]] = {  # the name of the file that each reads
    "safetensors": ("model.safetensors", _tensors),
    "gguf": ("model.gguf", _gguf),
    "conversations": ("chats.jsonl", lambda path: list(read_conversations([str(path)]))),
    "source": ("chats.jsonl", lambda path: list(read_source(path))),
    "prompts": ("chat.jsonl", lambda path: read_prompt_set(path)),
    "benchmark": ("q.jsonl", lambda path: read_prompt_set(f"mtbench:{path}")),
    "sidecar": ("shard-0-00000.json", Shard.read),
    "manifest": ("manifest.json", lambda path: StoreManifest.read(path.parent)),
    "results": ("results.json", AcceptResult.load),
}


def seeds(name: str, folder: Path) -> None:
    """Sound inputs to begin with, so that the fuzzer need not find the formats first."""
    import json

    import test_fuzz_json as told
    import test_fuzz_records as records
    from safetensors.torch import save
    from test_fuzz_tensors import TENSORS
    from test_targets_gguf import write_gguf

    if name == "gguf":
        write_gguf(folder / "seed", tied=False)
        return
    sound = {
        "safetensors": save(TENSORS),
        "manifest": json.dumps(told.MANIFEST).encode(),
        "results": json.dumps(told.RESULTS).encode(),
        "benchmark": json.dumps(records.BENCHMARK).encode(),
    }
    (folder / "seed").write_bytes(sound.get(name, records.LINES))


def fuzz(name: str, flags: list[str]) -> None:
    """Run one parser; libFuzzer ends the process."""
    file, parse = PARSERS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    (folder / "corpus").mkdir()
    (folder / "in").mkdir()
    seeds(name, folder / "corpus")
    path = folder / "in" / file

    def one(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(RedraftError):
            parse(path)

    atheris.Setup([sys.argv[0], *flags, str(folder / "corpus")], one)
    atheris.Fuzz()


def main() -> int:
    """Entry point; not 0 where a parser raised something else than a RedraftError."""
    name, flags = (sys.argv[1:2] or ["all"])[0], sys.argv[2:]
    if name in PARSERS:
        fuzz(name, flags)
        return 0
    codes = {one: subprocess.call([sys.executable, __file__, one, *flags]) for one in PARSERS}
    failed = [one for one, code in codes.items() if code]
    print(f"{len(codes)} parsers, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
