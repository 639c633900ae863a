"""The router's command of deploy/kubernetes, by the router's own parser."""

from __future__ import annotations

import argparse

import pytest

from tests.deploy.manifests import BASE, container, manifests, pods, words

router_args = pytest.importorskip("sglang_router.router_args", reason="no sglang-router in this environment")


def test_the_command_is_a_real_one() -> None:
    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser)
    parsed = parser.parse_args(words(container(pods(manifests(BASE))["router"])))
    assert parsed.service_discovery
    assert parsed.selector == ["app.kubernetes.io/name=sglang"]
    assert (parsed.host, parsed.port, parsed.service_discovery_port) == ("0.0.0.0", 30000, 30000)
    assert parsed.disable_circuit_breaker
