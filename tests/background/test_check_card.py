"""The section and the metadata of a model card, read with YAML and with Hugging Face's own reader."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import camkit
from camkit.cli import main

HEAD = """language: en  # theirs
model-index:
- name: mine
  results:
  # an earlier result
  - task: {type: image-classification, name: Leaves}
    dataset: {type: beans, name: Beans}
    metrics:
    - {type: accuracy, value: 0.25}

# about the tags
tags: ["b", a]
"""
BODY = "# Mine \n\n<!-- camkit check -->\nold\n<!-- end of camkit check -->\n\nLast words"
OPTIONS = {"check": {"pastes": 1}, "limits": {"least_pictures": 4}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return camkit.scenes.write_scenes(tmp_path_factory.mktemp("scenes"), 4)


@pytest.fixture(scope="module")
def result(data):
    return camkit.check("demo-biased", data, config=OPTIONS)


@pytest.mark.parametrize(
    ("newline", "key"), [("\n", "model-index:"), ("\r\n", '"model-index":'), ("\n", "'model-index' :")]
)
def test_only_the_own_results_and_the_own_section_are_replaced(result, tmp_path, newline, key):
    card, effect = tmp_path / "README.md", result.judged[""].effects["gap"]
    card.write_bytes(f"---\n{HEAD}---\n{BODY}".replace("model-index:", key).replace("\n", newline).encode())
    for _ in range(2):  # the second time, its own results are there
        result.write_card(card)
        text = card.read_bytes().decode()
        assert text.count("\r\n") == (text.count("\n") if newline == "\r\n" else 0)
        _, head, body = text.replace("\r\n", "\n").split("---\n")
        before, section, after = re.split("<!-- camkit check -->|<!-- end of camkit check -->", body)
        assert (before, after) == ("# Mine \n\n", "\n\nLast words")
        assert head.startswith("language: en  # theirs\nmodel-index:\n")
        assert head.endswith('\n\n# about the tags\ntags: ["b", a]\n')
        (model,) = yaml.safe_load(head)["model-index"]
        theirs, own = model["results"]
        assert theirs == yaml.safe_load(HEAD)["model-index"][0]["results"][0]
        (gap,) = (each for each in own["metrics"] if each["name"] == "background gap")
        assert gap["value"] == pytest.approx(effect.value, abs=1e-6)
        assert gap["args"] == pytest.approx({"low": effect.low, "high": effect.high, "limit": 0.1}, abs=1e-6)
        assert f"| background gap | {effect.value:.2f} | {effect.low:.2f} to {effect.high:.2f} | 0.10 |" in section
        assert f"**{result.verdict}**" in section


def test_a_new_card_shows_the_names_of_the_model_and_of_the_folder(result, data, tmp_path, monkeypatch):
    monkeypatch.chdir(data)
    plan = result.plan
    model, here = replace(plan.model, name="a\n<b>"), replace(plan.data, root=Path())
    replace(result, plan=replace(plan, model=model, data=here)).write_card(tmp_path / "README.md")
    _, head, text = (tmp_path / "README.md").read_text().split("---\n")
    assert text.startswith("\n# a\\\\n\\<b\\>\n")
    assert yaml.safe_load(head)["model-index"][0]["results"][0]["dataset"] == {"type": data.name, "name": data.name}
    assert f"Checked on {data.name}: " in text


def test_hugging_face_reads_a_card_that_the_shell_created(data, tmp_path):
    hub, card = pytest.importorskip("huggingface_hub"), tmp_path / "README.md"
    options = ["--model", "demo-biased", "--least-pictures", "4", "--pastes", "1", "--out", str(tmp_path)]
    main(["check", str(data), *options, "--card", str(card)])
    read = hub.ModelCard.load(card)
    assert read.data.model_name == "demo-biased"
    assert [(each.metric_type, each.task_type) for each in read.data.eval_results][:3] == [
        (name, "image-classification") for name in ("verdict", "accuracy", "gap")
    ]
    assert "## Does it read the background?" in read.text


def test_a_card_in_a_folder_that_does_not_exist_is_refused(data, tmp_path, capsys):
    card, out = tmp_path / "typo/README.md", tmp_path / "out"
    assert main(["check", str(data), "--model", "demo-fair", "--out", str(out), "--card", str(card)]) == 2
    assert f"the folder of the model card {card} does not exist" in capsys.readouterr().err
    assert not card.parent.exists()


@pytest.mark.parametrize("head", ["a: [", "just text", "model-index: 3"])
def test_a_card_that_cannot_be_read_is_refused_before_anything_is_computed(data, tmp_path, capsys, head):
    card = tmp_path / "README.md"
    card.write_text(f"---\n{head}\n---\n")
    assert main(["check", str(data), "--model", "demo-fair", "--out", str(tmp_path / "out"), "--card", str(card)]) == 2
    assert f"the model card {card}, or its metadata, cannot be read" in capsys.readouterr().err
    assert card.read_text() == f"---\n{head}\n---\n"
    assert not (tmp_path / "out").exists()
