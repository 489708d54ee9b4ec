"""Checkpoint against the safetensors library, torch and the cases about what may lie in a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from formats.checkpoint import TORCH_DTYPES, Checkpoint, read_header
from formats.finite import first_nonfinite, nonfinite_in
from formats.writer import copy_file
from tests.conftest import MODELS, SIDE_FILES
from tests.failure.damage import CONFIG, entry, pack, safetensors_of, write_folder


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_is_what_the_library_reads(tiny_model: Callable[[str], Path], model: str) -> None:
    folder = tiny_model(model)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.notes == ()
    assert checkpoint.config == json.loads((folder / "config.json").read_text())
    assert [file.name for file in checkpoint.weight_files] == sorted(path.name for path in folder.glob("*.safetensors"))
    seen = set()
    for file in checkpoint.weight_files:
        assert file.nbytes == (folder / file.name).stat().st_size
        assert file.metadata["format"] == "pt"
        with safe_open(folder / file.name, framework="pt") as library:
            for name in library.keys():  # noqa: SIM118  (not a dict)
                seen.add(name)
                expected = library.get_tensor(name)
                info = checkpoint.tensors[name]
                assert (info.file, info.shape) == (file.name, tuple(expected.shape))
                assert info.nbytes == expected.numel() * expected.element_size()
                assert info.elements == expected.numel()
                found = checkpoint.tensor(name)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
                assert checkpoint.raw(name).tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert seen == set(checkpoint.tensors)
    assert len(checkpoint.weight_files) == (3 if model == "sharded" else 1)


def test_tensors_come_in_file_order_shard_by_shard(tiny_model: Callable[[str], Path]) -> None:
    infos = list(Checkpoint.open(tiny_model("sharded")).tensors.values())
    assert [(info.file, info.start) for info in infos] == sorted((info.file, info.start) for info in infos)
    assert [info.name for info in infos] != sorted(info.name for info in infos)


def test_raw_is_a_view_that_cannot_be_written_and_tensor_is_a_copy(tiny_copy: Callable[[str], Path]) -> None:
    folder = tiny_copy("llama")
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(folder)
    raw = checkpoint.raw("model.norm.weight")
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    checkpoint.tensor("model.norm.weight").fill_(7.0)
    assert checkpoint.tensor("model.norm.weight").tolist() == [1.0] * 64
    assert (folder / "model.safetensors").read_bytes() == before


def test_all_types_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {f"t.{code}": torch.arange(3).to(getattr(torch, name)) for code, name in TORCH_DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "odd": torch.ones(5, dtype=torch.bfloat16)}
    folder = write_folder(tmp_path / "model", data=b"")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.tensor(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
        if "." in name:
            assert checkpoint.tensors[name].dtype == name[2:]


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E8M0", torch.float8_e8m0fnu),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
    ],
)
def test_finite_means_what_torch_says_for_every_pattern(code: str, dtype: torch.dtype) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    patterns = np.arange(256**width, dtype=f"<u{width}")
    values = torch.from_numpy(patterns.view(f"<i{width}")).view(dtype).float()
    for pattern, value in zip(patterns, values.tolist(), strict=True):
        found = nonfinite_in(np.array([0, pattern], dtype=patterns.dtype).view(np.uint8), code, (2,))
        expected = "nan" if np.isnan(value) else "inf" if np.isinf(value) else None
        assert found == (None if expected is None else ((1,), expected)), hex(pattern)


@pytest.mark.parametrize(("code", "dtype"), [("F32", np.float32), ("F64", np.float64), ("C64", np.complex64)])
def test_finite_means_what_numpy_says_for_wide_types(code: str, dtype: Any) -> None:
    draws = np.random.default_rng(0).integers(0, 256, size=(4000, np.dtype(dtype).itemsize), dtype=np.uint8)
    draws[::2, -1] |= 0x7F  # every second value gets the largest exponent, so that both answers are frequent
    draws[::2, -2] |= 0xF0
    edge = [np.finfo(dtype).max, np.finfo(dtype).tiny, -np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, -0.0]
    values = np.concatenate([draws.reshape(-1).view(dtype), np.array([*edge, np.inf, -np.inf, np.nan], dtype=dtype)])
    answers = [nonfinite_in(value.reshape(1).view(np.uint8), code, (1,)) is None for value in values]
    assert answers == np.isfinite(values).tolist()
    assert 500 < sum(answers) < 3500


def test_integers_are_passed_over_by_the_search(tmp_path: Path) -> None:
    header = {"a": entry("I32", [4], 0), "b": entry("U8", [4], 16), "c": entry("F32", [1], 20)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(header, b"\xff" * 20 + bytes(4)))
    assert first_nonfinite(tmp_path, read_header(path)[0].values()) is None


@pytest.mark.parametrize("metadata", ["absent", None, {}, {"format": "pt"}, {"who": "mlx"}])
def test_r40_a_file_without_the_framework_tag_is_accepted(tmp_path: Path, metadata: Any) -> None:
    header: dict[str, Any] = {"a.weight": entry("F32", [2], 0)}
    if metadata != "absent":
        header["__metadata__"] = metadata
    folder = write_folder(tmp_path / "model", data=pack(header, bytes(8)))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.weight_files[0].metadata == (metadata if isinstance(metadata, dict) else {})
    assert checkpoint.tensor("a.weight").tolist() == [0, 0]


def test_r42_r46_every_side_file_is_listed_and_copied_byte_for_byte(tiny_copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_copy("sharded")
    for hidden in (".git/config", ".cache/huggingface/x", ".gitattributes"):
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        (folder / hidden).write_text("hidden")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.side_files() == tuple(sorted([*SIDE_FILES, "tokenizer.json", "tokenizer_config.json"]))
    for name in checkpoint.side_files():
        nbytes, _ = copy_file(folder / name, tmp_path / "out" / name)
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
        assert nbytes == (folder / name).stat().st_size
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")} >= {"assets/notes.txt"}
    for name, data in SIDE_FILES.items():
        assert (tmp_path / "out" / name).read_bytes() == data


def test_r42_weights_in_other_formats_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    others = [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "tf_model.h5",
    ]
    others += ["model-q4.gguf", "sub/model.safetensors", "quantize_config.json", "training_args.bin", "manifest.json"]
    for name in [*others, "onnx/README.md"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.side_files() == ("onnx/README.md",)
    for name in others:
        assert sum(note.startswith(f"{name} is left out: ") for note in checkpoint.notes) == 1


def test_r42_a_missing_tokenizer_is_said_at_the_start(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    assert any("has no tokenizer" in note for note in Checkpoint.open(folder).notes)
    (folder / "tokenizer.json").write_text("{}")
    assert Checkpoint.open(folder).notes == ()


BLOCK = {"quant_method": "fp8"}
STALE: dict[str, dict[str, Any]] = {
    "top": {"quantization_config": BLOCK},
    "nested": {"text_config": {"hidden_size": 4, "quantization_config": BLOCK}},
    "older name": {"compression_config": BLOCK},
    "in a list": {"parts": [{"quantization_config": BLOCK}]},
}


@pytest.mark.parametrize("stale", STALE.values(), ids=STALE.keys())
def test_r44_a_stale_block_over_float_weights_is_noted_and_dropped(tmp_path: Path, stale: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "model", config={**CONFIG, **stale})
    checkpoint = Checkpoint.open(folder)
    assert [note for note in checkpoint.notes if "stale" in note]
    assert checkpoint.config == {**CONFIG, **stale}
    plain = checkpoint.plain_config()
    assert "quantization_config" not in json.dumps(plain)
    assert "compression_config" not in json.dumps(plain)
    assert {key: plain[key] for key in CONFIG} == CONFIG
    if "text_config" in stale:
        assert plain["text_config"] == {"hidden_size": 4}


def test_r44_no_block_no_note_and_an_empty_block_is_no_block(tmp_path: Path) -> None:
    configs: list[dict[str, Any]] = [{}, {"quantization_config": None}, {"text_config": {"quantization_config": {}}}]
    for number, config in enumerate(configs):
        folder = write_folder(tmp_path / str(number), config={**CONFIG, **config})
        assert not [note for note in Checkpoint.open(folder).notes if "stale" in note]


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_r48_every_tensor_keeps_its_own_type_and_the_config_its_spelling(tmp_path: Path, spelling: str) -> None:
    tensors = {"q_proj.weight": ("BF16", [4, 4]), "norm.weight": ("F32", [4]), "gate.e_score_correction_bias": ("F16", [2])}
    folder = write_folder(tmp_path / "model", data=safetensors_of(tensors), config={"model_type": "llama", spelling: "bfloat16"})
    checkpoint = Checkpoint.open(folder)
    assert {name: info.dtype for name, info in checkpoint.tensors.items()} == {
        name: dtype for name, (dtype, _) in tensors.items()
    }
    assert checkpoint.tensor("norm.weight").dtype == torch.float32
    assert checkpoint.tensor("q_proj.weight").dtype == torch.bfloat16
    assert checkpoint.plain_config() == {"model_type": "llama", spelling: "bfloat16"}
