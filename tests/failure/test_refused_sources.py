"""Folders that are no float checkpoint: refused in one sentence that names the way out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import Checkpoint
from quant.errors import SourceError
from tests.failure.damage import CONFIG, safetensors_of, write_folder

BLOCK = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        Checkpoint.open(folder)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_that_are_no_checkpoint_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nope") == f"No such folder: {tmp_path / 'nope'}"
    (tmp_path / "file").write_text("x")
    assert "is a file" in refusal(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "has no safetensors weights" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "merge it into its base model" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": }', "[" * 100_000])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert "has no tensor" in refusal(write_folder(tmp_path / "model", data=safetensors_of({})))


class Trap:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_r47_a_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    trap = tmp_path / "made by the pickle"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(trap)))
    checkpoint = Checkpoint.open(folder)  # with safetensors beside it, the pickle is left alone
    assert any("pytorch_model.bin is left out: a pickle" in note for note in checkpoint.notes)
    assert checkpoint.side_files() == ()
    (folder / "model.safetensors").unlink()
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "convert to safetensors" in message
    assert not trap.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert trap.exists(), "the pickle was no trap: the test shows nothing"


QUANTISED: dict[str, dict[str, tuple[str, list[int]]]] = {
    "fp8 with a block scale": {"q_proj.weight": ("F8_E4M3", [4, 4]), "q_proj.weight_scale_inv": ("F32", [1, 1])},
    "fp8 without any scale": {"q_proj.weight": ("F8_E4M3", [4, 4])},
    "fp8 hidden in a float weight's name": {"q_proj.weight": ("F32", [4, 4]), "q_proj.weight_scale": ("F32", [4])},
    "gptq": {"q_proj.qweight": ("I32", [1, 4]), "q_proj.qzeros": ("I32", [1, 1]), "q_proj.scales": ("F16", [1, 4])},
    "compressed-tensors": {"q_proj.weight_packed": ("I32", [4, 1]), "q_proj.weight_shape": ("I64", [2])},
    "int8": {"q_proj.weight": ("I8", [4, 4])},
    "bitsandbytes": {"q_proj.weight": ("U8", [8, 1]), "q_proj.weight.absmax": ("U8", [1])},
    "quanto": {"q_proj.weight._data": ("I8", [4, 4]), "q_proj.weight._scale": ("F32", [4, 1])},
    "torchao": {"q_proj._weight_qdata": ("I8", [4, 4])},
    "mxfp4 experts": {"mlp.experts.gate_up_proj_blocks": ("U8", [1, 4, 1, 16])},
}


@pytest.mark.parametrize("tensors", QUANTISED.values(), ids=QUANTISED.keys())
@pytest.mark.parametrize("where", ["top", "nested", "nowhere"])
def test_r45_weights_that_are_codes_already(tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], where: str) -> None:
    block: dict[str, Any] = {"quantization_config": BLOCK}
    places: dict[str, dict[str, Any]] = {"top": block, "nested": {"text_config": block}, "nowhere": {}}
    folder = write_folder(tmp_path / "model", {"model.norm.weight": ("F32", [4]), **tensors}, {**CONFIG, **places[where]})
    message = refusal(folder)
    assert "already quantised" in message
    assert next(iter(tensors)) in message
    assert "model.norm.weight" not in message


def test_buffers_that_are_integers_are_no_quantised_weights(tmp_path: Path) -> None:
    buffers = {"h.0.attn.bias": ("BOOL", [1, 1, 8, 8]), "h.0.attn.masked_bias": ("U8", [1]), "position_ids": ("I64", [1, 8])}
    folder = write_folder(tmp_path / "model", {"wte.weight": ("F32", [4, 2]), **buffers})
    assert len(Checkpoint.open(folder).tensors) == 4


def test_refusals_come_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    script = (
        "import json, sys; from pathlib import Path\n"
        "import formats.output, formats.writer; from formats.checkpoint import Checkpoint\n"
        "try: Checkpoint.open(Path(sys.argv[1]))\n"
        "except Exception as error: print(json.dumps([type(error).__name__, sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    kind, modules = json.loads(done.stdout)
    assert kind == "TruncatedFile"
    assert not {"torch", "transformers", "safetensors", "huggingface_hub", "pandas"} & set(modules)
