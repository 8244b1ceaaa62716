"""The page in a real browser, over a real dashboard process.

Needs Debian's chromium and chromium-driver; skipped without them.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from rollmesh.core.process import Ready
from rollmesh.core.run_state import RunRecord, RunState
from rollmesh.core.types import EVAL_SAMPLING, ErrorPlace
from rollmesh.serve.client.evaluation_files import EvaluationPlan, Row, write_plan
from rollmesh.serve.client.scores import report_of
from rollmesh.testing.run_folder import FakeRun
from tests.flow.demo import start

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WAIT_S = 60.0
PARTS_OF_AN_END = ("#phase", "#ending")
SCRIPT = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
DRAWN_PIXELS = """
const canvas = document.querySelector("#reward canvas");
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return data.filter((value, at) => at % 4 === 3 && value > 0).length;
"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", autouse=True)
def needs_chromium() -> None:
    if not CHROMIUM or not DRIVER:
        pytest.skip("no Chromium on this machine")


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path / "demo", num_steps=60)
    run.add_baseline()
    run.add_steps(40)
    return run


@pytest.fixture
def address(run: FakeRun) -> Iterator[str]:
    """A dashboard process over `run`."""
    with serving(run.folder) as address:
        yield address


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A dashboard process over this folder; yields its address."""
    reading, writing = os.pipe()
    argv = [sys.executable, "-m", "rollmesh.cli.main", "dashboard", str(folder)]
    argv += ["--port", "0", "--ready-fd", str(writing)]
    process = subprocess.Popen(argv, pass_fds=[writing], stdout=subprocess.DEVNULL)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ready = msgspec.json.decode(pipe.readline(), type=Ready)
    assert ready.role == "dashboard"
    try:
        yield ready.address
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.binary_location = CHROMIUM or ""
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,940"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def keep(browser: webdriver.Chrome, name: str) -> None:
    """Save a screenshot if ROLLMESH_SCREENSHOTS names a folder."""
    if folder := os.environ.get("ROLLMESH_SCREENSHOTS"):
        browser.save_screenshot(f"{folder}/{name}.png")


def write_evaluation(folder: Path, rewards: tuple[float, ...]) -> Path:
    """Write an ended evaluation of one task whose last rollout failed."""
    run = FakeRun(folder)
    plan = EvaluationPlan(
        env="guess",
        env_settings={},
        model="",
        split="eval",
        num_tasks=1,
        num_samples=len(rewards) + 1,
        seed=0,
        sampling=EVAL_SAMPLING,
    )
    write_plan(plan, folder)
    place = ErrorPlace("ValueError", "/h/my_env.py", 15, "run")
    row = Row(task_id="t", group_id="r0/0", index=0, num_samples=len(rewards) + 1, outcome="")
    rows = [
        msgspec.structs.replace(
            row, index=at, outcome="completed", reward=reward, metrics={"num_guesses": 2.0}
        )
        for at, reward in enumerate(rewards)
    ]
    error = "ValueError: no (my_env.py:15 in run)"
    failed = {"index": len(rewards), "outcome": "agent_error", "error": error, "place": place}
    rows.append(msgspec.structs.replace(row, **failed))
    for each in rows:
        run.append("results.jsonl", each)
        run.add_rollout(outcome=each.outcome, reward=each.reward, error=each.error, success=None)
    (folder / "summary.json").write_bytes(msgspec.json.encode(report_of(rows)))
    return folder


def wait(browser: webdriver.Chrome, condition: Callable[[webdriver.Chrome], object]) -> None:
    """Wait for a condition, which is tried again if the page was redrawn meanwhile."""
    redrawn = [StaleElementReferenceException]
    waiting = WebDriverWait(browser, WAIT_S, poll_frequency=0.05, ignored_exceptions=redrawn)
    waiting.until(condition)


def all_of(browser: webdriver.Chrome, selector: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


def text_of(browser: webdriver.Chrome, selector: str) -> str:
    """Visible text, '' while the element does not exist."""
    script = "return document.querySelector(arguments[0])?.innerText ?? ''"
    return str(browser.execute_script(script, selector))


def texts_of(browser: webdriver.Chrome, selector: str) -> list[str]:
    """Visible texts of all such elements at one moment."""
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)"
    texts: list[str] = browser.execute_script(script, selector)
    return texts


def press_enter(browser: webdriver.Chrome, selector: str) -> None:
    """Press Enter on the first such element, once there is one."""

    def pressed(_browser: webdriver.Chrome) -> bool:
        for each in all_of(browser, selector)[:1]:
            each.send_keys(Keys.ENTER)
            return True
        return False

    wait(browser, pressed)


def open_rollout(browser: webdriver.Chrome, rollout_id: str) -> None:
    press_enter(browser, f'#rollout-list button[data-id="{rollout_id}"]')
    wait(browser, lambda _: rollout_id in text_of(browser, "#viewer h3"))


def test_the_page_shows_the_curve_and_follows_the_run(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    browser.get(address)
    wait(browser, lambda _: "40 of 60" in text_of(browser, "#tiles"))
    assert browser.execute_script(DRAWN_PIXELS) > 1000
    assert "0.660" in text_of(browser, "#reward-key")
    assert not all_of(browser, "#success-panel")[0].is_displayed(), "it is the reward"
    tiles = text_of(browser, "#tiles").splitlines()
    assert tiles.index("Reward, last 10") < tiles.index("Success, last 10")
    assert "num_guesses" in text_of(browser, "#metrics")
    assert not all_of(browser, "#failed-panel")[0].is_displayed()
    assert len(all_of(browser, "#ages tbody tr")) == 3
    assert "worker-1" in text_of(browser, "#workers")
    assert "engine-0" in text_of(browser, "#memory-key")
    run.add_steps(3)
    wait(browser, lambda _: "43 of 60" in text_of(browser, "#tiles"))
    run.finish()
    wait(browser, lambda _: text_of(browser, "#phase") == "done")
    wait(browser, lambda _: text_of(browser, "#queue").startswith("As last seen at "))
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_a_failed_run_is_shown_with_its_cause_and_how_to_resume_it(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    cause, resume = "router exited with code 1: boom", "rollmesh up mesh.toml --resume"
    run.finish(RunRecord(state=RunState.FAILED, cause=cause, resume=resume))
    browser.get(address)
    wait(browser, lambda _: text_of(browser, "#phase") == "failed")
    assert text_of(browser, "#ending") == f"{cause}\nTo resume it: {resume}"
    colour = {all_of(browser, name)[0].value_of_css_property("color") for name in PARTS_OF_AN_END}
    run.finish(RunRecord(state=RunState.DONE))
    wait(browser, lambda _: text_of(browser, "#phase") == "done")
    assert all_of(browser, "#phase")[0].value_of_css_property("color") not in colour
    assert len(colour) == 1


def test_a_trajectory_shows_its_messages_and_coloured_tokens(
    browser: webdriver.Chrome, address: str, run: FakeRun, tmp_path: Path
) -> None:
    rollout_id = run.add_rollout(step=7)
    browser.get(address)
    open_rollout(browser, rollout_id)
    assert "Guess my number" in text_of(browser, ".chat")
    sampled = all_of(browser, ".tokens .sampled")
    assert sampled
    assert all("log-prob" in (token.get_attribute("title") or "") for token in sampled)
    assert "policy version" in (sampled[0].get_attribute("title") or "")
    colours = {token.value_of_css_property("background-color") for token in sampled}
    assert len(colours) > 1
    assert len(all_of(browser, ".tokens .context")) > 10
    assert text_of(browser, ".tokens .version").startswith("v")
    picture = tmp_path / "page.png"
    assert browser.save_screenshot(str(picture))
    assert picture.stat().st_size > 20_000


def test_a_run_without_success_figures_shows_its_reward_only(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    run = FakeRun(tmp_path / "dense", num_steps=60, is_dense=True)
    run.add_baseline(0.05)
    run.add_steps(40)
    with serving(run.folder) as address:
        browser.get(address)
        wait(browser, lambda _: "40 of 60" in text_of(browser, "#tiles"))
        assert browser.execute_script(DRAWN_PIXELS) > 1000
        keep(browser, "dense")
        assert "Reward, last 10" in text_of(browser, "#tiles")
        assert "untrained 0.050" in text_of(browser, "#tiles")
        assert not all_of(browser, "#success-panel")[0].is_displayed()
        assert "success" not in text_of(browser, "body").lower()


def test_success_that_the_environment_reports_has_its_own_curve(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    row = {"time_s": run.now_s + 1.0, "step": 40, "reward": 0.155, "success": 0.25}
    run.append("metrics.jsonl", row)
    browser.get(address)
    wait(browser, lambda _: "41 of 60" in text_of(browser, "#tiles"))
    assert "0.25" in text_of(browser, "#success-key")
    assert "0.66" in text_of(browser, "#success-key"), "the untrained policy's"


def test_failed_rollouts_are_listed_with_error_and_place(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    place = {"kind": "ValueError", "file": "/h/my_env.py", "line": 15, "function": "score"}
    error = f"ValueError: {SCRIPT} (my_env.py:15 in score)"
    rollout_id = run.add_failure(error, place)
    browser.get(address)
    wait(browser, lambda _: all_of(browser, "#failed tbody tr"))
    keep(browser, "failed")
    assert texts_of(browser, "#failed tbody td") == [
        rollout_id,
        "guess-3",
        "agent_error",
        f"ValueError: {SCRIPT}",
        "my_env.py:15 in score",
    ]


def test_an_evaluation_is_shown_as_an_evaluation(browser: webdriver.Chrome, tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "my-eval", rewards=(0.155, 0.155, 0.9))
    with serving(folder) as address:
        browser.get(address)
        wait(browser, lambda _: all_of(browser, "#evaluation tbody tr"))
        keep(browser, "evaluation")
        assert text_of(browser, "#run-name") == "my-eval \u00b7 guess"
        assert text_of(browser, "#phase") == "done"
        rows = [row.split() for row in texts_of(browser, "#evaluation tbody tr")]
        assert rows[0][:2] == ["reward", "0.302"], "of the agent that broke: 0"
        assert rows[1][:2] == ["num_guesses", "2.000"]
        assert "success" not in text_of(browser, "body").lower()
        assert not all_of(browser, "#reward-panel")[0].is_displayed()
        assert "agent_error" in text_of(browser, "#failed")
        open_rollout(browser, "r0/0/1")
        assert "Guess my number" in text_of(browser, ".chat")
        assert all_of(browser, ".tokens .sampled")
        press_enter(browser, "#failed a")
        wait(browser, lambda _: "ValueError: no" in text_of(browser, "#viewer .error"))


@pytest.mark.slow
def test_tool_calls_are_shown_as_calls(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    arguments = '{"query": "red \\"shoes\\"", "limit": 3}'
    messages: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "search", "arguments": arguments}}],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "name": "look", "input": {"at": [1]}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": [{"text": "two"}]}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "cut", "arguments": '{"a": '}}]},
    ]
    rollout_id = run.add_rollout(messages=messages)
    browser.get(address)
    open_rollout(browser, rollout_id)
    keep(browser, "calls")
    assert texts_of(browser, ".chat .call") == [
        'search(query="red \\"shoes\\"", limit=3)',
        "look(at=[1])",
        'cut({"a": )',
    ]
    assert texts_of(browser, ".chat .said")[2] == "two"


def test_a_trajectory_has_its_own_address(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    rollout_id = run.add_rollout(step=7)
    browser.get(f"{address}/#{rollout_id}")
    wait(browser, lambda _: rollout_id in text_of(browser, "#viewer h3"))
    assert all_of(browser, ".tokens .sampled")


@pytest.mark.slow
def test_the_page_of_a_running_demo_shows_its_progress(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    """The screenshot is kept in ROLLMESH_SCREENSHOT, for the README."""
    with start(tmp_path, **{"trainer.num_steps": 10_000}) as demo:
        assert demo.stdout
        line = next(line for line in demo.stdout if line.startswith("dashboard: "))
        browser.get(line.removeprefix("dashboard: ").strip())
        wait(browser, lambda _: int(browser.execute_script(DRAWN_PIXELS)) > 1000)
        press_enter(browser, "#rollout-list button")
        wait(browser, lambda _: all_of(browser, ".tokens .sampled"))
        assert "log-prob" in (all_of(browser, ".sampled[title]")[0].get_attribute("title") or "")
        assert text_of(browser, "#phase") == "running"
        picture = Path(os.environ.get("ROLLMESH_SCREENSHOT") or tmp_path / "page.png")
        assert browser.save_screenshot(str(picture))
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=WAIT_S)


def test_messages_of_a_rollout_are_text_and_never_markup(
    browser: webdriver.Chrome, address: str, run: FakeRun
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": SCRIPT, "content": SCRIPT},
        {"role": "assistant", "content": [{"text": SCRIPT}]},
    ]
    rollout_id = run.add_rollout(messages=messages)
    browser.get(address)
    open_rollout(browser, rollout_id)
    assert text_of(browser, ".chat .said") == SCRIPT
    assert all_of(browser, ".chat script, .chat img") == []
    assert "owned" not in browser.title
