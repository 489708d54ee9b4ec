"""ShardedWriter: files equal to their plan to the byte, the same bytes each time, and readable by everybody."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from formats.checkpoint import TORCH_DTYPES, Checkpoint, read_header
from formats.header import DTYPE_BITS
from formats.writer import ShardedWriter, TensorSpec, WrittenFile, copy_file, hash_file, plan_index, plan_shards
from quant.errors import CoverageError, NonFiniteTensor, OutputError

Groups = list[list[TensorSpec]]


def specs(*tensors: tuple[str, str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(name, dtype, shape, "kept") for name, dtype, shape in tensors]


def content(spec: TensorSpec) -> torch.Tensor:
    """A tensor of the planned type whose values depend on its name."""
    seed = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:4], "little")
    values = torch.randint(0, 100, spec.shape, generator=torch.Generator().manual_seed(seed))
    dtype: torch.dtype = getattr(torch, TORCH_DTYPES[spec.dtype])
    return values.to(dtype)


def write(
    folder: Path, groups: Sequence[Sequence[TensorSpec]], metadata: dict[str, str], **options: Any
) -> tuple[WrittenFile, ...]:
    with ShardedWriter(folder, groups, metadata, **options) as writer:
        for spec in (spec for group in groups for spec in group):
            writer.put(spec.name, content(spec))
        return writer.finish()


MISALIGNED: Groups = [
    specs(("q.weight_packed", "I32", (4, 2)), ("q.weight_scale", "F16", (3, 1)), ("q.weight_shape", "I64", (2,))),
    specs(("norm.weight", "BF16", (5,))),
    specs(("k.weight_packed", "I32", (3, 1)), ("k.weight_scale", "F16", (4, 1)), ("k.weight_zero_point", "I32", (1, 1))),
    specs(("mask", "BOOL", (3,)), ("bias", "F32", (7,)), ("scalar", "F64", ()), ("empty", "F32", (0, 3)), ("byte", "U8", (1,))),
]


def test_every_tensor_reads_back_and_starts_at_a_multiple_of_its_item_size(tmp_path: Path) -> None:
    (written,) = write(tmp_path, MISALIGNED, {"scheme": "int4-sym-g64-f16"})
    path = tmp_path / "model.safetensors"
    expected = {spec.name: content(spec) for group in MISALIGNED for spec in group}
    found = load_file(path)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    with safe_open(path, framework="np") as library:  # numpy is strict about alignment in its views
        for name in library.keys():  # noqa: SIM118  (not a dict)
            if expected[name].dtype != torch.bfloat16:
                assert library.get_tensor(name).tobytes() == expected[name].numpy().tobytes()
        assert library.metadata() == {"format": "pt", "scheme": "int4-sym-g64-f16"}
    infos, metadata, header_bytes = read_header(path)
    assert header_bytes % 8 == 0
    assert metadata == {"format": "pt", "scheme": "int4-sym-g64-f16"}
    for info in infos.values():
        assert info.start % max(1, DTYPE_BITS[info.dtype] // 8) == 0, info.name
    assert (written.header_bytes, written.nbytes) == (header_bytes, path.stat().st_size)
    assert header_bytes + sum(info.nbytes for info in infos.values()) == path.stat().st_size, "no byte without an owner"
    assert list(written.tensors) == [info.name for info in infos.values()]
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert written.role == "weights"


DTYPES = st.sampled_from(["I64", "F32", "I32", "F16", "BF16", "U8", "BOOL"])
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.tuples(DTYPES, SHAPES), min_size=1, max_size=4), min_size=1, max_size=6),
    limit=st.integers(1, 3000),
)
def test_any_plan_is_what_is_written_and_respects_its_limit(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[tuple[str, tuple[int, ...]]]], limit: int
) -> None:
    named = [specs(*((f"m{i}.p{j}", dtype, shape) for j, (dtype, shape) in enumerate(group))) for i, group in enumerate(groups)]
    folder = tmp_path_factory.mktemp("plan")
    metadata = {"a": "1", "ü": "é"}
    plans = plan_shards(named, metadata, limit)
    written = write(folder, named, metadata, shard_bytes=limit)
    weights = [file for file in written if file.role == "weights"]
    assert [(p.name, p.nbytes, p.header_bytes) for p in plans] == [(w.name, w.nbytes, w.header_bytes) for w in weights]
    assert {file.name: file.nbytes for file in written} == {path.name: path.stat().st_size for path in folder.iterdir()}
    found = {}
    for plan in plans:
        tensors, _, _ = read_header(folder / plan.name)
        assert plan.nbytes <= limit or len({name.split(".")[0] for name in tensors}) == 1, "above the limit, yet not alone"
        for info in tensors.values():
            assert info.start % max(1, DTYPE_BITS[info.dtype] // 8) == 0
        found.update(load_file(folder / plan.name))
    for spec in (spec for group in named for spec in group):
        assert torch.equal(found[spec.name], content(spec))
    for group in named:
        assert sum(any(spec.name in plan_names(plan) for spec in group) for plan in plans) == 1, "a module is in one shard"
    shutil.rmtree(folder)


def plan_names(plan: Any) -> set[str]:
    return {spec.name for spec in plan.tensors}


def test_r39_the_index_counts_tensor_bytes_and_maps_every_tensor(tmp_path: Path) -> None:
    groups = [specs((f"layer{n}.a", "I32", (10, 10)), (f"layer{n}.b", "F16", (10, 1))) for n in range(6)]
    written = write(tmp_path, groups, {}, shard_bytes=1300)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [file.name for file in written] == [*names, "model.safetensors.index.json"]
    assert all(file.nbytes <= 1300 for file in written[:3])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 6 * (400 + 20)}
    assert index["weight_map"] == {name: file.name for file in written for name in file.tensors}
    assert len(index["weight_map"]) == 12
    assert written[3].role == "index"
    assert written[3].sha256 == hash_file(tmp_path / written[3].name)[1]
    (tmp_path / "config.json").write_text("{}")
    assert len(Checkpoint.open(tmp_path).tensors) == 12, "our own output passes the check of sources"
    assert plan_index(plan_shards(groups, {}, 10_000)) is None


def test_r39_one_huge_tensor_is_the_only_one_above_the_limit(tmp_path: Path) -> None:
    groups = [[spec] for spec in specs(("small1", "F32", (8,)), ("huge", "F32", (2000,)), ("small2", "F32", (8,)))]
    sizes = {next(iter(file.tensors)): file.nbytes for file in write(tmp_path, groups, {}, shard_bytes=600)[:3]}
    assert sizes["huge"] > 600
    assert sizes["small1"] <= 600
    assert sizes["small2"] <= 600


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from formats.writer import ShardedWriter, TensorSpec
groups = [[TensorSpec(f"t{n}", "F32", (n, 3), "kept")] for n in range(1, 8)]
metadata = {key: key * 3 for key in set("abcdefghij")}  # a set: another order in each process
with ShardedWriter(Path(sys.argv[1]), groups, metadata, 900) as writer:
    for n in range(1, 8):
        writer.put(f"t{n}", np.full((n, 3), n, np.float32))
    for file in writer.finish():
        print(file.name, file.sha256)
"""


