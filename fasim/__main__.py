"""Run the command line as a module: python -m fasim."""

from fasim.cli import main

main()
