"""Speed of tree decoding on this machine, beside the other ways to generate.

python -m hf_ddtree.benchmark --help
"""