def test_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    seen = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        assert done.stdout.split() == [word for name in sorted(hashes) for word in (name, hashes[name])]
        assert len(hashes) > 2
        seen.append(hashes)
    assert seen[0] == seen[1] == seen[2]


def test_r40_the_tag_is_always_there_and_metadata_is_sorted(tmp_path: Path) -> None:
    write(tmp_path, MISALIGNED, {"b": "2", "a": "1"})
    header = (tmp_path / "model.safetensors").read_bytes()
    text = header[8 : 8 + int.from_bytes(header[:8], "little")].decode()
    assert text.startswith('{"__metadata__":{"a":"1","b":"2","format":"pt"},')


def test_r41_views_slices_and_grids_on_large_buffers_are_written_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
    views = {
        "transposed": base[:4, :6].T,
        "strided": base[::25, ::50],
        "slice": base[7, 3:9],
        "same": base[7, 3:9],
        "step": base[5, ::7],
    }
    views |= {"leaf": torch.nn.Parameter(base[0, :3].clone()), "grid": base.expand(2, 100, 100)[:, 1, :2]}
    arrays: dict[str, Any] = {"np.transposed": np.arange(12, dtype=np.int32).reshape(3, 4).T, "np.big": np.arange(4, dtype=">f4")}
    groups = [specs((name, "F32", tuple(view.shape))) for name, view in views.items()]
    groups += [specs(("np.transposed", "I32", (4, 3)), ("np.big", "F32", (4,)))]
    with ShardedWriter(tmp_path, groups, {}) as writer:
        for name, data in {**views, **arrays}.items():
            writer.put(name, data)
        (written,) = writer.finish()
    found = load_file(tmp_path / "model.safetensors")
    for name, view in views.items():
        assert torch.equal(found[name], view.detach()), name
    assert found["np.transposed"].tolist() == arrays["np.transposed"].tolist()
    assert found["np.big"].tolist() == [0, 1, 2, 3]
    assert written.nbytes == written.header_bytes + sum(tensor.numel() * 4 for tensor in found.values())


