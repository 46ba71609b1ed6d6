"""Before the first request: half-open connections, ports in use, invalid hosts and API keys."""

import http.client
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import uvicorn

from reprieve.cli.main import main
from reprieve.errors import SpecError
from reprieve.playground import launch, limits
from reprieve.playground.settings import PlaygroundSettings


@pytest.fixture
def port(monkeypatch):
    """A server that answers `yes` and waits two seconds for headers; uvicorn alone would wait forever."""
    monkeypatch.setattr(limits, "HEADERS_S", 2.0)

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
            await send({"type": "http.response.body", "body": b"yes"})

    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", http=limits.PatientProtocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def asked(client):
    client.request("GET", "/health")
    return client.getresponse().read()


def connected(stack, port, sent):
    made = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    made.settimeout(60)
    made.sendall(sent)
    return made


def read_to_end(connection):
    while connection.recv(4096):  # an error message may come first
        pass


@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n"]
)
def test_half_open_connections_are_closed_and_block_no_client(port, sent):
    with ExitStack() as stack:
        half = [connected(stack, port, sent) for _ in range(300)]
        for _ in range(3):
            assert asked(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) == b"yes"
        for one in half:
            read_to_end(one)


def test_a_connection_may_idle_between_requests_but_not_within_headers(port):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    assert asked(client) == b"yes"
    used = client.sock
    time.sleep(2.5)
    assert asked(client) == b"yes" and client.sock is used
    with ExitStack() as stack:
        one = connected(stack, port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"yes"):  # headers and body may arrive separately
            piece = one.recv(4096)
            assert piece
            answer += piece
        one.sendall(b"GET / HTTP/1.1\r\n")
        read_to_end(one)


def test_a_port_in_use_is_reported_before_a_model_loads(monkeypatch, capsys):
    monkeypatch.setattr("reprieve.cli.screen.load", lambda *_: pytest.fail("the model was read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert main(["serve", "--port", str(number)]) == 2
    assert f"cannot listen on port {number} of 127.0.0.1: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["256.0.0.1", "no.such.host.invalid", "203.0.113.7", "x" * 300, "é" * 80])
def test_hosts_that_cannot_be_bound_are_refused(host):
    with pytest.raises(SpecError, match="cannot listen on port"):
        launch.require_free_port(PlaygroundSettings(host=host, port=0))


@pytest.mark.parametrize("key", ["schlüssel", "clé", "🔑", "a\nb", "a\0b", "", " "])
def test_keys_that_no_header_can_carry_are_refused(key, monkeypatch, capsys):
    with pytest.raises(SpecError, match="api_key must be of printable ASCII"):
        PlaygroundSettings(api_key=key)


def test_every_loopback_address_checks_the_host_header():
    assert (
        PlaygroundSettings(host="127.0.0.2").hosts is not None
        and "127.0.0.2" in PlaygroundSettings(host="127.0.0.2").hosts
    )
    assert PlaygroundSettings(host="0.0.0.0").hosts is None
