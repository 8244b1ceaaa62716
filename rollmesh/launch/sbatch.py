"""`rollmesh up --on slurm --nodes N`: write the script of a Slurm job, and submit it.

- The script runs `rollmesh up --on slurm` on the job's first node, which starts the processes of
  the other nodes by srun (hosts/slurm.py).
- It is written for the user to read, change and submit by hand.
- It resumes the run if Slurm starts the job again, and never resumes an older run of the name.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollmesh.core.addresses import is_loopback
from rollmesh.core.config import Config
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.files import make_folder
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.launch.checks import check_model
from rollmesh.launch.folder import config_path
from rollmesh.launch.hosts.slurm import check_gpus

SBATCH_TIMEOUT_S = 60.0
SCRIPT = "job.sh"


def in_job() -> bool:
    """Return whether this process runs in a job of Slurm."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def submit(config: Config, argv: Sequence[str]) -> list[str]:
    """Write the script and submit it; return lines for the user.

    `argv` are the arguments of `rollmesh up` in the job. UserError if Slurm refuses.
    """
    if not shutil.which("sbatch"):
        raise ConfigError(
            "--on slurm: no sbatch on this machine; run it where jobs are submitted, or add "
            "--dry-run to write the script only"
        )
    text, folder = job_script(config, argv), job_folder(config)
    try:
        make_folder(folder, config.run.mode)
        script = folder / SCRIPT
        script.write_text(text)
        script.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"run.folder = {config.run.folder}: cannot write {folder / SCRIPT}: {error.strerror}"
        ) from None
    # Variables of a job in which this runs would be taken for options of the new one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            capture_output=True,
            text=True,
            timeout=SBATCH_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"sbatch did not answer within {SBATCH_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise ConfigError(f"sbatch refused {script}: {done.stderr.strip()}")
    job_id = done.stdout.strip().partition(";")[0]
    return [
        f"job {job_id} is queued: {script}",
        f"to watch it:  squeue --jobs={job_id}; tail -F {shlex.quote(str(folder))}/{job_id}.out",
        f"to stop it:   scancel {job_id}",
    ]


def job_folder(config: Config) -> Path:
    """Return the folder of the job's script and output, beside the run's folder."""
    run = config.run_folder().absolute()
    return run.with_name(f"{run.name}.slurm")


def check_job(config: Config) -> None:
    """Raise UserError if a job with these settings cannot work."""
    slurm = config.slurm
    if not slurm.nodes:
        raise ConfigError(
            "--on slurm: the number of nodes is missing: --nodes N, or nodes in [slurm]"
        )
    check_model(config.model.path)
    for url in config.engine.urls:
        if is_loopback(urlsplit(url).hostname or ""):
            raise AddressError(
                f"engine.urls: {url} is each node's own loopback; name an address that the job's "
                "nodes reach"
            )
    if config.engine.urls and (slurm.engines_on_first or slurm.engines_per_node):
        raise ConfigError("slurm.engines_per_node starts engines; remove it, or engine.urls")
    check_gpus(config)
    stops_within_s = config.launch.stop_timeout_s
    if slurm.time_limit and 0 < slurm.stop_before_s <= stops_within_s:
        raise ConfigError(
            f"slurm.stop_before_s = {slurm.stop_before_s} leaves no time to save: use more than "
            f"launch.stop_timeout_s = {stops_within_s:g}, or lower that"
        )


def job_script(config: Config, argv: Sequence[str]) -> str:
    """Return the text of the job's script; `argv` are the arguments of `rollmesh up` in the job."""
    check_job(config)
    folder, slurm = job_folder(config), config.slurm
    python = shlex.quote(slurm.python or sys.executable)
    command = shlex.join(["-m", "rollmesh.cli.main", "up", *argv])
    is_shared = config.publish.mode != "distributed"
    settings = shlex.quote(str(config_path(config).absolute()))
    started = shlex.quote(f"{folder}/") + '"$SLURM_JOB_ID.started"'
    directives = "\n".join(f"#SBATCH {each}" for each in sbatch_options(config))
    setup = "\n".join(slurm.setup) or ": # nothing"
    return f"""\
#!/bin/bash
# Written by `rollmesh up --on slurm`; submit it again with `sbatch {folder / SCRIPT}`.
{directives}

set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}

# [slurm] setup
set +u
{setup}
set -u

# When Slurm starts this job again, it resumes the run that it began.
started={started}
resume=()
if [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 && {settings} -nt $started ]]; then
    resume=(--resume)
else
    touch "$started"
fi

# On every node: end what an earlier attempt of this job left there{
        ", and check that the run's folder is shared" if is_shared else ""
    }.
srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
    {python} -m rollmesh.launch.hosts.slurm prepare "slurm-$SLURM_JOB_ID"{
        ' "$started"' if is_shared else ""
    }
export {MARK_VARIABLE}="slurm-$SLURM_JOB_ID"

# Router, trainer and dashboard run on this node; srun starts the processes of the others.
{python} {command} "${{resume[@]}}" &
mesh=$!

# The run saves and stops when the time limit is near (USR1), and on scancel or preemption (TERM).
signal='' limit=''
trap 'signal=yes; kill -TERM "$mesh" 2>/dev/null || true' TERM INT
trap 'signal=yes; limit=yes; kill -TERM "$mesh" 2>/dev/null || true' USR1
while true; do
    signal='' code=0
    wait "$mesh" || code=$?
    [[ -n $signal ]] || break
done
{requeue_lines(config)}exit "$code"
"""


def requeue_lines(config: Config) -> str:
    """Return the lines that queue a job again which the time limit stopped."""
    if not (config.slurm.requeue and config.slurm.stop_before_s):
        return ""
    return """\
if [[ -n $limit && $code -eq 130 ]]; then  # stopped before its end
    echo "the time limit is near: job $SLURM_JOB_ID is queued again, and will resume the run"
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def sbatch_options(config: Config) -> list[str]:
    """Return the job's options of sbatch, the user's last."""
    slurm, folder = config.slurm, job_folder(config)
    options = [f"--job-name={slurm.job_name or config.run.name}", f"--nodes={slurm.nodes}"]
    options += ["--ntasks-per-node=1"]
    if slurm.cpus_per_node:
        options += [f"--cpus-per-task={slurm.cpus_per_node}"]
    else:
        options += ["--exclusive", "--mem=0"]
    if slurm.gpus_per_node:
        options += [f"--gpus-per-node={slurm.gpus_per_node}"]
    if slurm.partition:
        options += [f"--partition={slurm.partition}"]
    if slurm.account:
        options += [f"--account={slurm.account}"]
    if slurm.time_limit:
        options += [f"--time={slurm.time_limit}"]
    options += [f'--output="{folder}/%j.out"', "--open-mode=append"]
    if slurm.stop_before_s:
        options += [f"--signal=B:USR1@{slurm.stop_before_s}"]
    options += ["--requeue" if slurm.requeue else "--no-requeue"]
    # The loss of a node ends that node's processes only.
    return [*options, "--no-kill", *slurm.options]
