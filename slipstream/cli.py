"""The `slipstream` command. Services import torch, so their modules are imported by the command that needs them."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
import typer
from rich.console import Console

from slipstream.layout import DEFAULT_REDIS_URL, DEFAULT_STREAM_MAX_BYTES
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.errors import ConfigError, DraftError, SlipstreamError, StoreError, StreamError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.splitlines()[0])
console = Console(stderr=True)

Model = Annotated[str, typer.Option(help="Target: a Hugging Face model directory, an id, or the bundled model's name.")]
RedisUrl = Annotated[
    str, typer.Option(envvar="SLIPSTREAM_REDIS_URL", help="redis://, rediss:// or unix:// with the trace stream.")
]
Store = Annotated[
    Path, typer.Option(envvar="SLIPSTREAM_STORE", help="Directory of the draft versions, shared by serve and train.")
]
Dtype = Annotated[Literal["bfloat16", "float32", "float64"], typer.Option(help="Number type of the target.")]
DraftVocab = Annotated[int, typer.Option(min=2, help="Tokens that a fresh draft can propose.")]
Depth = Annotated[int, typer.Option(min=0, max=5, help="Most proposals a round; 0 decodes plainly.")]
Context = Annotated[int, typer.Option(min=16, help="Prompt and completion tokens together.")]


def main() -> None:
    """Run the command line; what an operator can fix ends in one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except (ConfigError, StreamError, StoreError, DraftError) as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except SlipstreamError as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(min=0.2, help="How long live traffic runs.")] = 10,
    model: Model = BUNDLED_MODEL,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of acceptance length and speedup here.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway on 127.0.0.1.")] = 8765,
    redis_url: Annotated[str | None, typer.Option(help="Use this empty Redis instead of starting one.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON lines with "domain" and "prompt".')] = None,
    clients: Annotated[int, typer.Option(min=1, max=8, help="Requests in flight.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Completion tokens a request.")] = 160,
    depth: Depth = 4,
    context_length: Context = 4096,
    draft_vocab_size: DraftVocab = 8192,
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the fresh draft and of the traffic's order.")] = 0,
) -> None:
    """Watch a real model get faster while it serves: Redis, gateway, engine, trainer and traffic, then the figures."""
    from slipstream.demo import DemoOptions, run_demo
    from slipstream.plot import draw
    from slipstream.report import figures, points, sentences
    from slipstream.topics import read_prompts

    _log_to_stderr()
    # SIGTERM ends the demo as Ctrl-C does: by way of every `finally`, so that nothing it started is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for path in (json_file, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path.parent} does not exist: create it or choose another place for {path.name}")
    options = DemoOptions(
        prompts=read_prompts(prompts) if prompts else None,
        model_dir=resolve_model(model),
        model_name=Path(model).name,
        minutes=minutes,
        port=port,
        redis_url=redis_url,
        clients=clients,
        max_tokens=max_tokens,
        depth=depth,
        context_length=context_length,
        draft_vocab_size=draft_vocab_size,
        seed=seed,
        dtype=dtype,
    )
    run = run_demo(options, console)
    document = figures(run, model=options.model_name, minutes=minutes)
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    if plot is not None:
        draw(points(run), run.swaps_s, plot, title=f"{options.model_name}: live traffic, draft learning beside it")
    console.print(sentences(document), highlight=False)


@app.command()
def serve(
    model: Model,
    name: Annotated[str | None, typer.Option(help="Name that clients use; default: the directory's.")] = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    capture: Annotated[bool, typer.Option("--capture", help="Record traces: prompts and answers go to Redis.")] = False,
    depth: Depth = 4,
    control_share: Annotated[
        float, typer.Option(min=0, max=0.5, help="Share of rounds at depth 0 that gives the measured baseline.")
    ] = 0.02,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Requests that decode together.")] = 8,
    context_length: Context = 2048,
    context_window: Annotated[int, typer.Option(min=1, help="Prompt positions kept in a trace.")] = 512,
    draft_vocab_size: DraftVocab = 8192,
    vocab_from: Annotated[
        Path | None,
        typer.Option(help='JSON lines with "domain" and "prompt": choose a fresh draft\'s vocabulary by them.'),
    ] = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one less than the cores.")] = None,
    stream_max_bytes: Annotated[int, typer.Option(min=1, help="Byte cap of the stream.")] = DEFAULT_STREAM_MAX_BYTES,
    seed: Annotated[int, typer.Option(help="Seed of a fresh draft.")] = 0,
) -> None:
    """Serve a model behind the OpenAI-compatible gateway, with the draft that the store holds or a fresh one."""
    _log_to_stderr()
    from serving.gateway.config import load_settings
    from serving.local.config import LocalEngineConfig
    from slipstream.serve import ServeOptions, run_server
    from slipstream.topics import read_prompts

    model_dir = resolve_model(model)
    config = LocalEngineConfig(
        model_dir=model_dir,
        model_name=name or model_dir.name,
        dtype=dtype,
        device=device,
        num_slots=slots,
        context_length=context_length,
        context_window=context_window,
        depth=depth,
        control_share=control_share,
        capture=capture,
        num_threads=threads or max(1, (os.cpu_count() or 2) - 1),
    )
    run_server(
        ServeOptions(
            engine=config,
            store=store,
            redis_url=redis_url,
            host=host,
            port=port,
            stream_max_bytes=stream_max_bytes,
            draft_vocab_size=draft_vocab_size,
            vocab_texts=tuple(prompt.text for prompt in read_prompts(vocab_from)) if vocab_from else (),
            seed=seed,
        ),
        load_settings(),
    )


@app.command()
def train(
    model: Model,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    state: Annotated[Path, typer.Option(help="Directory of the trainer's own checkpoint.")] = Path("trainer-state"),
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this loopback port.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the order of learning and of a fresh draft.")] = 0,
) -> None:
    """Learn from the traces in Redis and publish better drafts; SLIPSTREAM_TRAINER_* variables set the rest."""
    _log_to_stderr()
    from slipstream.layout import model_key
    from speculator.checkpoint import target_fingerprint
    from trainer.config import load_config
    from trainer.run import run_trainer

    model_dir = resolve_model(model)
    run_trainer(
        load_config(
            model_dir=model_dir,
            model_key=model_key(model_dir, target_fingerprint(model_dir)),
            redis_url=redis_url,
            store_dir=store,
            state_dir=state,
            metrics_port=metrics_port,
            num_threads=threads,
            seed=seed,
        )
    )


@app.command()
def doctor(
    model: Model = BUNDLED_MODEL,
    redis_url: Annotated[str | None, typer.Option(envvar="SLIPSTREAM_REDIS_URL", help="Also check this Redis.")] = None,
    store: Annotated[Path | None, typer.Option(envvar="SLIPSTREAM_STORE", help="Also check this store.")] = None,
    port: Annotated[int, typer.Option(help="Port that should be free.")] = 8765,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Check what Slipstream needs on this machine; each finding says how to mend it. Exit code 2 on any failure."""
    from slipstream.doctor import examine

    findings = examine(model=model, redis_url=redis_url, store=store, port=port)
    if as_json:
        typer.echo(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = "[green]ok[/]  " if finding.ok else "[red]fail[/]"
            console.print(f"{mark} {finding.name}: {finding.detail}", highlight=False, soft_wrap=True)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(2)


@app.command("version")
def show_version() -> None:
    """Print the version."""
    try:
        typer.echo(version("slipstream-spec"))
    except PackageNotFoundError:
        raise ConfigError("slipstream-spec is not installed here: run `make demo` or pip install it") from None


def _log_to_stderr() -> None:
    """Structured logs on standard error: readable on a terminal, JSON lines elsewhere."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    renderer: Any = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
