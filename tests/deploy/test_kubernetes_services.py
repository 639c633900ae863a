"""What the manifests start is what the compose file starts: the same programs, options and settings, and real ones."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
import yaml
from torch.distributed.run import get_args_parser

from serving.gateway.config import GatewaySettings
from slipstream.cli.main import app
from slipstream.settings import known_variables
from tests.deploy.compose import GPU, ROOT, argv, entrypoint, load
from tests.deploy.manifests import (
    BASE,
    Manifest,
    container,
    environment,
    labels,
    manifests,
    of_kind,
    pods,
    selects,
    words,
)
from tests.fixtures.command_line import check_slipstream

OURS = manifests(BASE)
PODS = pods(OURS)
SLIPSTREAM = ("init", "sglang", "gateway", "trainer")
EACH = pytest.mark.parametrize("name", SLIPSTREAM)
COMPOSE = load(GPU, {"SLIPSTREAM_MODEL": "Qwen/Qwen3-4B"})["services"]
POLICIES = of_kind("NetworkPolicy", OURS)

FORMER_FILTER = "SLIPSTREAM_DROP_PERSONAL_DATA"
GRACE_S = 10
"""In which a gateway that was told to stop lets answers end (serving/gateway/server.py)."""


def _command(name: str) -> list[str]:
    """The words after `slipstream`."""
    only = container(PODS[name])
    told = words(only)
    if "command" in only:
        assert only["command"] == ["python", "-m", "torch.distributed.run"]
        parsed = get_args_parser().parse_args(told)
        assert parsed.module
        assert parsed.training_script == "slipstream"
        assert parsed.nproc_per_node == "1"
        return list(parsed.training_script_args)
    return told


@EACH
def test_the_command_and_its_settings_are_real_ones(name: str) -> None:
    check_slipstream(_command(name))
    told = {key for key in environment(container(PODS[name])) if key.startswith("SLIPSTREAM_")}
    assert told <= known_variables(app)


@EACH
def test_it_is_told_what_compose_tells_it(name: str) -> None:
    compose = COMPOSE[name]
    theirs, ours = argv(compose["command"]), _command(name)
    # Here every command names its store; there the environment does. What stands in front of engines differs, too.
    options = {word for word in ours if word.startswith("--")} - {"--store", "--pool"}
    # Pods do not share a card: SGLang's part of it is a setting there, and computed or SGLang's own choice in compose.
    options -= {"--mem-fraction-static"}
    assert options == {word for word in theirs if word.startswith("--")} - {"--store"}
    values = {word: theirs[place + 1] for place, word in enumerate(theirs[:-1]) if word.startswith("--")}
    for option in options - {"--sglang", "--private-network", "--if-missing", "--"}:
        assert ours[ours.index(option) + 1] == values[option], option
    assert ours[ours.index("--store") + 1] == compose["environment"]["SLIPSTREAM_STORE"]
    here, there = environment(container(PODS[name])), compose["environment"]
    only_there = {key for key in there if key.startswith("SLIPSTREAM_")} - here.keys()
    # Pods get every line of an operator's settings; compose hands on what it names, and so what a start refuses, too.
    assert only_there - {"SLIPSTREAM_SGLANG_GPU", "SLIPSTREAM_TRAINER_GPU"} == {"SLIPSTREAM_STORE", FORMER_FILTER}
    same = (there.keys() & here.keys()) - {"SLIPSTREAM_REDIS_URL", "HF_TOKEN"}
    for key in same:
        assert here[key] == there[key].replace("/run/secrets/", "/run/secrets/slipstream/"), key
    if "SLIPSTREAM_REDIS_URL" in there:
        assert here["SLIPSTREAM_REDIS_URL"] == there["SLIPSTREAM_REDIS_URL"]


def test_several_trainer_processes_may_start_again() -> None:
    only = container(PODS["trainer"])
    assert get_args_parser().parse_args(words(only)).max_restarts > 0
    # Without it each of several processes ends at its start: tests/trainer/test_ranks.py.
    assert environment(only)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_trainer_takes_no_cpu_that_serving_wants() -> None:
    """Niceness counts within one container alone: what is requested is what a container weighs."""

    def cpus(name: str) -> float:
        asked = container(PODS[name])["resources"]["requests"]["cpu"]
        return float(asked.removesuffix("m")) / (1000 if asked.endswith("m") else 1)

    assert all(16 * cpus("trainer") <= cpus(name) for name in ("sglang", "gateway", "router", "redis"))


def test_engines_are_named_after_their_pods() -> None:
    [named] = [each for each in container(PODS["sglang"])["env"] if each["name"] == "SLIPSTREAM_ENGINE_ID"]
    assert named["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert "sglang" in of_kind("StatefulSet", OURS), "whose pods keep their names"


def test_redis_is_started_as_compose_starts_it() -> None:
    only = container(PODS["redis"])
    expected = [word.replace("/run/secrets/", "/run/secrets/slipstream/") for word in argv(COMPOSE["redis"]["command"])]
    assert only["command"] == COMPOSE["redis"]["entrypoint"]
    assert words(only) == expected
    kustomization = yaml.safe_load((ROOT / "deploy" / "redis" / "kustomization.yaml").read_text())
    assert kustomization["configMapGenerator"] == [{"name": "redis", "files": ["redis.conf"]}]
    for probe in ("startupProbe", "readinessProbe"):
        assert only[probe]["exec"]["command"][-1] == COMPOSE["redis"]["healthcheck"]["test"][1]


def test_probes_ask_what_answers() -> None:
    paths = {
        "sglang": {"/health"},
        "gateway": {"/health"},
        "trainer": {"/metrics"},
        "router": {"/liveness", "/readiness"},
    }
    for name, expected in paths.items():
        only = container(PODS[name])
        ports = {port["name"] for port in only["ports"]}
        probes = [only[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert {probe["path"] for probe in probes} == expected
        assert {probe["port"] for probe in probes} <= ports


def test_running_answers_have_the_time_that_the_gateway_gives_them() -> None:
    longest = float(environment(container(PODS["gateway"]))["SLIPSTREAM_GATEWAY_MAX_REQUEST_S"])
    assert longest == GatewaySettings().max_request_s
    for name in ("sglang", "router", "gateway"):
        pod = PODS[name]["spec"]
        slept = container(PODS[name])["lifecycle"]["preStop"]["sleep"]["seconds"]
        left = pod["terminationGracePeriodSeconds"] - slept
        if name == "gateway":
            assert slept >= longest, "asked to stop, it cuts answers after ten seconds"
            assert left >= 2 * GRACE_S
        else:
            assert slept >= 5, "until whoever is in front has heard of it"
            assert left >= longest, "it ends when its last answer has"
    router = words(container(PODS["router"]))
    assert float(router[router.index("--shutdown-grace-period-secs") + 1]) >= longest


def test_the_router_finds_the_engines() -> None:
    router = words(container(PODS["router"]))
    key, value = router[router.index("--selector") + 1].split("=")
    assert [name for name in PODS if labels(PODS[name]).get(key) == value] == ["sglang"]
    [port] = container(PODS["sglang"])["ports"]
    assert router[router.index("--service-discovery-port") + 1] == str(port["containerPort"])
    [rule] = of_kind("Role", OURS)["router"]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    # A name for each of its pods: a gateway goes on from one to the next (tests/serving/gateway/test_upstream.py).
    assert of_kind("Service", OURS)["router"]["spec"]["clusterIP"] == "None"
    [bound] = of_kind("RoleBinding", OURS)["router"]["subjects"]
    assert bound["name"] == PODS["router"]["spec"]["serviceAccountName"]
    assert entrypoint(ROOT / "deploy" / "router.Dockerfile") == ["python", "-m", "sglang_router.launch_router"]


def test_a_clients_requests_meet_the_gateway_that_has_its_rollouts() -> None:
    """A rollout is in one gateway's memory."""
    assert of_kind("Service", OURS)["gateway"]["spec"]["sessionAffinity"] == "ClientIP"


