"""`batch`: every row of a dataset answered, in the form in which it came."""

import os
from pathlib import Path

from .llm import LLM

_PROMPT, _MESSAGES = "prompt", "messages"


def batch(dataset, model, sampling_params=None, *, prompt=None, answer="answer", output=None, use_tqdm=True, **options):
    """Answers each row of `dataset` and adds three columns: `answer` and `answer_finish_reason` (with `n` above 1 lists), and
    `answer_error`.

    `dataset`: a pandas DataFrame, a pyarrow Table, the name of a .parquet, .arrow, .feather or .jsonl file, or anything that iterates over
    dicts or texts, such as a HuggingFace dataset. A DataFrame gives a DataFrame, a Table or a file a Table; others give a list of dicts.
    `model`: an LLM, or what LLM takes, together with `options`; then it is closed at the end.
    `prompt`: the column that has the prompts, or a function of a row (default: `prompt`; `messages`, as a chat, where there is none).
    `output`: also writes the rows to this .parquet, .arrow, .feather or .jsonl file.
    """
    table = _Rows.of(dataset)
    if output is not None:
        _kind_of(output)
    for name in (answer, *_beside(answer)):
        if name in table.columns:
            raise ValueError(f'the dataset has a column "{name}" already: name another one with answer=')
    prompts, chat = table.prompts(prompt)
    llm = model if isinstance(model, LLM) else LLM(model, **options)
    try:
        outputs = (llm.chat if chat else llm.generate)(prompts, sampling_params, use_tqdm)
    finally:
        if llm is not model:
            llm.close()
    texts = _column([[one.text for one in each.outputs] for each in outputs])
    reasons = _column([[one.finish_reason for one in each.outputs] for each in outputs])
    errors = [each.error and each.error.message for each in outputs]
    made = table.with_columns(dict(zip((answer, *_beside(answer)), (texts, reasons, errors), strict=True)))
    if output is not None:
        _write(made, output)
    return made


def _column(answers):
    """Lists only where a row has several answers; None where it has none."""
    if any(len(one) > 1 for one in answers):
        return [one or None for one in answers]
    return [one[0] if one else None for one in answers]


def _beside(answer):
    return f"{answer}_finish_reason", f"{answer}_error"


class _Rows:
    """Rows as dicts. The kinds below differ in how they get columns."""

    def __init__(self, rows):
        self._rows = [row if isinstance(row, dict) else {_PROMPT: row} for row in rows]
        self.columns = {name for row in self._rows for name in row}

    @staticmethod
    def of(dataset):
        if isinstance(dataset, str | os.PathLike):
            dataset = _read(dataset)
        kind = type(dataset).__module__.partition(".")[0]
        if kind == "pandas":
            return _Frame(dataset)
        if kind == "pyarrow":
            return _Table(dataset)
        return _Rows(dataset)

    def rows(self):
        return self._rows

    def column(self, name):
        return [row.get(name) for row in self._rows]

    def prompts(self, prompt):
        """(the prompts, whether they are chats)."""
        if callable(prompt):
            made = [prompt(row) for row in self.rows()]
            return made, any(isinstance(one, list) and one and isinstance(one[0], dict) for one in made)
        name = prompt or (_PROMPT if _PROMPT in self.columns or _MESSAGES not in self.columns else _MESSAGES)
        if name not in self.columns:
            raise ValueError(f'the dataset has no column "{name}": name the one that has the prompts with prompt=')
        return [_plain(one) for one in self.column(name)], name == _MESSAGES

    def with_columns(self, columns):
        return [{**row, **{name: values[at] for name, values in columns.items()}} for at, row in enumerate(self._rows)]


class _Frame(_Rows):
    def __init__(self, frame):
        self._frame = frame
        self.columns = set(frame.columns)

    def rows(self):
        return self._frame.to_dict("records")

    def column(self, name):
        return list(self._frame[name])

    def with_columns(self, columns):
        return self._frame.assign(**columns)


class _Table(_Rows):
    def __init__(self, table):
        self._table = table
        self.columns = set(table.column_names)

    def rows(self):
        return self._table.to_pylist()

    def column(self, name):
        return self._table.column(name).to_pylist()

    def with_columns(self, columns):
        import pyarrow

        table = self._table
        for name, values in columns.items():
            kind = None if any(isinstance(one, list) for one in values) else pyarrow.string()
            table = table.append_column(name, pyarrow.array(values, kind))
        return table


def _plain(value):
    """A prompt as JSON has it: an array is a list, a missing text of pandas is None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return None if isinstance(value, float) and value != value else value


# ---- files


def _kind_of(path):
    kind = Path(path).suffix
    if kind not in (".parquet", ".arrow", ".feather", ".jsonl"):
        raise ValueError(f"{os.fspath(path)}: the name of a .parquet, .arrow, .feather or .jsonl file is wanted")
    return kind


def _pyarrow(path):
    try:
        import pyarrow
    except ImportError:
        raise ImportError(f"{os.fspath(path)} is read and written by pyarrow, which is not installed: pip install pyarrow") from None
    return pyarrow


def _read(path):
    kind, pyarrow = _kind_of(path), _pyarrow(path)
    if kind == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path)
    if kind == ".jsonl":
        import pyarrow.json

        return pyarrow.json.read_json(path)
    with pyarrow.OSFile(os.fspath(path), "rb") as file:
        is_file = file.read(6) == b"ARROW1"  # else a stream, as the package `datasets` keeps
    with pyarrow.OSFile(os.fspath(path), "rb") as file:
        return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(file).read_all()


def _write(made, path):
    kind, pyarrow = _kind_of(path), _pyarrow(path)
    if isinstance(made, list):
        made = pyarrow.Table.from_pylist(made)
    elif not isinstance(made, pyarrow.Table):
        made = pyarrow.Table.from_pandas(made, preserve_index=False)
    if kind == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(made, path)
    elif kind == ".jsonl":
        import json

        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in made.to_pylist())
    else:
        with pyarrow.OSFile(os.fspath(path), "wb") as file, pyarrow.ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)
