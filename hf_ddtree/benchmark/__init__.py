"""The benchmark: speed, acceptance and exactness of tree decoding on this machine, beside other ways to generate.

    python -m hf_ddtree.benchmark --help

options.py reads the command line, methods.py lists the ways to generate, and run.py lets them answer every prompt.
speed.py, exactness.py and stages.py measure an answer, rows.py keeps what they found. summary.py computes figures from
the rows, tables.py and plots.py show them, and verify_cost.py shows what the automatic budget assumes.
"""
