"""Target and draft in whichever engine params.yaml names, for the stages that serve: one way of opening both kinds."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from stages import engines
from stages.capture.dialects import points_of
from stages.contracts.draft import DRAFT, DRAFT_RECORD, DraftRecord, read_draft_config
from stages.contracts.errors import EngineError
from stages.contracts.params import Params
from stages.contracts.points import name_points
from stages.drafts._audit import audit_for_target
from stages.drafts._decode import DraftDecoder
from stages.drafts.eagle3 import DraftCheckpoint, read_draft
from stages.engines.sglang import DraftFacts, Launch, demand_alike, serve
from stages.targets import load_target, locate_target
from stages.targets._decoder import Decoder, Linear

# (requests at once, tokens of the longest request, drafted tokens a verification) -> an engine that answers; a server's also
# takes the first of the GPUs it is to have
Open = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class Served:
    """The target read here, which judges what was served, the draft as files, and how to open the engine.

    sampled_steps: drafted tokens of the sampling check; one is enough, but a server may have been started with more.
    """

    engine: ModuleType
    version: str
    target: Decoder
    checkpoint: DraftCheckpoint
    open: Open
    sampled_steps: int = 1


def packed_linear(weight: Tensor) -> Linear:
    """A product in the layout that is fastest here."""
    linear = Linear(weight.contiguous())
    linear.pack()
    return linear


def read_recorded(folder: Path = DRAFT) -> DraftCheckpoint:
    """The draft in `folder`, to be served with the norms that it was trained with.

    Raises:
        DataError, EngineError: see `read_draft`; or config.json makes engines compute other norms than the draft's record says,
            which for norm_output no tensor's name would tell.
    """
    checkpoint, record = read_draft(folder), DraftRecord.read(folder / DRAFT_RECORD)
    if checkpoint.config.norms != record.norms:
        raise EngineError(
            "The draft would be run with other norms than it was trained with",
            where=f"{folder}/config.json",
            expected=f"{list(record.norms)}, as in the draft's record",
            got=f"{list(checkpoint.config.norms)}",
            do="export the draft again: `dvc repro train`",
        )
    return checkpoint


def served_points(engine: ModuleType, checkpoint: DraftCheckpoint, record: DraftRecord, layers: int) -> tuple[int, ...]:
    """The points that the engine makes of the draft's config.json.

    Raises:
        EngineError: it can give none; how config.json's ids moved against the record's is told, as a shift if it is one.
    """
    ids = checkpoint.layer_ids
    try:
        if hasattr(engine, "served_points"):
            return engine.served_points(ids, layers)
        return points_of(ids, engine.DIALECT, record.target.model_type, layers, engine.VERSION)
    except EngineError as error:
        kept = record.layer_ids
        if len(ids) != len(kept) or ids == kept:
            raise
        meant = tuple(p + i - k for p, i, k in zip(record.points, ids, kept, strict=True))
        raise EngineError(
            f"{error.what}: {name_points(meant, record.points, layers)}",
            where=error.where,
            expected=f"{error.expected}; {list(kept)}, as in the draft's record",
            got=error.got,
            do="export the draft for this engine again: `dvc repro train`",
        ) from error


def open_served(params: Params, record: DraftRecord) -> Served:
    """Load the target, read the draft and make ready to serve; the draft is fed what this engine reads from config.json."""
    engine = engines.load(params.serve.engine)
    folder = locate_target(params.target.origin)
    checkpoint = read_recorded()
    target = load_target(folder, params.target.device, params.target.dtype).pack()
    points = served_points(engine, checkpoint, record, target.config.layers)
    if hasattr(engine, "Engine"):
        draft = DraftDecoder(checkpoint, points=points, embedding=target.embedding, linear=packed_linear)

        def open_here(slots: int, positions: int, steps: int) -> AbstractContextManager[Any]:
            return nullcontext(engine.Engine(target, draft, slots=slots, positions=positions))

        return Served(engine, engine.version(), target, checkpoint, open_here)
    facts = facts_for_server(checkpoint, record, points, target)
    opener = open_server(params, folder, facts)
    return Served(engine, f"sglang {engine.VERSION}", target, checkpoint, opener, params.serve.draft_steps)


def facts_for_server(
    checkpoint: DraftCheckpoint, record: DraftRecord, points: tuple[int, ...], target: Decoder | None = None
) -> DraftFacts:
    """What the launch checks need to know of the draft; with the target at hand the draft is audited against it, for a server
    itself would report nothing.

    Raises:
        EngineError: the draft does not fit the target, or is fed other widths than it takes.
    """
    if target is not None:
        size = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
        audit_for_target(DRAFT, checkpoint, embedding=target.embedding, **size)
    if len(points) != len(record.points):
        raise EngineError(
            "The draft takes in other states than the engine feeds it",
            where=f"{DRAFT}/config.json: eagle_config.eagle_aux_hidden_state_layer_ids",
            expected=f"{len(record.points)} points, as fc.weight has",
            got=f"points {list(points)} of ids {list(checkpoint.layer_ids)} (doubled ids count once)",
            do="export the draft for this engine again: `dvc repro train`",
        )
    raw = read_draft_config(DRAFT / "config.json")
    return DraftFacts(
        folder=DRAFT,
        architecture=str((raw.get("architectures") or [""])[0]),
        tied_embeddings=bool(raw.get("tie_word_embeddings")),
        vocab_size=checkpoint.config.vocab_size,
        draft_vocab_size=checkpoint.config.draft_vocab_size,
        max_positions=checkpoint.config.max_positions,
        points=record.points,
        served_points=points,
        compute_dtype=record.capture.compute_dtype,
    )


def open_server(params: Params, folder: Path, facts: DraftFacts) -> Open:
    """Opens SGLang with the draft, or without it for 0 steps; servers opened one after another are held to equal settings."""
    told, where = params.serve.sglang, params.target
    seen: list[Any] = []

    def open_one(slots: int, positions: int, steps: int, first_gpu: int = 0) -> AbstractContextManager[Any]:
        launch = Launch(
            target=folder, device=where.device, dtype=where.dtype, threads=where.threads, concurrency=slots,
            positions=positions, draft=facts if steps else None, draft_steps=steps, first_gpu=first_gpu,
        )  # fmt: skip
        label = f"drafted-{steps}" if steps else "plain"
        server = serve(launch, told, label=label, url=told.url if steps else told.plain_url, by_value=True)
        return _alike(server, seen)

    return open_one


@contextmanager
def _alike(opened: AbstractContextManager[Any], seen: list[Any]) -> Generator[Any, None, None]:
    """A server, compared with the ones opened before it."""
    with opened as server:
        for info in seen:
            demand_alike(server, info)
        seen.append(server.info)
        yield server
