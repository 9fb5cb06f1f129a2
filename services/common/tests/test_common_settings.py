"""Settings come from variables; a wrong one is refused by its name."""

import pytest
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from weighbridge_common.settings import ServiceSettings, SettingsError, load, parse


class FitLike(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="WEIGHBRIDGE_FIT_")

    workers: int = 2
    roots: list[str] = Field(default_factory=list)
    password: SecretStr = SecretStr("")


def test_variables_set_fields_and_the_rest_keeps_its_default() -> None:
    environ = {
        "WEIGHBRIDGE_FIT_WORKERS": "5",
        "WEIGHBRIDGE_FIT_ROOTS": '["/a", "/b"]',
        "WEIGHBRIDGE_FIT_LISTEN": "127.0.0.1:5051",
        "WEIGHBRIDGE_FIT_ALLOW_INSECURE_REMOTE": "true",
        "WEIGHBRIDGE_OTLP_ENDPOINT": "http://127.0.0.1:4317",
        "WEIGHBRIDGE_RUN_DIR": "/run/x",
        "WEIGHBRIDGE_FIT_TARGET": "fit:5051",  # a client's variable, not a setting of the service
        "WEIGHBRIDGE_LEDGER_LISTEN": "127.0.0.1:1",  # another service's
        "HOME": "/root",
    }
    settings = parse(FitLike, environ)
    assert (settings.workers, settings.roots, settings.listen) == (5, ["/a", "/b"], "127.0.0.1:5051")
    assert (settings.otlp_endpoint, settings.run_dir) == ("http://127.0.0.1:4317", "/run/x")
    assert settings.allow_insecure_remote and settings.grace_s == 5.0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WEIGHBRIDGE_FIT_WORKERS", "many"),
        ("WEIGHBRIDGE_FIT_GRACE_S", "-1"),
        ("WEIGHBRIDGE_FIT_LOG_LEVEL", "loud"),
        ("WEIGHBRIDGE_FIT_MAX_CONCURRENT_CALLS", "0"),
        ("WEIGHBRIDGE_FIT_ALLOW_INSECURE_REMOTE", "perhaps"),
    ],
)
def test_a_wrong_value_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^{variable}: "):
        parse(FitLike, {variable: value})


def test_a_value_that_must_be_json_names_its_field() -> None:
    with pytest.raises(SettingsError, match=r"^WEIGHBRIDGE_FIT_ROOTS: must be JSON"):
        parse(FitLike, {"WEIGHBRIDGE_FIT_ROOTS": "[oops"})


def test_every_wrong_value_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        parse(FitLike, {"WEIGHBRIDGE_FIT_WORKERS": "x", "WEIGHBRIDGE_FIT_GRACE_S": "y"})
    assert len(str(caught.value).splitlines()) == 2


def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingsError, match=r"^WEIGHBRIDGE_FIT_WORKRES: .*Did you mean WEIGHBRIDGE_FIT_WORKERS\?"):
        parse(FitLike, {"WEIGHBRIDGE_FIT_WORKRES": "3"})


def test_a_settings_object_made_in_code_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_FIT_WORKERS", "9")
    assert FitLike().workers == 2
    assert load(FitLike).workers == 9


def test_load_ends_the_process_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(FitLike, {"WEIGHBRIDGE_FIT_WORKERS": "x"})
    assert ended.value.code == 2
    assert "WEIGHBRIDGE_FIT_WORKERS: " in capsys.readouterr().err
