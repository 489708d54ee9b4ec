"""How much memory a run will need at its peak, from headers alone: the larger of quantising and evaluating. No torch here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from calib.windows import Windows
from formats.checkpoint import Checkpoint
from formats.fates import Alias, Keep, Quantise, TensorPlan
from formats.tables import is_head, is_table

# Python with torch and transformers imported, and the allocator's slack; measured on Linux with torch 2.13.
INTERPRETER_BYTES = 420_000_000
FLOAT = 4
# Float copies of the largest matrix while a candidate is rounded and scored.
SEARCH_COPIES = 8
# Float copies of the logits while a loss is computed (logits and log-softmax).
LOGIT_COPIES = 2
# Float copies of one window's logits while a cache is measured: of two models, and a chunk's log-softmax of each.
CACHE_LOGITS = 4
# Tensors as wide as the widest layer that one block's forward pass holds at once.
LIVE_ACTIVATIONS = 5
# Codes, levels in bfloat16, and a block's matrices made again while gradients are taken.
TUNING_BYTES_A_WEIGHT = 4
# Float copies of one window's logits: of teacher and student, their log-softmax, the gradient.
TUNING_LOGITS = 5


def held_states_bytes(checkpoint: Checkpoint, calibration: Windows | None, streams: int = 1, written: int = 0) -> int:
    """Bytes of hidden states that a calibrated run holds in memory: those before and after a block, for every stream.

    ``written`` counts windows that the model writes itself, which are calibrated on like those of the corpus.
    """
    hidden = int(checkpoint.config.get("hidden_size") or 0)
    return 0 if calibration is None else 2 * streams * (len(calibration.ids) + written) * calibration.length * hidden * FLOAT


def tuning_bytes(checkpoint: Checkpoint, plans: Sequence[TensorPlan], calibration: Windows, written: int = 0) -> int:
    """Bytes that tuning holds: held codes, levels and scales, two copies of what stays float, the teacher's states, logits."""
    quantised = sum(plan.info.elements for plan in plans if isinstance(plan.fate, Quantise))
    kept = sum(plan.info.elements for plan in plans if isinstance(plan.fate, Keep))
    vocabulary = int(checkpoint.config.get("vocab_size") or 0)
    states = held_states_bytes(checkpoint, calibration, 1, written) // 2
    logits = TUNING_LOGITS * calibration.length * vocabulary * FLOAT
    return TUNING_BYTES_A_WEIGHT * quantised + 2 * kept * FLOAT + states + logits


def peak_bytes(
    checkpoint: Checkpoint,
    plans: Sequence[TensorPlan],
    calibration: Windows | None,
    evaluation: Windows,
    batch: int,
    streams: int = 1,
    written: int = 0,
    tuned: bool = False,
    cached: bool = False,
) -> int:
    """Expected largest resident size in bytes.

    Args:
        streams: 2 where the float model runs beside the quantised one.
        written: windows that the model writes itself, for which it is in memory whole.
        tuned: whether scales and norms are trained in the end.
        cached: whether a quantised cache is measured, with the float model and the artefact side by side.
    """
    elements = {plan.name: plan.info.elements for plan in plans if not isinstance(plan.fate, Alias)}
    matrices = [plan for plan in plans if isinstance(plan.fate, Quantise)]
    inner = [plan for plan in matrices if not is_table(plan.module) and not is_head(plan.module)] or matrices
    widest = max(max(plan.matrix_shape) for plan in inner)
    largest = max(elements[plan.name] for plan in matrices)
    inner_largest = max(elements[plan.name] for plan in inner)
    tables = max(elements.values())
    vocabulary = int(checkpoint.config.get("vocab_size") or 0)
    quantise = max(SEARCH_COPIES * largest, 2 * tables) * FLOAT
    if calibration is not None:
        count, length = len(calibration.ids), calibration.length
        states = held_states_bytes(checkpoint, calibration, streams, written)
        live = LIVE_ACTIVATIONS * min(batch, count) * length * widest * FLOAT
        grams = streams * sum(plan.matrix_shape[1] ** 2 for plan in _one_block(inner)) * FLOAT
        block = (2 + streams) * sum(elements[plan.name] for plan in _one_block(inner)) * FLOAT
        inside = live + grams + block + SEARCH_COPIES * inner_largest * FLOAT
        quantise = states + max(quantise, inside, tables * FLOAT)
        if written:
            quantise = max(quantise, sum(elements.values()) * FLOAT)
        if tuned:
            quantise = max(quantise, tuning_bytes(checkpoint, plans, calibration, written))
    count, length = len(evaluation.ids), evaluation.length
    logits = LOGIT_COPIES * min(batch, max(count, 1)) * length * vocabulary * FLOAT
    evaluate = sum(elements.values()) * FLOAT + logits
    if cached:
        evaluate = max(evaluate, 2 * sum(elements.values()) * FLOAT + CACHE_LOGITS * length * vocabulary * FLOAT)
    return INTERPRETER_BYTES + max(quantise, evaluate)


def _one_block(matrices: Sequence[TensorPlan]) -> list[TensorPlan]:
    """The matrices of the largest block: those that share the first number in their name."""
    blocks: dict[str, list[TensorPlan]] = defaultdict(list)
    for plan in matrices:
        found = re.search(r"\.(\d+)\.", plan.name)
        blocks[found.group(1) if found else ""].append(plan)
    return max(blocks.values(), key=len)
