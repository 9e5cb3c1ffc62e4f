"""Command line: `python -m hf_ddtree.training generate|train|evaluate --help`."""

import argparse
import dataclasses
import json
import types
import typing

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..drafters import load_drafter
from ..embedded import load_embedded
from .evaluate import evaluate
from .generate import GenerateConfig, generate_shards
from .train import TrainConfig, train


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(prog="python -m hf_ddtree.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, config_class in (("generate", GenerateConfig), ("train", TrainConfig)):
        command = commands.add_parser(
            name, description=config_class.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_target_options(command)
        add_fields(command, config_class)
    command = commands.add_parser("evaluate", description=evaluate.__doc__)
    add_target_options(command)
    command.add_argument("--drafter", required=True, help="path or Hub id")
    command.add_argument("--prompts", required=True, help="JSONL file or dataset id")
    command.add_argument("--budgets", type=int, nargs="+", default=[0, 16, 64], help="0 is the chain")
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--max-new-tokens", type=int, default=128)
    command.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))

    name = options.pop("command")
    target, tokenizer = load_target(options.pop("model"), getattr(torch, options.pop("dtype")), options.pop("threads"))
    if name == "generate":
        generate_shards(target, tokenizer, GenerateConfig(**options))
    elif name == "train":
        train(target, TrainConfig(**options))
    else:
        drafter = load_drafter(options.pop("drafter"), dtype=target.dtype).to(target.device)
        print(json.dumps(evaluate(target, tokenizer, drafter, **options), indent=1))


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which target, and how to run it."""
    parser.add_argument("--model", default="embedded", help="the target: path, Hub id, or 'embedded'")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of this process")


def add_fields(parser: argparse.ArgumentParser, config_class: type) -> None:
    """One option per field of a config dataclass, with its default."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):
            kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
        many = {"nargs": "+"} if typing.get_origin(kind) is list else {}
        kind = typing.get_args(kind)[0] if many else kind
        required = field.default is dataclasses.MISSING
        default = {} if required else {"default": field.default}
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=required, **many, **default)


def load_target(name: str, dtype: torch.dtype, threads: int | None):
    """The target and its tokenizer."""
    if threads is not None:
        torch.set_num_threads(threads)
    if name == "embedded":
        return load_embedded(dtype)[:2]
    device_map = "auto" if torch.cuda.is_available() else None
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map)
    return model, AutoTokenizer.from_pretrained(name)


if __name__ == "__main__":
    main()
