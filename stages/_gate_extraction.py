"""What gate-extraction judges, gathered."""

from __future__ import annotations

from pathlib import Path

from stages._gate_files import Gathered, PreparedFrames, damaged
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED, PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import Params
from stages.contracts.quality import ACCEPTED_DATASET, PREPARED_QUALITY, AcceptedDataset, PreparedQuality, earlier_than
from stages.corpus.rendering import Renderer
from stages.gates import extraction
from stages.targets import identify_target, locate_target


def gather_extraction(params: Params) -> Gathered:
    """Prepared rows and their files."""
    import pandas as pd

    manifest = PreparedManifest.read(PREPARED_MANIFEST)
    quality = PreparedQuality.read(PREPARED_QUALITY)
    folder = locate_target(params.target.origin)
    renderer = Renderer(folder, params.prepare.rendering)
    evidence = extraction.Evidence(
        manifest=manifest,
        rows=PreparedFrames(manifest),
        files=pd.DataFrame(
            [
                {
                    "file": str(path),
                    "recorded": recorded,
                    "found": file_digest(path) if path.exists() else "no such file",
                }
                for path, recorded in [
                    *((PREPARED / s.name / "rows.parquet", s.rows_digest) for s in manifest.sources),
                    (PREPARED / "out_of_distribution.parquet", manifest.out_of_distribution_digest),
                    (PREPARED / "rejects.parquet", manifest.rejects_digest),
                ]
            ]
        ),
        target=identify_target(folder, params.target.name),
        template_prefix=renderer.opening(),
        bos_id=renderer.bos_id,
        quality=quality,
        earlier=earlier_than(quality, accepted_dataset()),
    )
    try:
        tables = extraction.tables(evidence, params)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        other = evidence.files[evidence.files["recorded"] != evidence.files["found"]]
        if other.empty:  # then it is no damage
            raise
        name, recorded, found = other.iloc[0][["file", "recorded", "found"]]
        raise damaged(Path(name), recorded, found) from error
    return "prepared rows", manifest.digest(), tables


def accepted_dataset() -> AcceptedDataset | None:
    """The rows that gate-extraction let pass last."""
    return AcceptedDataset.read(ACCEPTED_DATASET) if ACCEPTED_DATASET.exists() else None
