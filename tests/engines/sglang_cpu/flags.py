"""What the real SGLang needs to run on a CPU, read from the preset that users take (conf/server/sglang_cpu.yaml)."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
_TEXT = (ROOT / "conf" / "server" / "sglang_cpu.yaml").read_text(encoding="utf-8")
_SERVER = yaml.safe_load(_TEXT.replace("${project_root:}", str(ROOT)))["server"]

PYTHON = Path(_SERVER["python"])
SGLANG_CPU_ARGS: list[str] = _SERVER["extra_args"]
SGLANG_CPU_ENV: dict[str, str] = _SERVER["env"]
