"""Checkpoint: a folder of float safetensors, known from its headers alone; bytes are read one tensor at a time.

``Checkpoint.open`` reads config.json, the index and the headers, checks them against each other, and reads no weight. It accepts
what transformers accepts and refuses what would only show later as strange numbers: truncated shards, an index that disagrees
with its shards, pickles, links out of the folder, and weights that are quantised already.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from formats.finite import NonFinite, Progress, first_nonfinite, read_exactly
from formats.folder import INDEX_NAME, PICKLES, SINGLE_NAME, Listing, allowed_roots, inside, list_folder
from formats.header import GET_IT_AGAIN, TensorInfo, read_header
from quant.errors import NonFiniteTensor, SourceError, TruncatedFile

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "TensorInfo", "WeightFile", "read_header"]

TORCH_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
# What an artefact may hold besides: scales in eight bits. Sources with such tensors are quantised already, and refused.
STORED_DTYPES = TORCH_DTYPES | {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}

_QUANTISATION_KEYS = ("quantization_config", "compression_config")
_PACKED_NAME = re.compile(
    r"(^|[._])(qweight|qzeros|g_idx|weight_packed|weight_shape|weight_zero_point|weight_scale(_inv|_2)?|weight_global_scale|"
    r"weight_q?data|weight\._data|weight\._scale|W_q|SCB|absmax|quant_map|quant_state|quantized_weight)(\.|$)|_proj_(blocks|scales)$"
)
_TOKENIZER_NAME = re.compile(
    r"tokenizer\.(json|model)|vocab\.(json|txt)|(spiece|sentencepiece\.bpe)\.model|tekken\.json|.*\.tiktoken"
)
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One shard: name relative to the folder, size of the file, header bytes (8 + JSON length), and its ``__metadata__``."""

    name: str
    nbytes: int
    header_bytes: int
    metadata: dict[str, str]


class Checkpoint:
    """A checked checkpoint folder; make one with ``Checkpoint.open``.

    ``config`` is config.json as found (``plain_config`` is without quantisation blocks); ``tensors`` are in file order, shard by
    shard; ``notes`` are sentences on what was found odd and tolerated, to be shown before the run.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo], weight_files: tuple[WeightFile, ...],
        listing: Listing, notes: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.weight_files = weight_files
        self.notes = notes
        self._listing = listing
        self._maps: dict[str, np.ndarray] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read and check the headers of ``folder``. Raises SourceError, TruncatedFile (all of the refusals in this module)."""
        if not folder.exists():
            raise SourceError(f"No such folder: {folder}")
        if not folder.is_dir():
            raise SourceError(f"{folder} is a file: give the folder that holds config.json and the safetensors files")
        roots = allowed_roots(folder)
        config = _read_json(folder, "config.json", roots)
        names, weight_map, index_total = _weight_names(folder, roots)
        tensors, weight_files = _read_shards(folder, names, roots)
        listing = list_folder(folder, frozenset(names), roots)
        if weight_map is not None:
            _check_index(folder, weight_map, tensors)
            _check_unlisted_shards(folder, listing)
        merged = {name: infos[0] for name, infos in tensors.items()}
        if not merged:
            raise SourceError(f"{folder} has no tensor in its safetensors files")
        notes = [f"{name} is left out: {reason}" for name, reason in listing.left_out]
        notes += _check_not_quantised(folder, config, merged)
        total = sum(t.nbytes for t in merged.values())
        if index_total is not None and index_total != total:
            notes.append(f"{INDEX_NAME} gives total_size {index_total:,} but the tensors take {total:,} bytes")
        if not any(_TOKENIZER_NAME.fullmatch(name) for name in listing.side_files):
            notes.append(f"{folder} has no tokenizer: text cannot be encoded, and the output will have none either")
        return cls(folder, config, merged, weight_files, listing, tuple(notes))

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of tensor ``name``: a read-only uint8 view ``[nbytes]`` of the mapped file, no copy."""
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(self.folder / info.file, dtype=np.uint8, mode="r")
        return self._maps[info.file][info.start : info.stop]

    def tensor(self, name: str) -> torch.Tensor:
        """Tensor ``name`` as an own copy, dtype and shape as stored; its pages do not stay mapped. Raises TruncatedFile."""
        import torch

        info = self.tensors[name]
        dtype: torch.dtype = getattr(torch, TORCH_DTYPES[info.dtype])
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        data = np.empty(info.nbytes, dtype=np.uint8)
        with (self.folder / info.file).open("rb", buffering=0) as file:
            file.seek(info.start)
            read_exactly(file, data, info)
        return torch.from_numpy(data).view(dtype).reshape(info.shape)

    def first_nonfinite(self, progress: Progress | None = None) -> NonFinite | None:
        """The first NaN or infinity of the float tensors, in file order, or None; see ``formats.finite``."""
        return first_nonfinite(self.folder, self.tensors.values(), progress)

    def check_finite(self, progress: Progress | None = None) -> None:
        """Raise NonFiniteTensor when a tensor has a NaN or an infinity; ``progress`` gets bytes done and bytes in all."""
        found = self.first_nonfinite(progress)
        if found is not None:
            raise NonFiniteTensor(
                f"tensor {found.tensor} has {found.kind} at index {list(found.index)} in {found.file}: "
                "repair the checkpoint or get it again"
            )

    def side_files(self) -> tuple[str, ...]:
        """Relative names of all files to carry over byte for byte: not weights, index or config.json, nothing hidden."""
        return self._listing.side_files

    def plain_config(self) -> dict[str, Any]:
        """A copy of ``config`` without any quantisation block, at the top or nested."""
        plain = copy.deepcopy(self.config)
        for holder in _quantisation_holders(plain):
            for key in _QUANTISATION_KEYS:
                holder.pop(key, None)
        return plain


def _read_json(folder: Path, name: str, roots: tuple[Path, ...]) -> dict[str, Any]:
    path = inside(folder, name, roots)
    if not path.is_file():
        raise SourceError(f"{folder} has no {name}: give the folder of a model as transformers saves it")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON ({str(error).splitlines()[0]}): {GET_IT_AGAIN}") from None
    if not isinstance(found, dict):
        raise SourceError(f"{path} is not a JSON object: {GET_IT_AGAIN}")
    return found


def _weight_names(folder: Path, roots: tuple[Path, ...]) -> tuple[list[str], dict[str, str] | None, int | None]:
    """Shard names, sorted; the index's weight_map and total_size, or None for a single file without an index."""
    if not (folder / INDEX_NAME).exists():
        if (folder / SINGLE_NAME).exists():
            return [SINGLE_NAME], None, None
        raise SourceError(_why_no_weights(folder))
    index = _read_json(folder, INDEX_NAME, roots)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise SourceError(f"{folder / INDEX_NAME} has no weight_map from tensor names to file names: {GET_IT_AGAIN}")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not inside(folder, name, roots).is_file()]
    if missing:
        raise SourceError(f"{folder} lacks {_some(missing)}, which its index names: {GET_IT_AGAIN}")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return names, weight_map, total if isinstance(total, int) else None


