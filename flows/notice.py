"""Telling people how a run ended, through a notification block of Prefect (Slack, e-mail, a webhook, …)."""

from __future__ import annotations

import inspect

from prefect import get_run_logger
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.exceptions import PrefectException
from prefect.utilities.asyncutils import run_coro_as_sync


def notify(block: str, subject: str, body: str) -> None:
    """Send a message with the block called `block`, `<type>/<name>`. A message that cannot be sent is logged: the run's end
    does not depend on it, and a block's error may name its address, which is a secret."""
    try:
        loaded = Block.load(block)
        if not isinstance(loaded, NotificationBlock):
            get_run_logger().warning("Nobody was told: %s is no notification block", block)
            return
        sent = loaded.notify(body, subject)
        if inspect.iscoroutine(sent):
            run_coro_as_sync(sent)
    except (PrefectException, ValueError, OSError, RuntimeError) as error:
        get_run_logger().warning("Nobody was told: block %s failed with %s", block, type(error).__name__)
