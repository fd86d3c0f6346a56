"""The rules of the architecture, held by reading the sources: who may import whom, what a stage depends on, what a file
may say."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"bridges", "corpus", "capture", "targets", "engines", "drafts", "acceptance", "gates", "reporting"}
# Of the decoder a room may know the type, for its annotations alone.
TYPES_ANY_ROOM_MAY_NAME = {"stages.targets._decoder"}
HEAVY = {"torch", "transformers", "great_expectations", "pandas", "pyarrow", "safetensors", "gguf", "dvc"}
STAGE_GRAPH = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """`corpus` for stages.corpus.x, `` for an entry point, `flows` for flows.x."""
    parts = module.split(".")
    if parts[0] == "stages":
        return parts[1] if len(parts) > 1 and (ROOT / "stages" / parts[1]).is_dir() else ""
    return parts[0]


def _is_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def imports(path: Path, with_types: bool = True) -> frozenset[str]:
    """Modules a file imports, at any depth; without `with_types`, not those under TYPE_CHECKING."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and _is_type_checking(node) and not with_types:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import; write the whole name"
            found.add(node.module or "")
            found.update(f"{node.module}.{a.name}" for a in node.names if _file_of(f"{node.module}.{a.name}"))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return frozenset(found)


def _file_of(module: str) -> Path | None:
    """The first-party file of a module name."""
    base = ROOT / Path(*module.split("."))
    if module.split(".")[0] not in ("stages", "flows"):
        return None
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)


def first_party(path: Path, with_types: bool = True) -> set[str]:
    return {m for m in imports(path, with_types) if m.split(".")[0] in ("stages", "flows")}


def third_party(path: Path) -> set[str]:
    return {m.split(".")[0] for m in imports(path)} - {"stages", "flows"}


@pytest.mark.parametrize("path", sources("stages"), ids=name_of)
def test_a_room_imports_contracts_and_itself_only(path: Path) -> None:
    room = room_of(name_of(path))
    if not room:
        return
    allowed = {room, "contracts"} if room != "contracts" else {"contracts"}
    strangers = {m for m in first_party(path, with_types=False) if room_of(m) not in allowed and m != "stages"}
    strangers |= {
        m
        for m in first_party(path) - first_party(path, with_types=False)
        if room_of(m) not in allowed and not any(m.startswith(t) for t in TYPES_ANY_ROOM_MAY_NAME)
    }
    assert not strangers, f"{name_of(path)} imports {sorted(strangers)}; entry points wire rooms together"


@pytest.mark.parametrize("path", sources("stages/contracts"), ids=name_of)
def test_contracts_stand_on_no_heavy_library(path: Path) -> None:
    assert not third_party(path) & (HEAVY | {"prefect"})


@pytest.mark.parametrize("path", sources("flows"), ids=name_of)
def test_flows_reach_stages_only_through_dvc(path: Path) -> None:
    assert not third_party(path) & HEAVY
    strangers = {m for m in first_party(path) if not m.startswith(("stages.contracts", "flows"))} - {"stages"}
    assert not strangers


@pytest.mark.parametrize("path", sources("stages"), ids=name_of)
def test_stages_know_nothing_of_the_orchestrator(path: Path) -> None:
    assert not third_party(path) & {"prefect", "dvc"}
    assert not {m for m in first_party(path) if m.startswith("flows")}


def entry_of(stage: str) -> Path:
    words = STAGE_GRAPH[stage]["cmd"].split()
    assert words[:2] == ["python", "-m"]
    path = _file_of(words[2])
    assert path is not None, f"{stage}: no file for {words[2]}"
    return path


@pytest.mark.parametrize("stage", STAGE_GRAPH)
def test_a_stage_depends_on_every_first_party_file_it_imports(stage: str) -> None:
    """Otherwise a change of code leaves old results standing."""
    deps = [ROOT / d for d in STAGE_GRAPH[stage]["deps"]]
    seen: set[Path] = set()
    waiting = [entry_of(stage)]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        waiting += [f for m in first_party(path, with_types=False) if (f := _file_of(m))]
    empty = {ROOT / "stages/__init__.py"} | {
        p for p in seen if p.name == "__init__.py" and not ast.parse(p.read_text()).body
    }
    missing = sorted(str(p.relative_to(ROOT)) for p in seen - empty if not any(p == d or d in p.parents for d in deps))
    assert not missing, f"{stage} in dvc.yaml lacks deps on {missing}"


@pytest.mark.parametrize("stage", STAGE_GRAPH)
def test_an_entry_point_has_the_one_shape(stage: str) -> None:
    text = entry_of(stage).read_text()
    tree = ast.parse(text)
    mains = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    assert mains and not mains[0].args.args, "def main() -> None, without arguments"
    assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    run(main)"
    assert "argparse" not in imports(entry_of(stage)), "a selector, never a knob"


def test_every_stage_is_reached_from_the_graph_and_no_output_has_two_makers() -> None:
    outs = [
        path
        for stage in STAGE_GRAPH.values()
        for kind in ("outs", "metrics", "plots")
        for out in stage.get(kind, [])
        for path in ([out] if isinstance(out, str) else out)
    ]
    assert len(set(outs)) == len(outs)
    for name, stage in STAGE_GRAPH.items():
        for dep in stage["deps"]:
            assert dep in outs or (ROOT / dep).exists(), f"{name} depends on {dep}, which nothing makes"


@pytest.mark.parametrize("path", sources("stages", "flows"), ids=name_of)
def test_no_broad_except_and_no_unpickling(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("everything", "Exception", "BaseException"), f"line {node.lineno} catches {caught}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
            told = {k.arg: ast.unparse(k.value) for k in node.keywords}
            # other tools' stores are torch.save files: read as data only, in one place
            data_only = ast.unparse(node.func) == "torch.load" and told.get("weights_only") == "True"
            if not (data_only and name_of(path) == "stages.bridges._open"):
                pytest.fail(f"line {node.lineno} unpickles; use safetensors")


def tracked() -> list[Path]:
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / p for p in told.split("\0") if p and (ROOT / p).is_file()]


_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|srv)/\w")
_REGISTRY = re.compile(
    "|".join(re.escape("".join(p)) for p in (("pypi", ".org"), ("pythonhosted", ".org"), ("docker", ".io"), ("ghcr", ".io"), ("quay", ".io"), ("anaconda", ".org"), ("npmjs", ".org")))
)  # fmt: skip


def test_no_file_names_a_machines_path_or_a_registry() -> None:
    said = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if (_MACHINE.search(line) or _REGISTRY.search(line)) and path != Path(__file__):
                said.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not said


@pytest.mark.parametrize(
    "path", [ROOT / "params.yaml", *sorted((ROOT / "params").glob("*.yaml"))], ids=lambda p: p.stem
)
def test_every_knob_is_commented_on_its_line(path: Path) -> None:
    """With unit and range; a name and the entries of a list speak for themselves."""
    bare = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        knob = re.match(r"\s+(\w+): *\S", line)
        if knob and "#" not in line and knob[1] != "name":
            bare.append(f"{number}: {line.strip()}")
    assert not bare


def test_params_files_name_the_same_knobs() -> None:
    def knobs(value: object, at: str = "") -> set[str]:
        if isinstance(value, dict) and not at.endswith("min_domain_accept_length"):
            return {k for name, v in value.items() for k in knobs(v, f"{at}.{name}")}
        return {at}

    here = knobs(yaml.safe_load((ROOT / "params.yaml").read_text()))
    for path in (ROOT / "params").glob("*.yaml"):
        assert knobs(yaml.safe_load(path.read_text())) == here, path.name
