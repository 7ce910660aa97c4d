"""Run the command line from a checkout: python cli.py plan --help."""

from fasim.cli import main

main()
