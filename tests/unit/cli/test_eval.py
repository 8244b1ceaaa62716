"""`rollmesh eval` checks its arguments first and reports each mistake in one line."""

from pathlib import Path

import msgspec
import pytest

from rollmesh.cli.eval import arguments, conclude, main, open_folder, options_of
from rollmesh.core.errors import UserError
from rollmesh.core.process import FAILED, OK
from rollmesh.core.types import FieldPolicy
from rollmesh.launch.machine import RunEnd
from rollmesh.serve.client import evaluation
from rollmesh.serve.client.evaluation_files import RESULTS, Row


def refused(words: list[str]) -> str:
    with pytest.raises(UserError) as raised:
        main(words)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "0"], "-n 0: must be at least 1"),
        (["--num-tasks", "-3"], "--num-tasks -3: must be at least 1"),
        (["--env", "nonsense"], 'env = "nonsense" is neither built in'),
        (["--router", "tcp://h:1", "--engine", "http://h:2"], "--router: excludes --engine and"),
        (["--router", "tcp://h:1", "--model-dir", "m"], "--router: excludes --engine and"),
        (["--env", "guess"], "--model-dir is missing"),
        (["--env", "guess", "--model-dir", "nowhere"], "no such folder"),
        (["--router", "nonsense"], "write it as tcp://host:port"),
        (["--router", "tcp://127.0.0.1:9"], "tcp://127.0.0.1:9: no router answers there"),
        (["--resume"], "no evaluation to resume; leave out --resume"),
        (["--set", "worker.nonsense=1"], "unknown key"),
    ],
)
def test_mistake_is_one_line(
    words: list[str], message: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "ANSWER_S", 0.2)
    assert message in refused(["--out", out, *words])


def test_environment_without_tasks_is_one_line(tmp_path: Path, out: str) -> None:
    source = "from rollmesh.envs.echo import EchoEnv\n\nclass Empty(EchoEnv):\n"
    source += "    def tasks(self, split, seed):\n        return iter(())\n"
    module = tmp_path / "empty_eval_env.py"
    module.write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        message = refused(["--out", out, "--env", "empty_eval_env:Empty", "--model-dir", "m"])
    assert message.endswith('tasks("eval") gave no task; name another --split')
    assert not Path(out).exists()


def test_evaluation_lets_agents_choose_their_sampling(out: str) -> None:
    order = options_of(arguments().parse_args(["--out", out, "--model-dir", "m"]))
    assert order.plan.sampling.temperature.policy is FieldPolicy.DEFAULT
    assert order.plan.sampling.seed.policy is FieldPolicy.ALLOW
    assert order.config.worker.failed_sibling == "score_rest"


def test_resuming_needs_only_the_folder(out: str) -> None:
    words = ["--out", out, "--env", "echo", "--model-dir", "m", "-n", "3", "--num-tasks", "7"]
    first = options_of(arguments().parse_args(words))
    open_folder(first)
    again = options_of(arguments().parse_args(["--out", out, "--resume"]))
    assert again.plan == first.plan
    assert again.config == first.config
    assert again.resume


def test_resuming_with_another_plan_is_refused_in_one_line(out: str) -> None:
    words = ["--out", out, "--env", "echo", "--model-dir", "m", "-n", "3"]
    open_folder(options_of(arguments().parse_args(words)))
    message = refused(["--out", out, "--resume", "-n", "4"])
    assert "evaluates with num_samples = 3, not 4" in message


def test_mistake_moves_no_older_evaluation_aside(out: str) -> None:
    open_folder(options_of(arguments().parse_args(["--out", out, "--model-dir", "m"])))
    for words in (["--model-dir", "nowhere"], [], ["--env", "nonsense"]):
        refused(["--out", out, *words])
    assert not Path(f"{out}.1").exists()


def test_older_evaluation_is_moved_aside(out: str) -> None:
    words = ["--out", out, "--env", "echo", "--model-dir", "m"]
    for _ in range(2):
        open_folder(options_of(arguments().parse_args(words)))
    older = msgspec.json.decode(Path(f"{out}.1", "eval.json").read_bytes())
    assert older["env"] == "echo"


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["agent_error", "agent_error"], FAILED),
        (["infra_error", "env_failed"], FAILED),
        ([], FAILED),
        (["agent_error", "completed"], OK),
    ],
)
def test_an_evaluation_whose_rollouts_all_failed_ends_with_code_1_and_a_line(
    out: str, outcomes: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    order = options_of(arguments().parse_args(["--out", out, "--env", "echo", "--model-dir", "m"]))
    open_folder(order)
    error = "KeyError: 'answer' (env.py:15 in score)"
    for number, outcome in enumerate(outcomes):
        row = Row(
            task_id="t", group_id=f"g{number}", index=0, num_samples=1, outcome=outcome, error=error
        )
        with (Path(out) / RESULTS).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    assert conclude(order, RunEnd(OK, "done")) == code
    message = capsys.readouterr().err
    assert message.count("\n") == (code != OK)
    if outcomes and code == FAILED:
        assert f"every rollout failed (2), most with {outcomes[0]}: {error}" in message
