"""What gate-extraction judges, gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages._gate_files import Gathered, damaged, prepared_rows
from stages.contracts.files import file_digest
from stages.contracts.manifest import PREPARED, PREPARED_MANIFEST, PreparedManifest
from stages.contracts.params import Params
from stages.gates import extraction
from stages.targets import identify_target, locate_target


def gather_extraction(params: Params) -> Gathered:
    """Prepared rows and their files."""
    import pandas as pd

    manifest = PreparedManifest.read(PREPARED_MANIFEST)
    folder = locate_target(params.target.origin)
    prefix, bos = template_opening(folder)
    evidence = extraction.Evidence(
        manifest=manifest,
        rows=prepared_rows(manifest),
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
        template_prefix=prefix,
        bos_id=bos,
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


def template_opening(folder: Path) -> tuple[tuple[int, ...], int | None]:
    """The ids that every conversation opens with, whatever it says, and the BOS id."""
    from jinja2.exceptions import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "Zero."}
    openings: list[list[int]] = []
    for messages in ([user], [{"role": "user", "content": "Why?"}], [system, user]):
        try:
            openings.append(tokenizer.apply_chat_template(messages, return_dict=False))
        except TemplateError:  # a template without a system role says so in this way
            continue
    common = 0
    while all(len(o) > common for o in openings) and len({o[common] for o in openings}) == 1:
        common += 1
    return tuple(openings[0][:common]), tokenizer.bos_token_id
