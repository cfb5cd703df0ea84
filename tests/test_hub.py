"""Where a model's files are."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specdec.draft.service import require_device
from specdec.errors import SetupError
from specdec.hub import DEMO_HEAD, DEMO_MODEL, model_folder
from specdec.model import demo_head

FILES = {"config.json": b"{}", "tokenizer.json": b"{1}", "model.safetensors": b"weights", "pytorch_model.bin": b"no"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """One public model, a/b, in the hub's own protocol."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        name = path.rpartition("/")[2]
        data, status, headers = b"", 404, {"X-Error-Code": "RepoNotFound"}
        if path.startswith("/api/models/a/b"):
            siblings = [{"rfilename": name} for name in FILES]
            data, status, headers = json.dumps({"id": "a/b", "sha": COMMIT, "siblings": siblings}).encode(), 200, {}
            if "/tree/" in path:
                data = json.dumps(
                    [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
                ).encode()
        elif path.startswith("/a/b/resolve/") and name in FILES:
            data, status, headers = FILES[name], 200, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def ask(tmp_path):
    """What `model_folder` finds, in a process of its own, since the hub's library reads its variables once: the names
    of the folder's files, or the error."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = """if True:
        import sys
        from specdec.errors import SpecdecError
        from specdec.hub import model_folder
        for name in sys.argv[2:]:
            try:
                folder = model_folder(name, "--model", weights=sys.argv[1] == "all")
                print(*sorted(file.name for file in folder.iterdir()))
            except SpecdecError as error:
                print(f"{type(error).__name__}: {error}")
        """

    def asked(what: str, *names: str, offline: bool = False) -> list[str]:
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(tmp_path / "hub")}
        env = os.environ | hub | {"HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-c", code, what, *names]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()

    yield asked
    server.shutdown()
    server.server_close()


def test_what_is_here_is_taken_as_it_is(tmp_path):
    (tmp_path / "a").mkdir()
    assert model_folder(str(tmp_path / "a"), "--model") == tmp_path / "a"
    assert model_folder(DEMO_HEAD, "--model") == demo_head()
    assert (model_folder(DEMO_MODEL, "--model") / "model.safetensors").is_file()


def test_a_name_is_fetched_from_the_hub_without_what_is_not_needed(ask):
    assert ask("config", "a/b") == ["config.json tokenizer.json"]
    assert ask("all", "a/b") == ["config.json model.safetensors tokenizer.json"]
    assert ask("all", "a/b", offline=True) == ["config.json model.safetensors tokenizer.json"]


def test_names_that_lead_nowhere_say_why(ask):
    unknown, *nowhere = ask("all", "x/y", "nowhere", "/no/such/folder", "a b/c")
    assert unknown == "SettingsError: --model x/y: the hub has no such model, or HF_TOKEN may not read it"
    for line, name in zip(nowhere, ("nowhere", "/no/such/folder", "a b/c"), strict=True):
        assert line.startswith(f"SettingsError: --model {name}: there is no such folder, and it is no OWNER/NAME")
    (odd,) = ask("all", "a--b/c")
    assert odd.startswith("SettingsError: --model a--b/c: ")
    (missing,) = ask("all", "c/d", offline=True)
    assert missing.startswith("SetupError: --model c/d: not in the hub's cache")


def test_a_gpu_that_is_not_visible_is_named_with_what_to_set():
    require_device("cpu")
    with pytest.raises(SetupError, match=r"--device cuda:7: \d GPUs are visible here\. In Kubernetes, gpu\.mode whole"):
        require_device("cuda:7")