# -- who reaches whom


def _lines(name: str, direction: str) -> list[Manifest]:
    """The rules of all policies for a pod."""
    found: list[Manifest] = []
    for policy in POLICIES.values():
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], labels(PODS[name])):
            found += policy["spec"].get(direction.lower(), [])
    return found


def _may(one: str, port: str, other: str) -> bool:
    """Whether a pod may connect to another's port: both ends have to allow it."""

    def allows(line: Manifest, peers: str, peer: str) -> bool:
        ports = {each["port"] for each in line["ports"]}
        if port not in ports:
            return False
        selectors = [each["podSelector"] for each in line.get(peers, []) if "podSelector" in each]
        return peers not in line or any(selects(selector, labels(PODS[peer])) for selector in selectors)

    out = any(allows(line, "to", other) for line in _lines(one, "Egress"))
    into = any(allows(line, "from", one) for line in _lines(other, "Ingress"))
    return out and into


def test_pods_reach_what_they_need_and_nothing_else() -> None:
    assert POLICIES["nothing-else"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ports = {name: [port["name"] for port in container(pod).get("ports", [])] for name, pod in PODS.items()}
    lines = {(one, other, port) for one in PODS for other in PODS for port in ports[other] if _may(one, port, other)}
    assert lines == {
        ("gateway", "router", "http"),
        ("router", "sglang", "http"),
        # Rollouts and new weights, which routers do not pass on.
        ("gateway", "sglang", "http"),
        *((name, "redis", "redis") for name in ("sglang", "gateway", "trainer")),
    }
    away = {name for name in PODS if any("to" not in line for line in _lines(name, "Egress"))}
    assert away == {"init", "router"}, "who may reach what is outside of the cluster"


def test_every_pod_may_ask_for_names_also_where_a_cache_on_the_node_answers() -> None:
    """NodeLocal DNSCache is of no namespace, and listens on this address; many clusters have it by default."""
    for name in PODS:
        peers = [
            peer
            for line in _lines(name, "Egress")
            if 53 in {each["port"] for each in line["ports"]}
            for peer in line["to"]
        ]
        assert any("namespaceSelector" in peer for peer in peers), name
        blocks = [ip_network(peer["ipBlock"]["cidr"]) for peer in peers if "ipBlock" in peer]
        assert any(ip_address("169.254.20.10") in block for block in blocks), name


def test_addresses_in_settings_are_those_lines() -> None:
    """Each `name:port` that a service is told is a Service, on that port, that it may reach."""
    services = of_kind("Service", OURS)
    for name in PODS:
        told = [*words(container(PODS[name])), *environment(container(PODS[name])).values()]
        for service, one in services.items():
            for port in one["spec"]["ports"]:
                address = f"{service}:{port['port']}"
                named = [text for text in told if f"//{address}" in text or f"@{address}" in text]
                assert not named or _may(name, port["targetPort"], service), f"{name} is told {address}"
    assert "http://router:30000" in words(container(PODS["gateway"]))
