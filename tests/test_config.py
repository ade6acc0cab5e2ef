"""Settings from a file, the environment and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.config import SETTINGS, Config, Preset, load_config
from rekindle.config.presets import DeclaredModel
from rekindle.errors import ConfigError
from rekindle.protocol.frames import frame
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings

GIB = 1 << 30
GB = 10**9

#: Every setting with a value that is not its default: as text, and as parsed.
EVERY: dict[str, tuple[str, Any]] = {
    "model": ("smollm2,org/repo:q4", ("smollm2", "org/repo:q4")),
    "embedding_model": ("minilm,/rank.gguf", ("minilm", "/rank.gguf")),
    "vlm": ("true", True),
    "mmproj": ("/mmproj.gguf", Path("/mmproj.gguf")),
    "models": ("{eyes: smollm2}", {"eyes": DeclaredModel(model="smollm2")}),
    "max_memory": ("8GB", 8 * 10**9),
    "idle_unload": ("15m", 900.0),
    "adapter": ("poet=/p.gguf, /lora", ("poet=/p.gguf", "/lora")),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "ollama_port": ("11434", 11434),
    "api_key": ("alpha, beta", ("alpha", "beta")),
    "admin_key": ("root", ("root",)),
    "api_keys_file": ("/keys", Path("/keys")),
    "no_auth": ("true", True),
    "exact": ("1", True),
    "engine": ("mlx", "mlx"),
    "llama_lib": ("/build/libmtmd.so", Path("/build/libmtmd.so")),
    "parallel": ("4", 4),
    "uds": ("/run/rekindle.sock", Path("/run/rekindle.sock")),
    "tls_cert": ("/cert.pem", Path("/cert.pem")),
    "tls_key": ("/key.pem", Path("/key.pem")),
    "drain_timeout": ("5", 5.0),
    "queue": ("8", 8),
    "step_timeout": ("20", 20.0),
    "max_model_len": ("2048", 2048),
    "kv_fraction": ("0.5", 0.5),
    "park_fraction": ("0.25", 0.25),
    "fp8_kvcache": ("true", True),
    "kv_bits": ("8", 8),
    "kv_quantization_start": ("100", 100),
    "ram_cache": ("512MiB", 512 << 20),
    "disk_cache": ("0", 0),
    "disk_floor": ("5GB", 5 * 10**9),
    "cache_dir": ("/kv", Path("/kv")),
    "cache_secret_file": ("/secret", Path("/secret")),
    "cache_write": ("on-evict", "on-evict"),
    "cache_eviction": ("lru", "lru"),
    "context_cache": ("false", False),
    "force_cache": ("true", True),
    "normalise": ("false", False),
    "normaliser": ("tools, dates", ("tools", "dates")),
    "tool_format": ("hermes", "hermes"),
    "chat_template_kwargs": ('{"a": 1}', {"a": 1}),
    "reasoning_format": ("none", "none"),
    "key_ttl": ("60", 60.0),
    "projects": ("{a: {system_prompt: x}}", {"a": Preset(system_prompt="x")}),
    "any_model_name": ("true", True),
    "aliases": ("{gpt-*: smollm2}", {"gpt-*": "smollm2"}),
    "threads": ("3", 3),
    "gpu_layers": ("0", 0),
    "gpu": ("0, 2", (0, 2)),
    "tensor_split": ("3,1", (3.0, 1.0)),
    "models_dir": ("/models", Path("/models")),
    "cors_origin": ("https://a.example,*", ("https://a.example", "*")),
    "allowed_host": ("Models.example, proxy", ("models.example", "proxy")),
    "media_allow": ("10.0.0.0/8, cdn.example", ("10.0.0.0/8", "cdn.example")),
    "media_folder": ("/a, /b", (Path("/a"), Path("/b"))),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "log_file": ("/logs/rekindle.log", Path("/logs/rekindle.log")),
    "log_file_size": ("10MB", 10_000_000),
    "otlp_endpoint": ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
    "max_tokens": ("50", 50),
    "completion_max_tokens": ("null", None),
    "prefill_assistant": ("true", True),
    "temperature": ("0", 0.0),
    "top_p": ("1", 1.0),
    "repetition_penalty": ("1.1", 1.1),
    "repetition_context_size": ("64", 64),
    "seed": ("7", 7),
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def load(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Config:
    file = None
    if text is not None:
        file = Path("settings.yaml")
        file.write_text(text)
    return load_config(flags or {}, environment or {}, file)


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(**sources)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_defaults_are_the_documented_ones() -> None:
    config = load()
    assert (config.host, config.port, config.model) == ("127.0.0.1", 8080, ())
    assert (config.max_tokens, config.completion_max_tokens) == (None, 100)
    assert (config.temperature, config.top_p) == (0.7, 0.9)
    assert (config.repetition_penalty, config.repetition_context_size) == (1.0, 20)
    assert (config.ram_cache, config.disk_cache, config.disk_floor) == (None, None, GIB)
    assert config.cache_dir == Path("~/.cache/rekindle/kv").expanduser()
    assert (config.cache_write, config.key_ttl) == ("always", 1800)
    assert (config.context_cache, config.force_cache, config.fp8_kvcache) == (True, False, False)
    assert (config.api_keys_file, config.projects) == (None, {})
    assert (config.tool_format, config.reasoning_format, config.normalise) == ("auto", "auto", True)
    assert config.models_dir == Path("~/.cache/rekindle/models").expanduser()


@pytest.mark.parametrize("former", ["adaptive", "frequency"])
@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_a_former_eviction_policy_means_hit_density_and_is_warned_about_once(
    source: str, former: str, caplog: pytest.LogCaptureFixture
) -> None:
    match source:
        case "file":
            config = load(text=f"cache_eviction: {former}")
        case "environment":
            config = load(environment={"REKINDLE_CACHE_EVICTION": former})
        case _:
            config = load({"cache_eviction": former})
    assert config.cache_eviction == config.runtime.cache_eviction == "hit-density"
    [warning] = caplog.records
    assert warning.levelname == "WARNING"
    assert warning.getMessage() == (
        f"`cache_eviction` no longer has the value {former!r}; using 'hit-density'."
    )


@pytest.mark.parametrize("text", ["8", "8.0", "'8'", "'8.0'", "' 8 '"])
def test_kv_bits_may_be_any_spelling_of_a_whole_number(text: str) -> None:
    assert load(text=f"kv_bits: {text}").kv_bits == 8


@pytest.mark.parametrize("text", ["8.5", "true", "nan", "16.0"])
def test_other_kv_bits_are_refused(text: str) -> None:
    assert "kv_bits" in refusal(text=f"kv_bits: {text}")


def test_every_setting_is_tested_below() -> None:
    assert set(EVERY) == set(SETTINGS)


@pytest.mark.parametrize("name", EVERY)
def test_a_setting_can_come_from_the_file(name: str) -> None:
    written, value = EVERY[name]
    assert getattr(load(text=f"{name}: {written}"), name) == value
    assert getattr(load(text=f"{name.replace('_', '-')}: {written}"), name) == value


@pytest.mark.parametrize("name", EVERY)
def test_a_setting_can_come_from_the_environment(name: str) -> None:
    written, value = EVERY[name]
    assert getattr(load(environment={f"REKINDLE_{name.upper()}": written}), name) == value


@pytest.mark.parametrize("name", [name for name in EVERY if name != "completion_max_tokens"])
def test_a_setting_can_come_from_a_flag(name: str) -> None:
    written, value = EVERY[name]
    assert getattr(load({name: written}), name) == value
    assert getattr(load({name: value}), name) == value


def test_the_environment_wins_over_the_file_and_flags_over_both() -> None:
    text = "port: 1\nparallel: 1\nqueue: 1"
    environment = {"REKINDLE_PARALLEL": "2", "REKINDLE_QUEUE": "2"}
    config = load({"queue": 3}, environment, text)
    assert (config.port, config.parallel, config.queue) == (1, 2, 3)


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    flags: dict[str, Any] = {"port": None, "model": None, "api_key": [], "exact": None}
    config = load(flags, {"REKINDLE_EXACT": "true"}, "port: 5\nmodel: [a, b]")
    assert (config.port, config.model, config.exact) == (5, ("a", "b"), True)


def test_a_flag_of_zero_counts_as_given() -> None:
    assert load({"port": 0, "gpu_layers": 0}, text="port: 5").port == 0


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("100b", 100),
        ("5k", 5_000),
        ("2GB", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("2 GB", 2 * 10**9),
        ("1.5g", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("512mi", 512 << 20),
        ("0.5TiB", 1 << 39),
        ("3t", 3 * 10**12),
    ],
)
def test_sizes_can_be_written_with_units(written: str, size: int) -> None:
    assert load({"ram_cache": written}).ram_cache == size


def test_a_size_may_be_a_plain_number_in_the_file() -> None:
    assert load(text="ram_cache: 1000000").ram_cache == 1_000_000


@pytest.mark.parametrize(
    "written", ["2XB", "-1", "5i", "GB", "1.2.3g", "9" * 400, "2e9", "2000000t"]
)
def test_an_invalid_size_is_refused_with_the_name_of_the_setting(written: str) -> None:
    assert "`--ram-cache`" in refusal(flags={"ram_cache": written})


@pytest.mark.parametrize("name", ["ram_cache", "disk_cache"])
def test_a_budget_can_be_reset_to_automatic(name: str) -> None:
    variable = {f"REKINDLE_{name.upper()}": "null"}
    assert getattr(load(environment=variable, text=f"{name}: 1GB"), name) is None


def test_lists_can_be_lists_or_separated_by_commas() -> None:
    assert load(text="api_key: [a, b]").api_key == ("a", "b")
    assert load(text="api_key: a, b").api_key == ("a", "b")
    assert load(text="api_key:\n  - a,b").api_key == ("a,b",)
    assert load({"api_key": ["a,b", "c"]}).api_key == ("a,b", "c")


@pytest.mark.parametrize("written", ["", ",", " , "])
def test_an_empty_key_is_not_accepted(written: str) -> None:
    """Otherwise anybody could send it."""
    assert load(environment={"REKINDLE_API_KEY": written}).api_key == ()
    assert "`--api-key`" in refusal(flags={"api_key": [""]})


def test_null_removes_an_optional_limit() -> None:
    assert load(text="max_tokens: null").max_tokens is None
    assert (
        load(environment={"REKINDLE_MAX_TOKENS": "none"}, text="max_tokens: 5").max_tokens is None
    )
    assert load(text="max_tokens: null", flags={"max_tokens": 7}).max_tokens == 7


def test_null_keeps_the_default_of_other_settings() -> None:
    assert load(text="port: null\nmodel: null\napi_key:").port == 8080
    assert load(environment={"REKINDLE_PORT": "null"}, text="port: 5").port == 5


def test_none_is_a_plain_value_for_settings_without_null() -> None:
    assert load(environment={"REKINDLE_TOOL_FORMAT": "none"}).tool_format == "none"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "high"),
        ("port", 70000),
        ("parallel", 0),
        ("parallel", 1000),
        ("queue", -1),
        ("max_model_len", 3),
        ("kv_fraction", 1.5),
        ("kv_fraction", "nan"),
        ("park_fraction", 1),
        ("park_fraction", -0.1),
        ("ram_cache", "plenty"),
        ("threads", 0),
        ("log_level", "loud"),
        ("max_tokens", 0),
        ("max_tokens", 2**70),
        ("temperature", -1),
        ("temperature", "inf"),
        ("top_p", 0),
        ("repetition_penalty", 0),
        ("repetition_context_size", -1),
        ("exact", "perhaps"),
        ("host", ["a"]),
        ("disk_cache", "much"),
        ("cache_write", "never"),
        ("key_ttl", 0),
        ("fp8_kvcache", "perhaps"),
        ("kv_bits", "16"),
        ("kv_bits", "eight"),
        ("kv_quantization_start", "-1"),
    ],
)
def test_an_error_spells_the_setting_like_its_source(name: str, value: Any) -> None:
    assert f"`--{name.replace('_', '-')}`" in refusal(flags={name: value})
    text = yaml.safe_dump({name: value})
    assert f"`{name}` in settings.yaml" in refusal(text=text)
    if not isinstance(value, list):
        assert f"`REKINDLE_{name.upper()}`" in refusal(
            environment={f"REKINDLE_{name.upper()}": str(value)}
        )


def test_an_error_names_the_source_of_the_value() -> None:
    found = refusal(flags={"parallel": 3}, environment={"REKINDLE_PORT": "x"}, text="port: 5")
    assert "`REKINDLE_PORT`" in found
    assert "'x'" in found


def test_all_bad_values_are_reported_together() -> None:
    found = refusal(flags={"port": -1, "parallel": 0})
    assert "`--port`" in found
    assert "`--parallel`" in found


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_an_error_does_not_show_a_secret_key(name: str) -> None:
    assert "canary" not in refusal(text=f"{name}: {{canary: 1}}")


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"text": "prot: 1"}, "unknown setting `prot` in settings.yaml; did you mean `port`?"),
        ({"text": "ram-cach: 1"}, "did you mean `ram_cache`?"),
        ({"text": "xyzzy: 1"}, "unknown setting `xyzzy` in settings.yaml"),
        ({"text": "3: 1"}, "unknown setting `3`"),
        (
            {"environment": {"REKINDLE_PARALEL": "1"}},
            "unknown setting `REKINDLE_PARALEL`; did you mean `REKINDLE_PARALLEL`?",
        ),
    ],
)
def test_an_unknown_setting_suggests_the_right_one(sources: dict[str, Any], said: str) -> None:
    assert said in refusal(**sources)


def test_variables_of_other_modules_are_accepted() -> None:
    assert load(environment={"REKINDLE_ENGINE_MODULE": "mine", "PATH": "/bin"}) == load()


def test_the_cache_folder_is_a_normal_setting() -> None:
    environment = {"REKINDLE_CACHE_DIR": "~/state"}
    assert load(environment=environment, text="cache_dir: /a").cache_dir == Path.home() / "state"


@pytest.mark.parametrize(("written", "size"), [("20", 20 * GB), ("0.5", GB // 2), (" 1 ", GB)])
def test_the_disk_budget_can_be_a_number_of_gigabytes(written: str, size: int) -> None:
    assert load(environment={"MAX_KV_SIZE_GB": written}).disk_cache == size


def test_the_gigabyte_variable_overrides_the_file_and_yields_to_the_other_variable() -> None:
    assert load(environment={"MAX_KV_SIZE_GB": "2"}, text="disk_cache: 1GB").disk_cache == 2 * GB
    both = {"MAX_KV_SIZE_GB": "2", "REKINDLE_DISK_CACHE": "3GB"}
    assert load(environment=both, text="disk_cache: 1GB").disk_cache == 3 * GB
    assert load({"disk_cache": "4GB"}, both).disk_cache == 4 * GB
    assert load(environment={"MAX_KV_SIZE_GB": ""}, text="disk_cache: 1GB").disk_cache == GB


@pytest.mark.parametrize("written", ["0", "-1", "nan", "inf", "1e3", "2GB", "lots", "9" * 17])
def test_an_invalid_number_of_gigabytes_is_refused_with_the_name_of_the_variable(
    written: str,
) -> None:
    assert "`MAX_KV_SIZE_GB`" in refusal(environment={"MAX_KV_SIZE_GB": written})


PROJECT = """
projects:
  financial-agent:
    provider: universal
    model: Qwen/Qwen3-8B-GGUF
    system_prompt: "You are a financial analyst..."
    tools:
      - get_portfolio
      - {type: function, function: {name: get_market_data, parameters: {type: object}}}
    cache:
      warm_on_startup: true
      pinned: true
