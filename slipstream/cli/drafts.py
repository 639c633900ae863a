"""`slipstream drafts`: create, list, compare, promote, roll back, pin, import and export draft versions.

The tables are for a terminal; `--json` has every number.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.table import Table

from slipstream.cli.effects import DRAFT_INIT, check_options
from slipstream.cli.options import AsJson, DraftVocab, InDataDir, Model, RedisUrl, Store, VocabFrom, at_home
from slipstream.models import check_target, checked_fingerprint, resolve_head, resolve_model
from slipstream.settings import DEFAULT_REDIS_URL
from slipstream.terminal import print_json, print_table, spinner
from speculator.errors import ConfigError

if TYPE_CHECKING:
    from speculator.redis.control_plane import DraftPointer
    from speculator.versions.operator import (
        Details,
        Difference,
        DraftChange,
        DraftOperator,
        DraftRow,
        EngineRow,
        Overview,
    )

app = typer.Typer(no_args_is_help=True, help="Draft versions: look at them, choose which one is served.")

Version = Annotated[int, typer.Argument(min=1, help="Number of a draft version.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Target that the engines serve; Redis is asked only with it.")
]

STORE = Path("drafts")


@app.command("list")
def list_versions(
    data_dir: InDataDir = None,
    store: Store = STORE,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """List all versions, oldest first; without --model or Redis, only what is on disk."""
    with _draft_operator(store, redis_url, model) as desk:
        overview = desk.overview()
    _print(overview, as_json, lambda: _overview_tables(overview))


@app.command()
def show(
    version: Version,
    data_dir: InDataDir = None,
    store: Store = STORE,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Show a version: its origin, the gate's numbers, and each change of state with its reason."""
    with _draft_operator(store, redis_url, model) as desk:
        details = desk.show(version)
    _print(details, as_json, lambda: _details_tables(details))


@app.command()
def diff(a: Version, b: Version, data_dir: InDataDir = None, store: Store = STORE, as_json: AsJson = False) -> None:
    """Compare two versions: tensors, config, manifest."""
    with _draft_operator(store, DEFAULT_REDIS_URL, None) as desk:
        difference = desk.diff(a, b)
    _print(difference, as_json, lambda: _difference_tables(difference))


