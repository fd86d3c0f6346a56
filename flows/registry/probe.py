"""Whether a store keeps the one promise that promotion stands on: of writers at once, exactly one wins.

Asked before anything is promoted. A store that takes If-Match and does not look at it answers as if all were well.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flows.registry.store import Store
from stages.contracts.errors import Refusal

_WRITERS = 8


def demand_conditional_writes(store: Store) -> None:
    """Let a promotion go on only where conditional writes are real.

    Raises:
        Refusal: they are not, and how that was seen.
        StoreError: see Store.
    """
    key = f"probe/{uuid.uuid4().hex}"
    try:
        fault = _fault(store, key)
    finally:
        store.delete(key)
    if fault:
        raise Refusal(
            "This store has no conditional writes, so two promotions at once could both win",
            where=store.where,
            expected="If-None-Match and If-Match obeyed by value, one winner of several at once",
            got=fault,
            do="use an S3 that has them (Amazon's, SeaweedFS, MinIO, Ceph), or a folder as registry.uri",
        )


def _fault(store: Store, key: str) -> str:
    """What the store did wrong, or nothing."""
    won = _at_once(lambda i: store.create(key, b"created %d" % i))
    if won != 1:
        return f"{won} of {_WRITERS} writers at once created the same object"
    if store.create(key, b"late"):
        return "an object was created where one was already"
    first = store.read(key)
    if first is None:
        return "an object just written is not there"
    won = _at_once(lambda i: store.replace(key, b"replaced %d" % i, first.version))
    if won != 1:
        return f"{won} of {_WRITERS} writers at once replaced the same version"
    if store.replace(key, b"late", first.version):
        return "an object was replaced under a version that was no longer its own"
    return ""


def _at_once(write: Callable[[int], bool]) -> int:
    with ThreadPoolExecutor(_WRITERS) as pool:
        return sum(pool.map(write, range(_WRITERS)))
