"""Exported models: programs of torch.export, ONNX and TorchScript files, and functions as black boxes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net, means
from PIL import Image
from refusals import refused
from tiers import rows_represented
from torch import Tensor, nn

import camkit
from camkit.cli import main
from camkit.errors import InputError, LayerError, MethodError, RunError, TargetError
from camkit.kit.store import digest_of_weights
from camkit.methods import variant

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper
from onnxruntime import quantization

SCENE = camkit.scenes.scene_paths()["plane-sky"]
PREPARED = {"mean": 0.5, "std": 0.5}
SIDE = 32
FEW = variant("rise", masks=20)


class Small(nn.Module):
    """A block inside a block, a skip connection and batch norm; the head is a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 1, 1))
        self.down = nn.MaxPool2d(2)
        self.last = nn.ReLU()
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.behind_the_stem(self.stem(images))

    def behind_the_stem(self, maps: Tensor) -> Tensor:
        return self.head(self.last(self.block(maps) + self.down(maps)).mean((2, 3)))


def small() -> nn.Module:
    torch.manual_seed(3)
    return Small().eval()


def picture(seed: int = 0) -> Tensor:
    return torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def exported(model: nn.Module, *, batch: int | None = None) -> torch.export.ExportedProgram:
    example = torch.randn(batch or 2, 3, SIDE, SIDE)
    shapes = None if batch else ({0: torch.export.Dim("N")},)
    return torch.export.export(model, (example,), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "small.pt2"
    torch.export.save(exported(small()), file)
    return file


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-5, **options: Any) -> None:
    """Compare the maps of two models for the same picture and class."""
    rows = [camkit.explain(each, picture(), **{"target": 1, **options}).raw for each in (found, expected)]
    np.testing.assert_allclose(*rows, atol=tolerance * np.abs(rows[1]).max())


def trusted(file: Path, **options: Any) -> camkit.LoadedModel:
    return camkit.load_model(str(file), trust_remote_code=True, **options)


def onnx_file(
    file: Path, model: nn.Module, *, dynamo: bool = False, batch: int | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    """Export a model with PyTorch's newer or older exporter."""
    example = torch.randn(batch or 2, 3, SIDE, SIDE, dtype=dtype)
    if dynamo:
        shapes = None if batch else ({0: "N"},)
        torch.onnx.export(
            model, (example,), file, dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False
        )
    else:
        axes = {} if batch else {"images": {0: "N"}}
        torch.onnx.export(
            model, (example,), file, dynamo=False, opset_version=17, input_names=["images"], dynamic_axes=axes
        )
    return file


pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore"),
]  # the exporters of PyTorch warn of what they deprecate


# --- torch.export


def test_a_program_has_the_layers_and_the_maps_of_its_model(program: Path) -> None:
    loaded, model = trusted(program, **PREPARED), small()
    assert {name for name, _ in loaded.module.named_modules()} <= {name for name, _ in model.named_modules()}
    found, expected = camkit.explain(loaded, picture(), target=1), camkit.explain(model, picture(), target=1)
    assert (found.layer, found.method, found.layer_reason) == (expected.layer, expected.method, expected.layer_reason)
    np.testing.assert_array_equal(found.raw, expected.raw)
    np.testing.assert_array_equal(found.heatmap, expected.heatmap)
    named = [camkit.explain(each, picture(), "stem", method="hirescam", target=1).raw for each in (loaded, model)]
    np.testing.assert_array_equal(*named)


def test_a_program_whose_last_convolution_scores_the_classes_is_explained_before_it() -> None:
    torch.manual_seed(0)
    scoring = [nn.Conv2d(8, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU()), nn.Sequential(*scoring)).eval()
    found, expected = (camkit.explain(each, picture(), method="gradcam") for each in (exported(model), model))
    assert found.layer == expected.layer == "0"


def test_a_program_for_one_picture_explains_any_number(tmp_path: Path) -> None:
    torch.export.save(exported(small(), batch=1), tmp_path / "m.pt2")
    loaded, pictures = trusted(tmp_path / "m.pt2"), [picture(seed) for seed in range(4)]
    rows = list(camkit.explain_many(loaded, pictures, target=2, batch_size=4))
    for row, image in zip(rows, pictures, strict=True):
        np.testing.assert_allclose(row.raw, camkit.explain(small(), image, target=2).raw, atol=1e-6)