def _why_no_weights(folder: Path) -> str:
    found = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in found if name.lower().endswith(PICKLES)]
    loose = [name for name in found if name.endswith(".safetensors")]
    if "adapter_config.json" in found:
        return f"{folder} is an adapter, not a model: merge it into its base model and save that"
    if loose:
        return f"{folder} has {_some(loose)} but neither {SINGLE_NAME} nor {INDEX_NAME}: add the index, or save the model again"
    if pickles:
        return (
            f"{folder} has its weights as pickles ({_some(pickles)}), which can run code when loaded and are refused: "
            "convert to safetensors (save_pretrained of transformers writes it)"
        )
    return f"{folder} has no safetensors weights ({SINGLE_NAME} or {INDEX_NAME})"


def _read_shards(
    folder: Path, names: list[str], roots: tuple[Path, ...]
) -> tuple[dict[str, list[TensorInfo]], tuple[WeightFile, ...]]:
    """Every tensor with all places where it is stored, and the shards; several damaged shards are named in one message."""
    tensors: dict[str, list[TensorInfo]] = defaultdict(list)
    files: list[WeightFile] = []
    damaged: list[SourceError] = []
    for name in names:
        path = inside(folder, name, roots)
        if not path.is_file():
            raise SourceError(f"{path} is not a file: {GET_IT_AGAIN}")
        try:
            found, metadata, header_bytes = read_header(path, name)
        except SourceError as error:
            damaged.append(error)
            continue
        files.append(WeightFile(name, path.stat().st_size, header_bytes, metadata))
        for info in found.values():
            tensors[info.name].append(info)
    if damaged:
        kind = TruncatedFile if all(isinstance(error, TruncatedFile) for error in damaged) else SourceError
        raise kind(f"{folder}: " + "; ".join(str(error) for error in damaged))
    return tensors, tuple(files)


def _check_index(folder: Path, weight_map: dict[str, str], tensors: dict[str, list[TensorInfo]]) -> None:
    problems = {
        "in no shard": [key for key in weight_map if key not in tensors],
        "in another shard than the index says": [
            key for key, file in weight_map.items() if key in tensors and file not in {info.file for info in tensors[key]}
        ],
        "in two shards": [key for key, infos in tensors.items() if len(infos) > 1],
        "in a shard but not in the index": [key for key in tensors if key not in weight_map],
    }
    found = [f"{_some(keys)} {'is' if len(keys) == 1 else 'are'} {where}" for where, keys in problems.items() if keys]
    if found:
        raise SourceError(f"{folder}: {INDEX_NAME} disagrees with the shards: {'; '.join(found)}; {GET_IT_AGAIN}")


def _check_unlisted_shards(folder: Path, listing: Listing) -> None:
    unlisted = [name for name, _ in listing.left_out if re.fullmatch(r"model[^/]*\.safetensors", name)]
    if unlisted:
        raise SourceError(f"{folder} has {_some(unlisted)}, which {INDEX_NAME} does not name: remove it, or get the right index")


def _check_not_quantised(folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> list[str]:
    """Refuse weights that are codes already; a stale block over float weights is only noted."""
    packed = [
        f"{info.name} {info.dtype} {list(info.shape)}"
        for info in tensors.values()
        if info.dtype.startswith(("F8_", "F6_"))
        or info.dtype == "F4"
        or _PACKED_NAME.search(info.name)
        or (info.dtype[0] in "IU" and info.name.endswith(".weight"))
    ]
    if packed:
        raise SourceError(
            f"{folder} is already quantised ({_some(packed)}): quantise the float checkpoint that it was made from instead"
        )
    if any(holder.get(key) for holder in _quantisation_holders(config) for key in _QUANTISATION_KEYS):
        return ["config.json has a quantisation block although all weights are float: the block is taken as stale and dropped"]
    return []


def _quantisation_holders(node: Any) -> list[dict[str, Any]]:
    """All objects of a config, at any depth, that hold a quantisation block."""
    if isinstance(node, list):
        return [holder for child in node for holder in _quantisation_holders(child)]
    if not isinstance(node, dict):
        return []
    here = [node] if any(key in node for key in _QUANTISATION_KEYS) else []
    children = [child for key, child in node.items() if key not in _QUANTISATION_KEYS]
    return here + [holder for child in children for holder in _quantisation_holders(child)]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
