"""What the chart starts the services with is what they take."""

import json

import pytest

from chart_kit import (
    CASES,
    CHART,
    each_case,
    render,
    values_of,
)
from chart_services import (
    COMMANDS,
    STAGES,
    arguments,
    environment,
    image_entrypoint,
    image_stages,
    image_variables,
    known_variable,
    router_settings,
    settings_of,
    verifier_settings,
    vllm_flags,
)
from specdec.cli import split_extra
from specdec.draft.settings import DraftSettings
from specdec.router.settings import RouterSettings
from specdec.verifier.settings import VerifierSettings
from specdec.verifier.supervisor import engine_command


@each_case
def test_the_services_take_what_they_are_started_with(case: str) -> None:
    rendered = render(case)
    started = {}
    for pod in rendered.pods():
        for container in pod.containers:
            words = arguments(pod, container)
            assert not [word for word in words if "$(" in word], words
            started[words[0]] = settings_of(pod, container)
            for name in environment(pod, container):
                known_variable(name)
    assert set(started) == set(COMMANDS)


@pytest.mark.parametrize("stage", [stage for stage in image_stages() if stage in STAGES])
def test_the_images_start_the_program_and_set_nothing_that_it_does_not_know(stage: str) -> None:
    assert image_entrypoint(stage)[-1] == "specdec"
    for name in image_variables(stage):
        known_variable(name)


@each_case
def test_no_container_takes_the_image_s_init_away(case: str) -> None:
    assert not any("command" in container for pod in render(case).pods() for container in pod.containers)


@each_case
def test_vllm_takes_what_it_is_started_with(case: str) -> None:
    engine = render(case).pod_with("verifier")
    _, extra = split_extra(arguments(engine, engine.container("verifier")))
    settings = verifier_settings(engine).model_copy(update={"model": "any"})
    assert engine_command(settings, extra)[-len(extra) :] == extra, "nothing that the plug-ins set themselves"
    flags = [word.partition("=")[0] for word in extra if word.startswith("--")]
    assert set(flags) <= vllm_flags()


def test_settings_are_all_that_the_chart_does_not_set_itself() -> None:
    """By the schema: else a flag would stand twice, or could not be set at all."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for name, kind in (("router", RouterSettings), ("verifier", VerifierSettings), ("draft", DraftSettings)):
        own: set[str] = set()
        for case in CASES:
            rendered = render(case, {"control": {"tls": {"existingSecret": "t"}}})
            pod = rendered.pod_with("router" if name == "router" else "verifier")
            words = split_extra(arguments(pod, pod.container(name)))[0]
            own |= (
                {word.partition("=")[0][2:] for word in words[1:]} - {"no-auth"} - {*values_of(case)[name]["settings"]}
            )
        fixed = {"port", "admin-port", "control-port", "health-port", "auth"}  # which the manifests name
        free = set(schema[name]["properties"]["settings"]["properties"])
        assert free | own | fixed >= {field.replace("_", "-") for field in kind.model_fields}, name
        assert not free & (own | fixed) - {"run-ahead"}, name


@each_case
def test_services_listen_where_others_reach_them(case: str) -> None:
    rendered = render(case)
    for name in ("router", "verifier", "draft"):
        pod = rendered.pod_with("router" if name == "router" else "verifier")
        if name not in [c["name"] for c in pod.containers]:
            continue
        container = pod.container(name)
        settings = settings_of(pod, container)
        assert settings.host in ("0.0.0.0", "::")
        ports = {port["containerPort"] for port in container["ports"]}
        if isinstance(settings, RouterSettings):
            assert settings.admin_host == settings.host
            assert ports == {settings.port, settings.admin_port}
            assert settings.api_keys_file or not settings.auth
        elif isinstance(settings, VerifierSettings):
            assert ports == {settings.port, settings.control_port, settings.health_port}
            assert settings.advertise, "a verifier that listens everywhere must be told its address"
        else:
            assert ports == {settings.health_port}
    numbers = list(rendered.pod_with("verifier").ports().values())
    assert len(numbers) == len(set(numbers)), "containers of a pod share its ports"


@each_case
def test_the_pair_is_one_pair(case: str) -> None:
    engine = render(case).pod_with("verifier")
    verifier = verifier_settings(engine)
    names = [c["name"] for c in engine.containers]
    if "draft" in names:
        draft = settings_of(engine, engine.container("draft"))
        assert draft.pair == verifier.pair
        assert (draft.drafter == "eagle3") == (verifier.head is not None)
        if draft.drafter == "eagle3":
            assert draft.model == verifier.head
        assert (draft.model is not None) == (draft.drafter in ("causal", "eagle3"))
    router = router_settings(render(case).pod_with("router"))
    assert (router.control_secret_file is None) == (verifier.control_secret_file is None)
    assert (router.control_tls_cert is None) == (verifier.control_tls_cert is None)
    assert router.control_secret_file or router.control_tls_cert, "whoever reaches the control port could order"


def test_services_listen_in_a_cluster_with_ipv6_only() -> None:
    rendered = render(values={"listen": "::"})
    for name in ("router", "verifier", "draft"):
        pod = rendered.pod_with("router" if name == "router" else "verifier")
        assert settings_of(pod, pod.container(name)).host == "::"
