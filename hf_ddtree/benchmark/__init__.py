"""The benchmark: speed, acceptance and exactness of tree decoding on this machine, beside other ways to generate.

    python -m hf_ddtree.benchmark --help

options.py        the command line
environment.py    what the figures depend on: model, machine and versions
methods.py        the ways to generate
case.py           one prompt at one temperature: what every method gets
run.py            every method answers every prompt
speed.py          the speed pass: how long each answer took, and what its rounds accepted
exactness.py      where a greedy text leaves plain generate's, and how far from a tie that is
stages.py         the timing pass: where the time of a round goes
rows.py           what the passes found, in memory and in a file
summary.py        figures computed from the rows
tables.py         the figures as Markdown tables
plots.py          the figures as PNG plots
verify_cost.py    the verification cost that the automatic budget uses, as a table and a plot
report.py         prints the tables and writes the plots
"""
