"""The page in a real browser: live figures, the prompt, the operator's actions, an outage, keyboard, phone, colours."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from fastapi import FastAPI
from playwright.sync_api import Page, Route, expect
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer
from speculator.redis.control_plane import DraftPointer
from tests.fixtures.doubles import DoubleEngine
from tests.page.conftest import KEY, Gateway, Watched
from tests.serving.gateway.client import serve
from tests.serving.gateway.keyfile import KeyFile
from tests.serving.gateway.passage import passing
from tests.serving.sglang.outside.fake_sglang import FakeSglang

TIMES = re.compile(r"^\d+\.\d\d×$")
NUMBER = re.compile(r"^\d+\.\d\d$")
CUT_LABELS = """
  const write = CanvasRenderingContext2D.prototype.fillText;
  window.cutLabels = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    if (this.textAlign === "center" && x + this.measureText(text).width / 2 > this.canvas.width) cutLabels.push(text);
    write.call(this, text, x, y);
  };
"""
"""Notes the labels of charts that end beyond their canvas."""
NO_PATIENCE = """
  const timeout = AbortSignal.timeout.bind(AbortSignal);
  AbortSignal.timeout = (ms) => timeout(ms % 30_000);
"""
"""Waits no time at all for what an operator does."""
PROMPT = "tell me 0123456789 and once more 0123456789"


def submit(page: Page, prompt: str, max_tokens: int = 60) -> None:
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(max_tokens))
    page.click("#send")
    expect(page.locator("#answer-status")).to_contain_text("first token after")


def act(page: Page, action: str) -> None:
    page.click(f"#admin-form button[value={action}]")
    page.click("#confirm-yes")
    expect(page.locator("#confirm")).to_be_hidden()


def background(page: Page) -> str:
    colour: str = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return colour


def wait_until_drawn(page: Page, chart: str) -> None:
    """Wait until the line is there: a pixel of the page's accent colour."""
    page.wait_for_function(
        """(chart) => {
          const canvas = document.querySelector(`${chart} canvas`);
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const accent = getComputedStyle(document.querySelector("#speedup")).color.match(/\\d+/g).map(Number);
          for (let at = 0; at < data.length; at += 4) {
            if (data[at + 3] === 255 && accent.every((value, part) => data[at + part] === value)) return true;
          }
          return false;
        }""",
        arg=chart,
    )


def too_wide(page: Page) -> list[str]:
    """What reaches beyond the window's right edge, where that makes the window scroll."""
    found: list[str] = page.evaluate(
        """() => {
          const width = document.documentElement.clientWidth;
          if (document.documentElement.scrollWidth <= width) return [];
          const beyond = [...document.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > width);
          return beyond.map((e) => `${e.tagName} ${e.id} ${e.className} ${e.textContent.slice(0, 40)}`);
        }"""
    )
    return found


