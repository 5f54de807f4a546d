"""What every result of camkit has: a table of plain values, JSON values, a file or folder, one line, and a view."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import camkit


def assert_is_a_result(result: Any, file: Path) -> list[dict[str, Any]]:
    """Check the methods of a result, write it to a file or folder, and return its table."""
    rows = result.table()
    assert rows
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert {type(value) for row in rows for value in row.values()} <= {str, bool, int, float, type(None)}
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    frame = result.to_pandas()
    assert (list(frame.columns), len(frame)) == (list(rows[0]), len(rows))
    json.dumps(result.to_dict(), allow_nan=False)
    saved = result.save(file)
    assert saved.is_file()
    assert saved.stat().st_size
    assert "\n" not in repr(result)
    assert len(repr(result)) < 400
    assert result._repr_html_().startswith("<")
    return rows


def with_run(result: camkit.CheckResult, **options: Any) -> camkit.CheckResult:
    """Return the result of a check as if the check had been run with these options."""
    settings = result.plan.settings
    settings = settings.model_copy(update={"run": dataclasses.replace(settings.run, **options)})
    return dataclasses.replace(result, plan=dataclasses.replace(result.plan, settings=settings))
