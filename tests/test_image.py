"""The Dockerfile, beside what the work pools expect of its image; building it takes a container engine."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture
def work_pools() -> Path:
    (definition,) = ROOT.glob("docs/**/work-pools/docker.yaml")
    return definition.parent


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_work_pools_use_the_folders_of_the_image(kind: str, work_pools: Path) -> None:
    said = yaml.safe_load((work_pools / f"{kind}.yaml").read_text())
    [[step]] = [list(step.values()) for step in said["pull"]]
    assert re.findall(r"^WORKDIR (.*)$", DOCKERFILE, re.MULTILINE) == [step["directory"]]
    variables = said["definitions"]["variables"]
    assert re.findall(r"\bGRPO_STORAGE=(\S+)", DOCKERFILE) == [variables["env"]["GRPO_STORAGE"]]


def test_the_image_runs_as_the_user_that_a_pod_s_volumes_are_for(work_pools: Path) -> None:
    user, group = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[-1]
    template = json.loads((work_pools / "kubernetes-job.json").read_text())
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(group)}
    assert int(user) > 0, "a pod that must not run as root is refused"


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_the_image_installs_what_is_locked_for_its_hardware(hardware: str) -> None:
    (requirements,) = re.findall(r"--requirements (\S+)", DOCKERFILE)
    assert (ROOT / requirements.replace("$HARDWARE", hardware)).is_file()


def test_no_link_of_the_package_ends_in_a_folder_that_the_image_leaves_out() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    links = [Path(folder, name) for folder, names, _ in os.walk(ROOT / "flows") for name in names]
    targets = [link.resolve().relative_to(ROOT) for link in links if link.is_symlink()]
    assert targets
    for target in targets:
        parents = [str(target), *map(str, target.parents)]
        assert [rule for rule in left_out if fnmatch.filter(parents, rule)] == []
