"""The files in deploy/ fit the project: images, the compose file and what configures proxies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from rekindle.protocol.events import Started
from tests.api.live import live, soon
from tests.api.scripted import HELLO, Front, Pause, Script, ScriptedRuntime, delta, finished
from tests.support.rounds import rounds
from tests.support.server import free_port, running

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = ("Dockerfile", "Dockerfile.cuda")
MODELS = Path("~/.cache/rekindle/models").expanduser()
STUB = "#!/bin/sh\nexit 0\n"


@dataclass(frozen=True)
class Step:
    """An instruction of a Dockerfile."""

    name: str
    text: str


def steps(name: str) -> Iterator[Step]:
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / name).read_text())
    for line in text.splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            yield Step(instruction, rest.strip())


def environment(name: str) -> dict[str, str]:
    pairs = [word for step in steps(name) if step.name == "ENV" for word in shlex.split(step.text)]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_copies_only_files_that_exist(name: str) -> None:
    copied = [step.text.split() for step in steps(name) if step.name == "COPY"]
    sources = [each for *given, _ in copied for each in given if not given[0].startswith("--")]
    assert "requirements.lock" in sources
    assert all((ROOT / each).exists() for each in sources)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_serves_as_another_user_and_keeps_its_data_in_a_volume(name: str) -> None:
    found = {step.name: step.text for step in steps(name)}
    assert found["USER"] == "rekindle"
    assert found["VOLUME"] == "/data"
    assert json.loads(found["ENTRYPOINT"]) == ["rekindle", "serve"]
    variables = environment(name)
    assert variables["REKINDLE_MODELS_DIR"].startswith("/data/")
    assert variables["REKINDLE_CACHE_DIR"].startswith("/data/")


def test_the_flags_of_the_cuda_build_exist() -> None:
    [built] = [step.text for step in steps("Dockerfile.cuda") if "build-llama.sh --" in step.text]
    usage = subprocess.run(
        [ROOT / "tools" / "build-llama.sh", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in re.findall(r"--\w+", built):
        assert flag in usage


def test_the_compose_file_mounts_only_what_is_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"rekindle", "prometheus", "grafana"}
    mounted = [each for service in services.values() for each in service["volumes"]]
    for source in (each.split(":")[0] for each in mounted if each.startswith(".")):
        assert (DEPLOY / source).exists(), source
    ports = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    [job] = scrape["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["rekindle:8080"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/rekindle_admin_key"


@contextmanager
def nginx(folder: Path, backend: int) -> Iterator[int]:
    """Run nginx with the configuration in deploy/, without TLS. Yields its port."""
    port = free_port()
    text = (DEPLOY / "nginx" / "rekindle.conf").read_text()
    text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{backend}")
    text = re.sub(r"\s*ssl_certificate.*;", "", text)
    (folder / "site.conf").write_text(text)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; include {folder}/site.conf;\n"
        f"client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; }}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(command) as process:
        try:
            soon(lambda: _answers(port))
            yield port
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.skipif(not shutil.which("nginx"), reason="there is no nginx to run")
def test_a_stream_passes_nginx_token_by_token(tmp_path: Path) -> None:
    released = asyncio.Event()

    class Held(ScriptedRuntime):
        async def paused(self) -> None:
            await released.wait()

    script: Script = [Started(0, 10, 0), delta("Hel"), Pause(), delta("lo"), finished()]
    front = Front(Held(script), allowed_host=["models.example.org"], api_key=["sk"])
    headers = {"Host": "models.example.org", "Authorization": "Bearer sk"}
    with live(front) as server, nginx(tmp_path, server.port) as port:
        url, body = f"http://127.0.0.1:{port}/v1/chat/completions", {**HELLO, "stream": True}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=10) as stream:
            assert stream.status_code == 200
            texts = stream.iter_text()
            text = next(texts)
            while "Hel" not in text:
                text += next(texts)
            assert "[DONE]" not in text
            server.call(released.set)
            text += "".join(texts)
    assert text.rstrip().endswith("[DONE]")


@pytest.mark.long
@pytest.mark.skipif(rounds(short=0, long=1) == 0, reason="it installs all packages: `make stress`")
def test_the_steps_of_the_cpu_image_lead_to_a_server(tmp_path: Path) -> None:
    """There may be no builder, so the steps run here, with their folders inside of a clean one."""
    image = ImageFolder(tmp_path / "image")
    for step in steps("Dockerfile"):
        if step.name == "RUN":
            image.run(step.text)
        elif step.name == "COPY":
            image.copy(step.text.split())
    own = {name: image.moved(value) for name, value in environment("Dockerfile").items()}
    own |= {"PATH": image.path, "REKINDLE_MODELS_DIR": str(MODELS)}
    flags = ["--no-auth", "--host", "127.0.0.1", "--cache-dir", own["REKINDLE_CACHE_DIR"]]
    program = image.folder / "opt" / "rekindle" / "bin" / "rekindle"
    command = (str(program), "serve")
    with running("smollm2", tmp_path, *flags, environment=own, command=command) as server:
        [check] = [step.text for step in steps("Dockerfile") if step.name == "HEALTHCHECK"]
        python, *arguments = json.loads(check.partition("CMD ")[2])
        port = str(httpx.URL(server.url).port)
        asked = [each.replace("8080", port) for each in arguments]
        assert subprocess.run([image.stubs / python, *asked]).returncode == 0


class ImageFolder:
    """A folder that stands for the root of an image. Commands that change the system do nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stubs = folder / "stubs"
        for each in ("src", "opt", "data", "stubs"):
            (folder / each).mkdir(parents=True)
        for name in ("apt-get", "useradd", "install"):
            (self.stubs / name).write_text(STUB)
            (self.stubs / name).chmod(0o755)
        (self.stubs / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
        self.path = f"{self.stubs}:/usr/bin:/bin"

    def moved(self, text: str) -> str:
        """Let absolute paths of the image lead into the folder."""
        return re.sub(r"(?<![\w./])/(?=(opt|data|src|var)\b)", f"{self.folder}/", text)

    def run(self, command: str) -> None:
        variables = {"PATH": self.path, "HOME": str(self.folder)}
        variables |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        ran = subprocess.run(
            ["sh", "-ec", self.moved(command)],
            cwd=self.folder / "src",
            env=variables,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"

    def copy(self, words: list[str]) -> None:
        """Copy files of the project, or check what an earlier stage has left."""
        if words[0].startswith("--"):
            assert Path(self.moved(words[1])).exists()
            return
        *sources, target = words
        for source in sources:
            _copy(ROOT / source, self.folder / "src" / target)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
