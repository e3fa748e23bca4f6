"""Every recipe of examples/, those to come too: its flags work at both scales; its numbers are held as docs/design.md section 6 says."""

import dataclasses
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_dllm import config
from megatron_dllm.config import ParallelConfig, RunConfig
from megatron_dllm.models.diffusion_gemma.build import build_model
from megatron_dllm.parallel import ParallelContext
from megatron_dllm.training.optimizer import MasterOptimizer

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "examples" / "diffusion_gemma").glob("*.sh") if path.name != "common.sh")
LAUNCHERS = sorted(path.relative_to(ROOT) for path in (ROOT / "examples" / "launch").glob("*.sh"))


def start(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The script in an environment without MODEL, DATA and SAVE."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MODEL", "DATA", "SAVE", "SCALE", "DRY_RUN", "PROCESSES")}
    return subprocess.run(["bash", str(ROOT / script), *arguments], env={**kept, "PYTHON": sys.executable, **environment},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


@cache
def command(recipe: Path, scale: str) -> tuple[str, ...]:
    result = start(recipe, DRY_RUN="command", SCALE=scale)
    assert result.returncode == 0, result.stderr
    return tuple(shlex.split(result.stdout.replace("\\\n", " ")))


def parsed(recipe: Path, scale: str) -> tuple[RunConfig, int]:
    """The run that a recipe starts, and on how many processes."""
    words = command(recipe, scale)
    script = next(number for number, word in enumerate(words) if word.endswith("pretrain_dllm.py"))
    processes = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    return config.parse(list(words[script + 1:])), processes


def test_there_are_recipes_and_launchers():
    assert len(RECIPES) >= 6 and {path.name for path in LAUNCHERS} == {"torchrun.sh", "slurm.sh"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("scale", ["full", "toy"])
def test_recipe_starts_what_can_work(recipe, scale):
    run, processes = parsed(recipe, scale)
    assert not (problems := config.validate(run, world_size=processes)), config.format_problems(problems)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_fp32_masters_and_computes_in_bf16(recipe):
    """The recipe's full settings on its toy model, which one process can hold."""
    full, toy = parsed(recipe, "full")[0], parsed(recipe, "toy")[0]
    assert full.training.bf16
    run = dataclasses.replace(full, model=toy.model, parallel=ParallelConfig())
    context = ParallelContext.single()
    model = build_model(run, context)
    optimizer = MasterOptimizer(model, run.optimizer, context)
    masters = {held.name: held.master for held in optimizer.held}
    assert masters
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert name not in masters and parameter.dtype == torch.bfloat16, f"{name} is frozen: held once, in bf16"
            continue
        assert masters[name].dtype == torch.float32, name
        # mHC's mappings compute in fp32 by design, and are their own masters.
        assert parameter.dtype == (torch.float32 if parameter.placement.hold_fp32 else torch.bfloat16), name
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert bool(frozen) == run.objective.freeze_router or "lora" in recipe.stem


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_what_it_needs(recipe):
    assert f"bash {recipe}" in start(recipe, "--help").stdout
    missing = start(recipe)
    assert missing.returncode == 2 and "is not set; start the recipe as" in missing.stderr and f"bash {recipe}" in missing.stderr


def test_recipe_checks_its_environment_first(tmp_path):
    recipe = Path("examples/diffusion_gemma/sft_26b.sh")
    for name in ("MODEL", "DATA"):
        values = {"MODEL": str(tmp_path), "DATA": str(tmp_path), "SAVE": str(tmp_path / "run")} | {name: str(tmp_path / "nothing")}
        (tmp_path / "config.json").write_text("{}")
        result = start(recipe, **values)
        assert result.returncode == 2 and f"{name}={tmp_path}/nothing" in result.stderr
    (tmp_path / "file").touch()
    result = start(recipe, MODEL=str(tmp_path), DATA=str(tmp_path), SAVE=str(tmp_path / "file"))
    assert result.returncode == 2 and "is a file" in result.stderr
    assert "SCALE=small is neither full nor toy" in start(recipe, SCALE="small").stderr


def test_recipe_passes_flags_on():
    result = start(Path("examples/diffusion_gemma/sft_26b.sh"), "--seed", "7", DRY_RUN="command")
    assert result.stdout.rstrip().endswith("--seed 7")


def test_torchrun_launcher_spreads_a_recipe_over_nodes():
    recipe = str(ROOT / "examples/diffusion_gemma/sft_26b.sh")
    launcher = Path("examples/launch/torchrun.sh")
    result = start(launcher, recipe, NODES="2", NODE_RANK="1", MASTER_ADDR="host0", DRY_RUN="command")
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr host0 --master-port 29500" in result.stdout
    assert "needs MASTER_ADDR" in start(launcher, recipe, NODES="2").stderr
    assert "needs a launcher" in start(Path(recipe), NODES="2", DRY_RUN="command").stderr
    assert "do not divide" in start(launcher, recipe, NODES="3", MASTER_ADDR="host0", DRY_RUN="command").stderr
    assert "no recipe nothing.sh" in start(launcher, "nothing.sh").stderr


def slurm_job(tmp_path: Path, *ends: tuple, srun: str = 'exec "$@"') -> list[subprocess.CompletedProcess]:
    """One start after the other of a job whose trainer leaves these (state, iteration, newest checkpoint, status, reason) behind; without a
    state it ends before its first step. srun and scontrol are played, srun by `srun`.
    """
    commands, save = tmp_path / "bin", tmp_path / "run"
    commands.mkdir()
    (commands / "srun").write_text(f"#!/bin/sh\nshift\n{srun}\n")
    (commands / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/requeued"\n')
    for path in commands.iterdir():
        path.chmod(0o755)
    recipe, results = tmp_path / "recipe.sh", []
    for state, iteration, checkpoint, status, reason in ends:
        text = f'{{"state": "{state}", "iteration": {iteration}, "reason": "{reason}", "started_at": {len(results)}}}'
        written = f"echo '{text}' > \"$SAVE/status.json\"" if state else ""
        saved = f'echo {checkpoint} > "$SAVE/latest_checkpointed_iteration.txt"' if checkpoint else ""
        recipe.write_text(f"echo LAUNCH=$LAUNCH PROCESSES=$PROCESSES\n{written}\n{saved}\nexit {status}\n")
        results.append(start(Path("examples/launch/slurm.sh"), str(recipe), SAVE=str(save), SLURM_JOB_ID="77", SLURM_NTASKS="8",
                             SLURM_JOB_NUM_NODES="1", PATH=f"{commands}:{os.environ['PATH']}"))
    return results


def stopped(checkpoint: int) -> tuple:
    return "stopped", checkpoint, checkpoint, 0, "SIGTERM"


def times_put_back(tmp_path: Path) -> int:
    requeued = tmp_path / "requeued"
    return requeued.read_text().count("requeue 77\n") if requeued.exists() else 0


def test_slurm_launcher_goes_on_while_the_run_is_stopped(tmp_path):
    first, last = slurm_job(tmp_path, stopped(40), ("finished", 90, 90, 0, "None"))
    assert first.returncode == 0 and "LAUNCH=rank PROCESSES=8" in first.stdout and "back into the queue" in first.stderr
    assert last.returncode == 0 and "from iteration 40" in last.stderr and "finished at iteration 90" in last.stderr
    assert times_put_back(tmp_path) == 1


NEVER_STARTED, KILLED = ("", 0, None, 1, ""), ("running", 37, 5, 137, "None")
LOST = ("failed", 37, 5, 143, "RuntimeError: Connection closed by peer")
HANGING = ("failed", 37, 5, 124, "no progress for 540 s since iteration 37, waiting for all_reduce")


@pytest.mark.parametrize("end", [stopped(5), NEVER_STARTED, KILLED, LOST, HANGING],
                         ids=["stopped", "never started", "killed", "lost another", "hanging"])
def test_slurm_launcher_gives_up_after_three_starts_without_a_newer_checkpoint(tmp_path, end):
    """However many iterations a start came to, it is lost without a checkpoint."""
    ends = [stopped(5), *((*end[:1], end[1] + number, *end[2:]) for number in range(3))]
    results = slurm_job(tmp_path, *ends)
    assert [result.returncode for result in results] == [0, 0, 0, end[3] or 1]
    assert "giving up" in results[-1].stderr and times_put_back(tmp_path) == 3


def test_slurm_launcher_counts_anew_after_a_newer_checkpoint(tmp_path):
    results = slurm_job(tmp_path, NEVER_STARTED, KILLED, stopped(40), KILLED, NEVER_STARTED)
    assert [result.returncode for result in results] == [0] * 5 and times_put_back(tmp_path) == 5


# What a start ends with -> the launcher's status.
LEFT = {
    "a mistake": (("", 0, None, 2, ""), 2), "a mistake that shows later": (("failed", 5, 5, 2, "ValueError: row 7"), 2),
    "it failed by itself": (("failed", 5, 5, 1, "TrainingFailed: 3 in a row"), 1),
    "memory": (("failed", 5, 5, 1, "OutOfMemoryError: x"), 1), "it could not say that it failed": (("running", 5, 5, 1, "None"), 1),
    "exports are missing": (("finished", 9, 9, 1, "exports failed"), 1), "nothing was to be done": (("", 0, None, 0, ""), 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_slurm_launcher_never_puts_back(tmp_path, case):
    end, status = LEFT[case]
    first, last = slurm_job(tmp_path, stopped(40), end)
    assert (first.returncode, last.returncode, times_put_back(tmp_path)) == (0, status, 1), last.stderr
    assert "finished at iteration 9" in last.stderr or "not put back" in last.stderr


def test_slurm_launcher_finds_the_mistake_of_one_rank_behind_those_that_srun_ends(tmp_path):
    result, = slurm_job(tmp_path, ("", 0, None, 2, ""), srun='SLURM_PROCID=5 "$@"; exit 143')
    assert result.returncode == 2 and "by the status of rank 5" in result.stderr and times_put_back(tmp_path) == 0


def test_slurm_launcher_leaves_signals_to_the_trainer(tmp_path):
    """srun signals every process of a step, the shell around the trainer too: what that one ends with is still noted."""
    (tmp_path / "trainer.py").write_text("import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(2))\n"
                                         "os.kill(os.getppid(), signal.SIGTERM)\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()\n")
    recipe = tmp_path / "recipe.sh"
    srun = f'echo \'exec "$PYTHON" "{tmp_path}/trainer.py"\' > "{recipe}"\nexec "$@"'
    result, = slurm_job(tmp_path, ("", 0, None, 0, ""), srun=srun)
    assert result.returncode == 2 and "by the status of rank 0" in result.stderr


def test_slurm_launcher_refuses_to_run_outside_a_job():
    assert "this is no Slurm job" in start(Path("examples/launch/slurm.sh"), "a.sh").stderr


def test_passkeys_stand_in_their_texts_at_places_that_move():
    sys.path.insert(0, str(ROOT / "examples" / "diffusion_gemma"))
    try:
        from synthetic_data import passkey
    finally:
        sys.path.pop(0)
    texts = [passkey(index, 2000) for index in range(20)]
    places = [text.index(f"The pass key is {key}. ") for text, key in texts]
    assert all(1700 < len(text) < 2100 and text.endswith("What is the pass key?") for text, _ in texts)
    assert len(set(places)) == len({key for _, key in texts}) == 20 and max(places) - min(places) > 1500


def test_recipe_on_random_weights_names_no_files_of_a_model(tmp_path):
    recipe = Path("examples/diffusion_gemma/lora_26b.sh")
    environment = {"MODEL": "random", "SAVE": str(tmp_path / "run"), "DRY_RUN": "command"}
    words = shlex.split(start(recipe, **environment).stdout.replace("\\\n", " "))
    run = config.parse(words[2:])
    assert not (problems := config.validate(run, world_size=1)), config.format_problems(problems)
    assert run.model.num_layers == 30 and run.checkpoint.pretrained_checkpoint is None and run.training.train_iters == 20
    assert run.data.data_path == (str(tmp_path / "run" / "data" / "chat.jsonl"),) and not run.training.use_cpu_initialization
    # A checkpoint of the whole model would be larger than most disks.
    assert run.checkpoint.save is None is run.checkpoint.load and run.logging.run_dir == str(tmp_path / "run")