@app.command()
def promote(
    version: Version,
    data_dir: InDataDir = None,
    store: Store = STORE,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have engines serve a version; one in quarantine is released. Engines try it once they have traffic."""
    with _draft_operator(store, redis_url, model) as desk:
        _say("promoted", desk.promote(version, actor=operator()), as_json)


@app.command()
def rollback(
    reason: Annotated[str, typer.Option(help="Reason, kept in the version's history.")],
    version: Annotated[
        int | None, typer.Option(min=1, help="Version to take out; default: the one that engines should run.")
    ] = None,
    data_dir: InDataDir = None,
    store: Store = STORE,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Take a version out of service; engines serve the last good one instead."""
    with _draft_operator(store, redis_url, model) as desk:
        _say("rolled back", desk.rollback(actor=operator(), reason=reason, version=version), as_json)


@app.command()
def pin(
    version: Version,
    data_dir: InDataDir = None,
    store: Store = STORE,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have engines serve one version, whatever the trainer publishes, until `unpin`."""
    with _draft_operator(store, redis_url, model) as desk:
        _say("pinned", desk.pin(version, actor=operator()), as_json)


@app.command()
def unpin(
    data_dir: InDataDir = None,
    store: Store = STORE,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have engines follow the trainer's versions again."""
    with _draft_operator(store, redis_url, model) as desk:
        _say("unpinned", desk.unpin(actor=operator()), as_json)


@app.command()
def export(
    version: Version,
    out: Annotated[Path, typer.Option(callback=at_home, help="Folder to write.")],
    data_dir: InDataDir = None,
    store: Store = STORE,
    layout: Annotated[
        Literal["specforge", "speculators"],
        typer.Option(help="specforge is for SGLang; speculators is for vLLM and needs --model."),
    ] = "specforge",
    model: Annotated[str | None, typer.Option(help="Target that the engines serve.")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a version and write it as a folder of its own."""
    from speculator.draft.checkpoint import model_name
    from speculator.draft.public_heads import as_speculators

    convert = None
    if layout == "speculators":
        if model is None:
            raise ConfigError("--layout speculators writes the target's name into the folder: pass --model")
        model_dir = resolve_model(model)
        convert = partial(as_speculators, model_dir=model_dir, model=model_name(model_dir))
    with _draft_operator(store, DEFAULT_REDIS_URL, None) as desk:
        folder = desk.export(version, out, actor=operator(), layout=convert)
    _print({"folder": str(folder)}, as_json, lambda: [str(folder)])


@app.command("import")
def import_(
    head: Annotated[str, typer.Argument(help="EAGLE-3 head: a folder, or an id on the hub.")],
    model: Model,
    data_dir: InDataDir = None,
    store: Store = STORE,
    traces: Annotated[list[Path] | None, typer.Option(help="Recording to score the head on; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Begin a store with a public EAGLE-3 head, in the layout of SpecForge or of vLLM's speculators."""
    with spinner("starting"):
        from slipstream.replay import ReplayOptions, replay
        from speculator.draft.public_heads import read_public_head
        from speculator.versions.lineage import import_head
        from speculator.versions.store import DraftStore

    model_dir, folder, drafts = resolve_model(model), resolve_head(head), DraftStore(store)
    with spinner(f"reading {head}, writing it as the first version of {store}"):
        found = read_public_head(folder, model_dir)
        fingerprint = checked_fingerprint(model_dir, drafts)
        version = import_head(drafts, found, target_fingerprint=fingerprint, source=head)
    document: dict[str, Any] = {"folder": str(drafts.folder(version).absolute()), "layout": found.layout}
    document |= {"draft_vocab_size": found.config.draft_vocab_size, "notes": list(found.notes)}
    if traces:
        with spinner("scoring it on the recordings"):
            options = ReplayOptions(recordings=traces, model_dir=model_dir, depths=[1, 2, 3], num_steps=0, store=store)
            scored = replay(options)
        document |= {name: scored[name] for name in ("accept_length", "recorded_accept_length", "held_out_traces")}
    _print(document, as_json, lambda: list(_imported(document)))


def _imported(document: dict[str, Any]) -> Iterator[str]:
    yield document["folder"]
    yield f"layout of {document['layout']}, a vocabulary of {document['draft_vocab_size']:,} tokens"
    yield from document["notes"]
    if "accept_length" in document:
        yield (
            f"it would commit {document['accept_length']} tokens a verification of {document['held_out_traces']} "
            f"recorded answers, at depth 3; the draft that served them did {document['recorded_accept_length']}"
        )


@contextlib.contextmanager
def _draft_operator(store_dir: Path, redis_url: str, model: str | None) -> Iterator[DraftOperator]:
    with spinner("starting"):
        from speculator.draft.checkpoint import model_key
        from speculator.redis.client import connect
        from speculator.redis.control_plane import DraftPointer
        from speculator.redis.model_names import check_name
        from speculator.versions.operator import DraftOperator
        from speculator.versions.store import DraftStore

    store = DraftStore(store_dir)
    newest = store.latest()
    if newest is None:
        raise ConfigError(f"{store_dir} holds no draft versions: check --store, or --data-dir")
    fingerprint = store.manifest(newest).target_fingerprint
    with contextlib.ExitStack() as opened:

        @cache
        def pointer() -> DraftPointer:
            if model is None:
                raise ConfigError("Redis was not read: pass --model, the target that the engines serve")
            # The newest draft has the target's fingerprint: computing it from a large target's weights takes minutes.
            key = model_key(resolve_model(model), fingerprint)
            client = opened.enter_context(connect(redis_url))
            check_name(client, key)
            return DraftPointer(client, key)

        yield DraftOperator(store, pointer)


def operator() -> str:
    try:
        return f"operator:{getpass.getuser()}"
    except (KeyError, OSError):
        # A container's user may have no name.
        return f"operator:{os.getuid()}"


def _print(document: Any, as_json: bool, tables: Callable[[], list[Any]]) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
        return
    for each in tables():
        if isinstance(each, Table):
            print_table(each)
        else:
            typer.echo(each)


def _say(what: str, outcome: DraftChange, as_json: bool) -> None:
    state = "unknown" if outcome.state is None else outcome.state.value
    line = f"{what}: draft version {outcome.version}, {state}; engines should run {_or_dash(outcome.desired)}"
    _print(outcome, as_json, lambda: [line])


@app.command()
def init(
    model: Model,
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(callback=at_home, help="Folder for a draft as SGLang loads it.")] = None,
    data_dir: InDataDir = None,
    store: Annotated[
        Path | None, typer.Option(callback=at_home, help="Draft store whose first version it becomes.")
    ] = None,
    vocab_from: VocabFrom = None,
    draft_vocab_size: DraftVocab = None,
    intermediate_size: Annotated[
        int | None, typer.Option(min=16, help="Width of the draft's MLP; default: the target's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random weights; default: 0.")] = None,
    fc_norm: Annotated[bool, typer.Option("--fc-norm", help="Norm each target feature before `fc`.")] = False,
    norm_before_fc: Annotated[
        bool, typer.Option("--norm-before-fc", help="Norm the three target features as one vector.")
    ] = False,
    norm_output: Annotated[bool, typer.Option("--norm-output", help="Feed back the final norm's output.")] = False,
    norm_before_residual: Annotated[
        bool, typer.Option("--norm-before-residual", help="Add the layer's output to the normed feature.")
    ] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="With --store: keep its versions; only shapes are compared.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a fresh draft for a target; it has learned nothing."""
    with spinner("starting"):
        from slipstream.demo.topics import read_texts
        from speculator.draft.checkpoint import model_name

    if (out is None) == (store is None):
        raise ConfigError(
            "pass either --out, for a folder of its own, or --store (--data-dir), for a store's first version"
        )
    check_options(context, DRAFT_INIT)
    model_dir = resolve_model(model)
    texts = read_texts(vocab_from) if vocab_from else []
    switches = {
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_output": norm_output,
        "norm_before_residual": norm_before_residual,
    }
    asked = {
        "draft_vocab_size": draft_vocab_size,
        "intermediate_size": intermediate_size,
        "seed": seed,
        "texts": texts,
        "switches": [name for name, is_on in switches.items() if is_on],
    }
    with spinner(f"reading {model_name(model_dir)}, writing a draft for it"):
        if out is not None:
            written = _write_folder(model_dir, out, **asked)
        else:
            assert store is not None, "checked above"
            written = _write_first_version(model_dir, store, if_missing=if_missing, **asked)
    if as_json:
        print_json({"folder": str(written)})
    else:
        typer.echo(written)


def _write_folder(model_dir: Path, out: Path, **asked: Any) -> Path:
    """Write a draft as a Hugging Face folder, atomically. Raises ConfigError."""
    from speculator.draft.checkpoint import check_can_write, draft_config_json, draft_state, write_folder
    from speculator.draft.initialization import fresh_draft
    from speculator.draft.public_heads import check_sglang_layout

    check_can_write(out)
    check_target(model_dir)
    draft = fresh_draft(model_dir, **asked)
    check_sglang_layout(draft.config)
    return write_folder(out, draft_state(draft), draft_config_json(draft.config))


def _write_first_version(model_dir: Path, root: Path, *, if_missing: bool, **asked: Any) -> Path:
    """Write a draft as the first version of a store; with `if_missing`, leave a store that has versions as it is.

    Raises ConfigError where the store has versions, or, with `if_missing`, versions that do not fit the options.
    """
    from speculator.versions.lineage import ensure_lineage
    from speculator.versions.store import ANOTHER_STORE, DraftStore

    store = DraftStore(root)
    latest = store.latest()
    if latest is not None and not if_missing:
        raise ConfigError(f"{root} already holds draft versions, {latest} is the newest: {ANOTHER_STORE}")
    # An existing version has the target's fingerprint: computing it from a large target's weights takes minutes.
    fingerprint = checked_fingerprint(model_dir, store) if latest is None else store.manifest(latest).target_fingerprint
    return store.folder(ensure_lineage(store, model_dir, fingerprint, **asked)).absolute()


draft_app = typer.Typer(hidden=True, no_args_is_help=True, help="The old name of `slipstream drafts`.")
draft_app.command("init", hidden=True)(init)


@draft_app.callback()
def _renamed() -> None:
    typer.echo("`slipstream draft` is now `slipstream drafts`; the old name goes with the next release", err=True)


# -- tables for a terminal


def _overview_tables(overview: Overview) -> list[Any]:
    table = Table("version", "state", "parent", "created", "gate", "served as")
    for row in overview.drafts:
        state = "unknown" if row.state is None else row.state.value
        gate = row.damage or _gate(row.gate)
        table.add_row(str(row.version), state, _or_dash(row.parent), _when(row.created_ms), gate, _served_as(row))
    engines = [_engines_table(overview.engines)] if overview.engines else []
    return [table, *engines, *([f"nothing from Redis: {overview.no_redis}"] if overview.no_redis else [])]


def _engines_table(rows: list[EngineRow]) -> Table:
    table = Table("engine", "version", "role", "accept length", "target", "trials", "last verdict")
    for row in rows:
        length = "–" if row.accept_length is None else f"{row.accept_length:.3f}"
        numbers = (_or_dash(row.version), row.role or "–", length, _or_dash(row.target_version))
        table.add_row(row.engine_id, *numbers, row.verdicts or "–", row.last_verdict or "–")
    return table


def _served_as(row: DraftRow) -> str:
    marks = {"last good": row.is_last_good, "published": row.is_published, "pinned": row.is_pinned}
    return ", ".join([*(name for name, holds in marks.items() if holds), *row.engines])


def _details_tables(details: Details) -> list[Any]:
    manifest = Table("manifest", "", show_header=False)
    for name, value in msgspec.to_builtins(details.manifest).items():
        manifest.add_row(name, msgspec.json.encode(value).decode() if isinstance(value, dict) else _or_dash(value))
    manifest.add_row("served as", _served_as(details.draft) or "–")
    history = Table("when", "state", "by", "reason", "numbers")
    for each in details.history:
        history.add_row(_when(each.at_ms), each.state.value, each.actor, each.reason, _short(each.numbers))
    return [manifest, history]


def _difference_tables(difference: Difference) -> list[Any]:
    tensors = Table("tensor", "relative L2", "cosine", "changed elements")
    for each in difference.tensors:
        if each.num_changed is None:
            tensors.add_row(each.name, "–", "–", f"shapes {each.shapes[0]} and {each.shapes[1]}")
        else:
            tensors.add_row(each.name, _figure(each.relative_l2), _figure(each.cosine), str(each.num_changed))
    rest = Table("", f"version {difference.a}", f"version {difference.b}")
    for name, (a, b) in {**difference.config, **difference.manifest}.items():
        rest.add_row(name, _or_dash(a), _or_dash(b))
    return [tensors, rest]


def _short(numbers: Any) -> str:
    """A dict's plain values on one line; nested tables are left to --json."""
    if not isinstance(numbers, dict):
        return _or_dash(numbers)
    shown = {name: value for name, value in numbers.items() if isinstance(value, str | int | float)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )


def _gate(gate: Any) -> str:
    """The gate's outcome and the gain on held-out traces with its 95% interval, as on the page."""
    fresh = gate.get("fresh") if isinstance(gate, dict) else None
    if not isinstance(fresh, dict):
        return _short(gate)
    change, lower, upper = (_percent(fresh.get(name)) for name in ("change", "lower", "upper"))
    return f"{gate.get('outcome')} {change} ({lower} to {upper}), {fresh.get('num_traces')} traces"


def _percent(value: object) -> str:
    return f"{value:+.1%}" if isinstance(value, int | float) else "–"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _when(at_ms: int | None) -> str:
    return "–" if at_ms is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))
