"""The container files, as far as they can be judged without a container engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_the_services_a_flow_needs_are_there_and_wait_for_what_they_stand_on() -> None:
    assert set(SERVICES) == {"database", "server", "deploy", "worker", "storage", "sglang"}
    assert SERVICES["server"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    assert SERVICES["deploy"]["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert SERVICES["worker"]["depends_on"] == {"deploy": {"condition": "service_completed_successfully"}}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_unprivileged_and_on_the_loopback(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].partition(":")
    assert tag and tag != "latest" and "." not in image.split("/")[0], "a plain image name with a version"
    assert service["user"] not in ("root", "0", "0:0")
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert name == "deploy" or service["healthcheck"]["test"]


@pytest.mark.parametrize("name", SERVICES)
def test_no_secret_stands_in_the_file_and_a_missing_one_stops_the_start(name: str) -> None:
    for key, value in SERVICES[name].get("environment", {}).items():
        if re.search("PASSWORD|SECRET|KEY_ID|CONNECTION_URL", key):
            assert re.search(r"\$\{\w+:\?", value), key


def test_every_variable_asked_for_is_in_the_example_and_the_real_file_is_ignored() -> None:
    asked = set(re.findall(r"\$\{(\w+)", (ROOT / "docker/compose.yaml").read_text()))
    assert asked == set(re.findall(r"^(\w+)=", (ROOT / "docker/env.example").read_text(), re.M))
    assert "/docker/.env" in (ROOT / ".gitignore").read_text().split()


def test_the_worker_and_the_deploy_step_stand_in_one_folder_and_on_the_pool_of_prefect_yaml() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {d["work_pool"]["name"] for d in deployments} == {"draftline"}
    for name in ("deploy", "worker"):
        assert SERVICES[name]["volumes"] == ["..:/line"] and SERVICES[name]["working_dir"] == "/line"
        assert "draftline" in str(SERVICES[name]["command"])


@pytest.mark.parametrize("path", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda p: p.stem)
def test_an_image_is_pinned_and_does_not_run_as_root(path: Path) -> None:
    text = path.read_text()
    args = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.M))
    base = re.sub(r"\$\{(\w+)\}", lambda m: args[m[1]], re.findall(r"^FROM (\S+)", text, re.M)[0])
    assert re.search(r":v?\d+\.\d+", base)
    assert re.findall(r"^USER (\S+)", text, re.M)[-1] == "10001" and "useradd --uid 10001" in text


def test_deployments_name_flows_that_exist() -> None:
    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        file, _, function = deployment["entrypoint"].partition(":")
        assert f"def {function}(" in (ROOT / file).read_text()
