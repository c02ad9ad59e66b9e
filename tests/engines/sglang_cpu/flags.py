"""What the real SGLang 0.5.23 needs to run on a CPU with the stand-in kernels of `shim/`."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"

# Attention runs through the CPU backend's kernels (stood in for by shim/): torch's own backend cannot verify a draft.
# CUDA graphs do not exist here; the token pool is small because its pages are plain memory.
SGLANG_CPU_ARGS: list[str] = [
    "--device=cpu",
    "--prefill-attention-backend=intel_amx",
    "--decode-attention-backend=intel_amx",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--max-total-tokens=4096",
    "--max-running-requests=8",
    "--mem-fraction-static=0.2",
]
SGLANG_CPU_DRAFT_ARGS: list[str] = ["--speculative-draft-attention-backend=intel_amx"]

SGLANG_CPU_ENV: dict[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(HERE / "shim"),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the router takes longer than any test uses it
}
