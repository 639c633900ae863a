"""`slipstream doctor` as a command; what it looks at is in slipstream/doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.cli.effects import DOCTOR, check_options
from slipstream.cli.options import AsJson, Engine, Model, SglangPython
from slipstream.models import BUNDLED_MODEL
from slipstream.terminal import console, print_json, working

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "dim"}


def doctor(
    context: typer.Context,
    model: Model = BUNDLED_MODEL,
    engine: Engine = "local",
    redis_url: Annotated[str | None, typer.Option(envvar="SLIPSTREAM_REDIS_URL", help="Also check this Redis.")] = None,
    store: Annotated[Path | None, typer.Option(envvar="SLIPSTREAM_STORE", help="Also check this store.")] = None,
    state: Annotated[Path | None, typer.Option(help="Also check the trainer's checkpoint there.")] = None,
    port: Annotated[list[int] | None, typer.Option(help="Port that should be free; default: 8000 and 8765.")] = None,
    sglang_python: SglangPython = None,
    as_json: AsJson = False,
) -> None:
    """Check what Slipstream needs on this machine; each finding says how to mend it. Exit code 1 on any failure."""
    from slipstream.cli.main import app
    from slipstream.doctor.doctor import Patient, examine
    from slipstream.settings import known_variables

    check_options(context, DOCTOR)

    with working("looking"):
        findings = examine(
            Patient(
                model=model,
                redis_url=redis_url,
                store=store,
                state=state,
                ports=port or [8000, 8765],
                with_sglang=engine == "sglang",
                sglang_python=sglang_python,
                known_variables=known_variables(app),
            )
        )
    healthy = not any(finding.level == "failed" for finding in findings)
    if as_json:
        print_json({"ok": healthy, "findings": [finding.to_dict() for finding in findings]})
    else:
        for finding in findings:
            mark = f"[{_COLOURS[finding.level]}]{finding.level:7}[/]"
            console.print(f"{mark} {finding.name}: {escape(finding.detail)}", highlight=False, soft_wrap=True)
    if not healthy:
        raise typer.Exit(1)
