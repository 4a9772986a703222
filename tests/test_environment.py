"""What `scripts/test.sh` and `report.sh` find on a machine: a Python, the right extra; and what they say if not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("bash", "cat", "dirname", "head", "ls", "uname")
REPORTS_310 = "#!/usr/bin/env bash\nexit 1\n"


@pytest.fixture
def machine(tmp_path):
    """A machine with nothing but a few tools; `add` puts a program on its PATH, `run` a snippet after `_env.sh`."""

    class Machine:
        bin, home = tmp_path / "bin", tmp_path / "home"

        def add(self, path, script):
            path = self.bin / path if isinstance(path, str) else path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(script)
            path.chmod(0o755)

        def link(self, path):
            """This Python, under another name: an environment's executable would not find its library."""
            self.add(path, f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')

        def run(self, command, **environment):
            found = {"PATH": str(self.bin), "HOME": str(self.home)} | environment
            done = subprocess.run(
                [str(self.bin / "bash"), "-c", command],
                cwd=ROOT,
                env=found,
                capture_output=True,
                text=True,
                check=False,
            )
            return done.returncode, done.stdout.strip(), done.stderr.strip()

        def source(self, snippet, **environment):
            return self.run(f"set -uo pipefail; source scripts/_env.sh; {snippet}", **environment)

    made = Machine()
    made.bin.mkdir()
    made.home.mkdir()
    for tool in TOOLS:
        found = next(Path(d) / tool for d in os.environ["PATH"].split(":") if (Path(d) / tool).exists())
        (made.bin / tool).symlink_to(found)
    (made.bin / "env").symlink_to("/usr/bin/env")
    return made


# ---------------------------------------------------------------- the device
@pytest.mark.parametrize(
    ("driver", "device"),
    [("595.58.03", "cuda13"), ("580.159.04", "cuda13"), ("579.99", "cuda12"), ("525.60.13", "cuda12"), ("", "cpu")],
)
def test_the_driver_decides_the_extra(machine, driver, device):
    machine.add("nvidia-smi", f"#!/usr/bin/env bash\necho '{driver}'\necho '{driver}'\n")  # two GPUs
    assert machine.source("find_device") == (0, device, "")


def test_no_driver_is_the_cpu(machine):
    assert machine.source("find_device") == (0, "cpu", "")
    machine.add("nvidia-smi", "#!/usr/bin/env bash\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert machine.source("find_device") == (0, "cpu", "")


def test_a_driver_that_is_too_old_is_said(machine):
    machine.add("nvidia-smi", "#!/usr/bin/env bash\necho 470.82\n")
    message = "jaxattn: the GPU driver 470.82 is older than 525, which CUDA 12 needs; using the CPU"
    assert machine.source("find_device") == (0, "cpu", message)


# ---------------------------------------------------------------- the Python
def test_a_python_on_path_comes_first(machine):
    machine.add("python3.13", REPORTS_310)
    machine.link("python3")
    machine.link(machine.home / ".pyenv/versions/3.12.1/bin/python3")
    assert machine.source("find_python") == (0, str(machine.bin / "python3"), "")


@pytest.mark.parametrize(
    ("where", "environment"),
    [
        (".pyenv/versions/3.12.1/bin/python3", {}),
        ("elsewhere/versions/3.13.0/bin/python3", {"PYENV_ROOT": "elsewhere"}),
        (".local/share/uv/python/cpython-3.12.4-linux-x86_64-gnu/bin/python3", {}),
        ("uv/cpython-3.14.0-linux-x86_64-gnu/bin/python3", {"UV_PYTHON_INSTALL_DIR": "uv"}),
    ],
)
def test_pythons_of_pyenv_and_uv_are_found(machine, where, environment):
    machine.add("python3", REPORTS_310)  # the system's, too old
    machine.link(machine.home / where)
    environment = {name: str(machine.home / path) for name, path in environment.items()}
    assert machine.source("find_python", **environment) == (0, str(machine.home / where), "")


def test_uv_is_asked_where_its_pythons_are(machine):
    machine.link(machine.home / "hidden/python3")
    machine.add("uv", f"#!/usr/bin/env bash\n[ \"$1 $2\" = 'python find' ] && echo {machine.home}/hidden/python3\n")
    assert machine.source("find_python") == (0, str(machine.home / "hidden/python3"), "")


def test_no_python_is_said(machine):
    message = (
        "jaxattn: needs Python 3.12 or newer and found none on PATH, under pyenv or uv; install one (pyenv install "
        "3.12, or uv python install 3.12), or name one with --python PATH"
    )
    assert machine.source("find_python") == (3, "", message)
    machine.add("python3", REPORTS_310)
    assert machine.source("find_python") == (3, "", message)


def test_a_python_without_venv_is_said(machine):
    machine.add("python3", "#!/usr/bin/env bash\ncase $2 in *ensurepip*) exit 1 ;; esac\n")
    message = (
        f"jaxattn: {machine.bin}/python3 is recent enough but cannot make environments; install its venv module "
        "(Debian, Ubuntu: apt install python3-venv)"
    )
    assert machine.source("find_python") == (3, "", message)


# ---------------------------------------------------------------- the commands
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("test.sh --env nowhere", "--env must be default, newest-jax or cuda12, got nowhere"),
        ("test.sh --jobs 0", "--jobs must be a positive number, got 0"),
        ("test.sh --captures", "--captures needs a value; see scripts/test.sh --help"),
        ("test.sh --python python2", "--python must name a Python 3.12 or newer, got python2"),
        ("report.sh --python", "--python needs a value; see scripts/report.sh --help"),
    ],
)
def test_wrong_options_end_before_anything_is_installed(machine, command, message):
    assert machine.run(f"bash scripts/{command}") == (3, "", f"jaxattn: {message}")


@pytest.mark.parametrize("script", ["test.sh", "report.sh"])
def test_help_needs_no_environment(machine, script):
    status, out, errors = machine.run(f"bash scripts/{script} --help")
    assert (status, errors) == (0, "")
    assert out.startswith(f"usage: scripts/{script} ") and "--captures DIR" in out
