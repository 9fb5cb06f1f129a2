"""Where catalogue models and the user's manifests are, by the settings."""

from pathlib import Path

import pytest
from weighbridge_fit.settings import FitSettings


def test_models_are_pulled_under_the_models_root(tmp_path: Path) -> None:
    assert FitSettings(models_root=tmp_path).pulled_models() == tmp_path
    chosen = FitSettings(models_root=tmp_path, pull_folder=str(tmp_path / "pulled"))
    assert chosen.pulled_models() == tmp_path / "pulled"


def test_where_the_root_is_everything_they_are_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = FitSettings(models_root=Path("/"))
    assert settings.pulled_models() == tmp_path / ".weighbridge" / "models"
    assert settings.own_manifests() == tmp_path / ".weighbridge" / "catalog"


def test_a_folder_that_could_not_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    for folder in (tmp_path / "elsewhere", tmp_path / "root" / "out", tmp_path / "root" / ".." / "x"):
        settings = FitSettings(models_root=tmp_path / "root", pull_folder=str(folder))
        with pytest.raises(ValueError, match="is not under the models root"):
            settings.pulled_models()


def test_a_user_without_a_home_has_no_manifests_and_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    settings = FitSettings(models_root=Path("/models"))
    assert settings.own_manifests() is None


def test_the_services_settings_name_the_variable(tmp_path: Path) -> None:
    assert FitSettings.variable("pull_folder") == "WEIGHBRIDGE_FIT_PULL_FOLDER"
    assert FitSettings.variable("catalog_folder") == "WEIGHBRIDGE_FIT_CATALOG_FOLDER"
