"""Two sides of one thing: sets of rows, predicted against measured, estimated against published."""
