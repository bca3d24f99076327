"""Compile marked Python functions to machine code and keep it on disk; independent of the simulator."""
