"""What a user meets when settings are given, mistyped or impossible."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recycle import RecycleConfig, config
from megatron_recycle.errors import ConfigError

DOCUMENTED = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "settings.py")))


def parse(*arguments: str, calls: list[argparse.Namespace] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, when_given=None if calls is None else calls.append)
    return parser.parse_args(arguments)


def test_without_any_source_the_defaults_hold_and_say_so():
    settings = RecycleConfig.resolve(None, None, {})
    assert settings == RecycleConfig()
    assert (settings.heartbeat_interval, settings.heartbeat_timeout, settings.transport_timeout) == (
        0.5,
        10,
        1800,
    )
    assert settings.describe().count("default") == len(config.options())


@pytest.mark.parametrize("given_by", list(itertools.product([False, True], repeat=3)))
def test_a_flag_beats_a_variable_beats_json_beats_the_default(given_by: tuple[bool, bool, bool]):
    by_json, by_variable, by_flag = given_by
    settings = RecycleConfig.resolve(
        {"seed": 1} if by_json else {},
        parse(*(["--recycle-seed", "3"] if by_flag else [])),
        {"RECYCLE_SEED": "2"} if by_variable else {},
    )
    assert settings.seed == (3 if by_flag else 2 if by_variable else 1 if by_json else 0)
    source = (
        "--recycle-seed" if by_flag else "RECYCLE_SEED" if by_variable else "JSON" if by_json else "default"
    )
    (line,) = (line for line in settings.describe().splitlines() if line.strip().startswith("seed "))
    assert source in line


def test_every_setting_has_a_key_a_flag_a_variable_and_a_row_in_the_docs():
    table = DOCUMENTED.table()
    for option in config.options():
        assert option.help, f"{option.name} has no help"
        for name in (option.name, config.flag(option.name), config.variable(option.name)):
            assert f"`{name}`" in table
    known = {field.name for field in dataclasses.fields(RecycleConfig)} - {"sources"}
    assert known == {option.name for option in config.options()} == set(RecycleConfig().to_json())


def other_value(option: config.Option) -> Any:
    """An allowed value of `option` that is not its default."""
    if option.name == "costs":
        return "20,22,18; 4,5,6"
    if option.kind is bool:
        return not option.default
    if option.choices and option.kind is str:
        return option.choices[-1]
    if option.kind is float:
        return (option.default or 1.0) * 1.5
    return (option.default or 1) + 1 if option.kind is int else "elsewhere"


@pytest.mark.parametrize("option", config.options(), ids=lambda option: option.name)
def test_each_setting_reads_the_same_from_json_variable_and_flag(option: config.Option):
    value = other_value(option)
    text = str(value).lower() if option.kind is bool else str(value)
    by_json = RecycleConfig.resolve({option.name: value}, None, {})
    by_variable = RecycleConfig.resolve(None, None, {config.variable(option.name): text})
    by_flag = RecycleConfig.resolve(None, parse(config.flag(option.name), text), {})
    assert getattr(by_json, option.name) == value
    assert by_json == by_variable == by_flag


@pytest.mark.parametrize(
    "option", [o for o in config.options() if o.optional], ids=lambda option: option.name
)
def test_auto_undoes_a_weaker_source(option: config.Option):
    settings = RecycleConfig.resolve(
        {option.name: other_value(option)}, None, {config.variable(option.name): "auto"}
    )
    assert getattr(settings, option.name) is None
    assert getattr(RecycleConfig.resolve({option.name: "auto"}, None, {}), option.name) is None
    assert getattr(RecycleConfig.resolve({option.name: None}, None, {}), option.name) is None


def test_the_switch_calls_back_with_the_namespace_that_is_still_filled():
    calls: list[argparse.Namespace] = []
    assert parse(calls=calls).recycle is False
    assert calls == []
    namespace = parse("--recycle", "--recycle-reduction", "exact", calls=calls)
    assert calls == [namespace] and namespace.recycle is True
    settings = RecycleConfig.resolve({"enabled": False}, calls[0], {})
    assert settings.enabled and settings.reduction == "exact"


def test_a_mistyped_key_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match='unknown key "reducton".* nearest known key is "reduction"'):
        RecycleConfig.resolve({"reducton": "exact"}, None, {})
    with pytest.raises(ConfigError, match='"heart_beat_timeout".*"heartbeat_timeout"'):
        RecycleConfig.resolve({"heart_beat_timeout": 3}, None, {})
    with pytest.raises(ConfigError, match="RECYCLE_REDUCTON.*RECYCLE_REDUCTION"):
        RecycleConfig.resolve(None, None, {"RECYCLE_REDUCTON": "exact"})
    with pytest.raises(SystemExit):
        parse("--recycle-reducton", "exact")


def test_other_programs_variables_and_the_launchers_own_are_let_through():
    environ = {
        "RECYCLE_BIN_PATH": "/tmp",
        "RECYCLE_TOKEN": "x",
        "RECYCLE_COORDINATOR": "127.0.0.1:1",
        "PATH": "/bin",
    }
    assert RecycleConfig.resolve(None, None, environ) == RecycleConfig()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"seed": "3"}, '"seed" in the JSON section "recycle" is \'3\'; give an integer'),
        ({"seed": True}, "give an integer"),
        ({"seed": -1}, "give 0 or more"),
        ({"enabled": 1}, "give true or false"),
        ({"reduction": "exat"}, "give fast or exact; did you mean 'exact'"),
        ({"cap": 0}, "give 1 or more"),
        ({"chunks": 3}, "give 1, or 2 for V-shaped"),
        ({"memory": 0}, "a size in GiB, above 0"),
        ({"block": 1.5}, "give an integer or auto"),
        ({"heartbeat_interval": 0}, "above 0"),
        ({"transport_timeout": float("inf")}, "above 0"),
        ({"planner_budget": -1}, "0 or more"),
        ({"interface": ""}, "every address"),
        ({"costs": "1,2"}, "give three integers"),
        ({"costs": "1,2,3;4,5"}, "a triple for each stage"),
        ({"policy": "lossy"}, "give reroute"),
        ({"policy": "rollback", "reduction": "exact"}, "use reduction fast, or policy reroute"),
        ({"policy": "lossy_forward", "step": "staggered"}, "give barrier"),
        ([], "give an object"),
    ],
)
def test_a_bad_value_is_refused_and_the_message_says_what_to_give(section: Any, message: str):
    with pytest.raises(ConfigError) as caught:
        RecycleConfig.resolve(section, None, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("seed", "x"), ("enabled", "maybe"), ("planner_budget", "2s"), ("seed", "")]
)
def test_text_that_is_no_value_names_the_variable_or_flag(name: str, text: str):
    with pytest.raises(ConfigError, match=config.variable(name)):
        RecycleConfig.resolve(None, None, {config.variable(name): text})
    with pytest.raises(ConfigError, match=config.flag(name)):
        RecycleConfig.resolve(None, parse(f"{config.flag(name)}={text}"), {})


def test_an_impossible_order_of_timeouts_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"heartbeat_timeout.*at least 1,"):
        RecycleConfig(heartbeat_timeout=0.75)
    with pytest.raises(
        ConfigError, match=r"transport_timeout \(from RECYCLE_TRANSPORT_TIMEOUT\).*more than 10,"
    ):
        RecycleConfig.resolve(None, None, {"RECYCLE_TRANSPORT_TIMEOUT": "10"})
    with pytest.raises(ConfigError, match=r"report_timeout.*more than 0\.5"):
        RecycleConfig(report_timeout=0.5)


@given(st.floats(0.01, 10), st.floats(0.01, 100), st.floats(0.01, 1000))
def test_timeouts_are_accepted_only_in_an_order_that_can_work(beat: float, silence: float, transport: float):
    try:
        RecycleConfig(
            heartbeat_interval=beat,
            heartbeat_timeout=silence,
            transport_timeout=transport,
            report_timeout=2 * beat,
        )
    except ConfigError:
        assert silence < 2 * beat or transport <= silence
    else:
        assert beat < silence < transport


def test_blocks_default_to_what_spreads_a_dead_pipeline_over_all_peers():
    exact = RecycleConfig(reduction="exact")
    assert [exact.block_size(pipelines, 4) for pipelines in (1, 2, 3, 4, 5, 9)] == [4, 4, 2, 2, 1, 1]
    assert RecycleConfig(reduction="exact", block=3).block_size(3, 4) == 3
    assert RecycleConfig(reduction="fast", block=3).block_size(3, 4) == 0


def test_settings_cannot_be_changed_after_they_were_printed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RecycleConfig().seed = 1  # type: ignore[misc]


def test_the_documented_table_is_the_one_of_the_code():
    documented = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert DOCUMENTED.table() in documented, "paste the output of scripts/settings.py"


def test_a_guard_that_never_copies_is_refused() -> None:
    with pytest.raises(ConfigError, match="guard_interval is 0; give 1 or more"):
        RecycleConfig(guard="memory", guard_interval=0)