"""


def test_a_project_is_read_as_documented() -> None:
    project = load(text=PROJECT).projects["financial-agent"]
    assert project.model == "Qwen/Qwen3-8B-GGUF"
    assert project.system_prompt == "You are a financial analyst..."
    assert (project.cache.warm_on_startup, project.cache.pinned) == (True, True)
    assert (project.cache.ttl, project.shared) == (None, False)


def test_a_tool_that_is_only_named_becomes_a_function() -> None:
    named, described = load(text=PROJECT).projects["financial-agent"].tools
    assert named == {"type": "function", "function": {"name": "get_portfolio", "parameters": {}}}
    assert described["function"]["name"] == "get_market_data"


@pytest.mark.parametrize(
    ("project", "said"),
    [
        ("{}", "`a.system_prompt`"),
        ("{system_prompt: ''}", "`a.system_prompt`"),
        ("{system_prompt: x, sistem: y}", "unknown setting `sistem`"),
        ("{system_prompt: x, pinned: true}", "unknown setting `pinned`"),
        ("{system_prompt: x, cache: {pined: true}}", "did you mean `pinned`?"),
        ("{system_prompt: x, cache: {ttl: -1}}", "`a.cache.ttl`"),
        ("{system_prompt: x, tools: [1]}", "`a.tools.0`"),
        ("just text", "`a`"),
    ],
)
def test_an_invalid_project_is_refused_with_its_path(project: str, said: str) -> None:
    found = refusal(text=f"projects: {{a: {project}}}")
    assert "`projects` in settings.yaml" in found
    assert said in found


@pytest.mark.parametrize(
    ("cache", "ttl"),
    [
        ("{ttl: null}", None),
        ("{pinned: true}", None),
        ("{pinned: true, ttl: 60}", 60.0),
        ("{pinned: false}", 1800.0),
    ],
)
def test_a_project_expires_unless_it_is_pinned_or_has_a_null_ttl(
    cache: str, ttl: float | None
) -> None:
    text = f"projects: {{a: {{system_prompt: x, cache: {cache}}}}}"
    assert load(text=text).projects["a"].cache.ttl == ttl


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("port: 7")
    assert load(environment={"REKINDLE_CONFIG": "mine.yaml"}).port == 7


def test_a_file_with_the_default_name_is_found() -> None:
    Path("rekindle.yaml").write_text("port: 7")
    assert load().port == 7
    assert load(text="port: 8").port == 8


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_sets_nothing(text: str) -> None:
    assert replace(load(text=text), settings_file=None) == load()


@pytest.mark.parametrize("text", ["- a\n- b", "just text", "port: [1", "a: b: c", "\x00"])
def test_a_file_without_settings_is_refused(text: str) -> None:
    assert "settings.yaml" in refusal(text=text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read missing\.yaml: No such file"):
        load_config({}, {}, Path("missing.yaml"))
    with pytest.raises(ConfigError, match="cannot read"):
        load_config({}, {}, tmp_path)
    Path("latin.yaml").write_bytes("host: caf\xe9".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config({}, {}, Path("latin.yaml"))


def test_a_file_cannot_run_code() -> None:
    assert refusal(text="port: !!python/object/apply:os.getpid []")


def test_a_tilde_stands_for_the_home_folder() -> None:
    config = load(environment={"REKINDLE_MODELS_DIR": "~/models"})
    assert config.models_dir == Path.home() / "models"


def test_settings_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        load().port = 5  # type: ignore[misc]


@pytest.mark.parametrize("name", [field.name for field in fields(RuntimeSettings)])
def test_runtime_settings_are_part_of_the_configuration(name: str) -> None:
    written, value = EVERY[name]
    assert getattr(load({name: written}).runtime, name) == value


def test_keys_stay_in_the_front() -> None:
    config = load({"api_key": "canary", "admin_key": "canary"})
    assert type(config.runtime) is RuntimeSettings
    assert b"canary" not in frame(LoadModel(path="m.gguf", settings=config.runtime))


@pytest.mark.parametrize(
    "origin",
    ["example.org", "https://example.org/", "https://Example.org", "https://a b", "https://u@h"],
)
def test_an_origin_is_written_as_browsers_send_it(origin: str) -> None:
    sentence = refusal(flags={"cors_origin": [origin]})
    assert sentence.startswith("`--cors-origin`: takes * or an origin such as ")


@pytest.mark.parametrize("name", ["https://a.example", "a.example:8080", "*.example", "a b", "-a"])
def test_an_allowed_host_is_a_plain_name(name: str) -> None:
    sentence = refusal(flags={"allowed_host": [name]})
    assert sentence.startswith("`--allowed-host`: takes a name without scheme and port")


def test_a_config_knows_which_settings_were_given(tmp_path: Path) -> None:
    file = tmp_path / "rekindle.yaml"
    file.write_text("max_tokens: null\ntemperature: 0.7\n")
    config = load_config({"port": 9000}, {"REKINDLE_TOP_P": "0.9"}, file)
    assert config.given == {
        "max_tokens": str(file),
        "temperature": str(file),
        "top_p": "REKINDLE_TOP_P",
        "port": "--port",
    }
    assert config.settings_file == file
    with pytest.raises(ConfigError, match="unknown setting"):
        load_config({"given": ["port"]}, {})


def write_port(folder: Path, port: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rekindle.yaml"
    file.write_text(f"port: {port}\n")
    return file


def test_the_users_file_is_read_where_the_current_folder_has_none(tmp_path: Path) -> None:
    """The first file that exists is read, and only that one."""
    assert load_config({}, {}).settings_file is None
    users = write_port(tmp_path / "home" / ".config" / "rekindle", 1)
    config = load_config({}, {})
    assert (config.port, config.settings_file) == (1, users)
    own = write_port(tmp_path, 2)
    config = load_config({}, {})
    assert (config.port, config.settings_file) == (2, own)
    assert config.given == {"port": str(own)}


@pytest.mark.parametrize(("base", "port"), [("xdg", 3), ("", 1), ("relative", 1)])
def test_the_users_file_is_in_the_folder_that_xdg_names(
    tmp_path: Path, base: str, port: int
) -> None:
    """A relative folder is invalid there and ignored."""
    write_port(tmp_path / "home" / ".config" / "rekindle", 1)
    write_port(tmp_path / "xdg" / "rekindle", 3)
    write_port(tmp_path / "relative" / "rekindle", 4)
    named = str(tmp_path / base) if base == "xdg" else base
    assert load_config({}, {"XDG_CONFIG_HOME": named}).port == port


def test_a_settings_folder_that_may_not_be_read_counts_as_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    assert load_config({}, {}).settings_file is None


def test_default_template_arguments_are_a_json_object() -> None:
    flags = {"chat_template_kwargs": '{"enable_thinking": false}'}
    assert load(flags).runtime.chat_template_kwargs == {"enable_thinking": False}
    assert load().chat_template_kwargs == {}
    for wrong in ("[]", "{", "1"):
        assert "takes a JSON object" in refusal(flags={"chat_template_kwargs": wrong})