def test_figures_follow_the_traffic(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    expect(page.locator("#model")).to_have_text("toy")
    expect(page.locator("#speedup")).to_have_text("–")
    expect(page.locator("#interval")).to_contain_text("not measured yet")
    expect(page.locator("#end-to-end-interval")).to_have_text("not measured yet")
    expect(page.locator("#traces")).to_have_text("not captured here")
    expect(page.locator("#rate")).to_have_text("0")
    # The second answer is proposed from the first.
    for _ in range(2):
        gateway.ask("question 0123456789 0123456789", 80)
    expect(page.locator("#speedup")).to_have_text(TIMES)
    expect(page.locator("#baseline")).to_contain_text("depth0_same_batch")
    expect(page.locator("#accept-length")).to_have_text(NUMBER)
    expect(page.locator("#end-to-end")).to_have_text(TIMES)
    expect(page.locator("#end-to-end-interval")).to_contain_text("too little traffic")
    expect(page.locator("#rate")).not_to_have_text("0")
    expect(page.locator("#version")).to_have_text("v1")
    expect(page.locator("#positions tr").first.locator("td").nth(1)).to_contain_text("% of")
    # Both hold what follows; either may be the longer match.
    expect(page.locator("#sources")).to_contain_text(re.compile(r"(own text|its tenant's earlier text) \d+%"))
    expect(page.locator("#head-added")).to_be_hidden()  # this engine has no A/B of it
    expect(page.locator("#accept-reading")).to_have_text(NUMBER)
    wait_until_drawn(page, "#accept-chart")
    page.reload()
    expect(page.locator("#speedup-reading")).to_contain_text("×")
    wait_until_drawn(page, "#speedup-chart")


def test_the_newest_interval_is_drawn_whole(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    scales: list[list[float]] = page.evaluate(
        """async () => {
          const { range } = await import("/page/charts.js");
          const points = [[0, 1.5, 0.2, 9.0], [1000, 1.6, null, null], [2000, 1.7, 0.8, 2.6]];
          return [1, 2, 3].map((count) => range(points.slice(0, count)));
        }"""
    )
    (first_bottom, first_top), (without_bottom, without_top), (bottom, top) = scales
    assert first_bottom < 0.2 < 9.0 < first_top
    assert 0.9 < without_bottom < 1.6 < without_top < 1.8
    assert 0.6 < bottom < 0.8 < 2.6 < top < 3.0


def test_the_history_goes_back_an_hour_or_a_day(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    gateway.ask(PROMPT)
    expect(page.locator("#accept-reading")).to_have_text(NUMBER)
    expect(page.locator("#latency-reading")).to_contain_text("95th percentile")
    for label, name in (("1 hour", "hour"), ("1 day", "day")):
        with page.expect_response(f"**/slipstream/live?since=0&range={name}"):
            page.get_by_label(label).check()
        # Seconds are no step of an hour: the chart ends with the newest figures all the same.
        expect(page.locator("#accept-reading")).to_have_text(NUMBER)
        wait_until_drawn(page, "#rate-chart")


def test_a_range_left_and_chosen_again_is_asked_for_whole(watched: Watched, gateway: Gateway) -> None:
    page, held = watched.open(gateway), []
    page.route("**/slipstream/live?*", lambda route: held.append(route), times=1)
    with page.expect_request("**/slipstream/live?*"):
        pass
    for label in ("1 hour", "5 minutes"):
        page.get_by_label(label).check()
    with page.expect_request("**/slipstream/live?since=0&range=minutes"):
        held[0].continue_()


def test_a_chart_is_read_by_keys_and_as_a_table(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    for _ in range(2):
        gateway.ask(PROMPT)
    chart, reading = page.get_by_role("slider", name="Accept length"), page.locator("#accept-reading")
    expect(reading).to_have_text(NUMBER)
    expect(chart).to_have_attribute("aria-valuemax", re.compile("[1-9]"))
    chart.focus()
    page.keyboard.press("ArrowLeft")
    newest = chart.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowLeft")
    before = chart.get_attribute("aria-valuetext")
    assert before != newest
    assert reading.text_content() == before
    with page.expect_response("**/slipstream/live*"), page.expect_response("**/slipstream/live*"):
        pass
    expect(reading).to_have_text(str(before))  # the chart goes on, the reader stays where he is
    page.keyboard.press("End")
    expect(chart).not_to_have_attribute("aria-valuetext", str(before))
    page.keyboard.press("Tab")
    expect(reading).to_have_text(NUMBER)
    page.click("#figures summary")
    cells = page.locator("#figures-rows tr").first.locator("td")
    expect(cells).to_have_count(page.locator("#figures thead th").count() - 1)
    expect(cells.nth(3)).to_have_text(NUMBER)
    expect(cells.last).to_have_text("v1")


def test_a_sentence_is_behind_each_term(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    gateway.ask(PROMPT)
    expect(page.locator("#sources-section")).to_be_visible()
    expect(page.locator("#versions tr").first).to_be_visible()
    page.click("#operate summary")
    note = page.get_by_role("dialog")
    for term in page.locator("button.term:visible").all():
        term.press("Enter")
        expect(note).to_be_focused()
        expect(note.locator("#term-title")).to_have_text(str(term.text_content()))
        expect(note.locator("#term-text")).to_contain_text(".")
        page.keyboard.press("Escape")
        expect(note).to_be_hidden()
        expect(term).to_be_focused()


def test_what_is_selected_stays_selected(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    gateway.ask(PROMPT)
    expect(page.locator("#sources .entry").first).to_be_visible()
    expect(page.locator("#positions th").first).to_be_visible()
    for table in ("#sources", "#positions"):
        page.evaluate("table => getSelection().selectAllChildren(document.querySelector(table))", table)
        for _ in range(2):
            gateway.ask(PROMPT)
            with page.expect_response("**/slipstream/live?*"):
                pass
        assert page.evaluate("getSelection().toString()").strip() != ""


def test_what_is_put_stands_there_alone(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    texts = page.evaluate(
        """async () => {
          const { element, put } = await import("/page/common.js");
          const root = element("p"), b = (text, name) => element("b", name ? { class: name } : {}, text);
          return [[b("1"), "x", b("2")], [b("1", "a"), "y"], [], ["y", b("3"), b("4")]].map((children) => {
            put(root, ...children.map((child) => (child.cloneNode ? child : new Text(child))));
            return root.innerHTML;
          });
        }"""
    )
    assert texts == ["<b>1</b>x<b>2</b>", '<b class="a">1</b>y', "", "y<b>3</b><b>4</b>"]


def test_sources_are_told_apart_without_their_hue(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    submit(page, PROMPT)
    for forced in ("none", "active"):
        page.emulate_media(forced_colors=forced)  # type: ignore[arg-type]
        patterns: list[str] = page.evaluate(
            """() => ["head", "own", "group", "tenant"].map((source) => {
              const dot = document.createElement("span");
              dot.className = `dot ${source}`;
              document.body.append(dot);
              const { backgroundColor, backgroundImage, backgroundSize } = getComputedStyle(dot);
              dot.remove();
              const paper = getComputedStyle(document.documentElement).backgroundColor;
              if (backgroundImage === "none" && backgroundColor === paper) return "unseen";
              return backgroundImage.replace(/(rgb|color)[^)]*\\)/g, "") + backgroundSize;
            })"""
        )
        assert "unseen" not in patterns
        assert len(set(patterns)) == 4
        edges: list[str] = page.evaluate(
            """() => ["head", "suffix", "target"].map((source) => {
              const token = document.querySelector(`#answer-legend .${source}`);
              const { borderBottomStyle, boxShadow } = getComputedStyle(token);
              return `${borderBottomStyle} ${boxShadow === "none"}`;
            })"""
        )
        assert len(set(edges)) == 3


def test_a_prompt_is_answered_in_colours(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    page.check("#learn")
    submit(page, PROMPT)
    answer = page.locator("#answer")
    assert answer.locator(".token.target").count() > 0
    first = answer.text_content()
    submit(page, PROMPT)
    assert answer.locator(".token.suffix").count() > 0, "the same answer came a moment ago"
    assert answer.text_content() == first, "greedy text does not depend on who proposed what"
    colours = {
        source: page.evaluate(f"getComputedStyle(document.querySelector('#answer-legend .{source}')).backgroundColor")
        for source in ("head", "suffix", "target")
    }
    assert len(set(colours.values())) == 3
    expect(page.locator("#answer-status")).to_contain_text("a step")


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_plain_decoding_is_beside_it_and_says_the_same(watched: Watched, gateway: Gateway, temperature: str) -> None:
    page = watched.open(gateway)
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", "80")
    page.select_option("#temperature", temperature)
    # The page's random seed could be one whose answer ends at once.
    page.evaluate("() => { crypto.getRandomValues = (numbers) => numbers.fill(7); }")
    page.click("#compare")
    expect(page.locator("#comparison")).to_contain_text("Both texts are equal. ", timeout=15_000)
    expect(page.locator("#comparison")).to_contain_text("tokens a second with drafts")
    assert page.locator("#plain").text_content() == page.locator("#answer").text_content() != ""
    assert page.locator("#plain .token:not(.target)").count() == 0
    expect(page.locator("#plain-status")).to_contain_text("1.00 a step")
    submit(page, PROMPT)
    expect(page.locator("#plain-side")).to_be_hidden()
    expect(page.locator("#comparison")).to_be_empty()


def test_the_request_can_be_copied_as_curl(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("#prompt", "it's $HOME `here`")
    page.click("#copy")
    expect(page.locator("#copy-status")).to_have_text("Copied.")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert page.locator("#curl").text_content() == copied
    tool, *words = shlex.split(copied.replace("\\\n", ""))
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (tool, words[0], given.keys()) == ("curl", "-N", {"-H", "-d"})
    body = json.loads(given["-d"])
    assert body["messages"] == [{"role": "user", "content": "it's $HOME `here`"}]
    answer = httpx.post(words[1], json={**body, "max_tokens": 3}, timeout=30)
    assert answer.text.endswith("data: [DONE]\n\n")


def test_reasoning_is_shown_apart_from_the_answer(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    deltas = [{"reasoning_content": "two and "}, {"reasoning_content": "two"}, {"content": "four"}]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = "stop"
    events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="".join([*events, "data: [DONE]\n\n"])))
    submit(page, "what is two and two?")
    expect(page.locator("#answer .reasoning")).to_contain_text("two and two")
    expect(page.locator("#answer > .token")).to_have_text("four")


def test_a_refused_prompt_says_why(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    page.fill("#max-tokens", "4096")
    page.click("#send")
    expect(page.locator("#answer-status")).to_contain_text("maximum context length is 256 tokens")
    expect(page.locator("#send")).to_be_enabled()
    assert len(watched.expected()) == 1


def test_acting_needs_the_key(watched: Watched, gateway: Gateway, pointer: DraftPointer) -> None:
    pointer.report_engine("engine-7", {"version": 1})
    page = watched.open(gateway)
    rows = page.locator("#versions tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("passed the gate")
    expect(rows.nth(0)).to_contain_text("2.10 → 2.31")
    expect(rows.nth(0)).to_contain_text("+10.0% +4.0% … +16.0%")
    expect(rows.nth(1)).to_contain_text("in service")
    page.click("#operate summary")
    page.select_option("#admin-version", "2")
    act(page, "promote")
    expect(page.locator("#admin-status")).to_contain_text("This needs the admin key")
    page.fill("#admin-key", "another-key-of-some-length")
    act(page, "promote")
    expect(page.locator("#admin-status")).to_have_text("This is not the admin key.")
    assert pointer.desired() is None
    assert len(watched.expected()) == 2
    page.fill("#admin-key", KEY)
    page.click("button[value=promote]")
    expect(page.locator("#confirm")).to_contain_text("Promote version 2?")
    expect(page.locator("#confirm")).to_contain_text("Now in service: v1.")
    page.keyboard.press("Enter")  # it opens on Cancel
    expect(page.locator("#confirm")).to_be_hidden()
    page.click("button[value=promote]")
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    assert pointer.desired() is None, "neither is a yes"
    act(page, "promote")
    expect(page.locator("#admin-status")).to_have_text("Version 2 is promoted; engines should run version 2.")
    assert pointer.desired() == 2
    expect(rows.nth(0)).to_contain_text("published")
    expect(page.locator("#events li").first).to_contain_text("Operator promoted v2")
    act(page, "pin")
    expect(page.locator("#versions-note")).to_contain_text("Version 2 is pinned.")
    act(page, "unpin")
    expect(page.locator("#versions-note")).not_to_contain_text("pinned")
    page.click("button[value=rollback]")
    expect(page.locator("#admin-status")).to_contain_text("Say why")
    page.fill("#admin-reason", "slower on our evening traffic")
    page.press("#admin-reason", "Enter")
    page.press("#admin-key", "Enter")
    assert pointer.desired() == 2, "Enter sets off no action"
    act(page, "rollback")
    expect(page.locator("#admin-status")).to_contain_text("Version 2 is rolled back; engines should run version 1.")
    expect(page.locator("#events")).to_contain_text("Operator rolled back v2")
    expect(page.locator("#events")).not_to_contain_text("slower", timeout=100)
    kept = page.evaluate("JSON.stringify([localStorage, sessionStorage]) + document.cookie + location.href")
    assert KEY not in kept


@pytest.mark.parametrize("answer", [None, "<html>Welcome", "broken"])
def test_what_an_action_did_is_unknown_without_an_answer(
    watched: Watched, gateway: Gateway, answer: str | None
) -> None:
    page = watched.page

    def handle(route: Route) -> None:
        if answer == "broken":
            route.abort()
        elif answer is not None:
            route.fulfill(body=answer)

    if answer is None:
        page.add_init_script(NO_PATIENCE)
    page.route("**/admin/drafts/**", handle)
    watched.open(gateway)
    page.click("#operate summary")
    act(page, "unpin")
    expect(page.locator("#admin-status")).to_contain_text("did not say whether that was done")
    expect(page.locator("button[value=unpin]")).to_be_enabled()
    watched.expected()


def test_drafts_that_are_no_json_are_asked_for_again(watched: Watched, gateway: Gateway) -> None:
    watched.page.route("**/slipstream/drafts", lambda route: route.fulfill(body="<html>Welcome"))
    page = watched.open(gateway)
    expect(page.locator("#versions-note")).to_contain_text("cannot be read now; trying again.")
    page.unroute("**/slipstream/drafts")
    expect(page.locator("#versions tr")).to_have_count(2)


def test_the_page_outlives_a_restart_of_the_gateway(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    gateway.ask(PROMPT)
    gateway.stop()
    expect(page.locator("#status")).to_contain_text("disconnected")
    gateway.start()
    expect(page.locator("#status")).to_have_text("live")
    gateway.ask(PROMPT)
    expect(page.locator("#accept-length")).to_have_text(NUMBER)
    assert watched.expected()


def test_charts_are_whole_where_two_gateways_take_turns(watched: Watched, gateway: Gateway) -> None:
    asked: list[int] = []
    num_points = 20

    def take_turns(route: Route) -> None:
        response = route.fetch()
        live = response.json()
        since = int(parse_qs(urlsplit(route.request.url).query)["since"][0])
        at = [live["now_ms"] - 1000 * ago for ago in range(num_points, 0, -1)]
        history = [[at_ms, 1.5, None, None, 2.0, 9.0, 1, None, None, None] for at_ms in at if at_ms > since]
        asked.append(since)
        route.fulfill(response=response, json={**live, "started_ms": len(asked) % 2, "history": history})

    watched.page.route("**/slipstream/live?*", take_turns)
    page = watched.open(gateway)
    for _ in range(4):
        with page.expect_response("**/slipstream/live?since=0&*"):
            pass
        assert int(page.get_attribute("#accept-chart", "aria-valuemax") or 0) >= num_points - 1
    assert any(asked), "only the rest of the history is asked for first"
    page.unroute("**/slipstream/live?*")


def test_charts_go_on_after_the_servers_clock_has_stepped_back(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    expect(page.locator("#status")).to_have_text("live")
    step_ms = 600_000
    asked: list[int] = []
    told: list[int] = []

    def step_back(route: Route) -> None:
        response = route.fetch()
        live = response.json()
        for point in (*live["history"], live["newest"]):
            point[0] -= step_ms
        asked.append(int(parse_qs(urlsplit(route.request.url).query)["since"][0]))
        live["history"] = [point for point in live["history"] if point[0] > asked[-1]]
        told.append(live["now_ms"] - step_ms)
        route.fulfill(response=response, json={**live, "now_ms": told[-1]})

    page.route("**/slipstream/live?*", step_back)
    for _ in range(100):
        page.wait_for_timeout(100)
        if len(asked) > 2:
            break
    assert asked[0] > asked[-1], "it asks for what has come since the step"
    page.click("#figures summary")
    expect(page.locator("#figures-note")).to_contain_text("as of")
    note = page.locator("#figures-note").text_content() or ""
    clocks: list[str] = page.evaluate("told => told.map((ms) => new Date(ms).toLocaleTimeString('en-GB'))", told)
    assert any(clock in note for clock in clocks), "it is the server's time"
    page.unroute("**/slipstream/live?*")


def test_the_keyboard_reaches_everything(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    expect(page.locator("#versions tr")).to_have_count(2)
    order = []
    while "rollback" not in order and len(order) < 80:
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            page.keyboard.press("Enter")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
    charts = [f"{name}-chart" for name in ("speedup", "accept", "rate", "latency")]
    form = ["prompt", "max-tokens", "temperature", "learn", "send", "compare", "copy"]
    operate = ["admin-key", "admin-version", "promote", "pin", "unpin", "admin-reason", "rollback"]
    expected = ["theme", "minutes", *charts, *form, *operate]
    assert [name for name in order if name in expected] == expected
    page.fill("#max-tokens", "20")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer-status")).to_contain_text("first token after")


def test_the_focus_stays_on_a_button_that_works(watched: Watched, gateway: Gateway) -> None:
    page, held = watched.open(gateway), []
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    send, unpin = page.locator("#send"), page.locator("button[value=unpin]")
    with page.expect_request("**/v1/chat/completions"):
        send.press("Enter")
    expect(send).to_be_disabled()
    expect(send).to_be_focused()
    send.press("Enter")
    page.locator("#stop").press("Enter")
    expect(page.locator("#answer-status")).to_have_text("Stopped.")
    expect(page.locator("#stop")).to_be_disabled()
    expect(page.locator("#stop")).to_be_focused()
    page.route("**/admin/drafts/unpin", lambda route: held.append(route))
    page.click("#operate summary")
    with page.expect_request("**/admin/drafts/unpin"):
        act(page, "unpin")
    expect(unpin).to_be_disabled()
    unpin.press("Enter")
    expect(page.locator("#confirm")).to_be_hidden()
    held[-1].fulfill(json={"version": 1, "desired": 1})
    expect(page.locator("#admin-status")).to_contain_text("no longer pinned")
    expect(unpin).to_be_focused()
    assert len(held) == 2


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_is_wider_than_the_window(watched: Watched, gateway: Gateway, width: int) -> None:
    watched.page.set_viewport_size({"width": width, "height": 800})
    watched.page.add_init_script(CUT_LABELS)
    page = watched.open(gateway)
    submit(page, "x" * 150)
    page.click("#compare")
    expect(page.locator("#comparison")).not_to_be_empty(timeout=15_000)
    page.click("#copy")
    for summary in ("#figures", "#operate"):
        page.click(f"{summary} summary")
    expect(page.locator("#versions tr")).to_have_count(2)
    assert too_wide(page) == []
    assert page.evaluate("cutLabels") == []


def test_dark_and_light(watched: Watched, gateway: Gateway) -> None:
    page = watched.open(gateway)
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.click("#theme")
    page.click("#theme")
    expect(page.locator("#theme")).to_have_text("Theme: light")
    assert background(page) == light
    page.reload()
    assert background(page) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(watched: Watched, gateway: Gateway, scheme: str) -> None:
    watched.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = watched.open(gateway)
    gateway.ask(PROMPT)
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", "20")
    page.click("#compare")
    expect(page.locator("#comparison")).not_to_be_empty(timeout=15_000)
    page.click("#copy")
    for summary in ("#figures", "#operate"):
        page.click(f"{summary} summary")
    for opened in (None, ".term >> nth=0", "button[value=pin]"):
        if opened:
            page.click(opened)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_a_trainer_that_ended_is_shown_until_it_runs_again(watched: Watched) -> None:
    status: dict[str, bool | int | None] = dict.fromkeys(("exit_code", "ended_ms", "again_ms"))
    status |= {"running": True, "num_ended": 0}
    app = create_app(
        DoubleEngine(), settings=GatewaySettings(), registry=CollectorRegistry(), trainer_status=lambda: status
    )
    with watched.beside(lambda port: serve(app, port=port, grace_s=1)) as gateway:
        page = watched.open(gateway)
        notice, row = page.locator("#trainer-notice"), page.locator("#trainer")
        expect(row).to_have_text("running")
        expect(notice).to_be_hidden()
        status |= {"running": False, "num_ended": 1, "exit_code": -9, "ended_ms": 0, "again_ms": 2000}
        expect(notice).to_contain_text(re.compile("ended once, by signal 9 at .* starts it again at "))
        status |= {"running": True, "num_ended": 2, "exit_code": 2}
        expect(notice).to_be_hidden()
        expect(row).to_contain_text("running; ended 2 times, last with exit code 2 at ")


def test_without_a_draft_store_it_says_so(watched: Watched) -> None:
    app = create_app(DoubleEngine(), settings=GatewaySettings(), registry=CollectorRegistry())
    with watched.beside(lambda port: serve(app, port=port, grace_s=1)) as gateway:
        page = watched.open(gateway)
        expect(page.locator("#versions-note")).to_contain_text("started without a draft store")
        expect(page.locator("#desk")).to_be_hidden()


def test_a_proxy_may_put_it_below_a_path(watched: Watched, app: FastAPI) -> None:
    prefix = "/slip"

    async def proxied(scope: Scope, receive: Receive, send: Send) -> None:
        """What a proxy does that takes its prefix away, and has other sites beside it."""
        if scope["type"] == "http":
            path = scope["path"]
            scope = {**scope, "path": path.removeprefix(prefix) if path.startswith(f"{prefix}/") else "/elsewhere"}
        await app(scope, receive, send)

    with watched.beside(lambda port: serve(proxied, port=port, grace_s=1)) as gateway:
        page = watched.page
        page.goto(f"{gateway.url}{prefix}/")
        page.wait_for_selector("[data-connection=live]")
        expect(page.locator("#versions tr").first).to_be_visible()
        submit(page, PROMPT)
        assert page.locator("#answer .token").count() > 0
        for link in page.locator("#links a").all():
            assert page.request.get(link.evaluate("link => link.href")).ok
    assert all(httpx.URL(url).path.startswith(f"{prefix}/") for url in watched.urls)


def test_it_may_be_opened_with_a_login(watched: Watched, gateway: Gateway) -> None:
    page = watched.page
    page.goto(gateway.url.replace("//", "//user:secret@"))
    page.wait_for_selector("[data-connection=live]")
    expect(page.locator("#versions tr").first).to_be_visible()
    submit(page, PROMPT)
    page.click("#copy")
    expect(page.locator("#curl")).not_to_contain_text("secret")


def test_a_gateway_with_keys_asks_for_one(watched: Watched, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("user")
    settings = GatewaySettings(keys_file=keys.path)
    app = create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry())
    with watched.beside(lambda port: serve(app, port=port, grace_s=1)) as gateway:
        page = watched.page
        page.goto(gateway.url)
        entry = page.locator("#entry")
        expect(entry).to_be_visible()
        expect(page.locator("#status")).to_have_text("needs a key")
        assert Axe().run(page).violations_count == 0
        page.fill("#api-key", "wrong")
        page.press("#api-key", "Enter")
        expect(page.locator("#key-status")).to_contain_text("not known here")
        page.fill("#api-key", "secret-of-user")
        page.press("#api-key", "Enter")
        expect(entry).to_be_hidden()
        expect(page.locator("#model")).to_have_text("double")
        expect(page.locator("main")).to_be_focused()
        expect(page.locator("#links")).to_be_hidden()
        submit(page, "hello")
        assert watched.expected()
        page.goto("about:blank")
        page.goto(f"{gateway.url}/#key=secret-of-user")
        expect(page.locator("#model")).to_have_text("double")
        expect(entry).to_be_hidden()
        assert "secret" not in page.url
        page.goto("about:blank")
        page.goto(f"{gateway.url}/#key=50%off")
        expect(page.locator("#key-status")).to_contain_text("not known here")
        assert "off" not in page.url
        page.evaluate("window.isSame = true")
        page.goto(f"{gateway.url}/#key=secret-of-user")
        expect(entry).to_be_hidden()
        assert "secret" not in page.url
        assert page.evaluate("isSame"), "the tab had the page already"
        keys.revoke("user")
        expect(entry).to_be_visible()
        assert watched.expected()


def test_a_refusal_is_told_as_one(watched: Watched, gateway: Gateway) -> None:
    page, message = watched.page, "This gateway answers to addresses, not to names."
    error = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "host_not_allowed"}}
    page.route("**/slipstream/*", lambda route: route.fulfill(status=403, json=error))
    page.goto(gateway.url)
    expect(page.locator("#status")).to_have_text(message)
    expect(page.locator("#versions-note")).to_have_text(
        "This gateway answers to addresses, not to names; trying again."
    )
    page.route("**/slipstream/*", lambda route: route.fulfill(status=429, body="<html>Too Many Requests"))
    expect(page.locator("#status")).to_have_text("refused with status 429")
    page.route("**/slipstream/*", lambda route: route.fulfill(status=502, body="<html>Bad Gateway"))
    expect(page.locator("#status")).to_have_text("no answer from the gateway (status 502)")
    page.unroute_all()
    expect(page.locator("#status")).to_have_text("live")
    assert watched.expected()


def test_in_front_of_sglang_what_is_missing_is_not_zero(watched: Watched) -> None:
    @asynccontextmanager
    async def passed(port: int) -> AsyncIterator[GatewayServer]:
        async with passing(FakeSglang()) as server:
            yield server

    with watched.beside(passed) as gateway:
        page = watched.open(gateway)
        for figure in ("#rate", "#swaps"):
            expect(page.locator(figure)).to_have_text("not available")
        expect(page.locator("#positions-note")).to_contain_text("Not available")
        submit(page, "hello")
        expect(page.locator("#uncoloured")).to_be_visible()
        expect(page.locator("#answer-legend")).to_be_hidden()
        expect(page.locator("#compare")).to_be_hidden()
        expect(page.locator("#trainer-row")).to_be_hidden()
        assert page.locator("#answer .token.plain").count() > 0
