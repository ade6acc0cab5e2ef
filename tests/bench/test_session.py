from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Literal

import orjson
import pytest
from rich.console import Console

from rekindle.bench import (
    SCENARIO_NAMES,
    BenchFailed,
    BenchOptions,
    Results,
    plot,
    print_chart,
    print_table,
    quick_options,
    require_matplotlib,
    run,
    save_json,
    write_page,
)
from rekindle.bench.client import fitted
from rekindle.bench.results import FIGURES
from rekindle.bench.scenarios import Article, Crowd, Savings, SharedDocument
from tests.bench.fake_openai import FakeOpenAI

Serve = Callable[[FakeOpenAI], str]


def small(base_url: str, *scenarios: str) -> BenchOptions:
    """Options for a full bench on texts of a few words."""
    return BenchOptions(
        base_url=base_url,
        label="fake",
        scenarios=scenarios or SCENARIO_NAMES,
        repeats=2,
        seed="the same words every time",
        article_tokens=60,
        document_tokens=40,
        questions=3,
        agents=2,
        agent_tokens=30,
        agent_rounds=2,
        single_stream_tokens=8,
        streams=2,
        stream_tokens=4,
        tool_result_tokens=10,
        turns=3,
        turn_tokens=20,
        kept=6,
        kept_tokens=10,
        kept_again=3,
    )


def measure(options: BenchOptions) -> Results:
    return run(options, Console(file=StringIO()))


def test_every_scenario_is_measured_as_often_as_requested(serve: Serve) -> None:
    results = measure(small(serve(FakeOpenAI())))
    measured = {name: len(rounds) for name, rounds in results.rounds.items()}
    assert measured == dict.fromkeys(SCENARIO_NAMES, 2)
    assert list(results.figures()) == list(FIGURES)
    assert (results.label, results.model) == ("fake", "fake-model")


def test_the_stages_of_a_warm_turn_add_up_to_its_first_token(serve: Serve) -> None:
    results = measure(small(serve(FakeOpenAI()), "article"))
    for article in results.rounds["article"]:
        assert isinstance(article, Article)
        stages = article.second.breakdown()
        assert stages["encode"] == 0.0001
        assert stages["plan"] == 0.0  # not reported
        assert sum(stages.values()) == pytest.approx(article.second.ttft_s)


def test_a_server_that_reports_no_stages_has_no_breakdown(serve: Serve) -> None:
    results = measure(small(serve(FakeOpenAI(reports_stages=False)), "article"))
    assert not [name for name in results.figures() if name.startswith("warm_")]


def test_turn_two_contains_the_real_reply_and_reuses_turn_one(serve: Serve) -> None:
    fake = FakeOpenAI()
    article = measure(small(serve(fake), "article")).rounds["article"][0]
    assert isinstance(article, Article)
    histories = [body["messages"] for body in fake.bodies]
    second = next(history for history in histories if len(history) == 4)
    assert second[2] == {"role": "assistant", "content": "word0 word1 word2 word3 word4 "}
    assert article.first.cached_tokens == 0
    assert (
        article.second.cached_tokens == article.first.prompt_tokens - 4
    )  # everything except the template


USES_OF_THE_FIELD: list[Literal["honoured", "ignored", "refused"]] = [
    "honoured", "ignored", "refused",
]  # fmt: skip


@pytest.mark.parametrize("use_kv_cache", USES_OF_THE_FIELD)
@pytest.mark.parametrize("has_prepare", [True, False])
def test_each_turn_is_measured_with_the_cache_and_without_it(
    serve: Serve, use_kv_cache: Literal["honoured", "ignored", "refused"], has_prepare: bool
) -> None:
    fake = FakeOpenAI(use_kv_cache=use_kv_cache, has_prepare=has_prepare)
    for savings in measure(small(serve(fake), "savings")).rounds["savings"]:
        assert isinstance(savings, Savings)
        assert savings.was_prepared == has_prepare
        turns = (savings.cold, savings.prewarmed, savings.second, savings.third)
        assert all((turn.uncached.cached_tokens or 0) <= 1 for turn in turns)
        assert (savings.cold.cached.cached_tokens or 0) <= 1
        for turn in turns:
            assert abs(turn.uncached.prompt_tokens - turn.cached.prompt_tokens) <= 6
        for turn in (savings.prewarmed, savings.second, savings.third):
            assert (turn.cached.cached_tokens or 0) >= 60
    assert len(fake.prepared) == 2 * has_prepare
    opted_out = [body for body in fake.bodies if body.get("use_kv_cache") is False]
    assert len(opted_out) == 8


