"""export_draft: models/draft in the files of another engine or tool. `python -m stages.export_draft FORMAT FOLDER`

FORMAT is vllm or speculators (0.5 and later). What stands in FOLDER is whole or absent, and was read back; its
draft_record.json says what it is: the same draft, exported for that tool, with that tool's layer ids.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from stages._served import read_recorded
from stages.capture.dialects import layer_ids, points_of
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord
from stages.contracts.errors import LineError, Refusal, run
from stages.contracts.files import file_digest, whole_folder
from stages.contracts.params import load_params
from stages.contracts.release import RELEASES
from stages.drafts.eagle3 import FORMATS, Verifier, write_as
from stages.targets import identify_target, load_target, locate_target, read_target_config


def choose(arguments: list[str]) -> tuple[str, Path]:
    """The two selectors on the command line.

    Raises:
        LineError: not two, or no such format.
        Refusal: something else than an earlier export stands at the folder: it would be replaced.
    """
    if len(arguments) != 2 or arguments[0] not in FORMATS:
        raise LineError(
            "Export the draft in which format, and where?",
            where="command line",
            expected=f"{' | '.join(sorted(FORMATS))}, then a folder",
            got=" ".join(arguments) or "nothing",
        )
    root = Path(arguments[1])
    kept = next((k for k in (DRAFT, RELEASES) if root.resolve().is_relative_to(k.resolve())), None)
    if kept or (root.exists() and not _replaceable(root)):
        raise Refusal(
            "Something else stands where the export is to go",
            where=str(root),
            expected=f"no folder, an empty one, or an earlier export ({DRAFT_RECORD} says for {' or '.join(sorted(FORMATS))})",
            got=f"a place in {kept}, whose bytes others go by" if kept else "files of another origin",
            do="name another folder",
        )
    return arguments[0], root


def _replaceable(root: Path) -> bool:
    """An empty folder or an earlier export; the line's own drafts, wherever they are, have such a record too."""
    if not root.is_dir() or not any(root.iterdir()):
        return root.is_dir()
    return (root / DRAFT_RECORD).exists() and DraftRecord.read(root / DRAFT_RECORD).exported_for in FORMATS


def read_own(record: DraftRecord, weights_digest: str) -> None:
    """Raises Refusal when models/draft is not as its record says, or is a draft of another target."""
    pairs = (
        ("its weights", record.weights_digest, file_digest(DRAFT / "model.safetensors"), "dvc repro train"),
        ("its config", record.config_digest, file_digest(DRAFT / "config.json"), "dvc repro train"),
        ("the target's weights", record.target.weights_digest, weights_digest, "dvc repro"),
    )
    for what, expected, got, do in pairs:
        if expected != got:
            raise Refusal(
                f"The draft's record is of other bytes: {what}", where=str(DRAFT), expected=expected, got=got, do=do
            )


def main() -> None:
    name, root = choose(sys.argv[1:])
    params, record = load_params(), DraftRecord.read(DRAFT / DRAFT_RECORD)
    torch.set_num_threads(params.target.threads)
    origin = locate_target(params.target.origin)
    read_own(record, identify_target(origin, params.target.name).weights_digest)
    target, draft, dialect = record.target, read_recorded(DRAFT), FORMATS[name].dialect
    ids = layer_ids(record.points, dialect, target.model_type, target.layers)
    assert points_of(ids, dialect, target.model_type, target.layers) == record.points
    verifier = Verifier(target.name, read_target_config(origin).get("architectures") or [])
    embedding = load_target(origin, "cpu", stored=True).embedding
    if root.is_dir() and not any(root.iterdir()):
        shutil.rmtree(root)
    with whole_folder(root) as aside:
        steps = params.serve.draft_steps
        write_as(name, draft, aside, ids, steps=steps, target=verifier, embedding=embedding)
        digests = {
            "weights_digest": file_digest(aside / "model.safetensors"),
            "config_digest": file_digest(aside / "config.json"),
        }
        told = record.model_copy(update={"exported_for": name, "layer_ids": ids, **digests})
        told.write(aside / DRAFT_RECORD)
    print(f"{root}: the draft for {name}, layer ids {list(ids)} for points {list(record.points)}; read back, all equal")


if __name__ == "__main__":
    run(main)
