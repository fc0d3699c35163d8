"""`python -m decode_node` is `hisparse-pd decode`."""

import sys

from cli.main import main

main(["decode", *sys.argv[1:]])
