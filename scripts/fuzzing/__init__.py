"""The fuzzer of `make fuzz`: targets that change input, and oracles that compare motet's results with the truth."""
