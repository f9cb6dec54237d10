"""The files of ``RolloutDump``: one for each RL step, as JSONL or as parquet, with the same rows either way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import pyarrow as pa

DumpFormat = Literal["jsonl", "parquet"]
FORMATS: tuple[DumpFormat, ...] = get_args(DumpFormat)

FOLDER = "rollouts"
"""In the run's folder."""

Row = dict[str, Any]


class RolloutFileError(ValueError):
    """A file is not as ``RolloutDump`` writes it; the message names it and the place."""


def dump_path(folder: Path, rl_step: int, file_format: DumpFormat = "jsonl") -> Path:
    """The file of one RL step."""
    return folder / f"rl_step={rl_step:06d}.{file_format}"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes the rows beside ``path``, in the format that its name says, then renames.

    Raises:
        OSError: if it cannot be written; a file that was there is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    write: Callable[[Path, Iterable[Row]], None] = _write_parquet if path.suffix == ".parquet" else _write_jsonl
    try:
        write(part, rows)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_rows(path: Path) -> list[Row]:
    """What ``write_rows`` was given, whatever the format.

    Raises:
        RolloutFileError: if the file was changed, cut, or is another one.
        ImportError: for parquet without pyarrow.
    """
    return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)


def _write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(_json(row) + "\n")


def _json(value: object) -> str:
    """Metadata is the user's own: what JSON has no word for is kept as its text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8", newline="\n") as file:  # str.splitlines ends lines inside responses, too
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RolloutFileError(
                    f"{path}, line {number}: not JSON ({error}). The file was changed or cut."
                ) from error
            if not isinstance(row, Mapping) or "reward" not in row:
                raise RolloutFileError(f"{path}, line {number}: not a rollout as RolloutDump writes it.")
            rows.append(dict(row))
    return rows


# --- parquet -------------------------------------------------------------------------------------------------------

_AS_JSON = ("metadata", "reward_components")
"""Objects whose keys differ from run to run: text in one column, for a column's type must not depend on the rows."""
_OPTIONAL = ("response_mask", "reward_components", "token_advantages", "old_log_probs")
"""Keys that only some rows have; a null in their columns."""


def check_pyarrow() -> None:
    """Refuses parquet where nothing writes it, before a run begins.

    Raises:
        ImportError: if pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Rollouts as parquet need pyarrow: pip install 'lightning_rlhf[parquet]', or use format='jsonl'."
        ) from error


def _schema() -> pa.Schema:
    import pyarrow as pa

    integers, numbers = pa.list_(pa.int64()), pa.list_(pa.float64())
    types = {
        "rl_step": pa.int64(), "uid": pa.string(), "sample_index": pa.int64(), "prompt": pa.string(),
        "response": pa.string(), "metadata": pa.string(), "reward": pa.float64(), "reward_components": pa.string(),
        "advantage": pa.float64(), "trained": pa.bool_(), "finish_reason": pa.string(), "policy_version": integers,
        "prompt_token_ids": integers, "response_token_ids": integers, "response_mask": pa.list_(pa.bool_()),
        "rollout_log_probs": numbers, "old_log_probs": numbers, "token_advantages": numbers,
    }  # fmt: skip
    return pa.schema(list(types.items()))


def _write_parquet(path: Path, rows: Iterable[Row]) -> None:
    check_pyarrow()
    import pyarrow as pa
    from pyarrow import parquet

    schema = _schema()
    columns: list[Row] = []
    for row in rows:
        if unknown := row.keys() - set(schema.names):
            raise KeyError(f"A rollout has {sorted(unknown)}, for which rollout files have no column.")
        column = {
            name: _json(row[name]) if name in _AS_JSON and name in row else row.get(name) for name in schema.names
        }
        version = column["policy_version"]
        columns.append({**column, "policy_version": version if isinstance(version, list) else [version]})
    parquet.write_table(pa.Table.from_pylist(columns, schema=schema), path)


def _read_parquet(path: Path) -> list[Row]:
    check_pyarrow()
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path).read()
    except pa.ArrowInvalid as error:
        raise RolloutFileError(f"{path}: not parquet ({error}). The file was changed or cut.") from error
    if not table.schema.equals(_schema()):
        raise RolloutFileError(
            f"{path}: not rollouts as RolloutDump writes them; its columns are {table.schema.names}."
        )
    rows = []
    for column in table.to_pylist():
        row = {name: value for name, value in column.items() if value is not None or name not in _OPTIONAL}
        for name in _AS_JSON:
            if name in row:
                row[name] = json.loads(row[name])
        version = row["policy_version"]
        rows.append({**row, "policy_version": version[0] if len(version) == 1 else version})
    return rows
