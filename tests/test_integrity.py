"""Damage that comes with matching sizes and hashes, as from a faulty writer: the checks behind the hashes find and name it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.config_block import check_config
from formats.folder import INDEX_NAME
from formats.header import build_header, read_header
from formats.integrity import Broken, verify_folder
from formats.manifest import Manifest
from quant.errors import VerifyError
from tests.artefact import build_artefact, config, edit, reseal

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "artefact"
    build_artefact(path)
    return path


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "artefact"))


def broken(folder: Path) -> Broken:
    with pytest.raises(Broken) as found:
        verify_folder(folder)
    return found.value


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another header in front of the same tensor bytes, as the library would accept it."""
    tensors, metadata, header_bytes = read_header(path)
    entries = {n: [n, t.dtype, t.shape, t.start - header_bytes, t.stop - header_bytes] for n, t in tensors.items()}
    change(entries)
    body = path.read_bytes()[header_bytes:]
    path.write_bytes(build_header([tuple(entry) for entry in entries.values()], metadata) + body)  # type: ignore[misc]


def test_swapped_weight_files_are_found(folder: Path) -> None:
    first, second = (folder / FIRST).read_bytes(), (folder / SECOND).read_bytes()
    (folder / FIRST).write_bytes(second)
    (folder / SECOND).write_bytes(first)
    assert (broken(folder).check, broken(folder).file) == ("files", FIRST)
    reseal(folder, FIRST, SECOND)  # somebody who also corrects sizes and hashes
    found = broken(folder)
    assert (found.check, found.file) == ("headers", FIRST)


@pytest.mark.parametrize(
    ("change", "tensor", "text"),
    [
        (lambda e: e[Q_PROJ + "_scale"].__setitem__(1, "BF16"), Q_PROJ + "_scale", "dtype"),
        (lambda e: e[Q_PROJ + "_packed"].__setitem__(2, (8, 64)), Q_PROJ + "_packed", "shape"),
        (lambda e: e["model.norm.weight"].__setitem__(0, "model.norm.other"), "model.norm.other", "is stored but not recorded"),
    ],
)
def test_headers_are_compared_with_the_records(folder: Path, change: Callable[[Any], Any], tensor: str, text: str) -> None:
    rewrite_header(folder / FIRST, change)
    data = json.loads((folder / "manifest.json").read_text())
    header_bytes = read_header(folder / FIRST)[2]
    reseal(folder, FIRST, ledger=[data["ledger"][0] | {"header_bytes": header_bytes}, data["ledger"][1]])
    found = broken(folder)
    assert (found.check, found.file, found.tensor) == ("headers", FIRST, tensor)
    assert found.text.startswith(text)


def test_what_the_headers_say_of_the_whole_is_compared(folder: Path) -> None:
    edit(folder, "manifest.json", lambda d: d.update(method="awq"))
    found = broken(folder)
    assert (found.check, found.text) == ("headers", "bitledger.method in __metadata__")
    assert (found.expected, found.actual) == ("awq", "rtn")
    edit(folder, "manifest.json", lambda d: d.update(method="rtn"))
    edit(folder, "manifest.json", lambda d: d["tensors"][3]["parts"][0].update(role="scales"))
    found = broken(folder)
    assert found.text == "bitledger.scales_bytes in __metadata__"
    assert (found.expected, found.actual) == ("2752", "704")


def test_a_recorded_tensor_that_is_not_stored_is_named(folder: Path) -> None:
    part = {"name": "model.extra.weight", "file": FIRST, "dtype": "F32", "shape": [2], "nbytes": 8, "role": "kept"}
    record = {"name": "model.extra.weight", "dtype": "F32", "shape": [2], "fate": "kept", "parts": [part], "nbytes": 8}
    edit(folder, "manifest.json", lambda d: d["tensors"].append(record))
    found = broken(folder)
    assert (found.check, found.file, found.tensor) == ("headers", FIRST, "model.extra.weight")
    assert found.text == "is recorded but not stored there"


def test_header_bytes_are_compared_with_the_ledger(folder: Path) -> None:
    right = read_header(folder / FIRST)[2]
    edit(folder, "manifest.json", lambda d: d["ledger"][0].update(header_bytes=right - 8))
    found = broken(folder)
    assert (found.check, found.text, found.expected, found.actual) == ("headers", "header bytes", str(right - 8), str(right))


