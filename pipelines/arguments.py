"""Arguments and options of the run command: name, type, help and panel of each. What they mean together is in ``options``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calib.conventions import CONVENTIONS
from calib.cut import BOS_CHOICES
from calib.methods import METHODS
from formats.codec import codec_names
from pipelines.recipe import preset_names
from quant.activations import ALIASES as INPUT_NAMES
from quant.kvscheme import ALIASES as SHORT_NAMES
from quant.scheme import ALIASES, SCALE_BYTES

_METHODS_HELP = "; ".join(f"{method.name}: {method.summary}" for method in METHODS.values())
_WINDOWS = ", ".join(f"{found.window} for {name}" for name, found in CONVENTIONS.items())
_CALIBRATION, _QUALITY, _FILES, _CARDS = "Text and calibration", "Scheme", "Output", "Cards"

Method = Annotated[str, typer.Argument(metavar="METHOD", help=f"How to quantise. {_METHODS_HELP}.")]
Model = Annotated[str, typer.Option(help="A name of models.toml, a hub id (org/name or org/name@revision), or a folder.")]
Bits = Annotated[int, typer.Option(help="Bits per code, 2 to 8; smoothquant: 8.", rich_help_panel=_QUALITY)]
GroupSize = Annotated[
    str,
    typer.Option(metavar="N|channel|tensor", help="Weights that share a scale; smoothquant: channel.", rich_help_panel=_QUALITY),
]
Symmetric = Annotated[
    bool,
    typer.Option("--symmetric/--zero-point", help="Signed grid around 0, or an integer zero point.", rich_help_panel=_QUALITY),
]
FullRange = Annotated[
    bool,
    typer.Option(
        "--full-range",
        help="Symmetric with all 2^bits codes and scales of either sign: better at 2 to 4 bits, for no more bytes.",
        rich_help_panel=_QUALITY,
    ),
]
ScaleDtype = Annotated[
    str, typer.Option(metavar="|".join(SCALE_BYTES), help="Type in which scales are stored.", rich_help_panel=_QUALITY)
]
Scheme = Annotated[
    str | None,
    typer.Option(
        help=f"All of a scheme by name instead of the five above: {', '.join(ALIASES)}, or a string as python -m "
        "pipelines.methods prints it.",
        rich_help_panel=_QUALITY,
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="|".join(codec_names()),
        help="How it is stored. dense holds any scheme and shape, but no engine reads it; by default what most engines read "
        "among those that hold the scheme.",
        rich_help_panel=_QUALITY,
        show_default=False,
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(
        metavar="none|" + "|".join(INPUT_NAMES),
        help="Round the inputs of the quantised matrices to 8 bits too, with a scale per token, per batch, or one that is "
        "calibrated; token for smoothquant, else none.",
        rich_help_panel=_QUALITY,
        show_default=False,
    ),
]
Alpha = Annotated[
    str | None,
    typer.Option(
        metavar="search|A",
        help="smoothquant: how much of the inputs' range goes into the weights, 0 to 1; searched per group of matrices by "
        "default.",
        rich_help_panel=_QUALITY,
        show_default=False,
    ),
]
Percentile = Annotated[
    float | None,
    typer.Option(
        help="smoothquant: what stands for a channel's largest input, such as 99.9; 100, the maximum, by default.",
        rich_help_panel=_QUALITY,
        show_default=False,
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=f"A scheme per pattern instead of the five above: {', '.join(preset_names())}, or a TOML file.",
        rich_help_panel=_QUALITY,
    ),
]
Clip = Annotated[
    bool,
    typer.Option(
        "--clip/--no-clip",
        help="Calibrated methods: also search how far to clip every block; not smoothquant, unless asked for.",
        rich_help_panel=_QUALITY,
    ),
]
Mse = Annotated[
    bool,
    typer.Option(
        "--mse",
        help="Shrink every block's range to the least squared error of its weights: needs no data, replaces --clip.",
        rich_help_panel=_QUALITY,
    ),
]
Order = Annotated[
    str | None,
    typer.Option(metavar="energy|none", help="gptq: order of the columns; energy by default.", rich_help_panel=_QUALITY),
]
ScalePolicy = Annotated[
    str | None,
    typer.Option(
        metavar="static|updated",
        help="gptq: grids of the original weights (static, by default), or of each group's weights when it is due.",
        rich_help_panel=_QUALITY,
    ),
]
Damping = Annotated[
    float | None,
    typer.Option(
        help="gptq: share of the mean diagonal that is added to it; 0.01 by default.",
        rich_help_panel=_QUALITY,
        show_default=False,
    ),
]
Asymmetric = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="gptq: also make up for what earlier layers did to the inputs (GPTAQ), 0 to 1; off by default.",
        rich_help_panel=_QUALITY,
    ),
]
Tune = Annotated[
    int,
    typer.Option(
        metavar="STEPS",
        help="Then train scales and norm weights end to end on the calibration windows, this many steps; codes stay.",
        rich_help_panel=_QUALITY,
    ),
]
TargetBpw = Annotated[
    float | None,
    typer.Option(
        help="At most so many bits per quantised weight: widths are allocated by sensitivity, and kept only if they beat the "
        "best uniform scheme.",
        rich_help_panel=_QUALITY,
        show_default=False,
    ),
]
TargetBytes = Annotated[
    int | None,
    typer.Option(help="The same for the bytes of all weight files.", rich_help_panel=_QUALITY, show_default=False),
]
KvCache = Annotated[
    str,
    typer.Option(
        metavar="none|" + "|".join(SHORT_NAMES),
        help="Also measure a quantised key-value cache, and store its calibrated scales: a name here, or a format in full "
        "such as int8-ktoken-vtoken-g32.",
        rich_help_panel=_QUALITY,
    ),
]
LearnIterations = Annotated[int, typer.Option(help="Methods with learned rounding: steps per block.", rich_help_panel=_QUALITY)]
Corpus = Annotated[
    str,
    typer.Option(
        help="pydoc, wikitext2, hub:ORG/NAME (a data set; @REVISION, :CONFIG and :SPLIT may follow), or a .parquet, .jsonl "
        "or .txt file.",
        rich_help_panel=_CALIBRATION,
    ),
]
Convention = Annotated[
    str,
    typer.Option(
        metavar="|".join(CONVENTIONS),
        help="How the text is joined, cut and scored; --window and --bos overrule it.",
        rich_help_panel=_CALIBRATION,
    ),
]
CalibrationWindows = Annotated[int, typer.Option(help="Windows to calibrate on.", rich_help_panel=_CALIBRATION)]
SelfWritten = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Calibrate on N more windows that the float model writes itself, continuing pieces of the calibration text.",
        rich_help_panel=_CALIBRATION,
    ),
]
EvaluationWindows = Annotated[str, typer.Option(metavar="N|all", help="Windows to measure on.", rich_help_panel=_CALIBRATION)]
Window = Annotated[
    int | None,
    typer.Option(
        help=f"Tokens per window; by default the convention's: {_WINDOWS}.", rich_help_panel=_CALIBRATION, show_default=False
    ),
]
EvaluationStart = Annotated[int, typer.Option(help="First token of the evaluation windows.", rich_help_panel=_CALIBRATION)]
CalibrationStart = Annotated[
    int | None,
    typer.Option(
        help="First token of the calibration windows; 200,000 or as far behind as the text reaches.",
        rich_help_panel=_CALIBRATION,
        show_default=False,
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        metavar="|".join(BOS_CHOICES),
        help="Start token: before every window, once before the text, or in place of every window's first token; "
        "auto: where the convention puts it if the tokenizer adds one.",
        rich_help_panel=_CALIBRATION,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the intervals' resampling.", rich_help_panel=_CALIBRATION)]
Cards = Annotated[str, typer.Option(help="all, none, names with commas, or a TOML file of one's own.", rich_help_panel=_CARDS)]
PromptTokens = Annotated[int, typer.Option(help="Tokens in of a planned request.", rich_help_panel=_CARDS)]
OutputTokens = Annotated[int, typer.Option(help="Tokens out of a planned request.", rich_help_panel=_CARDS)]
PricePerHour = Annotated[
    float | None,
    typer.Option(help="Price of a card-hour in USD, instead of the cards' own.", rich_help_panel=_CARDS, show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Folder to write; artifacts/MODEL-METHOD-SCHEME by default.", rich_help_panel=_FILES, show_default=False),
]
Force = Annotated[
    bool, typer.Option("--force", "--yes", "-y", help="Replace an earlier artefact in that folder.", rich_help_panel=_FILES)
]
SystemPrompt = Annotated[
    Path | None, typer.Option(help="Text file to be recorded as the deployment's system prompt.", rich_help_panel=_FILES)
]
ShardBytes = Annotated[int, typer.Option(help="Largest size of one weight file.", rich_help_panel=_FILES)]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Batch = Annotated[int, typer.Option(help="Windows per forward pass.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print fates, exact bytes and problems, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan or the manifest as JSON.")]
