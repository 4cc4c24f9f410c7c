"""Notices that this machine is about to be taken away: SIGTERM, and on Google Cloud the metadata server.

A run that is given notice finishes its step, saves a checkpoint and exits with status 143 (128 + SIGTERM, what shells
and schedulers show for a terminated process), so that a scheduler tells it from a finished run (0) and a failed one.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

EXIT_STATUS = 128 + signal.SIGTERM
METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/instance"
# Key and value of a notice: a spot machine is taken back, or its host is to be repaired with it shut down.
_NOTICES = (("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"))

_INTERVAL = 5.0  # seconds between two questions to the metadata server

log = logging.getLogger(__name__)


class Preempted(SystemExit):
    """The run has saved its state and stops because its machine is taken away; exits with `EXIT_STATUS`."""

    def __init__(self) -> None:
        super().__init__(EXIT_STATUS)


@contextlib.contextmanager
def preemption_notices(metadata_url: str | None = None) -> Iterator[Callable[[int], bool]]:
    """Watch for notices; gives a function that says, after each step, whether to save now and stop.

    On one process a SIGTERM sets a flag. Where `jax.distributed` runs, JAX has a handler of its own, and the function
    says yes on every process after the same step, whichever of them was given notice; all must ask after every step.
    Further SIGTERMs change nothing until the block is left. Outside the main thread, where Python allows no signal
    handlers, one process gets no notice.

    Args:
      metadata_url: where to ask every few seconds; None: on a TPU the metadata server of Google Cloud, elsewhere none.
    """
    if metadata_url is None and jax.default_backend() == "tpu":
        metadata_url = METADATA_URL
    with contextlib.ExitStack() as stack:
        if jax.distributed.is_initialized():
            asked: Callable[[int], bool] = multihost_utils.reached_preemption_sync_point
        else:
            asked = stack.enter_context(_sigterm())
        if metadata_url is not None:
            stack.enter_context(_metadata_notices(metadata_url))
        yield asked


@contextlib.contextmanager
def _sigterm() -> Iterator[Callable[[int], bool]]:
    noticed = False  # no lock: a handler may run in the middle of itself

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal noticed
        noticed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield lambda step: noticed
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def _metadata_notices(url: str) -> Iterator[None]:
    """Ask a metadata server in a thread; a notice is handed on as the signal that everything else listens for."""
    stopping = threading.Event()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine's own link

    def ask() -> None:
        while not stopping.wait(_INTERVAL):
            for key, notice in _NOTICES:
                request = urllib.request.Request(f"{url}/{key}", headers={"Metadata-Flavor": "Google"})
                # A server that does not answer says nothing about this machine.
                try:
                    with opener.open(request, timeout=5) as reply:
                        value = reply.read().decode(errors="replace").strip()
                except (OSError, http.client.HTTPException):
                    continue
                if value == notice and not stopping.is_set():
                    log.warning("the metadata server says that this machine is taken away (%s)", notice)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

    thread = threading.Thread(target=ask, name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()  # a daemon: an answer that is under way is not waited for
