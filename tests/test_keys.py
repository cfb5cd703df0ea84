"""router/keys.py: the file, its reload, and requests with and without a key."""

import asyncio
import hashlib
import logging
import os

import httpx
import openai
import pytest

from edge_kit import CHAT, error_of, reply, routed, run, sent
from specdec.errors import SettingsError
from specdec.router.app import create_app
from specdec.router.errors import ApiError
from specdec.router.keys import ApiKeys, bearer
from specdec.router.settings import RouterSettings
from specdec.telemetry import RouterMetrics

HASHED = "sha256:" + hashlib.sha256(b"hashed-key").hexdigest()


def accepts(keys: ApiKeys, key: str | None) -> bool:
    try:
        keys.check(key)
    except ApiError as error:
        return error.code != "invalid_api_key"
    return True


def reloads(metrics: RouterMetrics, result: str) -> float:
    return metrics.registry.get_sample_value("specdec_router_key_reloads_total", {"result": result}) or 0


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# mine\nplain-key\n\n  spaced-key  \n{HASHED}\n")
    return path


def test_a_line_is_a_key_or_its_digest(file):
    keys = ApiKeys(file, RouterMetrics())
    for key in ("plain-key", "spaced-key", "hashed-key"):
        assert accepts(keys, key)
    for key in (None, "", "plain-ke", "# mine", HASHED, "plain-key ", "é"):
        assert not accepts(keys, key)


def test_keys_are_not_kept_as_they_are(file):
    keys = ApiKeys(file, RouterMetrics())
    assert b"plain-key" not in b"".join(keys._hashes)
    assert "plain-key" not in repr(vars(keys))


