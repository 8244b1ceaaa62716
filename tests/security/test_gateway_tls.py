"""A gateway that other machines can reach: TLS or --plain, and nothing shown to strangers."""

import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from rollmesh.core.addresses import own_address, with_host
from tests.flow.gateway_process import argv_of, serving

RELAY = ("--capture", "relay", "--engine", "http://127.0.0.1:9/v1")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    openssl = shutil.which("openssl")
    assert openssl, "tests of https make their certificate with openssl"
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    argv = f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split()
    argv += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out"]
    subprocess.run([*argv, str(certificate)], check=True, capture_output=True)
    return certificate, key


def refused(tmp_path: Path, *args: str) -> str:
    argv = argv_of(*RELAY, "--port", "0", "--admin-token-file", str(tmp_path / "token"), *args)
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    return ended.stderr


def test_an_address_that_others_reach_is_refused_without_tls(tmp_path: Path) -> None:
    line = refused(tmp_path, "--host", "0.0.0.0")
    assert "0.0.0.0: others can reach it" in line
    assert "--tls-cert" in line
    assert "--plain" in line


def test_a_certificate_needs_its_key(tmp_path: Path, files: tuple[Path, Path]) -> None:
    certificate, key = files
    assert "--tls-key is missing" in refused(tmp_path, "--tls-cert", str(certificate))
    key.write_text("no key")
    line = refused(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key))
    assert str(key) in line


async def test_a_public_gateway_speaks_tls_and_shows_strangers_only_that_it_runs(
    tmp_path: Path, files: tuple[Path, Path]
) -> None:
    trust = ssl.create_default_context(cafile=files[0])
    args = "--host", "0.0.0.0", "--tls-cert", str(files[0]), "--tls-key", str(files[1])
    async with serving(tmp_path, *RELAY, *args) as gateway:
        assert gateway.address.startswith(f"https://{own_address()}:")
        base = with_host(gateway.address, "localhost")
        admin = {"Authorization": f"Bearer {gateway.token}"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as client:
            async with client.get(f"{base}/healthz") as response:
                assert await response.json() == {"status": "ok"}
            async with client.get(f"{base}/healthz", headers=admin) as response:
                assert "127.0.0.1:9" in await response.text()
            async with client.post(f"{base}/admin/sessions", headers=admin) as response:
                opened = await response.json()
            assert opened["base_url"] == f"{base}/v1"
            # A body that is refused unread ends the connection, which TLS cannot half-close.
            async with client.post(f"{base}/v1/chat/completions", data=b"x" * 10**6) as response:
                assert response.status == 401


async def test_a_public_gateway_behind_a_proxy_shows_strangers_only_that_it_runs(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, *RELAY, "--host", "0.0.0.0", "--plain") as gateway:
        base = gateway.address
        async with gateway.client.get(f"{base}/healthz") as response:
            assert await response.json() == {"status": "ok"}


async def test_a_gateway_on_loopback_shows_its_engines_to_this_machine_only(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, *RELAY) as gateway:
        url = f"{gateway.address}/healthz"
        async with gateway.client.get(url) as response:
            assert "engines" in await response.json()
        for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "203.0.113.9"}):
            async with gateway.client.get(url, headers=headers) as response:
                assert await response.json() == {"status": "ok"}
