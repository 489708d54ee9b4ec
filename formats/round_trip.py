"""Do the recorded parts mean what the codec says? Layouts of all quantised tensors, and one round trip per codec and scheme.

A round trip unpacks the stored parts of one matrix and packs them again: equal bytes show that nothing in them is outside of what
the codec can say. Torch is imported here and in no other check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from formats.broken import Broken, named
from formats.codec import get_codec
from formats.header import TensorInfo
from formats.records import TensorRecord
from quant.errors import VerifyError
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch


def check_codecs(folder: Path, tensors: Iterable[TensorRecord], stored: Mapping[str, TensorInfo]) -> str:
    """The layout of every quantised tensor (reads no weight), then a round trip of the smallest matrix per codec and scheme."""
    samples: dict[tuple[str, str], TensorRecord] = {}
    for record in tensors:
        if record.fate == "quantised":
            _check_layout(record)
            key = (str(record.codec), str(record.scheme))
            if key not in samples or record.elements < samples[key].elements:
                samples[key] = record
    for record in samples.values():
        with named("codecs", record.parts[0].file, record.name):
            _check_round_trip(folder, record, stored)
    return "; ".join(f"{codec} {scheme}" for codec, scheme in samples) + " there and back" if samples else "nothing is quantised"


def _check_layout(record: TensorRecord) -> None:
    with named("codecs", record.parts[0].file, record.name):
        layout = get_codec(str(record.codec)).layout(Scheme.parse(str(record.scheme)), _matrix_shape(record))
    stem = record.name.removesuffix("weight")
    expected = sorted((f"{stem}{part.suffix}", part.dtype, part.shape, part.role) for part in layout)
    actual = sorted((part.name, part.dtype, tuple(part.shape), part.role) for part in record.parts)
    if expected != actual:
        text = f"{record.codec} lays {record.scheme} out in other parts"
        raise Broken("codecs", text, file=record.parts[0].file, tensor=record.name, expected=expected, actual=actual)


def _matrix_shape(record: TensorRecord) -> tuple[int, int]:
    if len(record.shape) != 2:
        raise VerifyError(f"a quantised tensor of shape {record.shape} is no matrix")
    return record.shape[0], record.shape[1]


def _check_round_trip(folder: Path, record: TensorRecord, stored: Mapping[str, TensorInfo]) -> None:
    codec, scheme, shape = get_codec(str(record.codec)), Scheme.parse(str(record.scheme)), _matrix_shape(record)
    stem = record.name.removesuffix("weight")
    read = {part.name.removeprefix(stem): _read(folder, stored[part.name]) for part in record.parts}
    packed = codec.pack(codec.unpack({suffix: tensor for suffix, (tensor, _) in read.items()}, scheme, shape))
    for suffix, (_, raw) in read.items():
        again = packed[suffix].contiguous().reshape(-1)
        if _bytes(again) != raw:
            text = f"unpacked and packed again as {record.codec}, {suffix} has other bytes"
            raise Broken("codecs", text, file=record.parts[0].file, tensor=record.name)


def _read(folder: Path, info: TensorInfo) -> tuple[torch.Tensor, bytes]:
    """The stored tensor and its bytes."""
    import torch

    from formats.checkpoint import STORED_DTYPES

    with (folder / info.file).open("rb") as file:
        file.seek(info.start)
        raw = file.read(info.nbytes)
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, STORED_DTYPES[info.dtype])).reshape(info.shape), raw


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.view(torch.uint8).numpy().tobytes()
