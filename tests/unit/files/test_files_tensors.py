"""Tensors are written whole or not at all, for everybody's eyes, and a refused write is the system's own error."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.leftovers import clear_leftovers
from eagle3.tensor_file import save_tensors


def test_it_replaces_what_was_there_and_others_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "below" / "model.safetensors"
    before = os.umask(0o027)
    try:
        for value in (1.0, 2.0):
            save_tensors(path, {"a": torch.full((3,), value)}, {"format": "pt"})
    finally:
        os.umask(before)
    assert load_file(path)["a"].tolist() == [2.0] * 3
    assert path.stat().st_mode & 0o777 == 0o640
    assert [found.name for found in path.parent.iterdir()] == [path.name]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from eagle3.tensor_file import save_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    save_tensors(Path(sys.argv[1]), {"a": torch.zeros(1000)})
except OSError as err:
    print(err.errno, err.filename)
"""


def test_a_refused_write_is_an_os_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"a": torch.ones(2)})
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EFBIG), str(path)]
    assert load_file(path)["a"].tolist() == [1.0, 1.0]
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


KILLED = """
import sys, torch, safetensors.torch
from pathlib import Path
from eagle3.tensor_file import save_tensors
save_tensors(Path(sys.argv[1]), {"a": torch.zeros(200_000_000, dtype=torch.uint8)})
print("written", flush=True)
"""


def test_a_killed_write_leaves_nothing_that_is_not_cleared(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any(tmp_path.iterdir()) and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    said, _ = child.communicate()
    assert said == "" and not path.exists() and any(tmp_path.iterdir())
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_library_stays_its_own(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="share memory"):
        shared = torch.zeros(4)
        save_tensors(tmp_path / "x", {"a": shared, "b": shared})
    assert list(tmp_path.iterdir()) == []
