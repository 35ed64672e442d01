"""The commands `motet show model | layout | step`."""
