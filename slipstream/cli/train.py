"""`slipstream train` as a command; the trainer is in trainer/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import Model, RedisUrl, Store, finite
from slipstream.logs import configure_logs
from slipstream.models import resolve_model
from slipstream.start.effects import TRAIN, check_variables, warn_of_unread_variables
from slipstream.start.shared_defaults import DEFAULT_REDIS_URL
from speculator.tracing import configure_spans

_PREFIX = "SLIPSTREAM_TRAINER_"
"""Of the trainer's settings: an option stands before its variable."""


def train(
    model: Model,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    state: Annotated[
        Path,
        typer.Option(envvar=f"{_PREFIX}STATE_DIR", help="Directory of the trainer's own checkpoint."),
    ] = Path("trainer-state"),
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            envvar=f"{_PREFIX}METRICS_PORT",
            help="Serve Prometheus metrics on this port; 0 takes any free one.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(envvar=f"{_PREFIX}NUM_THREADS", min=1, help="CPU threads.")] = 1,
    trace_ttl_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            envvar="SLIPSTREAM_TRACE_TTL_HOURS",
            help="Hours after which traces are gone from stream, replay and disk; 0 sets no limit.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(envvar=f"{_PREFIX}SEED", help="Seed of the order of learning and of a fresh draft.")
    ] = 0,
) -> None:
    """Learn from the traces in Redis and publish better drafts; SLIPSTREAM_TRAINER_* variables set the rest.

    With several GPUs, or several machines that share --store and --state: `torchrun … -m slipstream train …`.
    """
    configure_logs()
    configure_spans("slipstream-trainer")
    from slipstream.new_draft import checked_fingerprint
    from speculator.draft.checkpoint import model_key
    from speculator.versions.store import DraftStore
    from trainer.config import load_config
    from trainer.process import run_trainer

    model_dir = resolve_model(model)
    given = {} if trace_ttl_hours is None else {"trace_ttl_hours": trace_ttl_hours}
    config = load_config(
        **given,
        model_dir=model_dir,
        model_key=model_key(model_dir, checked_fingerprint(model_dir, DraftStore(store))),
        redis_url=redis_url,
        store_dir=store,
        state_dir=state,
        metrics_port=metrics_port,
        num_threads=threads,
        seed=seed,
    )
    check_variables(config, TRAIN)
    warn_of_unread_variables()
    run_trainer(config)
