"""Before the first request: ports in use, invalid hosts and API keys."""

import socket

import pytest

from reprieve.cli.main import main
from reprieve.errors import SpecError
from reprieve.playground import launch
from reprieve.playground.settings import PlaygroundSettings


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
