"""The fuzzer of `make fuzz`: targets that change input, and oracles that compare what motet does with the truth."""
