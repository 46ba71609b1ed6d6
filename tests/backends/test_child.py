"""A server ends with the process that started it, and a killed server leaves no process behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

# A server that starts an engine process and writes its pid to a file.
SERVER = """
import subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(engine.pid))
time.sleep(600)
"""
# A process that starts the server and prints the server's pid.
STARTER = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "reprieve.backends.child", str(os.getpid()), *sys.argv[1:]]
print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def gone(pid):
    """Wait up to 20 seconds for a process to end, and return whether it did."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks at Linux's processes")
@pytest.mark.parametrize("killed", ["starter", "server"])
def test_killing_the_starter_or_the_server_ends_server_and_engine(tmp_path, killed):
    (tmp_path / "a_server.py").write_text(SERVER)
    told = tmp_path / "engine"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, "a_server", str(told)], stdout=subprocess.PIPE, text=True, env=environment
    )
    server = int(starter.stdout.readline())
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine = int(told.read_text())
    os.kill(starter.pid if killed == "starter" else server, signal.SIGKILL)  # this process only
    assert gone(engine) and gone(server)
    starter.kill()
    starter.wait()
