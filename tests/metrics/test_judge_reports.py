"""The reports of a judgement, and what ``camkit judge`` prints: marks, notes, skipped pictures, and older reports."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from results import assert_is_a_result

import camkit
import camkit.metrics.judge
from camkit.cli import main
from camkit.metrics import METRICS
from camkit.metrics.judge import DECIDING, REPORTS, JudgedRow, MethodJudgement, Recommendation, figures_of

PICTURES = 12
METHODS = {"best": 0.5, "fair": 0.3, "blind": 0.1, "wrong": -0.3}
"""What each method gains over the random map: the best, one that beats it, one like it, and one that is worse."""
MEASURED = (*DECIDING, "insertion", "deletion", "average-drop", "complexity")
LONG = "gradcam-elementwise at features.1.0"


def judgement(unreadable: dict[str, str] | None = None) -> MethodJudgement:
    """Return a judgement whose values are drawn, with a row for each mark, and one that works nowhere."""
    draws = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {name: gain + draws.normal(0, 0.02, PICTURES) for name, gain in METHODS.items()}
    values["blind"] = np.array([0.1, -0.1] * (PICTURES // 2))
    values |= {"random": draws.normal(0, 0.02, PICTURES), "centre": 0.2 + draws.normal(0, 0.02, PICTURES)}
    values["centre"][:2] = np.nan
    values["nowhere"] = np.full(PICTURES, np.nan)
    signs = {name: 1 if METRICS[name].better == "higher" else -1 for name in MEASURED}
    by_metric = {
        name: figures_of({row: sign * numbers for row, numbers in values.items()}, METRICS[name].better, 0)
        for name, sign in signs.items()
    }

    def row(name: str, **more: object) -> JudgedRow:
        method = "" if name in ("random", "centre") else name
        of_metric = {metric: by_metric[metric][name] for metric in MEASURED}
        plain = JudgedRow(name, method, "features.1.0" if method else "", of_metric, 1.2, None, 0, (0, ""))
        return replace(plain, **more)  # type: ignore[arg-type]

    rows = (
        replace(row("best"), name=LONG),
        row("fair", empty=2),
        row("blind", failed=(3, "out of memory")),
        row("wrong", unmoved=0.9),
        replace(row("nowhere", failed=(PICTURES, "needs attention")), name="now|here"),
        row("random"),
        row("centre"),
    )
    names = tuple(f"{number}.png" for number in range(PICTURES))
    return MethodJudgement(
        "a_model",
        rows,
        unreadable or {},
        Recommendation(LONG, f"Use {LONG}.", against={"wrong": "worse than a random map in SRG"}),
        names,
        "features.1.0",
        0,
        1.0,
    )


BROKEN = {"mixed/trunc.jpg": "mixed/trunc.jpg cannot be read", "mixed/odd.png": "its class has no probability"}

NOTES = (
    "blind fails on 3 of 12 pictures: out of memory.",
    "now|here fails on 12 of 12 pictures: needs attention.",
    "fair: 2 of 12 maps are empty, and count like the random map.",
    "wrong is not recommended: worse than a random map in SRG.",
)


def columns(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def cells_of(text: str) -> dict[str, str]:
    """Return the cell of SRG of each row of a Markdown table, by the row's name."""
    lines = [columns(line) for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    return {line[0].strip("`()"): line[1] for line in lines[2:]}


def test_markdown_marks_each_mean_and_explains_the_marks() -> None:
    text = judgement().to_markdown()
    cells = cells_of(text)
    assert re.fullmatch(r"\*\*0\.\d\d\*\* \[0\.\d\d, 0\.\d\d\]", cells[LONG])
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", cells["fair"])
    assert re.fullmatch(r"-?0\.\d\d\? \[-0\.\d\d, 0\.\d\d\]", cells["blind"])
    assert re.fullmatch(r"-0\.\d\d! \[-0\.\d\d, -0\.\d\d\]", cells["wrong"])
    assert cells["now\\|here"] == "-"
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", cells["centre"])
    legend = text.splitlines()[-1]
    for explained in ("Bold: ", "?: not significantly better", "!: significantly worse", "95% interval"):
        assert explained in legend
    assert "Grey" not in text


@pytest.mark.extended
def test_the_table_has_a_row_for_each_method_and_reference(tmp_path: Path) -> None:
    found = judgement()
    rows = assert_is_a_result(found, tmp_path)
    assert [row["name"] for row in rows] == [row.name for row in found.rows]
    assert rows[0]["srg_mean"] == found.rows[0].metrics["srg"].value
    assert not any(name.endswith("values") for name in rows[0])


def test_all_reports_mark_the_same_means() -> None:
    found = judgement()
    in_markdown = [
        cell for line in found.to_markdown().splitlines()[2:-2] for cell in columns(line)[1 : 1 + len(found.metrics)]
    ]
    in_html = re.findall(r"<td[^>]*>(<b>)?(-?[\d.]*)(</b>)?([?!]?)<small>", found._repr_html_())
    assert len(in_html) == len(in_markdown) == len(found.rows) * len(found.metrics)
    assert [bool(bold) for bold, *_ in in_html] == [cell.startswith("**") for cell in in_markdown]
    assert [doubt for *_, doubt in in_html] == ["".join(re.findall(r"[?!]", cell)) for cell in in_markdown]


@pytest.mark.parametrize("report", ["judge.md", "judge.html"])
def test_reports_say_on_how_many_pictures_a_value_rests_and_how_it_was_measured(report: str, tmp_path: Path) -> None:
    found = judgement(BROKEN)
    text = html.unescape((found.save(tmp_path).parent / report).read_text("utf-8")).replace("\\", "")
    assert json.loads((tmp_path / "judge.json").read_text("utf-8")) == found.to_dict()
    for row in found.rows:
        assert row.name.replace("|", "") in text.replace("|", "") and str(row.metrics["srg"]) in text
    for note in (f"Use {LONG}.", *NOTES, camkit.__version__):
        assert note in text
    assert "The fill of removed pixels is blur, and a curve has 10 steps." in text
    assert "SRG of feature cells removes cells of layer 'features.1.0', for all rows alike." in text
    assert "2 pictures could not be used: mixed/trunc.jpg cannot be read, mixed/odd.png: its class has no" in text
    assert "http" not in text.replace("http-equiv", "")


def test_many_skipped_pictures_are_counted_and_the_first_are_named() -> None:
    found = judgement({f"{number}.jpg": f"{number}.jpg is not a picture" for number in range(9)})
    page = found._repr_html_()
    assert "<li>9 pictures could not be used: 0.jpg is not a picture, 1.jpg" in page
    assert "4.jpg is not a picture and 4 more.</li>" in page
    assert "could not be used" not in judgement()._repr_html_()


def test_json_names_directions_fill_steps_layer_and_version() -> None:
    found = judgement().to_dict()
    assert found["camkit"] == camkit.__version__
    assert (found["fill"], found["steps"], found["layer_of_feature_cells"]) == ("blur", 10, "features.1.0")
    better = {name: metric["better"] for name, metric in found["metrics"].items()}
    assert better == dict.fromkeys((*DECIDING, "insertion"), "higher") | dict.fromkeys(MEASURED[4:], "lower")
    assert found["rows"][1]["metrics"]["adcc"]["counted_like_random"] == 0
    assert found["recommendation"]["against"] == {"wrong": "worse than a random map in SRG"}


def test_names_do_not_break_markdown(tmp_path: Path) -> None:
    found = replace(judgement(), model="a_model\n# *no* heading")
    text = (found.save(tmp_path).parent / "judge.md").read_text("utf-8")
    assert text.splitlines()[0] == r"# Which method to trust on a\_model\\n\# \*no\* heading"


# --- the command


def run(folder: Path, out: Path, *more: str) -> int:
    return main(["judge", str(folder), "--model", "demo-fair", "--out", str(out), *more])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command print the drawn judgement, without a run."""
    monkeypatch.setattr(camkit.metrics.judge, "judge", lambda *_, **__: judgement(BROKEN))


@pytest.mark.usefixtures("drawn")
def test_the_printed_table_has_intervals_and_marks_that_survive_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = {line.split("  ")[0]: line for line in printed.splitlines()}
    for name, mark in ((LONG.removesuffix(" features.1.0"), r"\*"), ("fair", " "), ("blind", r"\?"), ("wrong", "!")):
        assert len(re.findall(rf"-?\d\.\d\d{mark} \[-?\d\.\d\d, -?\d\.\d\d\]", lines[name])) == len(DECIDING)
    table, _, below = printed.partition("\n[95% interval]")
    assert max(map(len, table.splitlines())) <= 120
    explained = below.splitlines()[0]
    assert len("[95% interval]" + explained) <= 120
    for mark in "*?!":
        assert f" {mark} " in explained
    for note in NOTES:
        assert note in printed
    assert printed.splitlines()[-1] == f"Use {LONG}."


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("more", [(), ("--json",), ("--quiet",)])
def test_skipped_pictures_are_told_and_end_with_2(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, out, *more) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors.count("mixed/trunc.jpg cannot be read") == 1
    assert errors.count("mixed/odd.png: its class has no probability") == 1
    assert {file.name for file in out.iterdir()} == set(REPORTS)


@pytest.mark.usefixtures("drawn")
def test_the_reports_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    for name in REPORTS:
        (tmp_path / name).write_text(f"older {name}")
    run(tmp_path, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {*REPORTS, *(f"before-{name}" for name in REPORTS)}
    for name in REPORTS:
        assert (tmp_path / f"before-{name}").read_text() == f"older {name}"


def test_a_folder_that_cannot_be_written_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file"
    out.write_text("mine")
    assert main(["judge", str(tmp_path), "--model", "no-such-model", "--out", str(out)]) == 2
    assert f"cannot write into the folder {out}" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.extended
def test_a_real_run_with_broken_pictures_and_a_method_that_works_nowhere(
    scene_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = scene_folder, tmp_path / "out"
    (folder / "broken.png").write_bytes(b"nothing")
    (folder / "short.png").write_bytes((folder / "0.png").read_bytes()[:200])
    assert run(folder, out, "--method", "gradcam", "--method", "legrad") == 2
    printed = capsys.readouterr()
    assert f"\n{folder / 'broken.png'} is not a picture\n" in printed.err
    assert f"\n{folder / 'short.png'} cannot be read: " in printed.err
    assert "SRG of feature cells" in printed.out
    assert "Use gradcam: it beats a random map" in printed.out
    assert "legrad fails on 6 of 6 pictures: 'legrad' reads attention maps" in printed.out
    values = json.loads((out / "judge.json").read_text("utf-8"))
    assert len(values["unreadable"]) == 2
    assert values["layer_of_feature_cells"] == "features"
