"""examples/measure/pausing.py."""

import json
import sys

from helpers import char_tokenizer

from hf_ddtree.testing import tiny_dflash_drafter, tiny_model


def test_pausing_runs_the_benchmark_with_an_untrained_drafter_and_with_random_prompts(script, monkeypatch, capsys):
    pausing, runs = script("pausing"), []
    target = tiny_model("llama")
    trained = tiny_dflash_drafter(target)

    def benchmark(arguments):
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        if "--prompts" in options:
            with open(options["--prompts"], encoding="utf-8") as lines:
                options["--prompts"] = [json.loads(line) for line in lines]
        runs.append(options)

    monkeypatch.setattr(pausing, "load_embedded", lambda: (target, char_tokenizer(), trained))
    monkeypatch.setattr(pausing, "benchmark", benchmark)
    monkeypatch.setattr(sys, "argv", ["pausing.py", "--limit", "8", "--output", "results"])
    pausing.main()
    untrained, random = runs
    # the later --limit wins
    assert untrained["--output"] == "results-untrained" and untrained["--limit"] == "8"
    assert random["--output"] == "results-random" and "--assistant-model" not in random
    assert len({prompt["prompt"] for prompt in random["--prompts"]}) == pausing.N_PROMPTS
    assert untrained["--tree-budgets"] == random["--tree-budgets"] == "16,auto"
    assert "An untrained drafter" in capsys.readouterr().out