def test_r48_raw_bytes_pass_for_any_type_and_a_copy_of_a_model_loads_the_same(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    import transformers

    source = tiny_model("bfloat16")
    checkpoint = Checkpoint.open(source)
    groups = [[TensorSpec(info.name, info.dtype, info.shape, "kept")] for info in checkpoint.tensors.values()]
    with ShardedWriter(tmp_path, groups, {"a": "1", "b": "2"}, shard_bytes=60_000) as writer:
        for number, name in enumerate(checkpoint.tensors):
            writer.put(name, checkpoint.raw(name) if number % 2 else checkpoint.raw(name).tobytes())
        assert len(writer.finish()) > 3
    for name in ("config.json", *checkpoint.side_files()):
        copy_file(source / name, tmp_path / name)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = [transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (source, tmp_path)]
    assert torch.equal(logits[0], logits[1])


PLANNED = [specs(("a", "F32", (2, 3)), ("b", "BF16", (3,)))]
A, B = torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16)
WRONG: dict[str, tuple[list[tuple[str, Any]], str]] = {
    "out of turn": ([("b", B)], "'b' is out of turn: the next planned tensor is 'a'"),
    "unknown": ([("c", A)], "'c' is out of turn"),
    "twice": ([("a", A), ("a", A)], "'a' is out of turn: the next planned tensor is 'b'"),
    "one too many": ([("a", A), ("b", B), ("b", B)], "all planned tensors are written"),
    "missing": ([("a", A)], "1 planned tensors were not written, the first is 'b'"),
    "other shape": ([("a", A.T)], r"'a' is F32 \[3, 2\], planned was F32 \[2, 3\]"),
    "other type": ([("a", A.half())], r"'a' is F16 \[2, 3\], planned was F32"),
    "numpy type": ([("a", np.zeros((2, 3)))], r"'a' is F64 \[2, 3\], planned was F32"),
    "too few bytes": ([("a", bytes(23))], "'a' has 23 bytes, planned were 24"),
    "bytes of another size": ([("a", np.zeros(25, np.uint8))], "'a' is U8"),
}


@pytest.mark.parametrize(("puts", "reason"), WRONG.values(), ids=WRONG.keys())
def test_what_is_not_planned_stops_the_write_and_leaves_nothing(tmp_path: Path, puts: list[tuple[str, Any]], reason: str) -> None:
    def run() -> None:
        with ShardedWriter(tmp_path, PLANNED, {}) as writer:
            for name, data in puts:
                writer.put(name, data)
            writer.finish()

    with pytest.raises(CoverageError, match=reason):
        run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "nan"), (float("inf"), "inf"), (1e6, "inf")])
def test_r18_a_scale_that_is_not_finite_never_reaches_a_file(tmp_path: Path, value: float, kind: str) -> None:
    def run() -> None:
        with ShardedWriter(tmp_path, [specs(("w", "I32", (2,)), ("s", "F16", (3, 1)))], {}) as writer:
            writer.put("w", torch.tensor([-1, -1], dtype=torch.int32))  # the bits of a NaN, but no float
            writer.put("s", torch.tensor([[1.0], [value], [2.0]]).half())

    with pytest.raises(NonFiniteTensor, match=rf"'s' would be written with {kind} at index \[1, 0\]"):
        run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("private_files")
def test_nothing_has_its_final_name_before_finish_and_then_all_have(tmp_path: Path) -> None:
    groups = [[spec] for spec in specs(("a", "F32", (100,)), ("b", "F32", (100,)))]
    with ShardedWriter(tmp_path, groups, {}, shard_bytes=600) as writer:
        for name in ("a", "b"):
            writer.put(name, torch.ones(100))
            assert all(path.name.startswith(".") for path in tmp_path.iterdir())
        writer.finish()
    assert len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.iterdir():
        assert not path.name.startswith(".")
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(OutputError, match=r"already has model-00001-of-00002\.safetensors"):
        ShardedWriter(tmp_path, groups, {}, shard_bytes=600)


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with ShardedWriter(tmp_path, PLANNED, {}) as writer:
        writer.put("a", A)
        writer.put("b", B)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("groups", "reason"), [([[]], "no tensor"), ([], "no tensor"), ([PLANNED[0], PLANNED[0]], "'a' is planned twice")]
)
def test_plans_that_make_no_file(groups: Groups, reason: str) -> None:
    with pytest.raises(CoverageError, match=reason):
        plan_shards(groups, {})
