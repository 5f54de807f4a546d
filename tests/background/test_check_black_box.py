"""The check of models without layers and gradients: an exported file, a function, a server on the loopback."""

from __future__ import annotations

import hashlib
import html
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiers import represented_by

import camkit
from camkit.cli import main

PER_CLASS = 10
CONFIG = {"check": {"pastes": 1, "batch_size": 8}, "limits": {"least_pictures": PER_CLASS}}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return camkit.scenes.write_scenes(tmp_path_factory.mktemp("scenes"), PER_CLASS)


@pytest.fixture(scope="module")
def of_the_model(scenes: Path) -> camkit.CheckResult:
    return camkit.check("demo-biased", scenes, config=CONFIG)


def as_black_box(name: str) -> Any:
    """Return a demo network as a function, with its preprocessing and labels."""
    loaded = camkit.load_model(name)

    def scores(pictures: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return loaded.module(pictures).numpy()

    return camkit.black_box(scores, labels=loaded.labels, preprocess=loaded.preprocess, name=name)


def assert_same_figures(found: camkit.CheckResult, expected: camkit.CheckResult) -> None:
    assert (found.verdict, found.exit_code()) == (expected.verdict, expected.exit_code())
    assert {row.name: row.answer for row in found.images} == {row.name: row.answer for row in expected.images}
    for name, measures in expected.classes.items():
        assert found.classes[name].gap.by_fill == measures.gap.by_fill


def test_a_function_gets_the_verdict_and_the_figures_of_the_model_that_it_calls(
    scenes: Path, of_the_model: camkit.CheckResult, tmp_path: Path
) -> None:
    found = camkit.check(as_black_box("demo-biased"), scenes, config=CONFIG, out=tmp_path)
    assert found.verdict == "FAIL"
    assert_same_figures(found, of_the_model)
    assert found.layer_reason == "no heat: the model is a black box"
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "no heat: the model is a black box" in page
    assert np.isnan(found.overall.skill.value) if found.overall.skill is not None else True


@pytest.mark.extended
def test_heat_is_drawn_if_the_config_names_a_method_that_a_black_box_has(scenes: Path) -> None:
    config = {**CONFIG, "check": {**CONFIG["check"], "method": "occlusion"}}
    found = camkit.check(as_black_box("demo-biased"), scenes, config=config)
    assert found.verdict == "FAIL"
    assert {row.status for row in found.images} <= {"ok", "no_influence"}


@pytest.mark.filterwarnings("ignore")  # PyTorch's exporters warn of what they deprecate
@pytest.mark.parametrize("name", represented_by("m.ts", among=["m.ts", "m.pt2", "m.onnx"]))
def test_an_exported_file_is_checked_as_its_model(
    name: str, scenes: Path, of_the_model: camkit.CheckResult, tmp_path: Path
) -> None:
    plain, file, example = camkit.load_model("demo-biased"), tmp_path / name, torch.randn(2, 3, 128, 128)
    if name == "m.ts":
        torch.jit.trace(plain.module, example).save(file)
    elif name == "m.pt2":
        shapes = ({0: torch.export.Dim("N")},)
        torch.export.save(torch.export.export(plain.module, (example,), dynamic_shapes=shapes), file)
    else:
        axes = {"images": {0: "N"}}
        torch.onnx.export(
            plain.module, (example,), file, dynamo=False, opset_version=17, input_names=["images"], dynamic_axes=axes
        )
    again = camkit.load_model(str(file), trust_remote_code=True)
    found = camkit.check(
        again, scenes, config=CONFIG, out=tmp_path / "out", preprocess=plain.preprocess, labels=plain.labels
    )
    assert found.verdict == "FAIL"
    assert_same_figures(found, of_the_model)
    page = html.unescape((tmp_path / "out" / "report.html").read_text("utf-8"))
    assert again.note in page
    assert name in page
    assert ("without gradients" in page) == (name == "m.ts")
    assert ("no heat: camkit cannot read the layers and gradients of a TorchScript file" in page) == (name == "m.ts")
    assert hashlib.sha256(file.read_bytes()).hexdigest()[:12] in page


class Served(http.server.BaseHTTPRequestHandler):
    """Answers with a network's scores; after ``left`` requests, as ``then`` says."""

    left, then = 10**9, ""
    module = camkit.load_model("demo-biased").module
    answered: ClassVar[set[bytes]] = set()
    hold = threading.Event()

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        pictures = torch.from_numpy(np.frombuffer(data, np.float32).reshape(-1, 3, 128, 128).copy())
        Served.left -= 1
        with torch.no_grad():
            scores = self.module(pictures).tolist()
        if Served.left < 0 and Served.then == "fails":
            self.send_error(500, "out of order")
            return
        if Served.left < 0 and Served.then == "times out":
            Served.hold.wait(60)
            return
        if Served.left < 0 and Served.then == "wrong shape":
            scores = scores[:-1]
        if Served.left >= 0:
            Served.answered |= {picture.numpy().tobytes() for picture in pictures}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(scores).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Served.left, Served.then = 10**9, ""
    Served.answered.clear()
    Served.hold.clear()
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    Served.hold.set()
    served.shutdown()
    served.server_close()
    thread.join()


ASKING = """
import json, urllib.request
import camkit

def scores(pictures):
    with urllib.request.urlopen("{address}", pictures.numpy().tobytes(), timeout=3) as answer:
        return json.load(answer)

def build():
    demo = camkit.load_model("demo-biased")
    return camkit.black_box(scores, labels=demo.labels, preprocess=demo.preprocess)
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("fails", "HTTP Error 500: out of order"),
        pytest.param("times out", "TimeoutError: timed out", marks=pytest.mark.extended),
        pytest.param("wrong shape", r"returned scores of shape (7, 4) for 8", marks=pytest.mark.extended),
    ],
)
def test_a_server_that_fails_is_one_sentence_and_resume_goes_on(
    then: str, said: str, server: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "served.py").write_text(ASKING.format(address=server))
    (tmp_path / "camkit.toml").write_text(
        f"[check]\npastes = 1\nbatch_size = 8\n[limits]\nleast_pictures = {PER_CLASS}\n"
    )
    command = ["check", str(scenes), "--model", f"{tmp_path / 'served.py'}:build", "--out", str(tmp_path / "out")]
    command += ["--config", str(tmp_path / "camkit.toml")]
    Served.left, Served.then = 40, then
    code = main(command)
    captured = capsys.readouterr()
    assert code == 4
    assert said in captured.err
    assert len([line for line in captured.err.splitlines() if said in line]) == 1
    assert "Traceback" not in captured.err
    assert (tmp_path / "out").exists()
    before = set(Served.answered)
    Served.answered.clear()
    Served.left, Served.then = 10**9, ""
    assert main([*command, "--resume"]) == 1
    assert len(before - Served.answered) > len(before) // 2  # most of what was answered is not asked again
    assert capsys.readouterr().out.count("FAIL") >= 1
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert report["verdict"] == "FAIL"
