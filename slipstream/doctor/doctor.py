"""`slipstream doctor`: looks at everything that the services need, and says how to mend what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.doctor import deployment, machine
from slipstream.doctor.finding import Finding, failed, skipped
from speculator.errors import SlipstreamError

Check = Callable[[], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What to look at; None is left out."""

    model: str
    redis_url: str | None
    store: Path | None
    state: Path | None
    ports: Sequence[int]
    with_sglang: bool
    """Whether SGLang and a GPU are needed; otherwise the local engine is."""
    sglang_python: Path | None
    known_variables: Set[str]


def examine(patient: Patient) -> list[Finding]:
    """All checks, in the order in which a start would meet them; none of them raises."""
    return [finding for name, check in _checks(patient) for finding in _run(name, check)]


def _checks(patient: Patient) -> Iterator[tuple[str, Check]]:
    yield "settings", partial(deployment.check_settings, patient.known_variables)
    yield "keys", deployment.check_keys
    yield "python", machine.check_python
    yield "memory", machine.check_memory
    yield "disk", machine.check_disk
    yield "torch", machine.check_torch
    yield "gpu", partial(machine.check_gpu, needed=patient.with_sglang)
    yield "model", partial(machine.check_model, patient.model, local=not patient.with_sglang)
    if patient.with_sglang:
        yield "sglang", partial(machine.check_sglang, patient.sglang_python)
    yield "port", partial(machine.check_ports, patient.ports)
    url, root = patient.redis_url, patient.store
    yield "redis", partial(deployment.check_redis, url) if url else deployment.check_own_redis
    if root:
        yield "store", partial(deployment.check_store, root)
        yield "draft", partial(deployment.check_fit, patient.model, root)
    if patient.state:
        yield "trainer", partial(deployment.check_trainer, patient.state)
    if url and root:
        yield "stream", partial(deployment.check_stream, url, patient.model, root)
    yield "more", partial(_not_asked, patient)


def _not_asked(patient: Patient) -> Iterator[Finding]:
    given = {"--redis-url": patient.redis_url, "--store": patient.store, "--state": patient.state}
    if missing := [option for option, value in given.items() if not value]:
        yield skipped("more", f"{', '.join(missing)}: pass them to look at what they name")


def _run(name: str, check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except SlipstreamError as error:
        yield failed(name, str(error))
    except Exception as error:  # a sick machine fails in ways that nobody has thought of: say so, and look at the rest
        yield failed(
            name, f"this check itself failed ({type(error).__name__}: {error}): what it looks at is not as usual"
        )
