"""`python -m gateway` is `hisparse-pd gateway`."""

import sys

from cli.main import main

main(["gateway", *sys.argv[1:]])
