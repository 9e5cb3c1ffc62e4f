"""The training commands on a tiny target, end to end: generate, train, be killed, resume, evaluate, load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_drafters import draft_from_scratch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_ddtree
from hf_ddtree.testing import VOCAB_SIZE, tiny_dflash_drafter, tiny_model
from hf_ddtree.training import train as train_module
from hf_ddtree.training.__main__ import main
from hf_ddtree.training.acceptance import CHAIN, accepted_length, draft
from hf_ddtree.training.blocks import IGNORED, draft_blocks, make_batch, target_states
from hf_ddtree.training.data import Sequence, batches, read_shards, shard_path, split_held_out, write_shard
from hf_ddtree.training.features import compute_features, read_features
from hf_ddtree.training import __main__ as main_module
from hf_ddtree.training import loss as loss_module
from hf_ddtree.training.loss import candidate_tokens, draft_loss

CHAT_TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target that can be learnt, its tokenizer, and prompts.

    Tied embeddings without scaling make a random model's next token depend mostly on the last one.
    """
    folder = tmp_path_factory.mktemp("training")
    model = tiny_model("llama", initializer_range=0.15, eos_token_id=2)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder / "target")
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    prompts = [{"prompt": f"w{i} w{j}", "kind": f"kind {i % 2}"} for i in range(10, 60) for j in (70, 80)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    (folder / "test.jsonl").write_text('{"prompt": "w90 w95", "kind": "new"}\n{"prompt": "w91 w96 w97"}')
    return folder


def run(folder, command, **options):
    arguments = [command, "--model", str(folder / "target"), "--dtype", "float32"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    main(arguments)


def test_commands_end_to_end(folder, capsys, monkeypatch):
    """Generate, train with a kill in the middle, resume, evaluate: acceptance rises, and the resumed run is the same."""
    data, log = folder / "data", "training_log.json"
    generate = {"prompts": folder / "prompts.jsonl", "shard_size": 50, "max_new_tokens": 24, "batch_size": 50}
    run(folder, "generate", output=data, shards=2, **generate)
    first = shard_path(data, 0).read_bytes()
    run(folder, "generate", output=data, shards=4, **generate)
    assert shard_path(data, 0).read_bytes() == first and len(read_shards(data)) == 200

    settings = {
        "data": data,
        "steps": 60,
        "evaluate_every": 20,
        "batch_size": 8,
        "anchors": 8,
        "block_size": 4,
        "num_layers": 1,
        "layer_ids": [0, 2, 3],
        "held_out": 8,
        "frequent": 20,
        "negatives": 30,
        "mixed_precision": "no",
        "learning_rate": 1e-2,
        "warmup": 5,
        "mask_token_id": 3,
    }
    run(folder, "train", output=folder / "whole", **settings)
    whole = json.loads((folder / "whole" / log).read_text())["log"]
    figures = [entry["tokens_per_round"]["16"] for entry in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert len(figures) == 3 and max(figures) > 1.3 and figures[-1] >= figures[0]

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        original = train_module.learning_rate
        patch.setattr(train_module, "learning_rate", lambda step, c: killed() if step == 33 else original(step, c))
        run(folder, "train", output=folder / "killed", **settings)
    run(folder, "train", output=folder / "killed", **settings)
    resumed = json.loads((folder / "killed" / log).read_text())["log"]
    without_time = [{name: value for name, value in entry.items() if name != "seconds"} for entry in resumed]
    assert without_time == [{n: v for n, v in entry.items() if n != "seconds"} for entry in whole]
    with pytest.raises(ValueError, match="other settings .decay"):
        run(folder, "train", output=folder / "killed", **settings, decay=9.0)
    run(folder, "generate", output=data, shards=5, **generate)
    with pytest.raises(ValueError, match="other settings .data"):
        run(folder, "train", output=folder / "killed", **settings)

    capsys.readouterr()
    run(folder, "evaluate", drafter=folder / "whole", prompts=folder / "test.jsonl", budgets=[0, 8], max_new_tokens=24)
    table = json.loads(capsys.readouterr().out)
    assert set(table) == {"all", "new"} and set(table["all"]) == {"chain", "8"}
    assert table["all"]["8"] > 1.05
    drafter = hf_ddtree.load_drafter(folder / "whole")
    assert drafter.dtype == torch.bfloat16 and (folder / "whole" / "README.md").exists()


@torch.no_grad()
def test_blocks_are_drafted_as_in_generation():
    """All blocks of a batch at once, with masks, against one block at a time without any."""
    target = tiny_model("llama")
    drafter = tiny_dflash_drafter(target)
    generator = torch.Generator().manual_seed(0)
    sequences = [Sequence(torch.randint(4, VOCAB_SIZE, (n,), generator=generator), 5, 0.0) for n in (12, 20)]
    batch = make_batch(sequences, 6, drafter.config.block_size, generator)
    context, _ = target_states(target, batch, drafter.config.target_layer_ids)
    states = draft_blocks(drafter, drafter.config, target.get_input_embeddings(), batch, context)
    head = target.get_output_embeddings()
    for row, sequence in enumerate(sequences):
        for block, anchor in enumerate(batch.anchors[row].tolist()):
            if (batch.labels[row, block] == IGNORED).all():
                continue
            alone = draft_from_scratch(drafter, target, sequence.tokens[None, : anchor + 1])
            torch.testing.assert_close(head(states[row, block]), alone, rtol=2e-4, atol=2e-4)
            successors = sequence.tokens[anchor + 1 : anchor + 1 + batch.labels.shape[-1]]
            assert batch.labels[row, block, : len(successors)].tolist() == successors.tolist()
            assert (batch.labels[row, block, len(successors) :] == IGNORED).all()


def test_stored_hidden_states_are_those_of_the_sequence(tmp_path):
    """Also where held-out sequences lie between the others."""
    target = tiny_model("llama").requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    sequences = [Sequence(torch.randint(4, VOCAB_SIZE, (5 + i,), generator=generator), 3, 0.0) for i in range(9)]
    write_shard(shard_path(tmp_path, 0), sequences[:5], {})
    write_shard(shard_path(tmp_path, 1), sequences[5:], {})
    sequences = read_shards(tmp_path)
    for process in range(2):
        compute_features(target, sequences, [0, 2], tmp_path / "states", 4, process, num_processes=2)
    training, _ = split_held_out(sequences, 3)
    batch = make_batch(training, 2, 4, generator)
    for stored, expected in zip(read_features(tmp_path / "states", training), target_states(target, batch, [0, 2])):
        torch.testing.assert_close(stored[batch.valid], expected[batch.valid], rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="other layer_ids"):
        compute_features(target, sequences, [1, 2], tmp_path / "states", 4)


@torch.no_grad()
def test_the_finished_drafter_takes_states_as_they_are():
    """It is trained on states brought to one scale."""
    target = tiny_model("llama")
    drafter = tiny_dflash_drafter(target)
    generator = torch.Generator().manual_seed(0)
    sequences = [Sequence(torch.randint(4, VOCAB_SIZE, (20,), generator=generator), 5, 0.0) for _ in range(2)]
    batch = make_batch(sequences, 6, drafter.config.block_size, generator)
    context, _ = target_states(target, batch, drafter.config.target_layer_ids)
    scale = train_module.state_scale(target, drafter.config.target_layer_ids, sequences)
    spread = (context * scale).unflatten(-1, (len(drafter.config.target_layer_ids), -1)).square().mean(-1).sqrt()
    torch.testing.assert_close(spread.flatten(0, 1).median(0).values, torch.ones(spread.shape[-1]))
    scale = scale * torch.rand(len(scale), generator=generator)
    embedding, finished = target.get_input_embeddings(), train_module.finished_drafter(drafter, scale)
    expected = draft_blocks(drafter, drafter.config, embedding, batch, context * scale)
    states = draft_blocks(finished, drafter.config, embedding, batch, context)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_a_run_goes_on_from_a_finished_drafter(tmp_path):
    target = tiny_model("llama")
    settings = {"data": tmp_path, "output": tmp_path, "num_layers": 2, "block_size": 5, "mask_token_id": 3}
    config = train_module.TrainConfig(**settings, layer_ids=[0, 2])
    trained, fresh = (train_module.new_drafter(target, config) for _ in range(2))
    scale = torch.rand(2 * target.config.hidden_size, generator=torch.Generator().manual_seed(0)) + 0.5
    train_module.finished_drafter(trained, scale).save_pretrained(tmp_path)
    train_module.start_from(str(tmp_path), fresh, scale)
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], weight)
    other = train_module.new_drafter(target, train_module.TrainConfig(**{**settings, "block_size": 4}, layer_ids=[0, 2]))
    with pytest.raises(ValueError, match="--initial .*--block-size 5"):
        train_module.start_from(str(tmp_path), other, scale)
    target.save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="--initial .*DFlash"):
        train_module.start_from(str(tmp_path / "causal"), fresh, scale)


