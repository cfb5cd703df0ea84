"""control_auth.py: a router and a pair that know each other, and those that do not."""

import asyncio
import datetime
import hashlib
import ipaddress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fake_engine import FakePair, fake_pair, until
from specdec.control_auth import ControlAuth
from specdec.errors import SettingsError
from specdec.proto import speculation_pb2 as pb
from specdec.proto import speculation_pb2_grpc as pb_grpc
from specdec.router import pairs as pairs_module
from specdec.router.pairs import Pair
from specdec.telemetry import RouterMetrics


@pytest.fixture
def secrets(tmp_path) -> tuple[Path, Path]:
    for name, text in (("one", "the secret\n"), ("two", "another\n")):
        (tmp_path / name).write_text(text)
    return tmp_path / "one", tmp_path / "two"


def name_of(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}-ca.pem"
        certificate = self._sign(name, self._key.public_key(), [x509.BasicConstraints(ca=True, path_length=None)])
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name: str, key, extensions) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(name_of(self._name), name_of(name), key, x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def auth(self, name: str, trusts: "Authority", **more) -> ControlAuth:
        """A certificate for `name` and its key, with `trusts` as the authority of the other end."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), *(x509.IPAddress(ipaddress.ip_address(ip)) for ip in ("127.0.0.1", "::1"))]
        certificate = self._sign(name, key.public_key(), [x509.SubjectAlternativeName(names)])
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        return ControlAuth(cert=files[0], key=files[1], ca=trusts.file, **more)


async def describe(pair: FakePair, auth: ControlAuth, name: str = "pair.test") -> pb.PairDescription:
    async with auth.channel(pair.address, name, ()) as channel:
        stub = pb_grpc.SpeculationStub(channel)
        return await stub.Describe(pb.DescribeRequest(), timeout=5, metadata=auth.metadata())


async def refused(pair: FakePair, auth: ControlAuth, name: str = "pair.test") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await describe(pair, auth, name)
    return caught.value.code()


async def loop_refused(pair: FakePair, auth: ControlAuth) -> grpc.StatusCode:
    async with auth.channel(pair.address, "pair.test", ()) as channel:
        call = pb_grpc.SpeculationStub(channel).Loop(metadata=auth.metadata())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    return caught.value.code()


def test_only_who_knows_the_secret_gets_in(tmp_path, secrets):
    one, two = secrets
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED

    async def main():
        async with fake_pair(tmp_path, auth=ControlAuth(one)) as pair:
            assert (await describe(pair, ControlAuth(one))).engine_ready
            for auth in (ControlAuth(), ControlAuth(two)):
                assert await refused(pair, auth) == unauthenticated
                assert await loop_refused(pair, auth) == unauthenticated
            assert pair.control.routers == 0

    asyncio.run(main())


def test_a_router_with_the_secret_drives_a_pair_and_one_without_says_why_not(tmp_path, secrets, caplog):
    async def nobody(pair, session): ...

    async def main():
        async with fake_pair(tmp_path, auth=ControlAuth(secrets[0])) as pair:
            pairs = [
                Pair(pair.address, lease_ms=500, metrics=RouterMetrics(), drive=nobody, auth=auth)
                for auth in (ControlAuth(secrets[0]), ControlAuth(secrets[1]))
            ]
            tasks = [asyncio.create_task(one.run()) for one in pairs]
            await until(lambda: pairs[0].connected and "UNAUTHENTICATED" in caplog.text)
            assert not pairs[1].ready
            assert not pairs[1].connected
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with caplog.at_level("INFO"):
        asyncio.run(main())
    assert "the secret" not in caplog.text.replace("the control secret", "")


def test_a_new_secret_holds_without_a_restart(tmp_path, secrets):
    one, two = secrets

    async def main():
        async with fake_pair(tmp_path, auth=ControlAuth(one)) as pair:
            one.write_text("another")  # with or without a line's end
            assert (await describe(pair, ControlAuth(two))).engine_ready

    asyncio.run(main())


def test_with_tls_only_certificates_of_the_authority_get_in(tmp_path):
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    pair_end, router_end = ours.auth("pair.test", ours), ours.auth("router.test", ours)
    stranger = others.auth("stranger.test", ours)  # trusts the pair, and is not trusted
    suspicious = ours.auth("suspicious.test", others)  # would be let in, and does not trust the pair

    async def main():
        async with fake_pair(tmp_path, auth=pair_end) as pair:
            assert (await describe(pair, router_end)).engine_ready
            for auth in (stranger, suspicious, ControlAuth()):
                assert await refused(pair, auth) == grpc.StatusCode.UNAVAILABLE
            assert await refused(pair, router_end, "elsewhere.test") == grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_a_new_certificate_holds_from_the_next_connection_on_once_it_is_whole(tmp_path, caplog):
    """Of another authority, so that who gets in says which generation is served."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    routers = [one.auth(f"router-{number}.test", one) for number, one in enumerate((old, new))]
    unavailable = grpc.StatusCode.UNAVAILABLE

    async def main():
        after = new.auth("pair.test", new)
        later = [(file, file.read_bytes()) for file in (after.key, after.cert)]
        old.auth("pair.test", old)  # into the same files
        authority = tmp_path / "pair-ca.pem"
        authority.write_bytes(old.file.read_bytes())
        (key, new_key), (cert, new_cert) = later
        async with fake_pair(tmp_path, auth=ControlAuth(cert=cert, key=key, ca=authority)) as pair:
            writing = (key, b""), (key, new_key), (cert, new_cert[:300]), (cert, b""), (cert, None)
            for file, text in writing:  # a key without its certificate, then half a one, and none
                file.unlink() if text is None else file.write_bytes(text)
                assert (await describe(pair, routers[0])).engine_ready
                assert await refused(pair, routers[1]) == unavailable
            cert.write_bytes(new_cert)
            authority.write_bytes(new.file.read_bytes()[:100])
            assert (await describe(pair, routers[0])).engine_ready
            authority.write_bytes(new.file.read_bytes())
            assert (await describe(pair, routers[1])).engine_ready
            stranger = old.auth("stranger.test", new)  # trusts the pair, and is not trusted any more
            for auth in (routers[0], stranger, ControlAuth()):
                assert await refused(pair, auth) == unavailable

    with caplog.at_level("INFO"):
        asyncio.run(main())
    assert caplog.text.count("the control port has a new certificate") == 1
    assert caplog.text.count("the control port's certificate stays as it was") >= 3


def test_a_certificate_without_its_key_is_named_at_the_start(tmp_path):
    ours = Authority(tmp_path, "ours")
    one, other = ours.auth("one.test", ours), ours.auth("other.test", ours)

    async def main():
        with pytest.raises(SettingsError, match=r"^--control-tls-cert .*one\.test\.pem, its key or its authority: "):
            ControlAuth(cert=one.cert, key=other.key, ca=ours.file).listen(grpc.aio.server(), "127.0.0.1:0")

    asyncio.run(main())


def test_tls_and_the_secret_go_together(tmp_path, secrets):
    ours = Authority(tmp_path, "ours")

    async def main():
        async with fake_pair(tmp_path, auth=ours.auth("pair.test", ours, secret_file=secrets[0])) as pair:
            assert (await describe(pair, ours.auth("a.test", ours, secret_file=secrets[0]))).engine_ready
            assert await refused(pair, ours.auth("b.test", ours)) == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


def test_files_that_are_missing_or_empty_name_their_flag(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "cert").write_text("x")
    with pytest.raises(SettingsError, match=r"--control-secret-file .*empty"):
        ControlAuth(tmp_path / "empty")
    with pytest.raises(SettingsError, match=r"--control-secret-file .*No such file"):
        ControlAuth(tmp_path / "none")
    with pytest.raises(SettingsError, match=r"^--control-tls-key: certificate, key and authority go together"):
        ControlAuth(cert=tmp_path / "cert", ca=tmp_path / "cert")
    with pytest.raises(SettingsError, match=r"--control-tls-ca .*No such file"):
        ControlAuth(cert=tmp_path / "cert", key=tmp_path / "cert", ca=tmp_path / "none")


def test_a_secret_is_changed_without_a_gap(tmp_path, secrets):
    """Pairs know both for a while; a router says the first of those it has."""
    old, new = secrets
    at_pair, at_router = tmp_path / "pair", tmp_path / "router"
    at_pair.write_text("the secret\n\n  another \n")
    at_router.write_text("another\nthe secret\n")

    async def main():
        async with fake_pair(tmp_path, auth=ControlAuth(at_pair)) as pair:
            for file in (old, new, at_router):
                assert (await describe(pair, ControlAuth(file))).engine_ready
            at_pair.write_text("the secret\n")
            assert (await describe(pair, ControlAuth(old))).engine_ready
            for file in (new, at_router):
                assert await refused(pair, ControlAuth(file)) == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "\n \n", None], ids=["truncated", "blank", "removed"])
