"""The methods command: figures against the specification and against what a run really writes; who runs what natively."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from calib.methods import METHODS
from eval.capacity.cards import load_cards
from eval.capacity.native import native_cards, native_format
from formats.catalogue import catalogue_entry, known_schemes
from pipelines import methods
from quant.errors import SchemeError, UsageError
from quant.number_formats import number_formats
from quant.scheme import ALIASES, Scheme
from tests.numerics.number_oracle import FORMATS, PRINTED, numbers
from tests.tiny_runs import run, write_text


def shown(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    from typer.main import get_command

    command: Any = get_command(methods.app)
    command.main(args=[*options, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_ranges_and_steps_are_those_of_the_specification(name: str) -> None:
    found = next(each for each in number_formats() if each.name == name)
    largest, smallest, _ = PRINTED[name]
    values = set(numbers(name).values())
    assert (Fraction(found.largest), Fraction(found.lowest)) == (Fraction(largest), -Fraction(largest))
    assert Fraction(found.smallest) == Fraction(smallest)
    assert found.step is not None
    assert Fraction(found.step) == min(value for value in values if value > 1) - 1
    assert (found.numbers, found.bits) == (len(values), FORMATS[name].bits)
    assert found.specials == len(FORMATS[name].nonfinite)


def test_scale_types_and_integers_are_what_numpy_and_the_schemes_say() -> None:
    found = {each.name: each for each in number_formats()}
    half = found["f16"]
    assert (half.largest, half.smallest, half.step, half.specials) == (65504.0, 2.0**-24, 2.0**-10, 2048)
    brain = found["bf16"]
    assert (brain.largest, brain.smallest, brain.step) == ((2 - 2**-7) * 2.0**127, 2.0**-133, 2.0**-7)
    assert (found["e8m0"].lowest, found["e8m0"].largest, found["e8m0"].specials) == (2.0**-127, 2.0**127, 1)
    assert found["f32"].numbers + found["f32"].specials == 2**32 - 1
    assert (found["int4-sym"].lowest, found["int4-sym"].largest, found["int4-zp"].largest) == (-7, 7, 15)


@pytest.mark.parametrize("scheme", known_schemes(), ids=str)
def test_bits_per_weight_are_counted_by_hand(scheme: Scheme) -> None:
    """256 x 256: codes, a scale per block, a zero point per block, one divisor of 32 bits."""
    entry = catalogue_entry(scheme, [(256, 256)])
    blocks = {"channel": 256, "tensor": 1}.get(str(scheme.blocks)) or 256 * math.ceil(256 / int(scheme.blocks))
    scale_bits = {"f16": 16, "bf16": 16, "f32": 32, "e8m0": 8, "e4m3": 8}[scheme.scale]
    whole = 65536 * scheme.bits + blocks * (scale_bits + (scheme.bits if scheme.zero == "zp" else 0))
    whole += 32 if scheme.scale == "e4m3" else 0
    assert entry.ideal_bits == whole / 65536
    assert entry.stored_bits == entry.ideal_bits
    assert "dense" in entry.codecs


def test_the_bits_for_a_model_are_those_that_a_run_stores(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path)
    names = ["mxfp4", "nvfp4", "int4-sym-g32-f16", "fp8-tensor"]
    found = shown(capsys, *names, "--model", str(tiny_model("ragged")))
    for name, entry in zip(names, found["schemes"], strict=True):
        options = ("--scheme", name, *(("--format", "dense") if entry["codecs"][0] == "dense" else ()))
        manifest = run("rtn", tiny_model("ragged"), tmp_path / name, text, *options, without=("--group-size",))
        assert manifest.bits_per_weight.quantised == pytest.approx(entry["stored_bits"], rel=1e-12)


def test_cards_run_what_they_state() -> None:
    cards = load_cards("all")

    def slugs(name: str) -> set[str]:
        return {card.slug for card in native_cards(Scheme.parse(name), cards)}

    assert slugs("fp8-fnuz") == {"mi300x", "mi325x"}
    assert not slugs("fp8") & {"mi300x", "mi325x", "a100-40gb"}
    assert {"h100-sxm5-80gb", "mi355x", "l4"} <= slugs("fp8")
    assert slugs("mxfp6-e2m3") == {"b200-sxm", "mi355x"}
    assert "mi355x" not in slugs("nvfp4")
    assert slugs("nvfp4") == {"b200-sxm", "rtx-5090", "rtx-pro-6000-blackwell"}
    assert not slugs("mxint8")
    assert not slugs("int4-sym-g64-f16")
    assert native_format(Scheme.parse("e2m1-b16-e8m0.floor")) is None


def test_everything_there_is_stands_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys)
    assert [each["name"] for each in found["methods"]] == list(METHODS)
    assert set(ALIASES.values()) <= {each["scheme"] for each in found["schemes"]}
    assert found["bits_for"] == "one matrix of 4096x4096"
    by_name = {each["scheme"]: each for each in found["schemes"]}
    assert by_name[ALIASES["mxfp4"]]["engines"] == []
    assert "integers" in by_name[ALIASES["mxfp4"]]["refusals"]["pack-quantized"]
    assert by_name["int4-sym-g64-f16"]["engines"] == ["compressed-tensors"]


def test_a_shape_that_groups_do_not_divide_says_which_layout_holds_it(capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = shown(capsys, "int4-sym-g128-f16", "--shape", "64x576")["schemes"]
    assert entry["codecs"] == ["dense"]
    assert "no multiple" in entry["refusals"]["pack-quantized"]
    assert entry["stored_bits"] == entry["ideal_bits"] == 4 + 16 * 5 / 576


@pytest.mark.parametrize(
    ("options", "error"), [(["mxfp5"], SchemeError), (["--shape", "0x4"], UsageError), (["--cards", "x"], UsageError)]
)
def test_bad_input_is_refused(options: list[str], error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(error):
        shown(capsys, *options)


def test_tables_come_without_torch() -> None:
    code = "import sys, pipelines.methods as m; from typer.main import get_command as g\n"
    code += "g(m.app).main(args=[], standalone_mode=False); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "e2m1-b32-e8m0.floor" in done.stdout
