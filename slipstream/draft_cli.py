"""`slipstream draft`: drafts apart from a running service; what it does is in draft.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.effects import DRAFT_INIT, check_options
from slipstream.logs import configure_logs
from slipstream.models import resolve_model
from slipstream.options import AsJson, DraftVocab, Model, VocabFrom
from slipstream.terminal import print_json, working
from speculator.errors import ConfigError

draft_app = typer.Typer(no_args_is_help=True, help="Drafts apart from a running service.")


@draft_app.callback()
def _group() -> None:
    """Keeps `init` a subcommand while it is the only one."""


@draft_app.command()
def init(
    model: Model,
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Write a Hugging Face folder, as SGLang loads it, here.")] = None,
    store: Annotated[Path | None, typer.Option(help="Write the first version of this draft store.")] = None,
    vocab_from: VocabFrom = None,
    draft_vocab_size: DraftVocab = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random layer; default: 0.")] = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="With --store: leave a store that holds versions as it is.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a fresh draft for a target. It has learnt nothing yet; serve it and train."""
    configure_logs()
    from slipstream.draft import init_checkpoint, init_lineage
    from slipstream.topics import read_prompts
    from speculator.draft.checkpoint import model_name

    if (out is None) == (store is None):
        raise ConfigError("pass either --out, for a folder of its own, or --store, for a store's first version")
    check_options(context, DRAFT_INIT)
    model_dir = resolve_model(model)
    texts = [prompt.text for prompt in read_prompts(vocab_from)] if vocab_from else []
    with working(f"reading {model_name(model_dir)}, writing a draft for it"):
        if out is not None:
            written = init_checkpoint(model_dir, out, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
        else:
            assert store is not None, "checked above"
            written = init_lineage(
                model_dir, store, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts, if_missing=if_missing
            )
    if as_json:
        print_json({"folder": str(written)})
    else:
        typer.echo(written)
