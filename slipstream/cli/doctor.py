"""`slipstream doctor`: checks everything that the services need, and says how to fix what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slipstream.cli.effects import DOCTOR, check_options
from slipstream.cli.options import AsJson, Engine, InDataDir, Model, SglangPython, at_home
from slipstream.models import BUNDLED_MODEL
from slipstream.settings import known_variables
from slipstream.terminal import console, print_json, spinner

if TYPE_CHECKING:
    from slipstream.doctor.finding import Check

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def doctor(
    context: typer.Context,
    model: Model = BUNDLED_MODEL,
    engine: Engine = "local",
    data_dir: InDataDir = None,
    redis_url: Annotated[str | None, typer.Option(envvar="SLIPSTREAM_REDIS_URL", help="Also check this Redis.")] = None,
    store: Annotated[
        Path | None, typer.Option(callback=at_home, envvar="SLIPSTREAM_STORE", help="Also check this store.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(callback=at_home, help="Also check the trainer's checkpoint there.")
    ] = None,
    port: Annotated[list[int] | None, typer.Option(help="Port that should be free; default: 8000 and 8765.")] = None,
    sglang_python: SglangPython = None,
    as_json: AsJson = False,
) -> None:
    """Check what Slipstream needs on this machine, and say how to fix each fault. Exit code 1 on any failure."""
    from slipstream.cli.main import app
    from slipstream.doctor import deployment, machine
    from slipstream.doctor.finding import Finding, run_check, skipped

    check_options(context, DOCTOR)
    with_sglang = engine == "sglang"

    def more() -> Iterator[Finding]:
        given = {"--redis-url": redis_url, "--store": store, "--state": state}
        if missing := [option for option, value in given.items() if not value]:
            yield skipped("more", f"pass {', '.join(missing)}, or --data-dir, to check them as well")

    def checks() -> Iterator[tuple[str, Check]]:
        """All checks, in the order in which a starting service needs them."""
        yield "settings", partial(deployment.check_settings, known_variables(app))
        yield "keys", deployment.check_keys
        yield "python", machine.check_python
        yield "memory", machine.check_memory
        yield "disk", machine.check_disk
        yield "torch", machine.check_torch
        yield "gpu", partial(machine.check_gpu, needed=with_sglang)
        yield "model", partial(machine.check_model, model, local=not with_sglang)
        if with_sglang:
            yield "sglang", partial(machine.check_sglang, sglang_python)
        yield "port", partial(machine.check_ports, port or [8000, 8765])
        yield "redis", partial(deployment.check_redis, redis_url, model) if redis_url else deployment.check_own_redis
        if store:
            yield "store", partial(deployment.check_store, store)
            yield "draft", partial(deployment.check_fit, model, store)
        if state:
            yield "trainer", partial(deployment.check_trainer, state)
        if redis_url and store:
            yield "stream", partial(deployment.check_stream, redis_url, model, store)
        yield "more", more

    with spinner("checking"):
        findings = [finding for name, check in checks() for finding in run_check(name, check)]
    healthy = not any(finding.level == "failed" for finding in findings)
    if as_json:
        print_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            mark = f"[{_COLOURS[finding.level]}]{finding.level:7}[/]"
            console.print(f"{mark} {finding.name}: {escape(finding.detail)}", highlight=False, soft_wrap=True)
    if not healthy:
        raise typer.Exit(1)
