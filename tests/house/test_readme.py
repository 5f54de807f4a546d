"""What the README says, and the pages it points to, is what the code does."""

import doctest
import io
import re
import shutil
from pathlib import Path

import pytest

import camkit
from camkit.cli import main
from scripts.docs.docs_methods import cited

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
MODELS, TARGETS, METHODS = ((ROOT / f"docs/{page}.md").read_text("utf-8") for page in ("models", "targets", "methods"))
"""The pages that hold what the README's table only names."""


def test_a_cited_paper_is_a_link() -> None:
    paper = "after Wang et al. 2020, Score-CAM, arXiv:1910.01279, which multiplies the picture instead"
    link = "[Wang et al. 2020](https://arxiv.org/abs/1910.01279)"
    assert cited(paper) == f"after {link}, which multiplies the picture instead"
    assert cited("Zeiler & Fergus 2014, Visualizing, arXiv:1311.2901") == (
        "[Zeiler & Fergus 2014](https://arxiv.org/abs/1311.2901)"
    )
    assert cited("Desai and Ramaswamy 2020, Ablation-CAM, WACV") == "Desai and Ramaswamy 2020, Ablation-CAM, WACV"


@pytest.mark.parametrize("name", ["demo", "test"])
def test_the_set_up_commands_are_single_lines(name: str) -> None:
    block = re.search(rf"<!-- {name} command -->\n```sh\n(.*?)\n```\n<!-- end -->", README, re.DOTALL)
    assert block
    assert "\n" not in block[1]
    assert block[1].startswith("python3 -m venv .venv && ")


def test_linked_files_exist() -> None:
    for file in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text("utf-8")):
            assert (ROOT / link).exists(), f"{file} links to {link}"


def test_every_option_of_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"## In a shell\n\n```sh\n(.*?)```", README, re.DOTALL)
    assert block
    main(["--help"])
    known = capsys.readouterr().out
    tables = MODELS + TARGETS
    for option in set(re.findall(r"--[a-z][a-z-]*", block[1] + tables)):
        assert option in known, option


def test_every_target_of_the_readme_exists() -> None:
    names = set(re.findall(r"targets\.(\w+)\(", README + TARGETS))
    assert len(names) >= 7
    for name in names:
        assert callable(getattr(camkit.targets, name)), name


def test_the_python_example_names_what_exists() -> None:
    """The README's attributes, on a network that needs no download."""
    explanation = camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"])
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    attributes = set(re.findall(r"\bwhy\.(\w+)", block[1])) - {"png"}
    assert len(attributes) >= 7
    for attribute in attributes:
        assert hasattr(explanation, attribute), attribute


def test_the_example_of_a_method_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"<!-- method example -->\n```python\n(.*?)```", METHODS, re.DOTALL)
    assert block
    assert len(block[1].splitlines()) <= 10
    shutil.copy(camkit.scenes.scene_paths()["plane-sky"], tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    try:
        exec(block[1], {})
        assert camkit.METHODS["gradient-size"].summary == "how much each channel matters"
    finally:
        del camkit.METHODS["gradient-size"]


def test_the_examples_of_the_hooks_page_are_right() -> None:
    """Every example there, in one session; the fences between them are no output."""
    text = (ROOT / "docs" / "hooks.md").read_text("utf-8")
    session = doctest.DocTestParser().get_doctest(re.sub(r"(?m)^```.*$", "", text), {}, "docs/hooks.md", None, 0)
    assert len(session.examples) > 30
    failed = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(session, out=failed.write)
    assert not failed.getvalue()