def test_a_secret_file_that_has_become_empty_lets_nobody_in(tmp_path, secrets, text):
    at_pair, at_router = secrets

    class Guesses(ControlAuth):
        """A caller that knows what an empty file's digest would be."""

        def metadata(self):
            return (("authorization", f"Bearer {hashlib.sha256(b'').hexdigest()}"),)

    async def main():
        auth = ControlAuth(at_router)
        async with fake_pair(tmp_path, auth=ControlAuth(at_pair)) as pair:
            for file in secrets:
                file.unlink() if text is None else file.write_text(text)
            with pytest.raises(SettingsError, match="--control-secret-file"):
                auth.metadata()
            at_router.write_text("the secret")
            for caller in (auth, Guesses(), ControlAuth()):
                assert await refused(pair, caller) == grpc.StatusCode.UNAUTHENTICATED
            at_pair.write_text("the secret")
            assert (await describe(pair, auth)).engine_ready

    asyncio.run(main())


def test_a_routers_secret_file_that_is_gone_for_a_moment_stops_nothing(tmp_path, secrets, monkeypatch, caplog):
    monkeypatch.setattr(pairs_module, "_MISSES", 1)

    async def nobody(pair, session): ...

    async def main():
        async with fake_pair(tmp_path, auth=ControlAuth(secrets[0])) as pair:
            at_router = tmp_path / "router"
            at_router.write_text("the secret")
            known = Pair(pair.address, lease_ms=500, metrics=RouterMetrics(), drive=nobody, auth=ControlAuth(at_router))
            task = asyncio.create_task(known.run())
            await until(lambda: known.connected and known.ready)
            at_router.unlink()
            await until(lambda: not known.ready)  # it has missed a description
            assert known.connected  # and the stream, which needs no secret any more, goes on
            at_router.write_text("the secret")
            await until(lambda: known.ready)
            pair.description.engine_ready = False
            await until(lambda: not known.ready)  # it is still asked
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level("WARNING"):
        asyncio.run(main())
    assert "it does not say how it is: SettingsError: --control-secret-file" in caplog.text


def test_a_certificate_for_an_ipv6_address_is_that_addresss(tmp_path):
    ours = Authority(tmp_path, "ours")

    async def nobody(pair, session): ...

    async def main():
        async with fake_pair(tmp_path, auth=ours.auth("pair.test", ours)) as pair:
            router_end = ours.auth("router.test", ours)
            for known in (
                Pair("[::1]:8101", lease_ms=500, metrics=RouterMetrics(), drive=nobody, name=name)
                for name in ("", "[::1]")
            ):
                assert (await describe(pair, router_end, known._name)).engine_ready
            assert await refused(pair, router_end, "::2") == grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())
