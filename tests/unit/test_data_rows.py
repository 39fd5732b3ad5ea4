"""Data sources: formats, folders, columns, and errors that name the place."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash

from slipstream.config.settings import DataSettings
from slipstream.data import fingerprint, load_rows
from slipstream.data.jsonable import jsonable
from slipstream.errors import DataError
from slipstream.types import Draw, Group, decode, encode

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def load(source: str, folder: Path, part: str = "train", **settings: Any) -> list[dict[str, Any]]:
    return load_rows(source, DataSettings(**settings), folder, part=part)


def test_jsonl_json_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    write_parquet(tmp_path / "c.parquet", ROWS)
    for name in ("a.jsonl", "b.json", "c.parquet", str(tmp_path / "a.jsonl")):
        assert load(name, tmp_path) == ROWS


def test_blank_lines_and_a_byte_order_mark_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n\n  \n{"prompt": "y"}')
    assert [r["prompt"] for r in load("a.jsonl", tmp_path)] == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', ("a.jsonl, line 2", "not valid JSON")),
        ("a.jsonl", b'{"prompt": "x"}\n["x"]\n', ("a.jsonl, line 2", "a row is an object")),
        ("a.jsonl", b"", ("no rows",)),
        ("a.jsonl", b"\xff\xfe", ("not UTF-8",)),
        ("a.jsonl", b'{"prompt": "\\ud800"}\n', ("row 1", "not valid Unicode")),
        ("a.json", b'{"prompt": "x"}', ("one list of objects", ".jsonl")),
        ("a.json", b'{"prompt": "x"}\n{"prompt": "y"}', ("line 2", ".jsonl")),
        ("a.parquet", b"PAR1 no", ("not a readable parquet file",)),
        ("a.csv", b"prompt\nx\n", (".csv", ".jsonl")),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes, words: tuple[str, ...]) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file or folder .*absent\.jsonl.*reasoning_gym:NAME"):
        load("absent.jsonl", tmp_path)
    with pytest.raises(DataError, match="no such data set"):
        load("builtin:absent", tmp_path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    for package in ("pyarrow", "datasets", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, package, None)
    for source, package in (
        ("a.parquet", "pyarrow"),
        ("openai/gsm8k:main:train", "datasets"),
        ("reasoning_gym:chain_sum", "reasoning-gym"),
    ):
        with pytest.raises(DataError, match=f"package {package}.*pip install"):
            load(source, tmp_path)


def test_builtin_parts(tmp_path: Path) -> None:
    train, held_out = load("builtin:sort_digits", tmp_path), load("builtin:sort_digits", tmp_path, part="eval")
    assert {"prompt", "answer"} <= set(train[0])
    assert held_out == load("builtin:sort_digits:eval", tmp_path, part="eval")
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}


def test_columns_add_names_and_keep_the_rest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "gold": "g", "level": 3}])
    (row,) = load("a.jsonl", tmp_path, columns={"prompt": "question", "answer": "gold"})
    assert row == {"question": "q", "gold": "g", "level": 3, "prompt": "q", "answer": "g"}
    with pytest.raises(DataError, match=r"no column 'questions'.*question, gold, level; did you mean 'question'\?"):
        load("a.jsonl", tmp_path, columns={"prompt": "questions"})


def test_limit_cuts_training_rows_only(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert load("a.jsonl", tmp_path, limit=2) == ROWS[:2]
    assert load("a.jsonl", tmp_path, limit=2, part="eval") == ROWS


# ---- folders -----------------------------------------------------------------------------------------------------------------


def test_folder_with_splits_and_configurations(tmp_path: Path) -> None:
    hub = tmp_path / "gsm8k"
    write_jsonl(hub / "main" / "train-00000-of-00002.jsonl", ROWS[:1])
    write_jsonl(hub / "main" / "train-00001-of-00002.jsonl", ROWS[1:2])
    write_jsonl(hub / "main" / "test.jsonl", ROWS[2:3])
    write_jsonl(hub / "socratic" / "train.jsonl", ROWS[3:])
    assert load("gsm8k:main:train", tmp_path) == ROWS[:2]
    assert load("gsm8k:main", tmp_path) == ROWS[:2]
    assert load("gsm8k:main", tmp_path, part="eval") == ROWS[2:3]
    assert load("gsm8k:main:test", tmp_path) == ROWS[2:3]
    assert load("gsm8k/socratic", tmp_path) == ROWS[3:]
    for source, words in (
        ("gsm8k:main:valid", "no files of split 'valid'; inside are test.jsonl, train-0"),
        ("gsm8k:mane:train", "there is no folder"),
        ("gsm8k", "several configurations; name one: main/, socratic/"),
    ):
        with pytest.raises(DataError, match=words):
            load(source, tmp_path)


def test_folder_of_files_without_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d" / "1.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "d" / "2.jsonl", ROWS[2:])
    assert load("d", tmp_path) == ROWS
    write_jsonl(tmp_path / "t" / "test.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no split for train .*test is; name one"):
        load("t", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files"):
        load("empty", tmp_path)


def test_folder_of_save_to_disk(tmp_path: Path) -> None:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    for split, names in (("train", ("data-00001.arrow", "data-00000.arrow")), ("test", ("data-00000.arrow",))):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            table = pyarrow.Table.from_pylist(ROWS[number : number + 1])
            with ipc.new_stream(str(folder / name), table.schema) as writer:
                writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load("saved", tmp_path) == ROWS[:2]  # in the order of state.json, not of the names
    assert load("saved:test", tmp_path) == ROWS[:1]


# ---- packages ----------------------------------------------------------------------------------------------------------------


def test_hugging_face_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, *, split: str, **options: Any) -> list[dict[str, Any]]:
        calls.append((name, config, split, options))
        if name == "org/absent":
            raise FileNotFoundError("no such data set on the hub")
        return ROWS

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load("openai/gsm8k:main:train", tmp_path) == ROWS
    load("org/set:test", tmp_path, options={"revision": "r"})
    load("org/set", tmp_path)
    assert calls == [("openai/gsm8k", "main", "train", {}), ("org/set", None, "test", {"revision": "r"}), ("org/set", None, "train", {})]
    with pytest.raises(DataError, match=r"org/absent.*no such data set on the hub"):
        load("org/absent:main:train", tmp_path)


def test_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    options = {"size": 3, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    rows = load("reasoning_gym:chain_sum", tmp_path, options=options)
    assert len(rows) == 3 and rows == load("reasoning_gym:chain_sum", tmp_path, options=options)
    assert rows[0]["prompt"] == rows[0]["question"] and "expression" in rows[0]["metadata"]
    assert json.loads(json.dumps(rows)) == rows
    with pytest.raises(DataError, match="did you mean chain_sum"):
        load("reasoning_gym:chain_sums", tmp_path)
    with pytest.raises(DataError, match="sizes"):
        load("reasoning_gym:chain_sum", tmp_path, options={"sizes": 3})


# ---- values ------------------------------------------------------------------------------------------------------------------


def test_values_become_json_and_survive_a_record() -> None:
    row = {
        1: (np.int64(1), np.float32(0.5), {3, 2}, np.arange(2)),
        "big": 2**70,
        "largest": 2**64 - 1,
        "bytes": b"\x00\xff",
        "decimal": Decimal("1.50"),
        "none": None,
        "flag": True,
    }
    plain = jsonable(row, "row 1")
    assert plain == {
        "1": [1, 0.5, [2, 3], [0, 1]],
        "big": str(2**70),
        "largest": 2**64 - 1,
        "bytes": "AP8=",
        "decimal": "1.50",
        "none": None,
        "flag": True,
    }
    assert json.loads(json.dumps(plain)) == plain
    group = Group(group_id=0, draw=Draw(number=0, row=0, epoch=0, dataset=""), row=plain)
    assert decode(encode(group), Group).row == plain


def test_fingerprint_sees_values_and_order_of_rows_but_not_of_keys() -> None:
    assert fingerprint(ROWS) == fingerprint([dict(reversed(row.items())) for row in ROWS])
    assert fingerprint(ROWS) != fingerprint(ROWS[::-1])
    assert fingerprint(ROWS) != fingerprint([ROWS[0] | {"answer": "9"}, *ROWS[1:]])
    assert fingerprint([{"a": 1}, {"b": 2}]) != fingerprint([{"a": 1, "b": 2}])
    assert fingerprint([{"prompt": "p0", "answer": "0"}]) == xxhash.xxh3_128_hexdigest(b'{"answer":"0","prompt":"p0"}\n')
