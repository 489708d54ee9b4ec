"""Self-written calibration text: its shape, its seed, what it never says, and a run that uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from calib.augment import PIECE, self_written
from formats.reader import load_model
from tests.tiny_runs import run, write_text

IDS = torch.randint(5, 256, (3, 40), generator=torch.Generator().manual_seed(0))


def test_windows_continue_pieces_of_the_calibration_text(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model("llama"))
    found = self_written(model, IDS, 7, banned=range(200), seed=1)
    assert found.shape == (7, 40)
    piece = min(PIECE, 20)
    for number, window in enumerate(found):
        text = IDS[number % 3].tolist()
        assert any(window[:piece].tolist() == text[start : start + piece] for start in range(40 - piece + 1))
        assert int(window[piece:].min()) >= 200
    assert torch.equal(found, self_written(model, IDS, 7, banned=range(200), seed=1))
    assert not torch.equal(found, self_written(model, IDS, 7, banned=range(200), seed=2))


def test_sampling_follows_the_model(tiny_model: Callable[[str], Path]) -> None:
    """A head that is sure of one token gives that token only, computed with the cache as without it."""
    model = load_model(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    found = self_written(model, IDS, 2)
    with torch.no_grad():
        best = model(found, use_cache=False).logits.argmax(-1)
    assert torch.equal(found[:, 20:], best[:, 19:-1])


def test_a_run_says_what_it_calibrated_on(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    text = write_text(tmp_path)
    options = ("--bits", "3", "--self-written", "4", "--tune", "2", "--learn-iterations", "2")
    made = [run("gptq+learned", tiny_model("llama"), tmp_path / name, text, *options) for name in ("one", "two")]
    notes = [next(note.text for note in manifest.notes if note.kind == "self-written") for manifest in made]
    assert notes[0].startswith("4 windows of 33 tokens")
    assert notes[0] == notes[1]
    assert "trained on 11 windows" in next(note.text for note in made[0].notes if note.kind == "tuned")  # 7 of 8, and 4
    assert [file.sha256 for file in made[0].files if file.role == "weights"] == [
        file.sha256 for file in made[1].files if file.role == "weights"
    ]