@pytest.mark.parametrize(
    ("change", "tensor", "text"),
    [
        (lambda i: i["weight_map"].update({"bogus": FIRST}), "bogus", "weight_map"),
        (lambda i: i["weight_map"].pop("model.norm.weight"), "model.norm.weight", "weight_map"),
        (lambda i: i["weight_map"].update({"model.norm.weight": SECOND}), "model.norm.weight", "weight_map"),
        (lambda i: i["weight_map"].update({"model.norm.weight": [1]}), "model.norm.weight", "weight_map"),
        (lambda i: i["metadata"].update(total_size=i["metadata"]["total_size"] + 2 * 1096), "", "total_size"),
        (lambda i: i.pop("metadata"), "", "total_size"),
    ],
)
def test_the_index_is_compared_with_the_weight_files(folder: Path, change: Callable[[Any], Any], tensor: str, text: str) -> None:
    """R37 and R39: every name in its file, and a total of tensor bytes, headers not counted."""
    edit(folder, INDEX_NAME, change)
    reseal(folder, INDEX_NAME)
    found = broken(folder)
    assert (found.check, found.file, found.tensor) == ("headers", INDEX_NAME, tensor)
    assert found.text.startswith(text)


def test_several_weight_files_without_an_index_are_broken(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    edit(folder, "manifest.json", lambda d: d.update(files=[file for file in d["files"] if file["name"] != INDEX_NAME]))
    assert broken(folder).text == "several weight files need an index"


def test_the_ledger_is_recomputed(folder: Path) -> None:
    edit(folder, "manifest.json", lambda d: d["ledger"][0].update(codes_bytes=3073, scales_bytes=383))
    found = broken(folder)
    assert (found.check, found.file) == ("ledger", "manifest.json")
    assert "codes_bytes 3073" in found.text


def test_a_measurement_of_other_bytes_is_found(folder: Path) -> None:
    edit(folder, "manifest.json", lambda d: d["measurements"][0]["subject"].update({SECOND: "b" * 64}))
    found = broken(folder)
    assert (found.check, found.file) == ("ledger", SECOND)
    assert "measurement perplexity was made on other bytes" in found.text


def _group(number: int, **weights: Any) -> Callable[[Any], None]:
    return lambda c: c["quantization_config"]["config_groups"][f"group_{number}"]["weights"].update(weights)


def _block(**values: Any) -> Callable[[Any], None]:
    return lambda c: c["quantization_config"].update(values)


CONFIG_DAMAGE: list[tuple[Callable[[Any], Any], str]] = [
    (_group(0, num_bits=8), "self_attn.q_proj is described as int8-sym-g32-f16, expected int4-sym-g32-f16"),
    (_group(0, group_size=64), "described as int4-sym-g64-f16"),
    (_group(1, symmetric=True), "mlp.up_proj is described as int3-sym-channel-f16"),
    (_group(1, strategy="tensor"), "described as int3-zp-tensor-f16"),
    (_group(1, num_bits="3"), "malformed"),
    (_group(1, type="float"), "float"),
    (_block(ignore=[Q_PROJ.removesuffix(".weight")]), "q_proj is quantised but ignored"),
    (_block(ignore=["re:.*q_proj"]), "q_proj is quantised but ignored"),
    (_block(ignore=["re:("]), "malformed"),
    (_block(ignore=None), "malformed"),
    (_block(config_groups={}), "no group targets it"),
    (_block(config_groups=[]), "malformed"),
    (_block(quant_method="gptq"), "quant_method is 'gptq', expected 'compressed-tensors'"),
    (_block(quantization_status="frozen"), "quantization_status is 'frozen', expected 'compressed'"),
    (_block(format="int-quantized"), "format is 'int-quantized', expected 'pack-quantized'"),
    (
        lambda c: c["quantization_config"]["config_groups"]["group_0"].update(format="int-quantized"),
        "q_proj has format 'int-quantized'",
    ),
    (lambda c: c.pop("quantization_config"), "expected at ['quantization_config']"),
    (lambda c: c.update(text_config={"quantization_config": {"bits": 4}}), "text_config.quantization_config"),
    (lambda c: c.update(tie_word_embeddings=False), "tie_word_embeddings is false, but lm_head.weight is not stored"),
]


@pytest.mark.parametrize(("change", "says"), CONFIG_DAMAGE)
def test_the_config_block_is_compared_with_what_was_stored(folder: Path, change: Callable[[Any], Any], says: str) -> None:
    edit(folder, "config.json", change)
    reseal(folder, "config.json")
    found = broken(folder)
    assert (found.check, found.file) == ("config", "config.json")
    assert says in found.text


def test_a_config_that_is_no_object_is_broken(folder: Path) -> None:
    for text in ("[]", "{", "\ufeff"):
        (folder / "config.json").write_text(text)
        reseal(folder, "config.json")
        assert broken(folder).check == "config"


def test_kept_linears_must_be_ignored_when_their_class_is_targeted(built: Path) -> None:
    """A kept Linear that "Linear" targets and nothing ignores would be filled with random numbers by some readers."""
    tensors = Manifest.load(built).tensors
    good = config()
    good["quantization_config"]["config_groups"]["group_1"]["targets"] = ["Linear"]
    assert "groups: 2, ignored modules: 2" in check_config(good, tensors)
    for missing, kept in ((0, "lm_head is alias"), (1, "model.layers.0.mlp.gate is kept")):
        bad = json.loads(json.dumps(good))
        bad["quantization_config"]["ignore"].pop(missing)
        with pytest.raises(VerifyError, match=f"{kept}, not quantised, but targeted and not in ignore"):
            check_config(bad, tensors)


def test_a_float_artefact_must_not_carry_a_block(built: Path) -> None:
    """R44: a stale block makes readers misread float weights."""
    kept = [record for record in Manifest.load(built).tensors if record.fate == "kept"]
    assert "nothing is quantised" in check_config({"model_type": "llama"}, kept)
    with pytest.raises(VerifyError, match="expected at no place"):
        check_config(config(), kept)


def test_parts_must_be_what_the_codec_lays_out(folder: Path) -> None:
    """A part under another name: sums, headers, index and hashes agree, but the codec lays out no such part."""
    renamed = Q_PROJ + "_renamed"
    rewrite_header(folder / FIRST, lambda e: e[Q_PROJ + "_packed"].__setitem__(0, renamed))
    edit(folder, INDEX_NAME, lambda i: i["weight_map"].update({renamed: i["weight_map"].pop(Q_PROJ + "_packed")}))
    edit(folder, "manifest.json", lambda d: d["tensors"][3]["parts"][0].update(name=renamed))
    _settle_header(folder)
    found = broken(folder)
    assert (found.check, found.file, found.tensor) == ("codecs", FIRST, Q_PROJ)
    assert "lays int4-sym-g32-f16 out in other parts" in found.text


def _settle_header(folder: Path) -> None:
    """Let ledger, totals, sizes and hashes follow the first file's new header."""
    manifest = reseal(folder, FIRST, INDEX_NAME)
    header_bytes = read_header(folder / FIRST)[2]

    def settle(data: Any) -> None:
        line = data["ledger"][0]
        line["total_bytes"] += header_bytes - line["header_bytes"]
        line["header_bytes"] = header_bytes
        total = sum(line["total_bytes"] for line in data["ledger"])
        data["bits_per_weight"]["whole_file"] = 8 * total / manifest.bits_per_weight.all_elements

    edit(folder, "manifest.json", settle)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("k_proj.weight_scale", b"\x00\x00", "a stored scale is zero, negative or not finite"),
        ("k_proj.weight_scale", b"\x00\x7c", "a stored scale is zero, negative or not finite"),
        ("k_proj.weight_shape", b"\x21", "weight_shape has other bytes"),
    ],
)
def test_values_that_do_not_survive_a_round_trip_are_found(folder: Path, part: str, value: bytes, says: str) -> None:
    name = f"model.layers.0.self_attn.{part}"
    for file in (FIRST, SECOND):
        info = read_header(folder / file)[0].get(name)
        if info is not None:
            data = bytearray((folder / file).read_bytes())
            data[info.start : info.start + len(value)] = value
            (folder / file).write_bytes(data)
            reseal(folder, file)
    found = broken(folder)
    assert (found.check, found.tensor) == ("codecs", "model.layers.0.self_attn.k_proj.weight")
    assert says in found.text
