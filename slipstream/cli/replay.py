"""The command `slipstream replay`; slipstream/replay.py does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.effects import REPLAY, check_options, warn_of_unread_variables
from slipstream.cli.options import DraftVocab, InDataDir, JsonFile, Model, at_home, check_output, write_json
from slipstream.models import BUNDLED_MODEL, resolve_model
from slipstream.terminal import print_status, progress_bar, spinner


def replay(
    context: typer.Context,
    recordings: Annotated[list[Path], typer.Argument(help="Recordings to learn from, in this order.")],
    loss: Annotated[
        str | None,
        typer.Option(help='Losses with weights, such as "forward_kl=1,discard=0.5"; default: the trainer\'s.'),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0, help="Training steps; default: every trace about four times. 0 only evaluates, on all traces."
        ),
    ] = None,
    data_dir: InDataDir = None,
    store: Annotated[
        Path | None, typer.Option(callback=at_home, help="Store with whose newest draft to begin.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fresh draft, the split and the order.")] = 0,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Maximum proposals per round.")] = 4,
    model: Model = BUNDLED_MODEL,
    draft_vocab_size: DraftVocab = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Learn from recorded traces without a server, and predict the acceptance of the draft in service.

    A fifth of the traces of every domain is held out for the prediction. SLIPSTREAM_TRAINER_* variables set the rest.
    `--store drafts --steps 0` predicts for a draft that was served, and prints what was recorded beside it.
    """
    check_options(context, REPLAY)
    with spinner("starting"):
        warn_of_unread_variables()
        import torch

        from slipstream.replay import ReplayOptions
        from slipstream.replay import replay as run

    check_output(json_file, *recordings)
    torch.set_num_threads(threads)
    options = ReplayOptions(
        recordings=recordings,
        model_dir=resolve_model(model),
        depths=range(1, depth + 1),
        loss=loss,
        num_steps=steps,
        seed=seed,
        draft_vocab_size=draft_vocab_size,
        store=store,
    )
    with progress_bar("steps") as bar:
        document = run(options, progress=print_status, on_step=bar)
    typer.echo(_sentence(document))
    write_json(json_file, document)


def _sentence(document: dict[str, Any]) -> str:
    skipped = document["skipped_steps"]
    return (
        f"{document['loss']}: {document['accept_length']} tokens a verification at depth {document['depth']} after "
        f"{document['trained_tokens']} trained tokens, on {document['held_out_traces']} held-out traces whose recorded "
        f"rounds committed {document['recorded_accept_length']}"
        + (f"; {skipped} of {document['steps']} steps skipped, not finite" if skipped else "")
    )
