"""The model: pure equations over arrays of tiles, no choices.

footprint (shared memory, registers, HBM) · visits (which tiles a mask leaves) · traffic (bytes per
level) · flops · occupancy · silicon (the rates of a GPU) · steps (clocks of one tile step) ·
timeline (seconds). Every function takes a Problem, the names of algorithm and pass, and a Tiles.
docs/model.md derives each equation under the same names.
"""
