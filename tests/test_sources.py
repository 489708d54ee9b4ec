"""What --model means: names, folders and hub ids, and every way in which each of them can be wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from formats import hub, sources
from formats.sources import EMBEDDED, EmbeddedEntry, HubModel, registered_models, resolve
from quant.errors import SourceError

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    for name in ("list_model", "fetch_snapshot", "fetch_file", "cached_snapshot"):
        monkeypatch.setattr(hub, name, asked)


# --- names ---


def test_registry_pins_what_the_published_figures_were_measured_on() -> None:
    models = registered_models()
    for size, revision in (
        ("135M", "93efa2f097d58c2a74874c7e644dbc9b0cee75a2"),
        ("360M", "f8027fd0eaeea54caa13c31d31b9fdc459c38b49"),
    ):
        assert models[f"smollm2-{size.lower()}"] == HubModel(repo=f"HuggingFaceTB/SmolLM2-{size}", revision=revision)
    assert isinstance(models[EMBEDDED], EmbeddedEntry)
    assert all(name == name.casefold() for name in models), "names are looked up in lower case"
    pins = [model.revision for model in models.values() if isinstance(model, HubModel)]
    assert all(pin is None or hub.is_commit(pin) for pin in pins), "a pin is a full commit hash"


def test_registry_refuses_keys_it_does_not_know() -> None:
    with pytest.raises(ValidationError, match="revison"):
        sources._Registry.model_validate({"models": {"x": {"repo": "a/b", "revison": OLD}}})


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("smolm2-135m", r"unknown model 'smolm2-135m': did you mean smollm2-135m\?"),
        ("Qwen2.5-7", r"did you mean qwen2\.5-7b\?"),
        ("gpt", r"unknown model 'gpt'.*known names are smollm2-135m, .*hub model is org/name"),
        ("", r"unknown model ''"),
        ("a model", r"unknown model 'a model'"),
        ("org/name@", r"No such folder: org/name@"),
    ],
)
def test_unknown_name_is_one_sentence_with_the_nearest_name(model: str, said: str) -> None:
    with pytest.raises(SourceError, match=said) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


# --- folders (R97) ---


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "model",
    [
        "/no/such/dir",
        "./nothing",
        "../nothing",
        "nothing/",
        "org/name/",
        "a/b/c",
        "~/no such",
        "~nobody-at-all/x",
        "model.safetensors",
    ],
)
def test_missing_path_is_reported_as_a_path_and_never_looked_up(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        resolve(model)
    assert str(caught.value).startswith(f"No such folder: {model}")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_network")
def test_misspelt_path_names_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "my-llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"No such folder: models/my-lama; did you mean .*/my-llama\?.*models/my-lama@main"):
        resolve("models/my-lama")
    with pytest.raises(SourceError, match=r"did you mean .*/models\?"):
        resolve("./modles/my-llama/x")
    with pytest.raises(SourceError, match=r"No such folder: x{300}/a/b"):  # longer than a name may be
        resolve("x" * 300 + "/a/b")


@pytest.mark.usefixtures("no_network")
def test_every_spelling_of_a_folder_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    folder = home / "org" / "a name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    shutil.copytree(folder, home / "org" / "name")
    for model in (str(folder), f"{folder}/", "./org/a name", "org/a name/", "~/org/a name"):
        source = resolve(model)
        assert (source.kind, source.folder, source.requested) == ("folder", folder, model)
        assert (source.repo, source.revision) == (None, None)
        assert str(folder) in source.note
    assert resolve("org/name").folder == home / "org" / "name", "a folder that exists is meant before a hub id of that name"


@pytest.mark.usefixtures("no_network")
def test_file_or_incomplete_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(SourceError, match=r"model\.safetensors is a file, not a folder"):
        resolve(str(file))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(SourceError, match=r"model\.gguf is a file, not a folder: convert it to safetensors"):
        resolve(str(gguf))
    with pytest.raises(SourceError, match=r"holds no config\.json"):
        resolve(str(tmp_path))
