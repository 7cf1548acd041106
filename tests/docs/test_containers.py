"""The program, torchrun and the shell accept the commands of docs/containers.md and examples/kubernetes.yaml."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.conftest import ROOT, TINY, load
from tests.docs.test_docs import SCRIPTS
from tests.docs.test_guide import anchors, blocks, commands_of
from tests.helpers.processes import free_port
from trainer.commands.parse import parse
from trainer.parallel import devices

PAGE = (ROOT / "docs" / "containers.md").read_text()
BLOCKS = blocks(PAGE)
DOCKER, NODES, RANKS = (block for block in BLOCKS if block.language == "bash")
YAML = (ROOT / "examples" / "kubernetes.yaml").read_text()
SLURM = {
    "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
"""Variables that srun sets for two tasks on one node."""


def arguments_of(tokens: list[str]) -> list[str]:
    """Returns the arguments of main_multi_gpu.py in a command."""
    return tokens[tokens.index("main_multi_gpu.py") + 1 :]


def what_srun_starts(block) -> str:
    """Returns the command that each task runs."""
    (command,) = (command for command in commands_of(block) if command.startswith("srun "))
    _, ranks, cores, *started = shlex.split(command)
    assert ranks.startswith("--ntasks-per-node=") and cores.startswith("--cpus-per-task=")
    return started[-1] if started[:2] == ["bash", "-c"] else shlex.join(started)


def kubernetes_command() -> list[str]:
    return [
        word.strip(' "') for word in re.search(r"command: \[(.*?)\]", YAML, re.DOTALL)[1].replace("\n", "").split(",")
    ]


def docker_command() -> list[str]:
    (run,) = (command for command in commands_of(DOCKER) if command.startswith("docker run "))
    (dockerfile,) = (block.commands for block in BLOCKS if block.language == "dockerfile")
    entrypoint = re.search(r'ENTRYPOINT \["(.*)"\]', dockerfile)[1].split('", "')
    _, _, arguments = run.partition(" lockstep ")
    return [*entrypoint, *shlex.split(arguments)]


def shown_commands() -> list[list[str]]:
    return [docker_command(), kubernetes_command(), *(shlex.split(what_srun_starts(b)) for b in (NODES, RANKS))]


@pytest.mark.parametrize("tokens", shown_commands(), ids=" ".join)
def test_the_program_parses_the_scripts_command(tokens, monkeypatch):
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 8)
    (script,) = SCRIPTS.keys() & set(tokens)
    flags, problems = parse(arguments_of(tokens), SCRIPTS[script])
    assert not problems
    assert flags.multi.multi_gpu == "ddp"


@pytest.mark.parametrize("tokens", [t for t in shown_commands() if "torchrun" in t], ids=" ".join)
def test_torchrun_parses_the_scripts_command(tokens, monkeypatch):
    for name, value in {**SLURM, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    known = get_args_parser().parse_args(list(map(os.path.expandvars, tokens[tokens.index("torchrun") + 1 :])))
    assert known.training_script == "main_multi_gpu.py"
    assert not any(option.startswith(("--nn", "--nproc", "--rdzv")) for option in known.training_script_args)


def test_every_block_says_what_it_needs():
    for block in BLOCKS:
        assert block.language == "dockerfile" or re.match(r"# needs (Docker|SLURM)\b", block.commands)
    assert re.findall(r"^COPY (\S+) ", BLOCKS[0].commands, re.MULTILINE) == ["requirements.txt", "."]


def test_the_manifests_belong_together():
    yaml = pytest.importorskip("yaml")
    runtime, job = yaml.safe_load_all(YAML)
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert job["spec"]["trainer"]["command"] == kubernetes_command()
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"  # Kubeflow Trainer's torch policy asks for this name
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_links_to_headings_exist():
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", PAGE):
        text = (ROOT / "docs" / path).read_text() if path else PAGE
        assert anchor in anchors(text), f"{path}#{anchor}"


@pytest.mark.slow
@pytest.mark.parametrize(("block", "num_tasks"), [(NODES, 1), (RANKS, 2)], ids=["torchrun", "ranks"])
def test_a_run_started_by_srun_trains(block, num_tasks, environment, tmp_path):
    """A shell with SLURM's variables stands in for srun, on CPU processes."""
    tiny = shlex.join(map(str, [*TINY, "--device", "cpu"]))
    folder = re.search(r"--save-dir (\S+)$", what_srun_starts(block))[1]
    script = what_srun_starts(block).replace(folder, f"{tmp_path}/run {tiny}")
    shell = environment | SLURM | {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            ["bash", "-c", script], cwd=ROOT, env=shell | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(num_tasks)
    ]  # fmt: skip
    outs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * num_tasks, "\n".join(outs)
    assert "Devices: DistributedDataParallel over gloo: 2 x cpu" in outs[0]
    assert load(tmp_path / "run" / "final.pth")["environment"]["world_size"] == 2
