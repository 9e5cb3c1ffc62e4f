"""Train a drafter: generate data with the target, train on it, evaluate the drafter."""

import argparse
import dataclasses
import json
import types
import typing

import torch

from ..embedded import load_models
from .answers import generate_shards
from .config import GenerateConfig, TrainConfig
from .evaluate import evaluate
from .train import train


def main(arguments: list[str] | None = None) -> None:
    """Run one command.

    Args:
        arguments: the command line without the program's name. None means `sys.argv[1:]`.
    """
    options = vars(_parser().parse_args(arguments))
    command, threads = options.pop("command"), options.pop("threads")
    if threads is not None:
        torch.set_num_threads(threads)
    target, tokenizer, drafter = load_models(
        options.pop("model"),
        options.pop("drafter", None),
        getattr(torch, options.pop("dtype")),
        device_map="auto" if torch.cuda.is_available() else None,
    )
    if command == "generate":
        generate_shards(target, tokenizer, GenerateConfig(**options))
    elif command == "train":
        train(target, TrainConfig(**options))
    else:
        assert drafter is not None  # --drafter is required
        table = evaluate(target, tokenizer, drafter.to(target.device), **options)
        print(json.dumps(table, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hf_ddtree.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    text = "Generate training data: the target answers prompts. A second run continues where the first one stopped."
    generation = commands.add_parser("generate", help="generate training data", description=text)
    _add_target_options(generation)
    _add_fields(generation, GenerateConfig)

    text = "Train a drafter on generated data. A run that stopped continues from the checkpoint in --output."
    training = commands.add_parser("train", help="train a drafter", description=text)
    _add_target_options(training)
    _add_fields(training, TrainConfig)

    text = "Print the tokens per round of a drafter inside generate, by kind of prompt and by tree budget."
    evaluation = commands.add_parser("evaluate", help="evaluate a drafter", description=text)
    _add_target_options(evaluation)
    evaluation.add_argument("--drafter", required=True, help="path or Hub id")
    evaluation.add_argument("--prompts", required=True, help="JSONL file or dataset id")
    evaluation.add_argument(
        "--budgets", type=int, nargs="+", default=[0, 16, 64], help="tree budgets. 0 means the chain (default: 0 16 64)"
    )
    evaluation.add_argument("--temperature", type=float, default=0.0, help="0 means greedy decoding (default: 0)")
    evaluation.add_argument("--max-new-tokens", type=int, default=128, help="tokens per answer (default: 128)")
    evaluation.add_argument("--seed", type=int, default=0, help="seed of every answer (default: 0)")
    return parser


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded", help="the target: a path, a Hub id, or 'embedded' (the default)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of the target (default: bfloat16)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads of this process. PyTorch chooses by default")


def _add_fields(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add an option for each field of a dataclass whose fields are annotated with `Annotated[type, help]`."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        kind, text = typing.get_args(hints[field.name])
        if isinstance(kind, types.UnionType):
            kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
        settings: dict[str, typing.Any] = {"type": kind, "help": text}
        if typing.get_origin(kind) is list:
            settings.update(type=typing.get_args(kind)[0], nargs="+")
        if field.default is dataclasses.MISSING:
            settings["required"] = True
        else:
            settings["default"] = field.default
        if settings.get("default") is not None:
            settings["help"] += f" (default: {field.default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", **settings)


if __name__ == "__main__":
    main()
