"""Read an artefact back from its own files: quantised matrices, or a whole transformers model in float.

What a module is stored as comes from ``quantization_config``, matched as an engine matches it, never from the manifest: this
reader must see what an engine will see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint import STORED_DTYPES
from formats.codec import get_codec
from formats.folder import INDEX_NAME, SINGLE_NAME
from formats.header import TensorInfo, read_header
from formats.kv_files import CONFIG_KEY, plan_kv
from formats.skeleton import Skeleton, model_config, quiet_transformers
from quant.activations import ActivationScheme
from quant.errors import CoverageError, SourceError
from quant.kvscheme import KvScheme
from quant.qtensor import QTensor

_PACKED = "weight_packed"


class Artefact:
    """The stored tensors of a folder, read by name; quantised matrices come back as QTensors.

    Raises:
        SourceError: no weights, or a stored matrix that no group of the configuration describes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        index = folder / INDEX_NAME
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE_NAME]
        self.tensors: dict[str, TensorInfo] = {}
        for file in files:
            found, _, _ = read_header(folder / file, file)
            self.tensors |= found

    def tensor(self, name: str) -> Tensor:
        """A stored tensor as an own copy."""
        return self._read(self.tensors[name])

    def _read(self, info: TensorInfo) -> Tensor:
        with (self.folder / info.file).open("rb") as file:
            file.seek(info.start)
            data = bytearray(file.read(info.nbytes))
        dtype: torch.dtype = getattr(torch, STORED_DTYPES[info.dtype])
        return torch.frombuffer(data, dtype=dtype).reshape(info.shape) if data else torch.empty(info.shape, dtype=dtype)

    def modules(self) -> Iterator[str]:
        """Names of the quantised modules."""
        for name in self.tensors:
            module, _, leaf = name.rpartition(".")
            if leaf == _PACKED or (leaf == "weight" and f"{module}.weight_scale" in self.tensors):
                yield module

    def qtensor(self, module: str) -> QTensor:
        """The quantised matrix of a module."""
        group = self._group(module)
        prefix = module + "."
        parts = {name.removeprefix(prefix): name for name in self.tensors if name.startswith(prefix) and name != prefix + "bias"}
        tensors = {suffix: self.tensor(name) for suffix, name in parts.items()}
        shape = tensors["weight_shape"].tolist() if "weight_shape" in tensors else list(tensors["weight"].shape)
        codec = get_codec(group["format"])
        return codec.unpack(
            tensors, codec.scheme_of_group(group, self.tensors[parts["weight_scale"]].dtype), (shape[0], shape[1])
        )

    def activations(self, module: str) -> ActivationScheme | None:
        """How the inputs of a quantised module are rounded while running, or None."""
        return get_codec(self._group(module)["format"]).activations

    def _group(self, module: str) -> Mapping[str, Any]:
        groups: Mapping[str, Mapping[str, Any]] = self.config["quantization_config"]["config_groups"]
        for named in (True, False):
            for group in groups.values():
                for target in group["targets"]:
                    by_name = re.match(target[3:], module) is not None if target.startswith("re:") else target == module
                    if by_name if named else target == "Linear":
                        return group
        raise SourceError(f"{self.folder}: {module} is stored packed, but no group of quantization_config targets it")

    def float_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its float name, quantised ones dequantised to float32."""
        packed = set(self.modules())
        scales = self._engine_scales()
        for module in packed:
            yield f"{module}.weight", self.qtensor(module).dequantise()
        for name in self.tensors:
            module, _, leaf = name.rpartition(".")
            if (module not in packed or leaf == "bias") and name not in scales:
                yield name, self.tensor(name)

    def _engine_scales(self) -> set[str]:
        """Names of the cache's scales among the weights, which belong to no parameter."""
        block = self.config.get("quantization_config") or {}
        return (
            {name for name in self.tensors if name.endswith((".k_scale", ".v_scale"))} if block.get("kv_cache_scheme") else set()
        )

    def kv_cache(self) -> tuple[KvScheme, dict[tuple[str, int], Tensor]] | None:
        """The cache's scheme and its calibrated float32 scales by (side, layer), or None where config.json tells of no cache."""
        entry = self.config.get(CONFIG_KEY)
        if entry is None:
            return None
        scheme = KvScheme.parse(entry["scheme"])
        plan = plan_kv(self.config, self.tensors, scheme)
        stored = self.tensors
        if entry["scales"] is not None:
            stored = read_header(self.folder / entry["scales"], entry["scales"])[0]
        return scheme, {(side, layer): self._read(stored[spec.name]) for side, layer, spec in plan.scales}


def load_model(folder: Path, dtype: str = "float32", report: Callable[[int, int], None] | None = None) -> Any:
    """The transformers model that the stored bytes mean, dequantised, in evaluation mode; it rounds inputs where engines do.

    Args:
        folder: an artefact of ours, or any float checkpoint.
        dtype: floating type of all parameters, for example ``float32``.

    Raises:
        CoverageError: a parameter of the architecture that no stored tensor fills, or the other way round.
    """
    artefact = Artefact(folder)
    wanted: torch.dtype = getattr(torch, dtype)
    skeleton = Skeleton(folder)
    names = set(skeleton.parameter_names())
    stored = {name: tensor.to(wanted) for name, tensor in artefact.float_tensors()}
    rounded = {module: found for module in artefact.modules() if (found := artefact.activations(module)) is not None}
    if not set(stored) <= names:
        if rounded:
            raise SourceError(f"{folder}: inputs of experts cannot be rounded here, the first is {next(iter(rounded))}")
        return _load_renamed(skeleton, folder, stored, wanted)
    for name, tensor in stored.items():
        skeleton.set(name, tensor)
    skeleton.tie()
    missing = skeleton.missing()
    if missing:
        raise CoverageError(f"{folder}: {len(missing)} parameters of the architecture are not stored, the first is {missing[0]}")
    for module, scheme in rounded.items():
        skeleton.model.get_submodule(module).register_forward_pre_hook(_rounding(scheme))
    return skeleton.model.to(wanted)


def _rounding(scheme: ActivationScheme) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, args: (scheme.rounded(args[0]), *args[1:])


def _load_renamed(skeleton: Skeleton, folder: Path, stored: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """For architectures whose stored names differ from those in memory (fused experts): transformers converts them itself."""
    config = model_config(folder)
    convert: Any = type(skeleton.model).from_pretrained  # the class itself: AutoModel asks for a folder or a name
    with quiet_transformers():
        model, found = convert(None, config=config, state_dict=stored, dtype=dtype, output_loading_info=True)
    wrong = [*found["missing_keys"], *found["unexpected_keys"], *(str(key) for key in found["mismatched_keys"])]
    if wrong:
        raise CoverageError(f"{folder}: stored tensors and architecture do not match: {', '.join(wrong[:8])}")
    return model.eval()
