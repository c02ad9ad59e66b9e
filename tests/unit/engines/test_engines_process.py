"""A started server leaves nothing behind, whatever ends its owner, and says why it does not come up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eagle3.errors import RedraftError
from eval.engines.process import free_port, last_words, server_process
from eval.engines.sglang import SGLangEngine

FAKE = Path(__file__).with_name("fake_sglang.py")

OWNER = """
import signal, sys, time
from pathlib import Path
from eval.engines import process
process.GRACE_S = 1.0
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started all this in the background
port = process.free_port("127.0.0.1")
url = f"http://127.0.0.1:{port}"
command = [sys.executable, sys.argv[1], "--host", "127.0.0.1", "--port", str(port), "--children", sys.argv[2]]
with process.server_process("stand-in", command, url, Path(sys.argv[2] + ".log")) as server:
    server.wait_ready("/health", 60)
    print("ready", server.pid, flush=True)
    time.sleep(3600)
"""


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return true()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_owner(tmp_path: Path, how: signal.Signals) -> None:
    pids_file = tmp_path / "pids"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(FAKE), str(pids_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith(b"ready")
    pids = [int(word) for word in pids_file.read_text().split()]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)  # the server, a stubborn child, one in its own session
    owner.send_signal(how)
    owner.wait(30)
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_ctrl_c_at_the_terminal_reaches_the_owner_alone(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [sys.executable, str(FAKE), "--host", "127.0.0.1", "--port", str(port)]
    with server_process("stand-in", command, f"http://127.0.0.1:{port}", tmp_path / "log") as server:
        server.wait_ready("/health", 60.0)
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert server.died() == ""
    assert server.died() != ""


def test_an_exception_inside_stops_the_server(make_engine: Callable[..., SGLangEngine], tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(ZeroDivisionError), make_engine("--children", str(pids)).serve(None):
        _ = 1 / 0
    assert not any(alive(int(word)) for word in pids.read_text().split())


def test_a_server_that_dies_at_start_is_told_with_its_last_error(make_engine: Callable[..., SGLangEngine]) -> None:
    with pytest.raises(RedraftError) as caught, make_engine("--fault", "dies_at_start").serve(None):
        pass
    line = str(caught.value)
    assert "did not start" in line and "RuntimeError: not enough memory on device 0" in line
    assert "sglang-plain.log" in line and "\n" not in line


def test_a_server_that_never_answers_is_given_up(make_engine: Callable[..., SGLangEngine]) -> None:
    engine = make_engine("--fault", "never_ready", start_timeout_s=1.0)
    with pytest.raises(RedraftError, match=r"did not become ready.*no answer in 1 s"), engine.serve(None):
        pass


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    gone = str(tmp_path / "no_such_program")
    with (
        pytest.raises(RedraftError, match=r"cannot start .*no_such_program: No such file"),
        server_process("stand-in", [gone], "http://127.0.0.1:9", tmp_path / "log") as server,
    ):
        server.wait_ready("/health", 60.0)


def test_last_words_prefers_exceptions_to_loud_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("python --error\nloading\n[10:00 TP0] ValueError: bad ids\nerror: stopping\nbye\n")
    assert last_words(log) == "its log says: [10:00 TP0] ValueError: bad ids"
    log.write_text("python --error\nloading\nfatal: no device\nbye\n")
    assert last_words(log).endswith("fatal: no device")
    log.write_text("python --error\n")
    assert last_words(log) == "its log is empty"
    assert "no log" in last_words(tmp_path / "none")


def test_an_address_that_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"cannot listen.*192\.0\.2\.1"):
        free_port("192.0.2.1")
