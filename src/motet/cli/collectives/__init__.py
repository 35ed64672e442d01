"""The commands `motet collectives list | draw | prove | cost | run`."""
