"""The fast engine: machine code shared by all policies, with the results of `simulator.reference` bit for bit."""
