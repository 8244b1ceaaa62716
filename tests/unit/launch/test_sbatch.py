"""The script of a Slurm job is valid shell with the user's options; mistakes cost one line."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import (
    Config,
    EngineConfig,
    ModelConfig,
    PublishConfig,
    RunConfig,
    SlurmConfig,
)
from rollmesh.core.errors import UserError
from rollmesh.launch.sbatch import job_script
from rollmesh.testing.model_folder import write_model_folder

WHOLE = """\
#SBATCH --job-name=math
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --time=1-00:00:00
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_model_folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    return Config(
        run=RunConfig(folder=str(tmp_path / "my runs"), name="math"),
        model=ModelConfig(path=str(tmp_path / "model")),
        slurm=SlurmConfig(nodes=4),
    )


def with_slurm(config: Config, **more: Any) -> Config:
    return msgspec.structs.replace(config, slurm=msgspec.structs.replace(config.slurm, **more))


def test_the_script_has_the_options_of_the_job(config: Config, tmp_path: Path) -> None:
    slurm = {"partition": "gpu", "account": "lab", "time_limit": "1-00:00:00", "gpus_per_node": 8}
    script = job_script(with_slurm(config, **slurm, options=("--constraint=h100",)), ["mesh.toml"])
    assert WHOLE in script
    assert f'#SBATCH --output="{tmp_path}/my runs/math.slurm/%j.out"\n' in script
    assert "#SBATCH --requeue\n#SBATCH --no-kill\n#SBATCH --constraint=h100\n" in script
    assert "scontrol requeue" in script


def test_a_job_may_share_its_nodes_and_end_at_its_limit(config: Config) -> None:
    slurm = {"cpus_per_node": 16, "requeue": False, "stop_before_s": 0, "job_name": "j"}
    script = job_script(with_slurm(config, **slurm), ["mesh.toml"])
    assert "#SBATCH --cpus-per-task=16\n" in script
    assert "--job-name=j\n" in script
    assert "--no-requeue" in script
    for word in ("--exclusive", "--signal", "scontrol requeue"):
        assert word not in script


def test_a_job_asks_for_the_gpus_of_its_servers(config: Config) -> None:
    engine = EngineConfig(launch="sglang", num_servers=4, gpus_each=2)
    config = msgspec.structs.replace(config, engine=engine)
    script = job_script(with_slurm(config, nodes=3, gpus_per_node=4), ["mesh.toml"])
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    with pytest.raises(UserError, match=r"gpus_per_node = 2: node 2 .* 2 engines .* need 4 GPUs"):
        job_script(with_slurm(config, nodes=3, gpus_per_node=2), ["mesh.toml"])


def test_a_run_folder_need_not_be_shared_if_weights_are_not_files(config: Config) -> None:
    assert ' "$started"\nexport' in job_script(config, [])
    distributed = msgspec.structs.replace(config, publish=PublishConfig(mode="distributed"))
    assert ' "$started"\nexport' not in job_script(distributed, [])


def test_the_script_is_valid_shell(config: Config, tmp_path: Path) -> None:
    slurm = {"setup": ('export A="b c"', "module() { :; }", "module load cuda")}
    argv = ["it's.toml", "--set", 'env_settings={a = "$HOME"}']
    script = tmp_path / "job.sh"
    script.write_text(job_script(with_slurm(config, **slurm), argv))
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(script)], check=True)
    assert """up 'it'"'"'s.toml' --set 'env_settings={a = "$HOME"}' """ in script.read_text()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"slurm": SlurmConfig()}, "--on slurm: the number of nodes is missing: --nodes N"),
        ({"engine": EngineConfig(urls=("http://127.0.0.1:1",))}, "engine.urls: http://127.0.0.1"),
        (
            {
                "engine": EngineConfig(urls=("http://h:1",)),
                "slurm": SlurmConfig(nodes=2, engines_per_node=1),
            },
            "slurm.engines_per_node starts engines; remove it, or engine.urls",
        ),
        (
            {"slurm": SlurmConfig(nodes=2, time_limit="60", stop_before_s=60)},
            "slurm.stop_before_s = 60 leaves no time to save",
        ),
        ({"model": ModelConfig(path="")}, "model.path is not set"),
    ],
)
def test_a_mistake_is_found_before_the_job_waits(
    config: Config, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        job_script(msgspec.structs.replace(config, **changes), ["mesh.toml"])


@pytest.mark.parametrize(
    ("key", "value"),
    [("job_name", "a b"), ("options", ("constraint=x",)), ("options", ("--a\n#SBATCH --b",))],
)
def test_a_setting_adds_no_line_of_its_own(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        SlurmConfig(**{key: value})