def test_a_program_that_takes_two_inputs_or_three_pictures_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, images: Tensor, other: Tensor) -> Tensor:
            return images.mean((2, 3)) + other

    program = torch.export.export(Two(), (torch.randn(2, 3, 8, 8), torch.randn(2, 3)))
    with refused("takes 2 inputs; camkit explains programs whose only input is the picture"):
        camkit.explain(program, torch.randn(3, 8, 8))
    with refused("takes exactly 3 pictures; export it for one, or with dynamic_shapes"):
        camkit.explain(exported(small(), batch=3), picture())


@pytest.mark.parametrize("suffix", [".pt2", ".ts", ".pt"])
def test_a_file_that_may_hold_code_is_not_read_unless_it_is_trusted(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"m{suffix}"
    if suffix == ".pt2":
        torch.export.save(exported(small()), file)
    else:
        torch.jit.trace(small(), torch.randn(1, 3, SIDE, SIDE)).save(file)
    for reader in ("torch.export.load", "torch.jit.load"):
        monkeypatch.setattr(reader, lambda *_, **__: pytest.fail("the file is read"))
    said = (
        r"may hold code; if you trust this file, pass trust_remote_code=True to load_model; otherwise ask for an ONNX"
    )
    with refused(said):
        camkit.load_model(str(file))


# --- ONNX


@pytest.mark.parametrize(
    ("dynamo", "batch"), rows_represented(lambda *row: row != (True, 1), itertools.product((False, True), (None, 1)))
)
def test_an_onnx_file_has_the_maps_of_its_model(tmp_path: Path, dynamo: bool, batch: int | None) -> None:
    file = onnx_file(tmp_path / "m.onnx", small(), dynamo=dynamo, batch=batch)
    loaded = camkit.load_model(str(file), **PREPARED)
    assert "run as a PyTorch module" in (loaded.note or "")
    for method in ("gradcam", "hirescam", "auto"):
        rows = camkit.explain_many(loaded, [picture(0), picture(1)], method=method, target=1)
        for row, image in zip(rows, (picture(0), picture(1)), strict=True):
            expected = camkit.explain(small(), image, method=method, target=1)
            np.testing.assert_allclose(row.raw, expected.raw, atol=1e-4 * np.abs(expected.raw).max())
            np.testing.assert_allclose(row.heatmap, expected.heatmap, atol=1e-4)


WEIGHTS = np.random.default_rng(0).standard_normal((4, 3, 4, 4)).astype(np.float32)


def of_weights(*between: nn.Module) -> nn.Module:
    """Return a network of one convolution with these weights, and of modules between it and the mean of its maps."""
    model = nn.Sequential(nn.Conv2d(3, 4, 4, 4, bias=False), *between, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    model[0].weight.data = torch.from_numpy(WEIGHTS)
    return model


def graph_file(file: Path, nodes: list[Any], *, shape: tuple[Any, ...] = ("N", 3, SIDE, SIDE), **values: Any) -> Path:
    """Write a graph from "images" to "scores" with the given nodes and constants."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file)
    return file


def test_branches_that_are_concatenated_are_explained_behind_the_joint(tmp_path: Path) -> None:
    def run(net: Net, images: Tensor) -> Tensor:
        maps = net.stem(images).relu()
        return net.head(means(torch.cat([net.left(maps).relu(), net.right(maps).relu()], 1)))

    model = Net(
        run, stem=nn.Conv2d(3, 8, 3, 2, 1), left=nn.Conv2d(8, 4, 1), right=nn.Conv2d(8, 4, 1), head=nn.Linear(8, 4)
    )
    found = camkit.explain(camkit.load_model(str(onnx_file(tmp_path / "m.onnx", model))), picture(), method="gradcam")
    assert found.layer.startswith("Concat")
    assert found.status == "ok"


POOLED = [
    helper.make_node("GlobalAveragePool", ["maps"], ["pooled"]),
    helper.make_node("Flatten", ["pooled"], ["scores"]),
]


def resized(file: Path) -> Path:
    """Write a graph that enlarges linearly and asymmetrically, which the converter gets wrong without an error."""
    return graph_file(
        file,
        [
            helper.make_node("AveragePool", ["images"], ["small"], kernel_shape=[8, 8], strides=[8, 8]),
            helper.make_node(
                "Resize", ["small", "", "scales"], ["large"], mode="linear", coordinate_transformation_mode="asymmetric"
            ),
            helper.make_node("Conv", ["large", "weights"], ["maps"], strides=[4, 4]),
            *POOLED,
        ],
        scales=np.array([1, 1, 3, 3], np.float32),
        weights=WEIGHTS,
    )


def test_a_graph_that_is_converted_wrongly_is_noticed_and_run_without_gradients(tmp_path: Path) -> None:
    loaded = camkit.load_model(str(resized(tmp_path / "m.onnx")), **PREPARED)
    assert "without gradients (converted to PyTorch, its outputs differ by" in (loaded.note or "")
    found = camkit.explain(loaded, picture(), target=1)
    assert (found.method, found.status) == ("occlusion", "ok")
    with refused("'gradcam' cannot be used: camkit runs this file without layers and gradients", MethodError):
        camkit.explain(loaded, picture(), method="gradcam")


def test_a_large_second_output_hides_no_wrong_scores(tmp_path: Path) -> None:
    file = resized(tmp_path / "m.onnx")
    graph = onnx.load(file)
    graph.graph.node.append(helper.make_node("Mul", ["images", "large_number"], ["boxes"]))
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e6, np.float32), "large_number"))
    graph.graph.output.append(helper.make_tensor_value_info("boxes", TensorProto.FLOAT, None))
    onnx.save(graph, file)
    assert "run by onnxruntime" in (camkit.load_model(str(file)).note or "")


def test_half_precision_is_converted(tmp_path: Path) -> None:
    file = onnx_file(tmp_path / "m.onnx", small().half(), dtype=torch.float16)
    loaded = camkit.load_model(str(file))
    assert "run as a PyTorch module" in (loaded.note or "")
    assert_alike(loaded, small(), 0.02, method="gradcam")


def test_a_graph_for_four_pictures_explains_one(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["images", "weights"], ["maps"], strides=[4, 4]),
        helper.make_node("GlobalAveragePool", ["maps"], ["pooled"]),
        helper.make_node("Reshape", ["pooled", "shape_to"], ["scores"]),
    ]
    file = graph_file(tmp_path / "m.onnx", nodes, shape=(4, 3, SIDE, SIDE), weights=WEIGHTS, shape_to=np.array([4, 4]))
    loaded = camkit.load_model(str(file))
    assert "without gradients (it takes exactly 4 pictures; export it for one" in (loaded.note or "")
    assert_alike(loaded, of_weights(), method="occlusion")


def test_features_beside_scores_are_not_taken_for_maps_of_classes(tmp_path: Path) -> None:
    def run(net: Net, images: Tensor) -> tuple[Tensor, Tensor]:
        maps = net.small.stem(images)
        return maps, net.small.behind_the_stem(maps)

    both = Net(run, small=small())
    for model in (both, camkit.load_model(str(onnx_file(tmp_path / "m.onnx", both)))):
        with refused(r"shapes \(1, 8, 16, 16\) and \(1, 4\); choose one .*output=1", TargetError):
            camkit.explain(model, picture())
        found = camkit.explain(model, picture(), method="gradcam", output=1, target=1).raw
        expected = camkit.explain(small(), picture(), method="gradcam", target=1).raw
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_of_several_outputs_the_caller_chooses_one(tmp_path: Path) -> None:
    file = resized(tmp_path / "m.onnx")
    graph = onnx.load(file)
    del graph.graph.output[:]
    graph.graph.output.append(helper.make_tensor_value_info("maps", TensorProto.FLOAT, None))
    graph.graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, None))
    onnx.save(graph, file)
    with refused(r"of shapes \(1, 4, 3, 3\) and \(1, 4\); choose one by its index", TargetError):
        camkit.explain(camkit.load_model(str(file)), picture())
    whole = camkit.explain(camkit.load_model(str(resized(tmp_path / "one.onnx"))), picture(), target=3)
    chosen = camkit.explain(camkit.load_model(str(file), output=1), picture(), target=3)
    assert chosen.method == "occlusion"
    np.testing.assert_array_equal(chosen.raw, whole.raw)


def test_pictures_with_their_colours_last_are_passed_so(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["images"], ["first"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["first", "weights"], ["scored"], strides=[4, 4]),
        helper.make_node("Relu", ["scored"], ["maps"]),
        *POOLED,
    ]
    file = graph_file(tmp_path / "m.onnx", nodes, shape=("N", SIDE, SIDE, 3), weights=WEIGHTS)
    assert_alike(camkit.load_model(str(file), **PREPARED), of_weights(nn.ReLU()), 1e-4, method="gradcam")


def with_metadata(file: Path, facts: dict[str, str]) -> Path:
    """Write metadata into an ONNX file, and return the file."""
    graph = onnx.load(file)
    for key, value in facts.items():
        graph.metadata_props.add(key=key, value=value)
    onnx.save(graph, file)
    return file


def test_metadata_says_how_pictures_are_prepared_and_what_the_classes_are(tmp_path: Path) -> None:
    facts = {"names": "{0: 'plane', 1: 'ship', 2: 'car', 3: 'bird'}", "mean": "[0.5]", "std": "[0.25]"}
    file = with_metadata(onnx_file(tmp_path / "m.onnx", small(), batch=1), facts)
    loaded = camkit.load_model(str(file))
    assert loaded.labels == ("plane", "ship", "car", "bird")
    assert loaded.preprocess is not None
    assert "; mean and std and labels as the file's metadata says" in (loaded.note or "")
    assert "labels as" not in (camkit.load_model(str(file), labels=["a", "b", "c", "d"]).note or "")
    assert camkit.explain(loaded, SCENE, target="ship").label == "ship"
    with refused(f"takes pictures of height {SIDE} and width {SIDE} only; leave out size"):
        camkit.load_model(str(file), size=64)


def test_values_for_pictures_up_to_255_are_not_taken_for_those_up_to_1(tmp_path: Path) -> None:
    facts = {"mean": "[123.7, 116.3, 103.5]", "std": "[58.4, 57.1, 57.4]", "labels": "plane\nship\ncar\nbird"}
    file = with_metadata(onnx_file(tmp_path / "m.onnx", small(), batch=1), facts)
    loaded = camkit.load_model(str(file))
    assert loaded.preprocess is None
    assert loaded.labels == ("plane", "ship", "car", "bird")
    with refused(r"numbers for values from 0 to 1.*divide those", InputError):
        camkit.load_model(str(file), mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))


@pytest.mark.parametrize("suffix", [".pt2", ".ts"])
@pytest.mark.parametrize("form", ["one JSON file", "a text for each"])
def test_metadata_beside_a_model_of_pytorch_is_used_and_said(suffix: str, form: str, tmp_path: Path) -> None:
    facts = {"names": {"0": "plane", "1": "ship", "2": "car", "3": "bird"}, "mean": [0.5], "std": [0.25]}
    facts["imgsz"] = [SIDE, SIDE]
    one = form == "one JSON file"
    texts = {"config.txt": json.dumps(facts)} if one else {f"{key}.txt": str(value) for key, value in facts.items()}
    file = tmp_path / f"m{suffix}"
    if suffix == ".ts":
        torch.jit.save(torch.jit.trace(small(), torch.randn(1, 3, SIDE, SIDE)), file, _extra_files=texts)
    else:
        torch.export.save(exported(small()), file, extra_files=texts)
    loaded = trusted(file)
    assert loaded.labels == ("plane", "ship", "car", "bird")
    assert "; mean and std and labels as the file's metadata says" in (loaded.note or "")
    pixels = np.full((SIDE, SIDE, 3), 255, np.uint8)
    assert loaded.preprocess is not None
    assert torch.equal(loaded.preprocess(Image.fromarray(pixels)), torch.full((3, SIDE, SIDE), 2.0))


# --- quantised graphs


def test_weights_in_a_file_beside_the_graph_are_read_and_are_part_of_the_checksum(tmp_path: Path) -> None:
    notes = []
    for seed in range(2):
        weights = np.random.default_rng(seed).standard_normal((3 * SIDE * SIDE, 4)).astype(np.float32)
        (tmp_path / "data").write_bytes(weights.tobytes() + bytes(100))
        loaded = camkit.load_model(str(of_weights_in_a_file(tmp_path, in_a_file("data"))))
        found = loaded.module(picture()[None])[0].numpy()
        np.testing.assert_allclose(found, picture().flatten().numpy() @ weights, atol=1e-3)
        notes.append(loaded.note)
    assert notes[0] != notes[1]


class Calibration(quantization.CalibrationDataReader):
    def __init__(self) -> None:
        self.left = iter([{"images": picture(seed)[None].numpy()} for seed in range(3)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_quantised_files_are_run_without_gradients(form: str, tmp_path: Path) -> None:
    plain, file = onnx_file(tmp_path / "plain.onnx", small()), tmp_path / "m.onnx"
    if form == "dynamic":
        quantization.quantize_dynamic(plain, file)
    else:
        quantization.quantize_static(plain, file, Calibration(), quant_format=quantization.QuantFormat[form])
    loaded = camkit.load_model(str(file))
    assert "without gradients (it is quantised, and integers have no gradients)" in (loaded.note or "")
    found, expected = (camkit.explain(each, picture(), method="occlusion", target=1) for each in (loaded, small()))
    assert np.corrcoef(found.raw.ravel(), expected.raw.ravel())[0, 1] > 0.9


def in_a_file(location: str) -> TensorProto:
    """Return weights that lie in a file beside the graph."""
    tensor = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[3 * SIDE * SIDE, 4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


LINEAR = [
    helper.make_node("Flatten", ["images"], ["values"]),
    helper.make_node("MatMul", ["values", "weights"], ["scores"]),
]


def of_weights_in_a_file(folder: Path, weights: TensorProto) -> Path:
    """Write a linear layer with these weights."""
    file = graph_file(folder / "m.onnx", LINEAR)
    graph = onnx.load(file)
    graph.graph.initializer.append(weights)
    file.write_bytes(graph.SerializeToString())
    return file


def of_a_constant(folder: Path) -> Path:
    """Write a linear layer whose weights are a constant among its nodes, which lies in a device."""
    constant = helper.make_node("Constant", [], ["weights"], value=in_a_file("/dev/zero"))
    return graph_file(folder / "m.onnx", [constant, *LINEAR])


def a_link_to_zeros(folder: Path) -> Path:
    (folder / "data").symlink_to("/dev/zero")
    return of_weights_in_a_file(folder, in_a_file("data"))


def named_twice(folder: Path) -> Path:
    """Write a tensor with two places; libraries take the last."""
    (folder / "data").write_bytes(bytes(3 * SIDE * SIDE * 4 * 4))
    (folder / "secret").write_bytes(bytes(3 * SIDE * SIDE * 4 * 4))
    tensor = in_a_file("data")
    tensor.external_data.add(key="location", value="../secret")
    return of_weights_in_a_file(folder, tensor)


def of_one_node(kind: str, **options: Any) -> Callable[[Path], Path]:
    node = helper.make_node(kind, ["images"], ["scores"], **options)
    return lambda folder: graph_file(folder / "m.onnx", [node])


def written(name: str, data: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def state_dict(folder: Path) -> Path:
    torch.save(small().state_dict(), folder / "m.pt")
    return folder / "m.pt"


def of_texts(form: str) -> Callable[[Path], Path]:
    """Return a function that writes a graph that holds code where numbers belong; the code would create a file."""
    text = "__import__('pathlib').Path('ran').touch()"
    texts = helper.make_tensor("scales", TensorProto.STRING, [4], [text.encode()] * 4)

    def write(folder: Path) -> Path:
        graph = onnx.load(resized(folder / "m.onnx"))
        resize = next(node for node in graph.graph.node if node.op_type == "Resize")
        constant = helper.make_node("Constant", [], ["scales"], value_strings=[text] * 4)
        branch = helper.make_graph([constant], "branch", [], [helper.make_tensor_value_info("scales", 1, [4])])
        if form != "another domain":
            graph.graph.initializer.remove(next(each for each in graph.graph.initializer if each.name == "scales"))
        if form in ("a function", "an initializer"):
            graph.graph.initializer.append(texts)
        if form == "a subgraph":
            graph.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
            branches = {"then_branch": branch, "else_branch": branch}
            graph.graph.node.insert(0, helper.make_node("If", ["yes"], ["scales"], **branches))
        if form in ("a function", "another domain"):
            resize.domain = "own"
            resize.ClearField("attribute")
            graph.opset_import.append(helper.make_opsetid("own", 1))
        if form == "a function":
            inner = [helper.make_node("Identity", ["x"], ["y"])]
            opset = [helper.make_opsetid("", 17)]
            graph.functions.append(helper.make_function("own", "Resize", ["x", "r", "s"], ["y"], inner, opset))
        (folder / "m.onnx").write_bytes(graph.SerializeToString())
        return folder / "m.onnx"

    return write


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "weights in another folder": (named_twice, "names weights in other folders"),
    "a constant in a device": (of_a_constant, "names weights in other folders"),
    "weights in a link": (a_link_to_zeros, "names weights in other folders"),
    "unknown operators": (
        of_one_node("Secret", domain="nobody.knows"),
        r"uses nobody\.knows\.Secret, which camkit does not run",
    ),
    "not an ONNX file": (written("m.onnx", b"words" * 100), "cannot be read as an ONNX file|cannot be run"),
    "not a program": (written("m.pt2", b"words" * 100), r"cannot be read as a program of torch\.export"),
    "not TorchScript": (written("m.ts", b"words"), "is not a TorchScript file"),
    "a state dict": (state_dict, "if it holds a state dict, name the network and pass the file as its weights"),
    "a function with texts": (of_texts("a function"), "holds functions, which camkit does not run"),
    "texts as constants": (of_texts("an initializer"), "holds texts among its numbers"),
    "texts in a subgraph": (of_texts("a subgraph"), "holds texts among its numbers"),
    "a tokenizer": (
        of_one_node("Tokenizer", domain="com.microsoft"),
        r"uses com\.microsoft\.Tokenizer, which camkit does not run",
    ),
    "a cast to texts": (of_one_node("Cast", to=TensorProto.STRING), "holds texts among its numbers"),
    "another domain": (of_texts("another domain"), r"uses own\.Resize, which camkit does not run"),
    "no file": (lambda folder: folder / "gone.onnx", "there is no file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_read_are_one_sentence(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, said = REFUSED[name]
    file = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with refused(said, quotes=True):
        trusted(file)
    call = [str(SCENE), "--model", str(file), "--trust-remote-code", "--out", str(tmp_path / "out.png")]
    assert main(call) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert str(file) in captured.err
    assert not [record for record in caplog.records if record.name.startswith("torch.export")]
    assert not (tmp_path / "ran").exists()


# --- forward passes


def as_resized(_: Net, images: Tensor) -> Tensor:
    """The graph of ``resized`` in PyTorch."""
    small = nn.functional.avg_pool2d(images, 8)
    places = torch.arange(12) / 3  # asymmetric: cell i of the large map is place i / 3 of the small one
    low, share = places.long(), places - places.floor()
    high = (low + 1).clamp(max=3)
    rows = small[:, :, low] * (1 - share)[:, None] + small[:, :, high] * share[:, None]
    large = rows[..., low] * (1 - share) + rows[..., high] * share
    return means(nn.functional.conv2d(large, torch.from_numpy(WEIGHTS), stride=4))


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, FEW) for kind in ("m.onnx", "resized.onnx", "m.pt2", "m.ts")),
        *((kind, "occlusion") for kind in ("m.onnx", "m.ts")),
    ],
)
def test_methods_of_forward_passes_explain_files_as_the_model(
    kind: str, method: Any, program: Path, tmp_path: Path
) -> None:
    model: nn.Module = small()
    if kind == "m.onnx":
        onnx_file(tmp_path / kind, model)
    elif kind == "resized.onnx":
        resized(tmp_path / kind)
        model = Net(as_resized)
    elif kind == "m.ts":
        torch.jit.script(model).save(tmp_path / kind)
    file = program if kind == "m.pt2" else tmp_path / kind
    assert_alike(trusted(file), model, 1e-5 if kind == "m.ts" else 1e-4, method=method)


# --- TorchScript and functions


def test_torchscript_of_half_precision_is_run_in_it(tmp_path: Path) -> None:
    torch.jit.trace(small().half(), torch.randn(1, 3, SIDE, SIDE).half()).save(tmp_path / "m.ts")
    assert_alike(trusted(tmp_path / "m.ts"), small(), 0.05, method="occlusion")


def test_a_script_that_fails_says_the_size_and_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 4))).save(tmp_path / "m.ts")
    command = [str(SCENE), "--model", str(tmp_path / "m.ts"), "--size", "64", "--mean", "0.5", "--std", "0.5"]
    command.append("--trust-remote-code")
    assert main([*command, "--out", str(tmp_path / "out.png")]) == 4
    assert r"failed on pictures of shape (1, 3, 64, 64) (RuntimeError: mat1 and mat2" in capsys.readouterr().err


def as_function(pictures: Tensor) -> np.ndarray:
    assert (pictures.device.type, pictures.dtype, pictures.requires_grad) == ("cpu", torch.float32, False)
    with torch.no_grad():
        return small()(pictures).numpy()


def test_a_function_is_explained_as_the_model_that_it_calls() -> None:
    box = camkit.black_box(as_function, labels=["a", "b", "c", "d"])
    found, expected = camkit.explain(box, picture()), camkit.explain(small(), picture(), method="occlusion")
    assert (found.method, found.label) == ("occlusion", "abcd"[int(small()(picture()[None]).argmax())])
    np.testing.assert_allclose(found.raw, expected.raw, atol=1e-5)
    rows = list(camkit.explain_many(box, [picture(seed) for seed in range(3)], method=FEW, batch_size=2))
    assert [row.status for row in rows] == ["ok"] * 3


class Clamped(nn.Module):
    """Leaves probabilities as they are."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.float().clamp(0, 1)


@pytest.mark.parametrize("kind", ["scripted", "onnx", "function"])
def test_a_sigmoid_at_the_end_of_a_black_box_gives_the_probabilities(kind: str, tmp_path: Path) -> None:
    model, above = nn.Sequential(small(), nn.Sigmoid(), nn.Identity(), Clamped()).eval(), camkit.targets.above(0.3)
    if kind == "function":
        box = camkit.black_box(model, sigmoid=True)
    elif kind == "onnx":
        box = camkit.load_model(str(onnx_file(tmp_path / "m.onnx", model, batch=2)))
    else:
        torch.jit.script(model).save(tmp_path / "m.ts")
        box = trusted(tmp_path / "m.ts")

    found, expected = (camkit.explain(each, picture(), method="occlusion", target=above) for each in (box, model))

    assert [row.target for row in found] == [row.target for row in expected]
    assert [row.probability for row in found] == pytest.approx([row.probability for row in expected], abs=1e-6)
    assert [row.quantity for row in found] == ["probability, as the model returns it"] * len(expected)
    for row, of_model in zip(found, expected, strict=True):
        np.testing.assert_allclose(row.raw, of_model.raw, atol=1e-5)


def test_a_module_without_gradients_is_a_black_box_if_asked() -> None:
    quantised = torch.ao.quantization.quantize_dynamic(small(), {nn.Linear})
    script = torch.jit.trace(small(), torch.randn(1, 3, SIDE, SIDE))
    for model, said in ((quantised, "the model is quantised"), (script, "takes no hooks")):
        with refused(rf"{said}.* or camkit\.black_box\(model\)"):
            camkit.explain(model, picture())
        with torch.no_grad():
            expected = camkit.explain(camkit.black_box(lambda x, model=model: model(x)), picture(), target=1)
        found = camkit.explain(camkit.black_box(model), picture(), target=1)
        np.testing.assert_array_equal(found.raw, expected.raw)
        assert (found.method, found.status) == ("occlusion", "ok")


def test_a_black_box_is_compared_by_the_methods_that_need_no_layers() -> None:
    compared = camkit.compare(camkit.black_box(as_function), picture(), target=1)
    assert [each.method for each in compared.rows[0].maps] == ["occlusion", "rise"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("function", "a black box has neither layers nor gradients"),
        ("m.ts", "cannot read the layers and gradients of a TorchScript file; export the model with torch.export"),
        ("m.onnx", "runs this file without layers and gradients .converted to PyTorch, its outputs differ by"),
    ],
)
def test_what_needs_layers_says_why_a_black_box_has_none(kind: str, said: str, tmp_path: Path) -> None:
    if kind == "m.ts":
        torch.jit.trace(small(), torch.randn(1, 3, SIDE, SIDE)).save(tmp_path / kind)
    elif kind == "m.onnx":
        resized(tmp_path / kind)
    model = camkit.black_box(as_function) if kind == "function" else trusted(tmp_path / kind)
    with refused(f"'gradcam' cannot be used: .*{said}.*use 'occlusion' or 'rise'", MethodError):
        camkit.explain(model, picture(), method="gradcam")
    for call in (
        lambda: camkit.explain(model, picture(), "block"),
        lambda: camkit.feature_maps(model, picture()),
        lambda: camkit.feature_maps(model, picture(), "block"),
        lambda: camkit.diagnose(model, picture()[None]),
    ):
        with refused(said, LayerError):
            call()


def test_a_function_may_take_a_fixed_number_of_pictures_and_raise_what_it_likes() -> None:
    def takes_four(pictures: Tensor) -> list[list[float]]:
        assert len(pictures) == 4
        return as_function(pictures).tolist()

    def fails(_: Tensor) -> Tensor:
        raise TimeoutError("no answer from the server")

    assert_alike(camkit.black_box(takes_four, batch=4), small(), 1e-4, method="occlusion")
    with pytest.raises(TimeoutError, match="no answer from the server"):
        camkit.explain(camkit.black_box(fails), picture())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda pictures: pictures.flatten(2).mean(2) + 2,
            "below 0 or above 1, which are not the results of a sigmoid",
        ),
        (lambda _: np.zeros(4), r"returned scores of shape \(4,\) for 1 pictures"),
        (lambda pictures: np.zeros((len(pictures) + 1, 4)), r"returned scores of shape \(2, 4\) for 1 pictures"),
        (lambda _: "cat", "the function returned str, not an array of scores"),
        (lambda _: None, "the function returned NoneType|the function returned scores of shape"),
    ],
)
def test_a_function_that_returns_something_else_is_one_sentence(function: Any, said: str) -> None:
    with refused(said, RunError):
        camkit.explain(camkit.black_box(function, sigmoid=True), picture())


def test_files_with_the_same_weights_and_other_code_have_fingerprints_of_their_own(
    program: Path, tmp_path: Path
) -> None:
    model = small()
    model.last = nn.Hardswish()
    torch.export.save(exported(model), tmp_path / "m.pt2")
    assert digest_of_weights(trusted(program).module) != digest_of_weights(trusted(tmp_path / "m.pt2").module)


def foreign(name: str) -> str:
    Path(name).write_text("some text in a file", "utf-8")
    return name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: camkit.black_box(as_function, batch=0), "batch must be a whole number from 1, not 0"),
        (lambda: camkit.load_model(str(SCENE)), r"camkit cannot load .*\.(png|jpg) as a model: exported files end in"),
        (lambda: camkit.load_model(foreign("m.keras")), r"m\.keras as a model: .* convert any other file to ONNX"),
        (lambda: camkit.load_model("demo-fair", foreign("m.h5")), r"m\.h5 cannot be read as weights"),
        (lambda: camkit.load_model("m.onnx", weights="w.pth"), r"m\.onnx holds its own weights; leave out weights"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    call: Callable[[], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(said):
        call()