def test_gpu_script_gives_arguments_that_the_commands_take(tmp_path, monkeypatch):
    """With a stand-in for Python that writes them down; every command reaches the loading of the target."""
    stand_in = tmp_path / "python"
    output = tmp_path / "out"
    stand_in.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nmkdir -p {output}/drafter\ntouch {output}/drafter/model.safetensors\n'
    )
    stand_in.chmod(0o755)
    script = Path(__file__).parents[1] / "examples" / "train_on_gpu.sh"
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", script, output, "some/model", "7"], check=True, env=environment)

    def loaded(*args):
        raise InterruptedError(args[0])

    monkeypatch.setattr(main_module, "load_target", loaded)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call[:3] for call in calls] == [
        ["-m", "hf_ddtree.training", name] for name in ("generate", "train", "evaluate")
    ]
    for call in calls:
        with pytest.raises(InterruptedError, match="some/model"):
            main(call[2:])


def test_two_processes_share_the_work(folder):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "hf_ddtree.training"]
    options = ["--model", str(folder / "target"), "--dtype", "float32"]
    data, output = folder / "data2", folder / "two"
    generate = [
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--output",
        str(data),
        "--shards",
        "2",
        "--shard-size",
        "40",
    ]
    subprocess.run([*launch, "generate", *options, *generate, "--max-new-tokens", "12"], check=True, timeout=120)
    small = "--steps 4 --evaluate-every 4 --batch-size 4 --anchors 4 --block-size 3 --num-layers 1 --layer-ids 0 2"
    small += " --held-out 4 --frequent 0 --negatives 0 --mixed-precision no --mask-token-id 3"
    paths = ["--data", str(data), "--output", str(output), "--features", str(folder / "states")]
    subprocess.run([*launch, "train", *options, *paths, *small.split()], check=True, timeout=120)
    assert len(list((folder / "states").iterdir())) == 2
    assert hf_ddtree.load_drafter(output).config.block_size == 3