@pytest.mark.parametrize("text", ["", "# only\n", "sha256:12\n", "sha256:" + "g" * 64])
def test_a_file_without_keys_ends_the_start(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(SettingsError, match="--api-keys-file"):
        ApiKeys(tmp_path / "keys", RouterMetrics())
    with pytest.raises(SettingsError, match="No such file"):
        ApiKeys(tmp_path / "none", RouterMetrics())


def test_a_changed_file_is_read_again(file):
    metrics = RouterMetrics()
    keys = ApiKeys(file, metrics)
    keys.reload()
    assert reloads(metrics, "ok") == 0
    file.write_text("new-key\n")
    keys.reload()
    assert accepts(keys, "new-key")
    assert not accepts(keys, "plain-key")
    assert reloads(metrics, "ok") == 1


def test_a_mounted_secrets_swap_is_seen(tmp_path):
    """Kubernetes: the file is a symlink through `..data`, which is renamed over."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(f"key-{name}\n")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = ApiKeys(tmp_path / "keys", RouterMetrics())
    (tmp_path / "next").symlink_to("two")
    os.rename(tmp_path / "next", tmp_path / "..data")
    keys.reload()
    assert accepts(keys, "key-two")
    assert not accepts(keys, "key-one")


def test_a_file_that_is_gone_or_empty_leaves_the_keys_and_is_told_once(file, caplog):
    metrics = RouterMetrics()
    keys = ApiKeys(file, metrics)
    file.write_text("")
    for _ in range(3):
        keys.reload()
    file.unlink()
    keys.reload()
    assert accepts(keys, "plain-key")
    assert reloads(metrics, "failed") == 1
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    file.write_text("later\n")
    keys.reload()
    assert accepts(keys, "later")


def as_directory(path):
    path.unlink()
    path.mkdir()


def as_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "replace",
    [
        lambda path: path.write_bytes(b"\xff\xfe\x00garbage"),
        lambda path: path.write_bytes(b"k\n" * (1 << 23)),
        as_directory,
        as_pipe,
    ],
    ids=["bytes", "huge", "directory", "pipe"],
)
def test_a_file_that_becomes_garbage_leaves_the_keys(file, replace):
    metrics = RouterMetrics()
    keys = ApiKeys(file, metrics)
    replace(file)
    keys.reload()
    keys.reload()
    assert accepts(keys, "plain-key")
    assert reloads(metrics, "failed") == 1


def test_a_key_may_be_any_text_and_its_file_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "keys").write_bytes("\ufeffschl\u00fcssel-\u00e0\n".encode())
    keys = ApiKeys(tmp_path / "keys", RouterMetrics())
    assert accepts(keys, bearer("Bearer schl\u00fcssel-\u00e0".encode().decode("latin-1")))


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        ("Bearer abc", None, "abc"),
        ("bearer  abc ", None, "abc"),
        ("Bearer", "x", None),
        ("Bearer ", None, None),
        ("Basic abc", None, None),
        (None, "x", "x"),
        (None, None, None),
        ("", None, None),
        ("Bearer abc", "x", "abc"),
    ],
)
def test_where_a_key_stands(authorization, x_api_key, key):
    assert bearer(authorization, x_api_key) == key


def test_requests_need_a_key_and_health_does_not(file, tmp_path, caplog):
    async def main():
        async with routed(tmp_path, reply(), api_keys_file=file) as router:
            for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": "Basic plain-key"}):
                for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/openapi.json"), ("GET", "/x")):
                    response = await router.client.request(method, path, headers=headers)
                    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
                    assert response.headers["www-authenticate"] == "Bearer"
            assert router.vllm.asked == []
            assert (await router.client.get("/livez")).status_code == 200
            assert (await router.client.get("/readyz")).status_code == 200
            for headers in ({"authorization": "Bearer plain-key"}, {"x-api-key": "hashed-key"}):
                response = await router.client.post(CHAT, json={"messages": []}, headers=headers)
                assert response.status_code == 200
                sent = {name for name, _ in router.vllm.asked[-1].headers}
                assert not sent & {"authorization", "x-api-key"}
            file.write_text("other\n")
            router.app.state.router.keys.reload()
            response = await router.client.post(CHAT, json={}, headers={"authorization": "Bearer plain-key"})
            assert response.status_code == 401

    with caplog.at_level(logging.INFO):
        run(main)
    for secret in ("plain-key", "wrong-key", "hashed-key", HASHED[7:]):
        assert secret not in caplog.text


def test_only_a_browsers_preflight_needs_no_key(file, tmp_path):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}

    async def some():
        yield b"x"

    async def main():
        async with routed(tmp_path, reply(), api_keys_file=file) as router:
            assert (await router.client.options(CHAT, headers=preflight)).status_code == 200
            assert len(router.vllm.asked) == 1
            for name in preflight:
                assert (await router.client.options(CHAT, headers={name: "POST"})).status_code == 401
            for content in (b"x", some()):  # with content-length, and without
                response = await router.client.request("OPTIONS", CHAT, headers=preflight, content=content)
                assert response.status_code == 401
            assert (await router.client.post(CHAT, headers=preflight)).status_code == 401
            assert len(router.vllm.asked) == 1

    run(main)


def test_the_openai_package_knows_a_bad_key(file, tmp_path):
    async def main():
        async with routed(tmp_path, reply(), api_keys_file=file) as router:

            def ask(key):
                with openai.OpenAI(base_url=router.url + "/v1", api_key=key, max_retries=0) as client:
                    return client.models.list()

            with pytest.raises(openai.AuthenticationError) as caught:
                await asyncio.to_thread(ask, "wrong")
            assert caught.value.code == "invalid_api_key"

    run(main)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback_keys_are_needed_or_a_word(host, file):
    with pytest.raises(SettingsError, match="--no-auth"):
        create_app(RouterSettings(host=host))
    create_app(RouterSettings.load(["--host", host, "--no-auth"]))
    create_app(RouterSettings(host=host, api_keys_file=file))


def test_readiness_tells_others_less():
    for host, keys in (("127.0.0.1", {"ready", "reasons", "pairs"}), ("0.0.0.0", {"ready", "reasons"})):
        router = create_app(RouterSettings(host=host, auth=False)).state.router
        assert set(router.public_readiness()) == keys
        assert "pairs" in router.readiness()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_loopback_keys_are_not_needed(host):
    create_app(RouterSettings(host=host))


def test_metrics_are_on_the_admin_port_only(tmp_path):
    async def main():
        async with routed(tmp_path, reply()) as router:
            assert error_of(await router.client.get("/metrics"))["code"] == "not_found"
            assert router.vllm.asked == []
            transport = httpx.ASGITransport(router.app.state.admin)
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
                assert "specdec_router_requests_total" in (await admin.get("/metrics")).text
                assert (await admin.get("/livez")).status_code == (await admin.get("/readyz")).status_code == 200
                assert (await admin.get("/v1/models")).status_code == 404

    run(main)


FOR_OPERATORS = (
    *("/metrics", "/docs", "/load", "/sleep", "/collective_rpc", "/server_info", "/reset_prefix_cache"),
    *("/v1/load_lora_adapter", "/v1/load_lora_adapter/", "/", "/x/../metrics", "/%6detrics", "//metrics", "/v1"),
    *("/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/..%2fmetrics", "/v1/x/../../sleep", "/v1/./models", "/v1/models/.."),
)


def test_what_is_for_operators_does_not_pass(tmp_path):
    async def main():
        async with routed(tmp_path, reply()) as router:
            for path in FOR_OPERATORS:
                for method in (b"GET", b"POST"):
                    head = b"%s %s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % (method, path.encode())
                    async with sent(router, head) as (reader, _):
                        assert b" 404 " in await reader.readline(), path
            assert router.vllm.asked == []

    run(main)
