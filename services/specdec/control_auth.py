"""How a router and a pair know each other: a shared secret, mutual TLS, or both. Both ends of the stream use it."""

import hashlib
import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from specdec.errors import SettingsError

log = logging.getLogger(__name__)
_HEADER = "authorization"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True)
class ControlAuth:
    """The files of one end. Certificates must be of the same authority.

    The secret file has a secret a line: the router sends the first, and the pair takes any. To change it without a
    gap, put the new one below the old one at every pair, then change the routers', then take the old one out.
    """

    secret_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        """Raises SettingsError for a file that is missing or empty, or where not all of TLS is given."""
        if self.secret_file is not None:
            self._secrets()
        tls = (("--control-tls-cert", self.cert), ("--control-tls-key", self.key), ("--control-tls-ca", self.ca))
        for flag, path in tls:
            if path is None and any(other is not None for _, other in tls):
                raise SettingsError(f"{flag}: certificate, key and authority go together, and one is missing")
            if path is not None:
                _read(path, flag)

    @property
    def given(self) -> bool:
        """Whether anything is asked for at all."""
        return self.secret_file is not None or self.cert is not None

    # ---- the router's end

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries. The file is read anew, so that a new secret holds from the next stream on. Raises
        SettingsError where it cannot be, or is empty."""
        return () if self.secret_file is None else ((_HEADER, f"Bearer {self._secrets()[0]}"),)

    def channel(self, address: str, name: str, options: tuple[tuple[str, Any], ...]) -> grpc.aio.Channel:
        """A channel to a pair whose certificate is for `name`."""
        if self.cert is None or self.key is None or self.ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in (self.ca, self.key, self.cert)))
        named = (*options, ("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(address, credentials, options=named)

    # ---- the pair's end

    def interceptors(self) -> "list[grpc.aio.ServerInterceptor]":
        """What refuses callers without the secret."""
        return [] if self.secret_file is None else [_Guard(self._secrets)]

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Adds the server's port; with TLS only callers with a certificate of the authority get through. Files that
        change hold from the next connection on. Raises SettingsError for files that do not go together."""
        if self.cert is None or self.key is None or self.ca is None:
            return server.add_insecure_port(address)
        certificates = _Certificates(self.cert, self.key, self.ca)
        credentials = grpc.dynamic_ssl_server_credentials(
            certificates.configuration,
            certificates.changed,  # type: ignore[arg-type]  # None is allowed
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)

    def _secrets(self) -> list[str]:
        """Their digests, one at least: any text is a valid secret, and gRPC's headers take only some. Raises
        SettingsError."""
        assert self.secret_file is not None
        lines = [line.strip() for line in _read(self.secret_file, "--control-secret-file").splitlines()]
        secrets = [hashlib.sha256(line).hexdigest() for line in lines if line]
        if not secrets:  # also for a moment while it is written anew: nothing must not become a secret
            raise SettingsError(f"--control-secret-file {self.secret_file}: it is empty")
        return secrets


class _Certificates:
    """A server's files, as they were when they last went together."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        """Raises SettingsError."""
        self._files = (cert, key, ca)
        try:
            self._held = self._whole()
        except (OSError, ValueError) as error:
            raise SettingsError(f"--control-tls-cert {cert}, its key or its authority: {error}") from error
        self._failed: str | None = None

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What the server is to use."""
        cert, key, ca = self._held
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The same where the files have changed; None where they have not, or are being written. gRPC asks before each
        connection, in a thread of its own."""
        try:
            if self._read() == self._held:
                return None
            self._held = self._whole()
        except (OSError, ValueError) as error:
            if str(error) != self._failed:  # once, however many connect
                log.warning("the control port's certificate stays as it was: %s", error)
                self._failed = str(error)
            return None
        self._failed = None
        log.info("the control port has a new certificate")
        return self.configuration

    def _read(self) -> tuple[bytes, bytes, bytes]:
        cert, key, ca = (path.read_bytes() for path in self._files)
        return cert, key, ca

    def _whole(self) -> tuple[bytes, bytes, bytes]:
        """The files' contents. Raises OSError or ValueError where one is missing, cut short or of another generation
        than the others."""
        held = self._read()
        cert, key, _ = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password="")  # without one it would ask at the terminal
        context.load_verify_locations(cadata=held[2].decode("ascii", "replace"))
        if self._read() != held:  # what has been checked may be another
            raise ValueError("the files are being written")
        return held


class _Guard(grpc.aio.ServerInterceptor):
    def __init__(self, secrets: Callable[[], list[str]]) -> None:
        self._secrets = secrets

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(details)
        if handler is None:
            return handler
        given = str(dict(details.invocation_metadata).get(_HEADER, "")).encode()
        try:
            if any(hmac.compare_digest(given, f"Bearer {secret}".encode()) for secret in self._secrets()):
                return handler
            refuse = _refuse
        except SettingsError:
            refuse = _refuse_all
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the control secret is missing, or another one")


async def _refuse_all(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the pair cannot read its own control secret")


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{flag} {path}: {error.strerror}") from error
