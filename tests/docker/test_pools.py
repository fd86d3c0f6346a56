"""The work pools' templates and the compose file, read by what will read them: Prefect's own workers, and the Compose specification."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

POOLS = ("docker", "kubernetes")


def template(repo_root: Path, kind: str) -> dict[str, Any]:
    return json.loads((repo_root / "docker/pools" / f"{kind}.json").read_text())


def configured(repo_root: Path, kind: str, **variables: Any) -> Any:
    """What the worker of this kind makes of the template and a deployment's job variables, as Prefect fills it in."""
    if kind == "docker":
        from prefect_docker.worker import DockerWorkerJobConfiguration as Configuration
    else:
        from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration as Configuration
    from prefect.utilities.templating import apply_values

    told = template(repo_root, kind)
    known = {name: v["default"] for name, v in told["variables"]["properties"].items() if "default" in v}
    return Configuration(**apply_values(told["job_configuration"], known | variables))


@pytest.mark.parametrize("kind", POOLS)
def test_every_place_of_a_template_has_a_variable_and_every_variable_a_place(repo_root: Path, kind: str) -> None:
    told = template(repo_root, kind)
    places = json.dumps(told["job_configuration"])
    variables = told["variables"]["properties"]
    assert all(f"{{{{ {name} }}}}" in places for name in variables)
    assert places.count("{{") == sum(places.count(f"{{{{ {name} }}}}") for name in variables)


def test_a_docker_run_is_no_root_and_has_the_clone_and_the_gpus(repo_root: Path) -> None:
    made = configured(repo_root, "docker", clone="/volumes/line")
    assert made.volumes == ["/volumes/line:/line"] and made.image == "draftline-pipeline:0.1.0"
    told = made.container_create_kwargs
    assert told["user"] == "10001:10001" and told["cap_drop"] == ["ALL"] and not made.privileged
    assert told["device_requests"][0]["Capabilities"] == [["gpu"]]
    without = configured(repo_root, "docker", device_requests=[])
    assert without.container_create_kwargs["device_requests"] == []


def test_docker_itself_takes_what_a_run_is_created_with(repo_root: Path) -> None:
    from docker.models.containers import _create_container_args

    told = configured(repo_root, "docker").container_create_kwargs
    made = _create_container_args(dict(told) | {"image": "x", "version": "1.44"})
    assert made["user"] == "10001:10001" and made["working_dir"] == "/line"
    host = made["host_config"]
    assert host["ShmSize"] == 8 * 2**30 and host["DeviceRequests"][0]["Count"] == -1


def test_a_kubernetes_run_is_no_root_and_has_the_clone_the_secret_and_the_gpus(repo_root: Path) -> None:
    made = configured(repo_root, "kubernetes", gpus="4", namespace="drafts")
    pod = made.job_manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container["envFrom"][0]["secretRef"] == {"name": "draftline", "optional": True}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "draftline-line"
    assert container["volumeMounts"][0] == {"name": "clone", "mountPath": "/line"}
    assert made.namespace == "drafts" and made.job_manifest["metadata"]["namespace"] == "drafts"


def test_a_kubernetes_job_without_gpus_asks_for_none(repo_root: Path) -> None:
    pod = configured(repo_root, "kubernetes", gpus="0").job_manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "0"


def _against_schema(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_compose_keeps_to_the_compose_specification(repo_root: Path, tmp_path: Path) -> None:
    told = _against_schema(repo_root / "docker/compose.yaml")
    assert told.returncode == 0, told.stdout
    broken = yaml.safe_load((repo_root / "docker/compose.yaml").read_text())
    broken["services"]["worker"]["stop_graceperiod"] = "2m"
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(broken))
    told = _against_schema(tmp_path / "compose.yaml")
    assert told.returncode != 0 and "stop_graceperiod" in told.stdout
