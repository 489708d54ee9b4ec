"""What a run calibrates on: windows of the corpus, those held back to judge tuning, and what the float model wrote itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from calib.augment import self_written
from calib.tune import split
from formats.reader import load_model
from pipelines.prepare import Prepared
from pipelines.progress import Progress
from quant.quantizer import Note


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows ``[n, length]`` to calibrate on, those held back from it to judge tuning, and what the model wrote itself."""

    training: torch.Tensor
    held_back: torch.Tensor
    written: torch.Tensor | None = None

    def note(self) -> Note:
        assert self.written is not None
        digest = hashlib.sha256(self.written.numpy().tobytes()).hexdigest()
        text = (
            f"{len(self.written)} windows of {self.written.shape[1]} tokens that the float model wrote itself were calibrated on"
        )
        return Note("self-written", f"{text}, SHA-256 of their ids {digest}")


def calibration_text(prepared: Prepared, progress: Progress) -> CalibrationText:
    """Cut the prepared windows, and let the float model write more where that was asked for."""
    request = prepared.request
    assert prepared.calibration is not None
    ids = torch.from_numpy(prepared.calibration.ids.copy())
    training, held_back = split(ids) if request.tune_steps else (ids, ids[:0])
    if not request.self_written_windows:
        return CalibrationText(training, held_back)
    with progress.stage("write text", unit="step") as report:
        written = self_written(
            load_model(prepared.checkpoint.folder).to(request.device),
            training,
            request.self_written_windows,
            banned=prepared.tokenizer.special_ids,
            seed=request.seed,
            report=report,
        )
    return CalibrationText(torch.cat([training, written]), held_back, written)