def test_a_server_without_a_report_is_measured_with_changed_prompts(serve: Serve) -> None:
    fake = FakeOpenAI(reports_cached_tokens=False)
    measure(small(serve(fake), "savings"))
    plain = [body["messages"] for body in fake.bodies if "use_kv_cache" not in body]
    assert len({str(messages[0]["content"]) for messages in plain if len(messages) > 1}) == 2 * 6


def test_a_row_has_the_time_without_the_cache_and_the_speed_up(serve: Serve) -> None:
    results = measure(small(serve(FakeOpenAI()), "savings"))
    figures, shown = results.figures(), printed(results)
    header, *_ = [line for line in shown.splitlines() if "figure" in line]
    assert header.split() == ["figure", "value", "no", "cache", "speed-up"]
    [row] = [line for line in shown.splitlines() if "turn 1 (pre-warmed)" in line]
    for name in ("s", "uncached_s", "speedup"):
        figure = f"savings_prewarmed_{name}"
        assert FIGURES[figure].show(figures[figure]) in row
    assert "no cache" not in printed(measure(small(serve(FakeOpenAI()), "document")))


def test_the_reference_computes_as_many_tokens_as_turn_two(serve: Serve) -> None:
    article = measure(small(serve(FakeOpenAI()), "article")).rounds["article"][0]
    assert isinstance(article, Article)
    assert abs(article.reference.computed_tokens - article.second.computed_tokens) <= 1
    assert article.reference.prompt_tokens < article.first.prompt_tokens


def test_no_article_shares_a_prefix_with_an_earlier_one(serve: Serve) -> None:
    rounds = measure(small(serve(FakeOpenAI()), "article", "document")).rounds
    for article in rounds["article"]:
        assert isinstance(article, Article)
        assert article.first.cached_tokens in (0, 1)  # one word may repeat by chance
    for document in rounds["document"]:
        assert isinstance(document, SharedDocument)
        assert any(answer.cached_tokens in (0, 1) for answer in document.answers)


def test_texts_have_the_requested_length_in_tokens_of_the_server(serve: Serve) -> None:
    document = measure(small(serve(FakeOpenAI()), "document")).rounds["document"][0]
    assert isinstance(document, SharedDocument)
    assert 40 <= document.answers[0].prompt_tokens < 100


def test_only_the_sampled_scenario_sends_a_temperature(serve: Serve) -> None:
    fake = FakeOpenAI()
    measure(small(serve(fake), "decode", "sampled"))
    sampled = [body for body in fake.bodies if body["temperature"]]
    assert {body["temperature"] for body in sampled} == {0.8}
    assert len(sampled) == 2 * (1 + 2)  # one stream and two together, in two rounds


def test_all_conversations_of_a_crowd_start_before_some_continue(serve: Serve) -> None:
    fake = FakeOpenAI()
    for crowd in measure(small(serve(fake), "crowd")).rounds["crowd"]:
        assert isinstance(crowd, Crowd)
        assert len(crowd.again) == len(crowd.fresh) == 3
        assert all((turn.cached_tokens or 0) >= 10 for turn in crowd.again)
    lengths = [len(body["messages"]) for body in fake.bodies[-12:]]
    assert lengths == [1] * 6 + [3, 1] * 3


def test_a_server_without_ignore_eos_is_measured_with_a_note(serve: Serve) -> None:
    fake = FakeOpenAI(takes_ignore_eos=False)
    results = measure(small(serve(fake), "document", "decode"))
    assert not results.ignores_eos
    assert ["ignore_eos" in body for body in fake.bodies].count(True) == 1
    assert "not support ignore_eos" in printed(results)


def test_a_server_that_reports_no_cached_tokens_is_measured(serve: Serve) -> None:
    results = measure(small(serve(FakeOpenAI(reports_cached_tokens=False))))
    assert "document_computed_tokens" not in results.figures()
    assert "article_turn2_computed_tokens" in results.figures()


def test_an_error_of_the_server_ends_the_bench_with_that_message(serve: Serve) -> None:
    fake = FakeOpenAI(failure="the model is restarting")
    with pytest.raises(BenchFailed, match="503: the model is restarting"):
        measure(small(serve(fake)))


def test_the_table_has_a_row_for_every_figure(serve: Serve) -> None:
    shown = printed(measure(small(serve(FakeOpenAI()))))
    for name, figure in FIGURES.items():
        assert figure.label in shown or name.endswith(("_uncached_s", "_speedup"))
    assert "fake · fake-model" in shown


