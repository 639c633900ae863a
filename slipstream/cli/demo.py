"""`slipstream demo` as a command; slipstream/demo does the work."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import Depth, Dtype, JsonFile, Model, SuffixDepth, at_home, check_output, finite, write_json
from slipstream.demo import TENANTS
from slipstream.models import BUNDLED_MODEL, INSTALL_DEMO, resolve_model
from slipstream.terminal import console
from speculator.errors import ConfigError
from speculator.host import exit_on_signal

_EXTRA = ("openai", "matplotlib")
"""Packages that the demo's modules import; the bundled model checks for its own."""


def demo(
    context: typer.Context,
    minutes: Annotated[
        float,
        typer.Option(min=0.2, callback=finite, help="Minutes of live traffic, without those of the plain server."),
    ] = 10,
    model: Model = BUNDLED_MODEL,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="File for a picture of speedup and acceptance length.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway on 127.0.0.1.")] = 8765,
    redis_url: Annotated[str | None, typer.Option(help="Use this empty Redis instead of starting one.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON lines with "domain" and "prompt".')] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            callback=at_home,
            help="Folder for drafts, trainer state and keys; a further run begins with its last good draft.",
        ),
    ] = None,
    tenants: Annotated[
        int, typer.Option(min=1, max=len(TENANTS), help="Tenants, each with topics of its own; they share no text.")
    ] = len(TENANTS),
    clients: Annotated[int, typer.Option(min=1, max=8, help="Requests at once.")] = 2,
    samples: Annotated[int, typer.Option(min=1, max=8, help="Answers to each prompt, as one prompt group.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2, callback=finite, help="0 is greedy.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Completion tokens per answer.")] = 160,
    depth: Depth = 4,
    suffix_depth: SuffixDepth = 16,
    context_length: Annotated[int, typer.Option(min=16, help="Maximum prompt and completion tokens together.")] = 4096,
    draft_vocab_size: Annotated[
        int, typer.Option(min=2, help="Tokens that the draft can propose: those of the prompts, and frequent ones.")
    ] = 4096,
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the fresh draft and of the traffic's order.")] = 0,
) -> None:
    """Serve a real model to several tenants, train its draft from their traffic, and measure the gain."""
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise ConfigError(f"the demo needs {', '.join(missing)}: {INSTALL_DEMO}")
    from slipstream.demo.demo import DemoOptions, run_demo
    from slipstream.demo.plot import check_format, draw
    from slipstream.demo.report import figures
    from slipstream.demo.summary import sentences
    from slipstream.demo.topics import read_prompts
    from speculator.draft.checkpoint import model_name

    exit_on_signal()
    if samples > 1 and temperature == 0:
        raise ConfigError(f"--samples {samples} at --temperature 0 would all be equal: set a temperature above 0")
    check_output(json_file, prompts)
    check_output(plot, prompts)
    if plot is not None:
        check_format(plot)
    model_dir = resolve_model(model)
    given = {name: value for name, value in context.params.items() if name not in ("model", "json_file", "plot")}
    given["prompts"] = read_prompts(prompts) if prompts else None
    options = DemoOptions(**given, model_dir=model_dir, model_name=model_name(model_dir))
    run = run_demo(options, console)
    settings = ("minutes", "tenants", "clients", "samples", "temperature", "depth", "suffix_depth")
    document = figures(run, {"model": options.model_name, **{name: given[name] for name in settings}})
    # First: what follows may find a full disk.
    console.print(sentences(document), highlight=False)
    write_json(json_file, document)
    if plot is not None:
        draw(run, plot, title=f"{options.model_name}: live traffic, draft learning beside it")
