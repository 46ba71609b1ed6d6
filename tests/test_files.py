"""Reading files: whatever a path holds, a clear error, never a traceback or a hang."""

import gzip
import os
import threading
import tracemalloc

import pytest

from reprieve.cli.main import main
from reprieve.errors import ReprieveError
from reprieve.files import parse_json, read_file, read_json, replace_file, whole_lines

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
def test_broken_json_is_refused_with_a_reason(name, tmp_path):
    content, says = BROKEN[name]
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ReprieveError, match=f"the thing .*x.json.* cannot be read: .*{says}"):
        read_json(path, "the thing")


def test_reading_a_special_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", tmp_path, "/dev/zero"):
        with pytest.raises(ReprieveError, match="it is not a regular file"):
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


def test_compressed_files_are_read_up_to_a_limit(tmp_path):
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


def test_json_values_are_parsed_unchanged():
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
def test_bad_paths_end_a_command_with_a_short_error(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    long = "/".join(["x" * 300] * 20)
    status = main([item.replace("PIPE", str(tmp_path / "pipe.json")).replace("LONG", long) for item in arguments])
    error = capsys.readouterr().err
    assert status in (1, 2) and "Traceback" not in error and error.count("\n") <= 2, error


def test_special_files_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ReprieveError, match=f"{name}' cannot be written: it is not a regular file"):
            replace_file(tmp_path / name, "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench --limit 1000000000000", "limit must be in [1, 10000000], got 1000000000000"),
        ("bench --offset 1000000000000", "offset must be in [0, 10000000], got 1000000000000"),
        ("bench --trials 1000000000", "num_trials must be in [1, 10000], got 1000000000"),
        ("bench --seed 18446744073709551616", "seed must be in [0, 9223372036854775807], got 18446744073709551616"),
        ("bench --seed -1", "seed must be in [0, 9223372036854775807], got -1"),
        ("bench --temperature 1e-300", "temperature must be 0 or in [1e-06, 1e+06], got 1e-300"),
        ("bench --temperature nan", "temperature must be"),
        ("bench --top-k 99999999999999999999", "top_k must be in [0, 2147483647]"),
        ("bench --max-new-tokens 99999999999999999999", "max_new_tokens must be in [1, 2147483647]"),
        ("bench --workers 100000 --limit 2", "workers must be in [1, 1024], got 100000"),
        ("mine autojudge --limit 1000000000000", "limit must be in [1, 10000000]"),
        ("mine autojudge --in-flight 1000000000", "num_in_flight must be in [1, 4096], got 1000000000"),
        ("mine pivot --rollouts 1000000000", "num_rollouts must be in [1, 4096], got 1000000000"),
        ("generate x --device meta", "device 'meta' cannot be used"),
        ("generate x --device nonsense", "device 'nonsense' cannot be used"),
        ("generate x --device cpu:x", "device 'cpu:x' cannot be used"),
        ("train lts --limit 1000000000000", "reprieve train lts: limit must be in [1, 10000000]"),
        ("monitor --rule margin --limit 1000000000000", "limit must be in [1, 10000000]"),
        ("serve --max-waiting 100000000000000000000", "max_waiting must be in [1, 1000000]"),
        (
            "certify --rule margin --max-drop 0.03 --held-out-limit 1000000000000",
            "held_out_limit must be in [1, 10000000]",
        ),
        ("bench --arm margin --limit 1 --out /proc/x", "--out '/proc/x' cannot be created"),
    ],
)
def test_options_out_of_range_are_named_before_any_work(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) in (1, 2)
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error, error


def test_lines_are_split_at_newlines_only(tmp_path):
    lines = ["one\u2028two", "three\x85four", "five\rsix", ""]
    path = tmp_path / "x.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode() + b"cut off")
    assert whole_lines(path) == lines
    path.write_bytes(b"\xff\n")
    with pytest.raises(ReprieveError, match="must be UTF-8"):
        whole_lines(path)


def test_concurrent_writers_of_one_file_do_not_mix(tmp_path):
    def write(number):
        for _ in range(50):
            replace_file(tmp_path / "x", str(number) * 1000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set((tmp_path / "x").read_text())) == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_small_file_takes_little_memory_whatever_its_limit(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 100)
    tracemalloc.start()
    try:
        assert len(read_file(tmp_path / "small", "the file", most=1 << 34)) == 100
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text('{"rule": "margin:delta=1", "fast": 2, "rule": "judge"}')
    with pytest.raises(ReprieveError, match="the key 'rule' is given twice"):
        read_json(path, "the configuration")


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ReprieveError, match="cannot be written: No space left on device"):
        replace_file(tmp_path / "x", "text")
    assert not list(tmp_path.iterdir())
