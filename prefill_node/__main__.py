"""`python -m prefill_node` is `hisparse-pd prefill`."""

import sys

from cli.main import main

main(["prefill", *sys.argv[1:]])
