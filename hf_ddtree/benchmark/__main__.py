"""Command line: `python -m hf_ddtree.benchmark`, also under `accelerate launch`."""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ..embedded import load_models
from ..enable import enable
from ..training.prompts import read_prompts
from .environment import environment
from .methods import methods
from .options import parse_options
from .report import print_report, print_verify_cost
from .rows import Row, RowFile
from .run import rows_by_prompt, warm_up

# A process that has finished its prompts waits at most this long for the others.
MAX_WAIT = timedelta(days=7)

Prompts = list[tuple[int, dict[str, Any]]]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark: measure every prompt, print the tables, write the plots.

    Args:
        arguments: the command line without the program's name. None means `sys.argv[1:]`.

    Raises:
        SystemExit: if the run was interrupted, or if a greedy fp32 text differs from plain generate's.
    """
    options = parse_options(arguments)
    prompts = list(enumerate(read_prompts(options.prompts)[: options.limit]))
    # Before every other use of torch, because it gives this process its device. Without `cpu`, CPU processes would not
    # find each other.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=MAX_WAIT)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target, tokenizer, drafter = load_models(options.model, options.assistant_model, getattr(torch, options.dtype))
    enable(target.to(state.device))
    if drafter is not None:
        drafter.to(state.device)
    compared = methods(target, drafter, options.tree_budgets)
    setting = {
        **environment(target, state),
        "assistant_model": options.assistant_model,
        "max_new_tokens": options.max_new_tokens,
    }
    warm_up(target, compared)
    rows, interrupted = _all_rows(
        state,
        prompts,
        lambda mine: rows_by_prompt(target, tokenizer, mine, compared, options.temperatures, options.max_new_tokens),
        setting,
        options.output,
    )
    if not state.is_main_process:
        return
    print_report(rows, options.output)
    if "auto" in options.tree_budgets:
        print_verify_cost(target, options.output)
    print(json.dumps(setting))
    if problem := _problem(rows, target.dtype, interrupted):
        sys.exit(problem)


def _all_rows(
    state: PartialState,
    prompts: Prompts,
    measure: Callable[[Prompts], Iterator[list[Row]]],
    setting: Row,
    output: str | None,
) -> tuple[list[Row], bool]:
    """Measure the prompts of this process, and gather the rows of all processes.

    Args:
        state: the processes of this run.
        prompts: the prompts of all processes, with their seeds.
        measure: yields the rows of each of the prompts that it is given.
        setting: the columns that all rows share.
        output: the prefix of the row file, or None for no file.

    Returns:
        The rows, and whether the run was interrupted. An interrupted process returns its own rows alone.
    """
    file = None if output is None else RowFile(f"{output}.jsonl")
    if file is not None and state.is_main_process:
        file.clear()
    state.wait_for_everyone()
    rows: list[Row] = []
    try:
        with state.split_between_processes(prompts) as mine:
            for new in measure(mine):
                new = [{**row, **setting} for row in new]
                rows += new
                if file is not None:
                    file.append(new)
        rows = gather_object(rows)
    except KeyboardInterrupt:
        return rows, True
    if file is not None and state.is_main_process and state.num_processes > 1:
        file.clear()  # the lines of the processes are mixed in it
        file.append(rows)
    return rows, False


def _problem(rows: list[Row], dtype: torch.dtype, interrupted: bool) -> str | None:
    """Return why the run failed, or None."""
    if interrupted:
        return "The run was interrupted: the tables and plots show the prompts that were finished."
    differing = [row for row in rows if row.get("differs_at") is not None]
    if dtype == torch.float32 and differing:
        return f"{len(differing)} fp32 texts differ from plain generate's. The first one is in this row: {differing[0]}"
    return None


if __name__ == "__main__":
    main()
