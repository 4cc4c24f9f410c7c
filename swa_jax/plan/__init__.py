"""What a run would take on given chips: memory, operations, collectives and time, from the compiled program."""
