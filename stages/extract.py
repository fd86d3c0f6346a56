"""extract: the target's residual stream at three points and the last state, for every prepared row.

The target runs over the rows, or states of another tool are adopted (capture.adopt): then only rows it lacks run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache as cache_once
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages._extract_ray import scatter
from stages.bridges.identity import bridge_digest, fingerprint
from stages.bridges.stores import open_store
from stages.capture.adopted import Adoption
from stages.capture.claims import adopted_spec, demand_claim
from stages.capture.code import code_digest
from stages.capture.dialects import layer_ids
from stages.capture.finishing import finish_folders, link_folders
from stages.capture.forecast import Forecast, device_name, forecast, remember_rate, remembered_rate, sample_rate
from stages.capture.rows import FolderPlan, Row, plan_folders, read_rows
from stages.capture.served import capture_served
from stages.capture.spill import capture_rows
from stages.capture.verify import describe_store
from stages.capture.work import WorkCache
from stages.contracts.adoption import ADOPTION
from stages.contracts.damage import Damage
from stages.contracts.errors import ParamsError, Refusal, run
from stages.contracts.manifest import (
    CAPTURE_MANIFEST,
    HIDDEN_STATES,
    PREPARED_MANIFEST,
    WORK,
    CaptureSpec,
    PreparedManifest,
    StoredForm,
    TargetIdentity,
)
from stages.contracts.params import Params, load_params
from stages.contracts.points import check_points
from stages.contracts.progress import progress
from stages.contracts.report import demand
from stages.engines.sglang import DIALECT, VERSION, Launch, Server, serve
from stages.targets import identify_target, load_target, locate_target

if TYPE_CHECKING:
    from stages.targets._decoder import Decoder

_WORTH_REMEMBERING_S = 10.0  # a shorter run's rate is mostly its start


def demand_target(found: TargetIdentity, prepared: TargetIdentity, params: Params) -> None:
    """Raises ParamsError when params.yaml describes another model, Refusal when the rows were prepared for another."""
    told = params.target
    for name in ("layers", "hidden_size", "vocab_size"):
        if getattr(told, name) != getattr(found, name):
            raise ParamsError(
                f"The target has another {name} than params.yaml says",
                where=f"params.yaml: target.{name}",
                expected=f"{getattr(found, name)}, from {told.origin}",
                got=str(getattr(told, name)),
                do="mend target.origin or the figures below it",
            )
    for name, what in (("weights", "weights"), ("tokenizer", "tokenizer"), ("template", "chat template")):
        digests = (getattr(prepared, f"{name}_digest"), getattr(found, f"{name}_digest"))
        if digests[0] != digests[1]:
            raise Refusal(
                f"The target's {what} changed since the rows were prepared",
                where=told.origin,
                expected=f"{digests[0]}, as in {PREPARED_MANIFEST}: answers and token ids are that target's own",
                got=digests[1],
                do="run `dvc repro prepare`, or put the former target back",
            )


def capture_spec(params: Params, target: TargetIdentity) -> CaptureSpec:
    """All that decides the bytes of a stored state, beside the row."""
    return CaptureSpec(
        weights_digest=target.weights_digest,
        code_digest=code_digest(target.model_type, engine=params.capture.engine),
        points=check_points(params.capture.points, target.layers),
        layers=target.layers,
        hidden_size=target.hidden_size,
        compute_dtype=params.target.dtype,
        engine=f"sglang {VERSION}" if params.capture.engine == "sglang" else "in_process",
        form=StoredForm(
            tokens=params.capture.store_tokens, last=params.capture.store_last, aux_dtype=params.capture.store_aux
        ),
    )


def demand_apart(store: Path) -> None:
    """Raises ParamsError when the store and data/hidden_states hold each other: what is strange there is removed."""
    here, there = HIDDEN_STATES.resolve(), store.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise ParamsError(
            "The store to adopt stands where extract writes",
            where="params.yaml: capture.adopt",
            expected=f"a folder beside {HIDDEN_STATES}, whose content is replaced by what is extracted",
            got=str(store),
            do=f"move the store, for example to data/theirs, and name it there; until then nothing in {HIDDEN_STATES} is touched",
        )


def open_adoption(params: Params, spec: CaptureSpec, model_type: str, plans: Sequence[FolderPlan]) -> Adoption | None:
    """The store that capture.adopt names, matched with the prepared rows; None where none is named.

    Raises:
        LineError: no store, other points or norm than are needed, nothing that says which, or rows that it lacks.
    """
    capture = params.capture
    if capture.adopt is None:
        return None
    demand_apart(Path(capture.adopt))
    store = open_store(Path(capture.adopt))
    claim = demand_claim(store, spec, model_type, capture.adopt_layer_ids, capture.adopt_last_state)
    mark, extract_lacking = fingerprint(store), capture.adopt_lacking == "extract"
    adopted = adopted_spec(spec, store.kind, mark, bridge_digest(), extract_lacking=extract_lacking)
    adoption = Adoption(store, [row for plan in plans for row in plan.rows], claim, adopted, mark)
    tell(adoption.words())
    if not extract_lacking:
        adoption.demand_all()
    return adoption


def look_ahead(plans: Sequence[FolderPlan], cache: WorkCache, output: Path) -> Forecast:
    """Check the finished folders, tell what was found damaged and what is going to happen.

    Raises:
        Refusal: the disk cannot hold what is to be written.
    """
    cache.take_in(output)
    with progress(max(cache.bytes_to_check(plans), 1), "extract: finished folders checked", "bytes") as advance:
        cache.heal(plans, advance)
    tell_damage(cache.damages, cache.quarantine)
    told = forecast(plans, cache, output)
    tell(told.words())
    told.demand_room()
    return told


def launch_capture(params: Params, folder: Path, model_type: str, longest: int) -> Launch:
    """A server that hands out states at the points, in its own numbering, with no draft; rows of at most `longest` tokens."""
    return Launch(
        target=folder,
        device=params.target.device,
        dtype=params.target.dtype,
        threads=params.target.threads,
        concurrency=params.serve.concurrency,
        positions=longest + 1,  # SGLang decodes at least one token
        capture_ids=layer_ids(params.capture.points, DIALECT, model_type, version=VERSION),
    )


def tell(words: str) -> None:
    print(f"extract: {words}", file=sys.stderr, flush=True)


def tell_damage(damages: Sequence[Damage], kept_in: Path) -> None:
    """A line a damaged place; what was found stays in quarantine."""
    for damage in damages:
        tell(f"damaged: {damage.where}: {damage.what} (expected {damage.expected}, got {damage.got})")
    if damages:
        tell(f"{len(damages)} damaged places; their bytes are kept in {kept_in}, the reason beside them")


def tell_hours(target: Decoder, told: Forecast, cache: WorkCache, params: Params) -> None:
    """Hours at the rate that this machine had last, else at that of a short sample."""
    rate, source = remembered_rate(cache.root, device_name(params.target.device)), "as measured here before"
    if rate is None:
        rate = sample_rate(target, told, cache.capture.points, params.capture.tokens_per_batch)
        source = "measured on the first rows"
    if rate:
        tell(told.hours(rate, source))


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.target.threads)
    prepared = PreparedManifest.read(PREPARED_MANIFEST)
    demand("extraction", prepared.digest())
    folder = locate_target(params.target.origin)
    demand_target(identify_target(folder, params.target.name), prepared.target, params)
    plans = list(plan_folders(read_rows(prepared), params.capture.rows_per_folder))
    spec = capture_spec(params, prepared.target)
    adoption = open_adoption(params, spec, prepared.target.model_type, plans)
    cache = WorkCache(adoption.spec if adoption else spec, WORK)
    told = look_ahead(plans, cache, HIDDEN_STATES)

    @cache_once
    def target() -> Decoder:
        return load_target(folder, params.target.device, params.target.dtype).pack()

    @cache_once
    def server() -> Server:
        longest = max(len(row) for plan in plans for row in plan.rows)
        launch = launch_capture(params, folder, prepared.target.model_type, longest)
        return opened.enter_context(serve(launch, params.serve.sglang, label="capture"))

    def through_target(rows: list[Row]) -> Iterator[Tensor]:
        if not rows:
            return iter(())
        how = (target(), rows, spec.points, params.capture.tokens_per_batch)
        if here:
            return capture_rows(*how)
        return capture_served(*how, lambda ids: server().states(ids)[0], params.serve.concurrency)

    def states_of(rows: list[Row]) -> Iterator[Tensor]:
        return adoption.states(rows, through_target) if adoption else through_target(rows)

    here = params.capture.engine == "in_process"
    if told.todo and not adoption and here:
        tell_hours(target(), told, cache, params)
    if params.capture.ray:
        scatter(plans, cache, folder, params)
    with ExitStack() as opened:
        took = finish_folders(states_of, plans, cache, params.capture.tokens_per_batch, told.todo_tokens)
    alone = here and not adoption and not params.capture.ray
    if took > _WORTH_REMEMBERING_S and told.todo and alone:
        remember_rate(cache.root, device_name(params.target.device), told.todo_tokens / took)
    known = len(cache.damages)
    folders = link_folders(plans, cache, HIDDEN_STATES)
    tell_damage(cache.damages[known:], cache.quarantine)
    if adoption:
        adoption.record.write(ADOPTION)
    cache.drop_superseded(plans)
    describe_store(prepared.digest(), cache.capture, folders).write(CAPTURE_MANIFEST)


if __name__ == "__main__":
    run(main)
