"""A user's own script: started as it is, watched from inside, or traced.

In: a command with placeholders. Out: columns of the row, or a trace.
The room must not change what the script does.
"""
