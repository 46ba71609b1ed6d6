"""The one reader of files: whatever lies there, a clear error, never a traceback and never a hang."""

import gzip
import os

import pytest

from reprieve.cli.main import main
from reprieve.errors import ReprieveError
from reprieve.files import parse_json, read_file, read_json

BROKEN = {
    "nothing": (b"", "Expecting value"),
    "no JSON": (b"{", "Expecting property name"),
    "deep": (b"[" * 100_000, "nests too deep"),
    "deep objects": (b'{"a":' * 100_000, "nests too deep"),
    "a long number": (b"9" * 6000, "4300 digits"),
    "a long negative": (b'{"a": -' + b"9" * 6000 + b"}", "4300 digits"),
    "no UTF-8": (b'"\xff"', "can't decode"),
    "zeros": (b"\0" * 100, "Expecting value"),
    "two documents": (b"{} {}", "Extra data"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_json_is_told(name, tmp_path):
    content, says = BROKEN[name]
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ReprieveError, match=f"the thing .*x.json.* cannot be read: .*{says}"):
        read_json(path, "the thing")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path, "/dev/zero"):
        with pytest.raises(ReprieveError, match="it is no plain file"):
            read_json(path, "the file")
    with pytest.raises(ReprieveError, match="No such file"):
        read_json(tmp_path / "none", "the file")
    with pytest.raises(ReprieveError, match="name too long"):
        read_json("x" * 5000, "the file")
    with pytest.raises(ReprieveError, match="null"):
        read_json("a\0b", "the file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ReprieveError, match="symbolic links"):
        read_json(tmp_path / "loop", "the file")


def test_packed_files_are_read_to_a_limit(tmp_path):
    path = tmp_path / "x.gz"
    packed = gzip.compress(b"x" * 10_000)
    path.write_bytes(packed)
    assert read_file(path, "the file") == b"x" * 10_000
    with pytest.raises(ReprieveError, match="larger than 9999 bytes"):
        read_file(path, "the file", most=9999)
    for damaged in (packed[:-9], b"no gzip", packed[:20] + b"\xff" * 5 + packed[25:], packed[:-8] + b"\0" * 8):
        path.write_bytes(damaged)
        with pytest.raises(ReprieveError, match="cannot be read"):
            read_file(path, "the file")


def test_numbers_and_texts_are_what_they_were():
    assert parse_json('{"a": [1, 2.5, null, "\u00e9"]}') == {"a": [1, 2.5, None, "\u00e9"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--config", "PIPE"],
        ["bench", "--config", "LONG"],
        ["bench", "--arm", "judge:path=LONG"],
        ["bench", "--arm", "certified:PIPE"],
        ["bench", "--task", "jsonl:path=PIPE"],
        ["bench", "--task", "jsonl:path=LONG"],
        ["labels", "stats", "LONG"],
        ["report", "LONG"],
        ["certify", "--rule", "margin", "--out", "LONG"],
        ["generate", "x", "--target", "LONG"],
    ],
)
def test_the_command_line_ends_in_one_line(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    long = "/".join(["x" * 300] * 20)
    status = main([item.replace("PIPE", str(tmp_path / "pipe.json")).replace("LONG", long) for item in arguments])
    error = capsys.readouterr().err
    assert status in (1, 2) and "Traceback" not in error and error.count("\n") <= 2, error
