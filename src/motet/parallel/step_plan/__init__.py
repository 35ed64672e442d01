"""One description of a step: its plan, proof, traffic, memory and timeline."""
