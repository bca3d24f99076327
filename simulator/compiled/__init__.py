"""The fast engine: one kernel of machine code for all policies, equal to `simulator.reference` to the bit."""
