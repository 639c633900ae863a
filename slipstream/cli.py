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

from slipstream import drafts_cli
from slipstream.layout import DEFAULT_REDIS_URL, DEFAULT_STREAM_MAX_BYTES
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.errors import ConfigError, DraftError, LifecycleError, SlipstreamError, StoreError, StreamError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.splitlines()[0])
draft_app = typer.Typer(no_args_is_help=True, help="Drafts apart from a running service.")
app.add_typer(draft_app, name="draft")
app.add_typer(drafts_cli.app, name="drafts")
traces = typer.Typer(no_args_is_help=True, help="Recordings of the trace stream.")
app.add_typer(traces, name="traces")
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
VocabFrom = Annotated[
    Path | None,
    typer.Option(help='JSON lines with "domain" and "prompt": choose a fresh draft\'s vocabulary by them.'),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Recording = Annotated[Path, typer.Argument(help="A file that `slipstream traces record` wrote.")]
Context = Annotated[int, typer.Option(min=16, help="Prompt and completion tokens together.")]


def main() -> None:
    """Run the command line; what an operator can fix ends in one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except (ConfigError, StreamError, StoreError, DraftError, LifecycleError) as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except SlipstreamError as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(min=0.2, help="How long live traffic runs.")] = 10,
    model: Model = BUNDLED_MODEL,
    json_file: JsonFile = None,
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
    context: typer.Context,
    model: Model,
    sglang_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- SGLANG_ARGUMENTS", help="Passed to SGLang as they are.")
    ] = None,
    engine: Annotated[
        Literal["local", "sglang"],
        typer.Option(help="What generates: the engine in here, or an SGLang started beside."),
    ] = "local",
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
    context_window: Annotated[int, typer.Option(min=1, help="Prompt positions kept in a trace.")] = 512,
    draft_vocab_size: DraftVocab = 8192,
    vocab_from: VocabFrom = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "float64"],
        typer.Option(help="Number type of the target; float16 is SGLang's alone, float64 the local engine's."),
    ] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cpu, with SGLang cuda.")] = None,
    stream_max_bytes: Annotated[int, typer.Option(min=1, help="Byte cap of the stream.")] = DEFAULT_STREAM_MAX_BYTES,
    seed: Annotated[int, typer.Option(help="Seed of a fresh draft.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Local engine: requests that decode together.")] = 8,
    context_length: Annotated[
        int, typer.Option(min=16, help="Local engine: prompt and completion tokens together.")
    ] = 2048,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Local engine: CPU threads; default: one less than the cores.")
    ] = None,
    suffix_depth: Annotated[
        int, typer.Option(min=0, max=64, help="Local engine: most proposals from earlier text; 0 keeps none.")
    ] = 16,
    sglang_python: Annotated[
        Path | None, typer.Option(help="SGLang: interpreter that has it; default: this one or .venv-sglang's.")
    ] = None,
    capture_bytes_per_s: Annotated[
        int, typer.Option(min=0, help="SGLang: budget of recorded traces; 0 sets no limit.")
    ] = 0,
    start_timeout_s: Annotated[float, typer.Option(min=1, help="SGLang: how long it may take to load.")] = 1200,
) -> None:
    """Serve a model behind the OpenAI-compatible gateway, with the draft that the store holds or a fresh one."""
    _log_to_stderr()
    from serving.gateway.config import load_settings
    from slipstream.topics import read_prompts

    _refuse_options_of_another_engine(context, engine)
    model_dir = resolve_model(model)
    texts = tuple(prompt.text for prompt in read_prompts(vocab_from)) if vocab_from else ()
    if engine == "sglang":
        from slipstream.serve_sglang import SglangServeOptions, run_sglang_server

        if dtype == "float64":
            raise ConfigError("--dtype float64 is for --engine local: SGLang has no such kernels")
        if depth == 0:
            raise ConfigError("--depth 0 would load no draft: pass 1 or more, SGLang drafts less where it does not pay")
        run_sglang_server(
            SglangServeOptions(
                python=sglang_python,
                model_dir=model_dir,
                model_name=name or model_dir.name,
                dtype=dtype,
                device=device or "cuda",
                depth=depth,
                capture=capture,
                control_share=control_share,
                context_window=context_window,
                capture_bytes_per_s=capture_bytes_per_s,
                store=store,
                redis_url=redis_url,
                host=host,
                port=port,
                stream_max_bytes=stream_max_bytes,
                draft_vocab_size=draft_vocab_size,
                vocab_texts=texts,
                seed=seed,
                start_timeout_s=start_timeout_s,
                extra=tuple(sglang_arguments or ()),
            ),
            load_settings(),
        )
        return
    from serving.local.config import LocalEngineConfig
    from slipstream.serve import ServeOptions, run_server

    if dtype == "float16":
        raise ConfigError("--dtype float16 is for --engine sglang: the local engine computes in bfloat16 or wider")
    config = LocalEngineConfig(
        model_dir=model_dir,
        model_name=name or model_dir.name,
        dtype=dtype,
        device=device or "cpu",
        num_slots=slots,
        context_length=context_length,
        context_window=context_window,
        depth=depth,
        control_share=control_share,
        capture=capture,
        num_threads=threads or max(1, (os.cpu_count() or 2) - 1),
        suffix_depth=suffix_depth,
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
            vocab_texts=texts,
            seed=seed,
        ),
        load_settings(),
    )


_OPTIONS_OF_ONE_ENGINE = {
    "local": ("slots", "context_length", "threads", "suffix_depth"),
    "sglang": ("sglang_python", "capture_bytes_per_s", "start_timeout_s"),
}
_INSTEAD = {"slots": "--max-running-requests", "context_length": "--context-length"}
"""SGLang's own flags for the same."""


def _refuse_options_of_another_engine(context: typer.Context, engine: str) -> None:
    """An option without effect would be taken for one that had it. Raises ConfigError."""
    for owner, names in _OPTIONS_OF_ONE_ENGINE.items():
        for name in names:
            source = context.get_parameter_source(name)
            if owner != engine and source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
                instead = f": pass {_INSTEAD[name]} after --" if name in _INSTEAD else ": leave it out"
                raise ConfigError(f"--{name.replace('_', '-')} is for --engine {owner}{instead}")
    if engine == "local" and (unknown := context.params["sglang_arguments"]):
        raise ConfigError(f"{unknown[0]!r} is an argument for --engine sglang: leave it out")


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
    """Learn from the traces in Redis and publish better drafts; SLIPSTREAM_TRAINER_* variables set the rest.

    With several GPUs, or several machines that share --store and --state: `torchrun … -m slipstream train …`.
    """
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


@draft_app.command("init")
def draft_init(
    model: Model,
    out: Annotated[Path | None, typer.Option(help="Write a Hugging Face folder, as SGLang loads it, here.")] = None,
    store: Annotated[Path | None, typer.Option(help="Write the first version of this draft store.")] = None,
    vocab_from: VocabFrom = None,
    draft_vocab_size: DraftVocab = 8192,
    seed: Annotated[int, typer.Option(help="Seed of the random layer.")] = 0,
) -> None:
    """Write a fresh draft for a target. It has learnt nothing yet; serve it and train."""
    _log_to_stderr()
    from slipstream.draft import init_checkpoint, init_lineage
    from slipstream.topics import read_prompts

    if (out is None) == (store is None):
        raise ConfigError("pass either --out, for a folder of its own, or --store, for a store's first version")
    model_dir = resolve_model(model)
    texts = [prompt.text for prompt in read_prompts(vocab_from)] if vocab_from else []
    if out is not None:
        written = init_checkpoint(model_dir, out, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
    else:
        assert store is not None, "checked above"
        written = init_lineage(model_dir, store, draft_vocab_size=draft_vocab_size, seed=seed, texts=texts)
    typer.echo(written)


@app.command()
def replay(
    recordings: Annotated[list[Path], typer.Argument(help="Recordings, learnt from in this order.")],
    loss: Annotated[
        str | None, typer.Option(help='Names with weights: "forward_kl=1,discard=0.5"; default: the trainer\'s.')
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Default: every trace about four times; 0 evaluates the draft on all.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="Begin with the newest draft of this store.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fresh draft, of the split and of the order.")] = 0,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Most proposals a round.")] = 4,
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Chains end below this confidence, as the engine ends them at 0.15.")
    ] = 0.0,
    model: Model = BUNDLED_MODEL,
    draft_vocab_size: Annotated[int | None, typer.Option(min=2, help="Tokens that the draft can propose.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Learn from recorded traces, no server needed, and predict the acceptance that the draft would have in service.

    A fifth of the traces of every domain is held out for the prediction. SLIPSTREAM_TRAINER_* variables set the rest.
    `--store drafts --steps 0 --min-confidence 0.15` predicts a served draft: beside it stands what was recorded.
    """
    _log_to_stderr()
    import torch

    from slipstream.replay import ReplayOptions
    from slipstream.replay import replay as run
    from slipstream.traces import check_output

    check_output(json_file)
    torch.set_num_threads(threads)
    document = run(
        ReplayOptions(
            recordings=recordings,
            model_dir=resolve_model(model),
            depths=range(1, depth + 1),
            loss=loss,
            num_steps=steps,
            seed=seed,
            min_confidence=min_confidence,
            draft_vocab_size=draft_vocab_size,
            store=store,
        ),
        progress=lambda line: console.print(line, highlight=False),
    )
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    console.print(
        f"{document['loss']}: {document['accept_length']} tokens a verification at depth {depth} after "
        f"{document['trained_tokens']} trained tokens, on {document['held_out_traces']} held-out traces whose recorded "
        f"rounds committed {document['recorded_accept_length']}",
        highlight=False,
    )


@traces.command("record")
def record_traces(
    model: Model,
    out: Annotated[Path, typer.Option(help="File to write; an existing recording is continued.")],
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    seconds: Annotated[float, typer.Option(min=0, help="Go on with new traces for so long.")] = 0,
    note: Annotated[str, typer.Option(help="Kept in a new file's header.")] = "",
) -> None:
    """Copy a stream's traces into a file. The trainer does not notice; prompts and answers are in the file."""
    import time

    from slipstream.layout import model_key
    from slipstream.traces import StreamCopy, check_output, record
    from speculator.checkpoint import target_fingerprint
    from speculator.recording import RecordingHeader
    from speculator.redis_client import connect

    check_output(out)
    model_dir = resolve_model(model)
    fingerprint = target_fingerprint(model_dir)
    header = RecordingHeader(
        target_fingerprint=fingerprint, model=model_dir.name, created_ms=time.time_ns() // 1_000_000, note=note
    )
    with connect(redis_url) as client:
        counts = record(StreamCopy(client, model_key(model_dir, fingerprint)), out, header, seconds=seconds)
    console.print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()), highlight=False)


@traces.command("info")
def trace_info(
    recording: Recording,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Say what a recording holds: traces, tokens, domains, acceptance, draft versions, bytes."""
    from slipstream.traces import sentences, summary

    document = summary(recording)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        console.print(sentences(document), highlight=False, soft_wrap=True)


@traces.command("export")
def export_traces(
    recording: Recording,
    out: Annotated[Path | None, typer.Option("--out", "--jsonl", help="JSON lines; default: standard output.")] = None,
) -> None:
    """Write traces as JSON lines: tokens, target distributions, rounds; everything but the features."""
    from slipstream.traces import check_output, export

    check_output(out)
    if out is None:
        export(recording, sys.stdout)
        return
    with out.open("w") as file:
        count = export(recording, file)
    console.print(f"{count} traces written to {out}", highlight=False)


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
    shared: list[Any] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            *shared,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # What also runs inside SGLang logs with the standard library alone; here it looks like the rest.
    handler = logging.StreamHandler(sys.stderr)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, renderer])
    )
    own = logging.getLogger("serving")
    own.handlers, own.propagate = [handler], False
    own.setLevel(logging.INFO)
