from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenrouter.errors import ConfigError
from tokenrouter.yaml_files import Dumper, load_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-1E5", -1e5),
        ("1.5e3", 1500.0),
        (".5e+1", 5.0),
        ("0.5", 0.5),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1e5x", "1e5x"),
        ("'1e-5'", "1e-5"),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    got = parse_yaml(f"a: {text}")["a"]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("value", [1e-5, "1e-5", "1e5", "-.5e3", "0x1", 3, "plain"])
def test_what_is_written_is_read_back(value: Any) -> None:
    got = parse_yaml(yaml.dump({"a": value}, Dumper=Dumper))["a"]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' stands twice, in lines 1 and 3; keep one of them"),
        ("a:\n  - {b: 1, c: 1, b: 1}\n", "the key 'b' stands twice, in lines 2 and 2"),
        ("a: {1: x, 1: y}\n", "the key '1' stands twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"deployment\.yaml is not valid YAML: {says}"):
        load_yaml(path)


def test_a_merged_key_may_be_overridden() -> None:
    text = "base: &base {a: 1, b: 2}\none: {<<: *base, a: 3}\n"
    assert parse_yaml(text)["one"] == {"a": 3, "b": 2}


def test_a_byte_order_mark_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("engine: torch\n", "utf-8-sig")
    assert load_yaml(path) == parse_yaml(path.read_bytes()) == {"engine": "torch"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.yaml cannot be read: No such file"):
        load_yaml(tmp_path / "nothing.yaml")
