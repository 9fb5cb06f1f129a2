"""Where a download may go, and where the token may. Nothing here opens a connection."""

import pytest
from weighbridge.pull.addresses import Route, check, is_private, origin, redirected
from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.settings import PullSettingsError, pull_settings
from weighbridge.pull.wanted import WantedFile, checked


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://hub.example/a", True),
        ("https://HUB.example./a", True),
        ("https://hub.example:443/a", True),
        ("https://hub.example:8443/a", False),
        ("http://hub.example/a", False),
        ("https://hub.example.evil.example/a", False),
        ("https://cdn.hub.example/a", False),
        ("https://evil.example/?https://hub.example", False),
    ],
)
def test_the_token_goes_to_the_hubs_own_origin_alone(url: str, sent: bool) -> None:
    assert bool(Route("https://hub.example", "secret").headers(url)) is sent


def test_a_mirror_in_the_clear_gets_no_token_unless_it_is_this_network() -> None:
    assert not Route("http://mirror.example", "secret").headers("http://mirror.example/a")
    assert Route("http://10.0.0.7:8000", "secret").headers("http://10.0.0.7:8000/a")


def test_a_route_does_not_show_its_token() -> None:
    assert "secret" not in repr(Route("https://hub.example", "secret"))


def test_a_mirror_takes_the_place_of_the_hub_and_of_nobody_else() -> None:
    route = Route("https://mirror.example/hf/")
    assert route.address("https://huggingface.co/a/b/resolve/main/x?y=1") == (
        "https://mirror.example/hf/a/b/resolve/main/x?y=1"
    )
    assert route.address("https://elsewhere.example/x") == "https://elsewhere.example/x"


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("https://a.example/x", "http://a.example/x"),
        ("https://a.example/x", "https://127.0.0.1/x"),
        ("https://a.example/x", "https://[::1]/x"),
        ("https://a.example/x", "https://10.1.2.3/x"),
        ("https://a.example/x", "https://169.254.169.254/latest/meta-data"),
        ("https://a.example/x", "https://0.0.0.0/x"),
        ("https://a.example/x", "https://[::ffff:127.0.0.1]/x"),
        ("https://a.example/x", "https://localhost/x"),
        ("https://a.example/x", "https://x.localhost./x"),
        ("https://a.example/x", "file:///etc/passwd"),
        ("https://a.example/x", "https://user:word@b.example/x"),
        ("https://a.example/x", "https://b.example:99999/x"),
        ("https://a.example/x", "https://[oops"),
        ("https://a.example/x", "https://127.1/x"),
        ("https://a.example/x", "https://2130706433/x"),
        ("https://a.example/x", "https://0x7f000001/x"),
        ("https://a.example/x", "https://017700000001/x"),
        ("https://a.example/x", "https://[fe80::1%25eth0]/x"),
        ("https://a.example/x", "https://127\u30020\u30020\u30021/x"),
    ],
)
def test_redirects_that_are_refused(here: str, there: str) -> None:
    with pytest.raises(PullError) as caught:
        redirected(here, there)
    assert caught.value.reason is PullReason.REDIRECT_REFUSED


@pytest.mark.parametrize(
    ("here", "there", "result"),
    [
        ("https://a.example/x/y", "z", "https://a.example/x/z"),
        ("https://a.example/x", "//b.example/y", "https://b.example/y"),
        ("http://127.0.0.1:1/x", "http://127.0.0.1:2/y", "http://127.0.0.1:2/y"),
    ],
)
def test_redirects_that_are_followed(here: str, there: str, result: str) -> None:
    assert redirected(here, there) == result


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "file:///x",
        "https://",
        "https://a b@c/",
        "https://u@h/",
        "https://h:x/",
        "https://h/a b",
        "https://h:0/",
        "https://a.example/x\r\nHost: b",
        "https://a.example/\t",
        "https://a\u3002example/x",
        "https://h\u00fc.example/x",
        "https://a.example\\@b.example/",
        "https://a.example/../x",
        "https://a.example/%2e%2e/x",
        "https://a.example/./x",
        "https://[::1/",
        "https://a.example/" + "x" * 8192,
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(PullError):
        check(url)


def test_what_signs_an_address_is_not_shown() -> None:
    with pytest.raises(PullError) as caught:
        redirected("https://a.example/x", "http://b.example/y?X-Signature=secret")
    assert "b.example/y" in caught.value.message and "secret" not in caught.value.message


def test_an_origin_has_a_default_port() -> None:
    assert origin("https://a.example/x") == ("https", "a.example", 443)
    assert not is_private("https://8.8.8.8/")


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a\\b", "C:/x", "a\0b", ".git/config",
     ".weighbridge-pull/x", "a/./b", "a/" * 256 + "x", "a\nb", "a/", "a.", "a ",
     " a", "a./b", "b/ a", "x" * 256, "\u00e9" * 128,
     "a\u202egpj.exe", "a\u200bb", "a\u2028b", "a\ud800b", "a\x7fb"],
)  # fmt: skip
def test_paths_that_no_model_has(path: str) -> None:
    with pytest.raises(PullError) as caught:
        checked(WantedFile(path, 1))
    assert caught.value.reason is PullReason.BAD_ENTRY


@pytest.mark.parametrize("digest", ["0" * 63, "G" * 64, "0" * 40, "A" * 64])
def test_digests_that_are_none(digest: str) -> None:
    with pytest.raises(PullError):
        checked(WantedFile("a", 1, sha256=digest))


def test_a_path_may_go_down_into_folders() -> None:
    file = WantedFile("vae/model.safetensors", 1, "0" * 64)
    assert checked(file) is file


def test_settings(tmp_path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    environ = {"WEIGHBRIDGE_PULL_TOKEN_FILE": str(tmp_path / "token"), "WEIGHBRIDGE_PULL_STALL_S": "5"}
    settings = pull_settings(environ)
    assert (settings.route.token, settings.stall_s, settings.route.hub) == ("from-file", 5.0, "https://huggingface.co")
    assert pull_settings({**environ, "WEIGHBRIDGE_PULL_TOKEN": "direct"}).route.token == "direct"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WEIGHBRIDGE_PULL_HUB", "mirror"),
        ("WEIGHBRIDGE_PULL_STALL_S", "0"),
        ("WEIGHBRIDGE_PULL_STALL_S", "nan"),
        ("WEIGHBRIDGE_PULL_TOKEN", "a b"),
        ("WEIGHBRIDGE_PULL_TOKEN_FILE", "/nowhere/token"),
    ],
)
def test_wrong_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(PullSettingsError, match=name):
        pull_settings({name: value})
