"""The command line: its help, the options that it passes on, and several processes."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

import hf_ddtree
from hf_ddtree.training import __main__ as main_module
from hf_ddtree.training.__main__ import main
from hf_ddtree.training.config import GenerateConfig, TrainConfig


@pytest.mark.parametrize(("command", "config_class"), [("generate", GenerateConfig), ("train", TrainConfig)])
def test_main_explains_every_setting(command, config_class, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = {}
    for text in capsys.readouterr().out.split("options:")[1].split("\n  --")[1:]:
        name, *explanation = text.split()
        options[name] = " ".join(explanation)
    for field in dataclasses.fields(config_class):
        explanation = options[field.name.replace("_", "-")]
        assert len(explanation.split()) > 3
        if field.default not in (None, dataclasses.MISSING):
            assert explanation.endswith(f"(default: {field.default})")


def test_main_passes_every_setting_on(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(main_module, "load_models", lambda *args, **kwargs: ("target", "tokenizer", None))
    monkeypatch.setattr(main_module, "train", lambda target, config: seen.append((target, config)))
    main(["train", "--data", str(tmp_path), "--output", "out", "--layer-ids", "1", "3", "--kl-weight", "0.5"])
    expected = TrainConfig(data=tmp_path, output=type(tmp_path)("out"), layer_ids=[1, 3], kl_weight=0.5)
    assert seen == [("target", expected)]


def test_main_evaluates_a_trained_drafter(trained, run_command, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w90 w95", "kind": "new"}\n{"prompt": "w91 w96 w97"}')
    run_command("evaluate", drafter=trained, prompts=prompts, budgets=[0, 8], max_new_tokens=24)
    table = json.loads(capsys.readouterr().out)
    assert set(table) == {"all", "new"} and set(table["all"]) == {"chain", "8"}
    assert table["all"]["8"] > 1.05


def test_main_shares_the_work_between_processes(target_folder, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "hf_ddtree.training"]
    target = ["--model", str(target_folder), "--dtype", "float32"]
    data, states, output = tmp_path / "data", tmp_path / "states", tmp_path / "out"
    generate = ["--prompts", str(target_folder / "prompts.jsonl"), "--output", str(data)]
    generate += ["--shards", "2", "--shard-size", "40", "--max-new-tokens", "12"]
    subprocess.run([*launch, "generate", *target, *generate], check=True, timeout=120)
    small = "--steps 4 --evaluate-every 4 --batch-size 4 --anchors 4 --block-size 3 --num-layers 1 --layer-ids 0 2"
    small += " --held-out 4 --frequent 0 --negatives 0 --mixed-precision no --mask-token-id 3"
    paths = ["--data", str(data), "--output", str(output), "--features", str(states)]
    subprocess.run([*launch, "train", *target, *paths, *small.split()], check=True, timeout=120)
    assert len(list(states.iterdir())) == 2
    assert hf_ddtree.load_drafter(output).config.block_size == 3


def test_gpu_script_passes_options_that_the_commands_take(tmp_path, monkeypatch):
    """A stand-in for Python records the calls of the script. Every call then gets as far as loading the target."""
    stand_in = tmp_path / "python"
    output = tmp_path / "out"
    drafter = output / "drafter"
    stand_in.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nmkdir -p {drafter}\ntouch {drafter}/model.safetensors\n'
    )
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = ROOT / "examples" / "train_on_gpu.sh"
    subprocess.run(["bash", script, output, "some/model", "7"], check=True, env=environment)

    def stop(*args, **kwargs):
        raise InterruptedError(args[0])

    monkeypatch.setattr(main_module, "load_models", stop)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[:3] for call in calls] == [
        ["-m", "hf_ddtree.training", name] for name in ("generate", "train", "evaluate")
    ]
    for call in calls:
        with pytest.raises(InterruptedError, match="some/model"):
            main(call[2:])
