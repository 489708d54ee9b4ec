"""The quantization block of a stored config.json against the manifest's records.

Engines trust the block, not the manifest: with the wrong bits they decode other weights, and some of them fill a kept matrix that
the block does not ignore with random numbers, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from formats.codec import get_codec
from formats.engine_config import block_head
from formats.records import TensorRecord
from formats.tables import TIE_KEY, is_head
from quant.errors import BitledgerError, VerifyError
from quant.scheme import Scheme

BLOCK_KEYS = ("quantization_config", "compression_config")


def check_config(config: Mapping[str, Any], tensors: Iterable[TensorRecord]) -> str:
    """Check the block of ``config`` against the records and return a sentence on what it says.

    Raises:
        VerifyError: no block or one too many, another method or status, a quantised matrix that is ignored, untargeted or
            described with another scheme, a kept one that is targeted and not ignored, a tie that is not as stored.
    """
    records = list(tensors)
    quantised = [record for record in records if record.fate == "quantised"]
    aliases = [record for record in records if record.fate == "alias"]
    if aliases and config.get(TIE_KEY) is False:
        raise VerifyError(f"{TIE_KEY} is false, but {aliases[0].name} is not stored")
    heads = [record for record in records if is_head(record.name.removesuffix(".weight")) and record.fate != "alias"]
    if heads and (config.get(TIE_KEY) is True or (heads[0].copy_of is not None and config.get(TIE_KEY) is not False)):
        raise VerifyError(f"{TIE_KEY} is not false, but {heads[0].name} is stored beside the embedding")
    places = list(_places(config, ""))
    wanted = ["quantization_config"] if quantised else []
    if places != wanted:
        raise VerifyError(f"quantization blocks at {places or 'no place'}, expected at {wanted or 'no place'}")
    if not quantised:
        return "no quantization block, nothing is quantised"
    block = config["quantization_config"]
    try:
        return _check_block(block, records)
    except BitledgerError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
        raise VerifyError(f"quantization_config is malformed: {type(error).__name__}: {error}") from error


def _places(value: Any, where: str) -> Iterator[str]:
    """Dotted places of all non-empty quantization blocks, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in BLOCK_KEYS and item:
                yield f"{where}{key}"
            else:
                yield from _places(item, f"{where}{key}.")


def _check_block(block: Any, records: list[TensorRecord]) -> str:
    head = block_head(str(record.codec) for record in records if record.fate == "quantised")
    for key in ("quant_method", "method", "quantization_status", "format"):
        expected = {**head, "quantization_status": "compressed"}.get(key)
        if block.get(key) != expected:
            raise VerifyError(f"{key} is {block.get(key)!r}, expected {expected!r}")
    groups, ignore = block["config_groups"], block["ignore"]
    modules = {record.name.removesuffix(".weight"): record for record in records if record.name.endswith(".weight")}
    for module, record in modules.items():
        group = next((g for g in groups.values() if _targets(g["targets"], module, record)), None)
        ignored = any(_matches(entry, module) for entry in ignore)
        if record.fate == "quantised":
            if ignored or group is None:
                raise VerifyError(f"{module} is quantised but {'ignored' if ignored else 'no group targets it'}")
            _check_group(group, module, record)
        elif group is not None and not ignored:
            raise VerifyError(f"{module} is {record.fate}, not quantised, but targeted and not in ignore")
    if len(modules) < sum(record.fate == "quantised" for record in records):
        raise VerifyError("a quantised tensor is not the weight of a module")
    method = head.get("quant_method") or head["method"]
    return f"{method} {head['format']}, groups: {len(groups)}, ignored modules: {len(ignore)}"


def _check_group(group: Mapping[str, Any], module: str, record: TensorRecord) -> None:
    scales = next((part.dtype for part in record.parts if part.role == "scales"), "")
    if group["format"] != record.codec:
        raise VerifyError(f"{module} has format {group['format']!r}, expected {record.codec!r}")
    found, expected = get_codec(str(record.codec)).scheme_of_group(group, scales), Scheme.parse(str(record.scheme))
    if found != expected:
        raise VerifyError(f"{module} is described as {found}, expected {expected}")


def _targets(targets: Iterable[str], module: str, record: TensorRecord) -> bool:
    """Whether a group means this module: by regex, by name, or by the class of the module, as the reference reader does.

    Where the manifest does not record the class, what is quantised or tied is taken for a Linear, anything else is not.
    """
    kind = record.module_class or ("Linear" if record.fate in ("quantised", "alias") else "")
    return any(_matches(target, module) or target == kind for target in targets)


def _matches(entry: str, module: str) -> bool:
    return re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module