def test_the_json_file_holds_figures_and_rounds(serve: Serve, tmp_path: Path) -> None:
    results = measure(small(serve(FakeOpenAI())))
    save_json(results, tmp_path / "new" / "bench.json")
    saved = orjson.loads((tmp_path / "new" / "bench.json").read_bytes())
    assert saved["figures"] == results.figures()
    assert saved["rounds"]["article"][0]["first"]["cached_tokens"] == 0
    assert len(saved["rounds"]["agents"][1]["rounds"][1]) == 2


@pytest.mark.parametrize("scenarios", [(), ("decode",)])
def test_a_plot_works_for_any_selection_of_scenarios(
    serve: Serve, tmp_path: Path, scenarios: tuple[str, ...]
) -> None:
    results = measure(small(serve(FakeOpenAI()), *scenarios))
    plot([results, results], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_plotting_library_is_reported_with_the_install_command(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = measure(small(serve(FakeOpenAI()), "decode"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BenchFailed, match="pip install matplotlib"):
        plot([results], tmp_path / "bench.png")
    with pytest.raises(BenchFailed, match=r"pip install matplotlib.*--html"):
        require_matplotlib()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_times_and_speeds_are_drawn_as_bars_in_any_terminal(serve: Serve, width: int) -> None:
    """The longest bar of a unit is that of its largest figure."""
    results = measure(small(serve(FakeOpenAI()), "savings", "decode"))
    output = StringIO()
    print_chart(results, Console(file=output, width=width))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for unit in ("s", "tokens/s"):
        figures = {n: v for n, v in results.figures().items() if FIGURES[n].unit == unit}
        drawn = {
            name: line.count("█")
            for name, value in figures.items()
            for line in lines
            if line.rstrip().endswith(f" {FIGURES[name].show(value)}")
        }
        assert drawn.keys() == figures.keys()
        largest = max(figures, key=lambda name: figures[name])
        assert max(drawn.values()) == drawn[largest] >= 9


def test_a_page_shows_every_time_and_speed_without_other_files(
    serve: Serve, tmp_path: Path
) -> None:
    results = measure(small(serve(FakeOpenAI()), "savings", "decode"))
    write_page([replace(results, label="<b>")], tmp_path / "new" / "bench.html")
    page = (tmp_path / "new" / "bench.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<script" not in page
    assert "http" not in page
    for name, value in results.figures().items():
        if FIGURES[name].unit in ("s", "tokens/s") and "uncached" not in name:
            assert FIGURES[name].show(value) in page


def test_progress_is_a_line_per_step_where_there_is_no_terminal(serve: Serve) -> None:
    output = StringIO()
    run(small(serve(FakeOpenAI()), "article", "decode"), Console(file=output))
    assert output.getvalue().splitlines() == [
        "calibrating: 1 of 1",
        "article: 1 of 2",
        "article: 2 of 2",
        "decode: 1 of 2",
        "decode: 2 of 2",
    ]


def test_a_quick_bench_shows_what_the_cache_saves_and_how_fast_replies_are(serve: Serve) -> None:
    results = measure(quick_options(serve(FakeOpenAI())))
    assert {"savings", "decode"} <= set(results.rounds)
    assert all(len(rounds) == 1 for rounds in results.rounds.values())
    assert "savings_second_speedup" in results.figures()


@pytest.mark.parametrize("prefill_s", [0.001, 0.1, 10.0])
def test_a_quick_bench_of_a_slow_server_is_shortened_to_its_budget(prefill_s: float) -> None:
    options = quick_options("http://a")
    assert options.budget_s is not None
    short = fitted(options, prefill_s, prefill_s)
    full = fitted(replace(options, budget_s=None), prefill_s, prefill_s)
    assert full == replace(options, budget_s=None)
    prefill_tokens = 6 * short.article_tokens + short.document_tokens
    if prefill_s == 0.001:
        assert short == options
    else:
        assert short.scale < 1
        assert prefill_tokens * prefill_s <= options.budget_s or short.article_tokens == 4


def test_a_shortened_bench_says_so(serve: Serve) -> None:
    results = measure(small(serve(FakeOpenAI()), "decode"))
    assert "usual length" not in printed(results)
    assert "25% of their usual length" in printed(replace(results, scale=0.25))


def printed(results: Results) -> str:
    output = StringIO()
    print_table(results, Console(file=output, width=120))
    return output.getvalue()
