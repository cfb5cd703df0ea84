"""A real nginx, with the settings that ingress-nginx makes of an Ingress' annotations, or with its own defaults."""

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest

PREFIX = "nginx.ingress.kubernetes.io/"
# ingress-nginx 1.x: annotation: (directive, its default, unit). internal/ingress/annotations/proxy/main.go has the
# names, controller/config/config.go the defaults, rootfs/etc/nginx/template/nginx.tmpl the directives.
_DIRECTIVES = {
    "proxy-body-size": ("client_max_body_size", "1m", ""),
    "proxy-connect-timeout": ("proxy_connect_timeout", "5", "s"),
    "proxy-send-timeout": ("proxy_send_timeout", "60", "s"),
    "proxy-read-timeout": ("proxy_read_timeout", "60", "s"),
    "proxy-buffering": ("proxy_buffering", "off", ""),
    "proxy-buffer-size": ("proxy_buffer_size", "4k", ""),
    "proxy-max-temp-file-size": ("proxy_max_temp_file_size", "1024m", ""),
    "proxy-request-buffering": ("proxy_request_buffering", "on", ""),
    "proxy-http-version": ("proxy_http_version", "1.1", ""),
    "proxy-next-upstream": ("proxy_next_upstream", "error timeout", ""),
    "proxy-next-upstream-timeout": ("proxy_next_upstream_timeout", "0", ""),
    "proxy-next-upstream-tries": ("proxy_next_upstream_tries", "3", ""),
}
_BUFFERS = "proxy-buffers-number"  # proxy_buffers takes their number and their size
_NO_PROXYING = frozenset(("ssl-redirect", "force-ssl-redirect", "backend-protocol"))  # change nothing that is looked at
_CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            {directives}
            proxy_pass {upstream};
        }}
    }}
}}
"""


def ingress_directives(annotations: Mapping[str, str]) -> list[str]:
    """What ingress-nginx writes into an Ingress' location. Raises ValueError for an annotation of its own that is not
    known here: it may be mistyped. Others' annotations are passed over."""
    given = {name.removeprefix(PREFIX): value for name, value in annotations.items() if name.startswith(PREFIX)}
    if unknown := given.keys() - _DIRECTIVES.keys() - _NO_PROXYING - {_BUFFERS}:
        raise ValueError(f"not known: {', '.join(sorted(unknown))}")
    values = {name: given.get(name, default) + unit for name, (_, default, unit) in _DIRECTIVES.items()}
    directives = [f"{_DIRECTIVES[name][0]} {value};" for name, value in values.items()]
    return [
        *directives,
        f"proxy_buffers {given.get(_BUFFERS, '4')} {values['proxy-buffer-size']};",
        "proxy_set_header Host $http_host;",
        'proxy_set_header Connection "";',
    ]


def nginx_conf(
    annotations: Mapping[str, str] | None, upstream: str, port: int, folder: Path, extra: Sequence[str] = ()
) -> str:
    """nginx.conf for a server on loopback's `port` in front of the URL `upstream`, as ingress-nginx makes it of these
    annotations; for None with nginx's own defaults. `extra`: directives that come in addition."""
    directives = [] if annotations is None else ingress_directives(annotations)
    return _CONFIGURATION.format(
        folder=folder, port=port, upstream=upstream, directives="\n            ".join([*directives, *extra])
    )


class Nginx:
    """nginx with this configuration, from entering to leaving. Skips the test where it is not installed."""

    def __init__(self, configuration: str, port: int, folder: Path) -> None:
        program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if program is None:
            pytest.skip("nginx is not installed")
        self.url, self._folder = f"http://127.0.0.1:{port}", folder
        file = folder / "nginx.conf"
        file.write_text(configuration)
        self._command = [program, "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(file)]

    def __enter__(self) -> "Nginx":
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE)
        end = time.monotonic() + 10
        while True:
            try:
                httpx.get(self.url + "/nginx-is-up", trust_env=False, timeout=5)
                return self
            except httpx.TransportError:
                if self._process.poll() is not None or time.monotonic() > end:
                    self.__exit__()
                    pytest.fail(f"nginx did not start: {self.log}")
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    @property
    def log(self) -> str:
        """Its error log."""
        return (self._folder / "error.log").read_text()