@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_the_formula(monkeypatch, kl_weight):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 20)  # two rows at a time
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(3, 2, 8, generator=generator), torch.randn(10, 8, generator=generator)
    teacher = torch.randn(3, 2, 8, generator=generator)
    labels = torch.tensor([[1, 2], [3, IGNORED], [4, 5]])
    candidates = candidate_tokens(labels, torch.empty(0), 0, 10)
    states.requires_grad_()
    loss, counts = draft_loss(states, labels, head, candidates, 2.0, teacher, kl_weight)
    (gradient,) = torch.autograd.grad(3 * loss, states)

    log_q, log_p = (states @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
    kept = labels != IGNORED
    weights = torch.exp(-torch.arange(2) / 2.0).expand(3, 2)[kept]
    cross_entropy = -log_q[kept].gather(1, labels[kept][:, None])[:, 0]
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)[kept]
    expected = (weights * ((1 - kl_weight) * cross_entropy + kl_weight * divergence)).sum() / weights.sum()
    (expected_gradient,) = torch.autograd.grad(3 * expected, states)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert counts[:, 1].tolist() == [3, 2]
    assert counts[:, 0].sum() == (log_q.argmax(-1) == labels).sum()


def test_candidates_hold_every_label():
    labels = torch.tensor([[5, IGNORED], [90, 7]])
    candidates = candidate_tokens(labels, torch.tensor([1, 2]), 10, 100)
    assert {1, 2, 5, 7, 90} <= set(candidates.tolist()) and candidates.tolist() == sorted(set(candidates.tolist()))


def test_held_out_prompts_are_not_trained_on(tmp_path):
    sequences = [Sequence(torch.tensor([i % 5, 9, 9, i]), 2, 0.0 if i % 3 else 0.7) for i in range(30)]
    write_shard(shard_path(tmp_path, 0), sequences, {})
    training, held_out = split_held_out(read_shards(tmp_path), 2)
    assert len(held_out) == 2 and all(sequence.temperature == 0 for sequence in held_out)
    prompts = [{tuple(s.tokens[:2].tolist()) for s in part} for part in (training, held_out)]
    assert not prompts[0] & prompts[1]


def test_an_epoch_visits_everything_once_in_similar_lengths():
    sequences = [Sequence(torch.zeros(1 + i % 37), 0, 0.0) for i in range(512)]
    order = batches(sequences, 8, seed=3)
    assert sorted(i for batch in order for i in batch) == list(range(512))
    assert order == batches(sequences, 8, seed=3) != batches(sequences, 8, seed=4)
    spread = [max(len(sequences[i].tokens) for i in b) - min(len(sequences[i].tokens) for i in b) for b in order]
    assert sum(spread) / len(spread) < 4


def test_acceptance_is_a_look_up_in_the_tree():
    draft_logits = torch.tensor([[2.0, 1.0, -9.0], [0.0, 3.0, -9.0]])
    assert accepted_length(draft(draft_logits, CHAIN), [0, 1]) == 2
    assert accepted_length(draft(draft_logits, CHAIN), [1, 1]) == 0
    assert accepted_length(draft(draft_logits, 4), [1, 1]) == 2
    assert accepted_length(draft(draft_logits, 4), [2, 1]) == 0
